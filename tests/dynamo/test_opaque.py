"""Quantizers as opaque values of graphs: registration, ops that take them, a user's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import mezzotint as mz
from mezzotint import is_value_opaque_quantizer
from mezzotint.dynamo import register_value_opaque_quantizer
from mezzotint.tensor.opaque import why_unregistered
from tests.dynamo.graphs import compiled
from tests.quantizer_formats import E4M3, E5M2, FORMATS, Format, over_formats, sample

opaque_object = pytest.importorskip("torch._library.opaque_object")

pytestmark = pytest.mark.compile


# Opaque registration


def test_which_quantizers_are_constants() -> None:
    for fmt in FORMATS.values():
        assert is_value_opaque_quantizer(fmt.make()) == fmt.is_value
    assert not is_value_opaque_quantizer(None)
    assert not is_value_opaque_quantizer(object())


@over_formats("mxfp8", "float8_delayed", "hybrid")
def test_asking_is_traceable(fmt: Format) -> None:
    def ask(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
        return x + 1 if is_value_opaque_quantizer(quantizer) else x - 1

    x = sample((32, 64))
    assert torch.equal(compiled(ask)[0](x, fmt.make()), x + 1 if fmt.is_value else x - 1)


def test_quantizers_have_no_static_methods() -> None:
    """Called on a constant of the graph, one breaks its guards (pytorch/pytorch#182741)."""
    for fmt in FORMATS.values():
        members = {name: value for cls in type(fmt.make()).__mro__ for name, value in vars(cls).items()}
        assert not [name for name, value in members.items() if isinstance(value, staticmethod)]


@over_formats("float8_current", "float8_block_2d", "mxfp8", "nvfp4")
def test_questions_to_a_quantizer_in_the_graph(fmt: Format) -> None:
    quantizer = fmt.make()

    def ask(x: torch.Tensor) -> list[Any]:
        shape = tuple(x.shape)
        quantizer.calibrate(x)
        made = [quantizer.get_columnwise_shape(shape), quantizer.is_quantizable(x), quantizer.get_usages()]
        if hasattr(quantizer, "get_scale_shape"):
            made.append(quantizer.get_scale_shape(shape, columnwise=True))
        if isinstance(quantizer, mz.NVFP4Quantizer):
            made.append(quantizer.convert_shape_for_fp4(shape))
        return made

    x = sample((32, 64))
    assert compiled(ask)[0](x) == ask(x)


def test_tensors_from_data_in_the_graph() -> None:
    quantizer, x = mz.MXFP8Quantizer(E4M3, columnwise=False), sample((32, 64))
    held = quantizer(x)

    def assemble(data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
        return quantizer.create_tensor_from_data(data, scale_inv, torch.float32).dequantize()

    assert torch.equal(compiled(assemble)[0](held._rowwise_data, held._rowwise_scale_inv), held.dequantize())


# Two values of each class that give different numbers.
PAIRS = {
    "float8_current": lambda: (mz.Float8CurrentScalingQuantizer(E4M3), mz.Float8CurrentScalingQuantizer(E5M2)),
    "float8_rowwise": lambda: (mz.Float8RowwiseQuantizer(E4M3), mz.Float8RowwiseQuantizer(E5M2)),
    "float8_block": lambda: (mz.Float8BlockQuantizer(E4M3), mz.Float8BlockQuantizer(E5M2)),
    "mxfp8": lambda: (mz.MXFP8Quantizer(E4M3), mz.MXFP8Quantizer(E4M3, scale_rule="floor")),
    "nvfp4": lambda: (mz.NVFP4Quantizer(), mz.NVFP4Quantizer(nvfp4_use_4over6=True)),
    "identity": lambda: (mz.IdentityQuantizer(), mz.IdentityQuantizer(dtype=torch.bfloat16)),
    "hybrid": lambda: tuple(
        mz.HybridQuantizer(rowwise_quantizer=mz.MXFP8Quantizer(dtype), columnwise_quantizer=mz.NVFP4Quantizer())
        for dtype in (E4M3, E5M2)
    ),
}


@contextmanager
def a_users_op(cls: type, name: str = "mezzotint_test", run: Callable[..., Any] | None = None) -> Iterator[Any]:
    """An op of another library that takes a quantizer of that class, and quantizes by it, if not told otherwise."""
    library = torch.library.Library(name, "DEF")
    try:
        type_name = opaque_object.get_opaque_type_name(cls)
        library.define(f"round_trip(Tensor x, {type_name} quantizer) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl("round_trip", _round_trip if run is None else run, "CPU")
        torch.library.register_fake(f"{name}::round_trip", lambda x, quantizer: torch.empty_like(x), lib=library)
        yield getattr(torch.ops, name).round_trip.default
    finally:
        library._destroy()


def _round_trip(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    return quantizer.quantize(x).dequantize()


@pytest.mark.parametrize("name", PAIRS)
def test_a_users_op_takes_a_quantizer(name: str) -> None:
    """Two values through one compiled function give two results, the first time and later."""
    pair, x = PAIRS[name](), sample((40, 48))
    expected = [_round_trip(x, quantizer) for quantizer in pair]
    assert not torch.equal(*expected)
    with a_users_op(type(pair[0])) as op:
        function, counter = compiled(lambda x, quantizer: op(x, quantizer))
        for _ in range(2):
            for quantizer, value in zip(pair, expected, strict=True):
                assert torch.equal(function(x, quantizer.copy()), value)
        assert counter.frame_count == 2


@pytest.mark.parametrize("name", ["mxfp8", "hybrid"])
def test_caches_on_disk_tell_values_apart(name: str) -> None:
    """Each function is compiled anew, with the compiler's caches cold and then warm."""
    pair, x = PAIRS[name](), sample((40, 48))
    expected = [_round_trip(x, quantizer) for quantizer in pair]
    with a_users_op(type(pair[0])) as op, fresh_inductor_cache():
        for _ in range(2):
            for quantizer, value in zip(pair, expected, strict=True):
                torch._dynamo.reset()
                function = torch.compile(lambda x, q: op(x, q), fullgraph=True)
                assert torch.equal(function(x, quantizer), value)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_caches_on_disk_tell_our_values_apart(name: str) -> None:
    pair, x = PAIRS[name](), sample((40, 48))
    expected = [_round_trip(x, quantizer) for quantizer in pair]
    with fresh_inductor_cache():
        for _ in range(2):
            for quantizer, value in zip(pair, expected, strict=True):
                torch._dynamo.reset()
                counters.clear()
                function = torch.compile(_round_trip, fullgraph=True)
                assert torch.equal(function(x, quantizer), value)
        assert counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"] >= 1


@contextmanager
def fresh_inductor_cache() -> Iterator[None]:
    from torch._inductor import utils

    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    with fresh():
        yield


def test_a_users_custom_op_takes_a_quantizer() -> None:
    def body(x: torch.Tensor, quantizer: mz.MXFP8Quantizer) -> torch.Tensor:
        return quantizer.quantize(x).dequantize()

    op = torch.library.custom_op("mezzotint_test_custom::round_trip", body, mutates_args=())
    op.register_fake(lambda x, quantizer: torch.empty_like(x))
    x = sample((32, 64))
    function, counter = compiled(lambda x, q: op(x, q))
    for _ in range(2):
        for quantizer in (mz.MXFP8Quantizer(E4M3), mz.MXFP8Quantizer(E5M2)):
            assert torch.equal(function(x, quantizer), _round_trip(x, quantizer))
    assert counter.frame_count == 2


def test_ops_with_a_quantizer_pass_opcheck() -> None:
    with a_users_op(mz.MXFP8Quantizer) as op:
        torch.library.opcheck(op, (sample((32, 64)), mz.MXFP8Quantizer(E4M3)))


# A user's quantizers


class _Halves(mz.IdentityQuantizer):
    """A user's format: an identity that is told a factor."""

    factor: float

    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.factor = factor

    def _value_fields(self) -> dict[str, Any]:
        return {**super()._value_fields(), "factor": self.factor}


def test_a_users_registered_subclass() -> None:
    class Mine(_Halves):
        pass

    assert register_value_opaque_quantizer(Mine) is Mine
    assert register_value_opaque_quantizer(Mine) is Mine  # a second time does nothing
    assert is_value_opaque_quantizer(Mine())

    def use(x: torch.Tensor, quantizer: Any) -> Any:
        return quantizer.quantize(x * quantizer.factor)

    x = sample((32, 64))
    function, counter = compiled(use)
    for factor in (0.5, 0.5, 0.25):
        made = function(x, Mine(factor))
        assert torch.equal(made.dequantize(), x * factor)
        assert type(made._quantizer) is Mine
        assert made._quantizer == Mine(factor)
    assert counter.frame_count == 2
    assert opaque_object.get_opaque_type_name(Mine).endswith("Mine")


def test_a_users_subclass_that_is_not_registered() -> None:
    def use(x: torch.Tensor, quantizer: Any) -> Any:
        return quantizer.quantize(x)

    x = sample((32, 64))
    function, _ = compiled(use)
    made = function(x, _Halves(0.5))
    assert torch.equal(made.dequantize(), x)
    assert made._quantizer == _Halves(0.5)


class _Fixed(mz.Quantizer):
    """A user's quantizer with an op of its own, fixed-point in eighths, held in the identity's classes."""

    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)

    def _quantize(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [(x * 8).round() / 8]

    def _update(self, src: torch.Tensor, buffers: list[torch.Tensor], noop_flag: torch.Tensor | None) -> None:
        buffers[0].copy_(self._quantize(src)[0])

    def _describe_buffers(self, shape: tuple[int, ...]) -> Any:
        return {"hp_data": (shape, torch.float32)}

    def _classes(self) -> Any:
        return mz.IdentityTensorStorage, mz.IdentityTensor


def test_a_users_plain_quantizer_works_in_eager() -> None:
    quantizer = _Fixed()
    assert not is_value_opaque_quantizer(quantizer)
    x = sample((32, 64)).requires_grad_()
    tensor = quantizer.quantize(x)
    assert torch.equal(tensor.dequantize(), (x.detach() * 8).round() / 8)
    tensor.sum().backward()
    assert torch.equal(x.grad, torch.ones(32, 64))
    target = quantizer.make_empty((32, 64))
    target.quantize_(x.detach() * 2)
    assert torch.equal(target.dequantize(), (x.detach() * 16).round() / 8)
    assert quantizer != _Fixed()


@pytest.mark.parametrize(
    "cls", [int, object, "MXFP8Quantizer", mz.MXFP8Quantizer(E4M3), None, mz.MXFP8Tensor], ids=repr
)
def test_only_quantizers_are_registered(cls: Any) -> None:
    with pytest.raises(TypeError, match=r"cls is .*: give a subclass of Quantizer"):
        register_value_opaque_quantizer(cls)


class _NoMembers:
    """An API that registers types, and does not know of members."""

    @staticmethod
    def register_opaque_type(cls: type, *, typ: str) -> None:
        raise AssertionError("must not be called")


@pytest.mark.parametrize("api", [None, object(), _NoMembers], ids=["missing", "empty", "partial"])
def test_registration_without_the_api(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this PyTorch cannot, eager value semantics remain."""
    monkeypatch.setattr("mezzotint.tensor.opaque._api", api)
    monkeypatch.setattr("mezzotint.tensor.opaque._REGISTERED", {})

    class Mine(_Halves):
        pass

    assert register_value_opaque_quantizer(Mine) is Mine
    assert "no API for opaque values" in (why_unregistered() or "")
    assert Mine(0.5) == Mine(0.5)
    assert hash(Mine(0.5)) != hash(Mine(0.25))
    assert torch.equal(Mine().quantize(sample((32, 64))).dequantize(), sample((32, 64)))


def test_later_names_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """`register_opaque_type(typ="value")` will be `register_custom_class(typ="constant")`."""
    seen: dict[str, Any] = {}

    class Later:
        MemberType = opaque_object.MemberType

        @staticmethod
        def register_custom_class(cls: type, *, typ: str, members: Any) -> None:
            seen.update(cls=cls, typ=typ, members=members)

    monkeypatch.setattr("mezzotint.tensor.opaque._api", Later)
    monkeypatch.setattr("mezzotint.tensor.opaque._REGISTERED", {})

    class Mine(_Halves):
        pass

    register_value_opaque_quantizer(Mine)
    assert seen["cls"] is Mine
    assert seen["typ"] == "constant"
    assert seen["members"]["quantize"] is opaque_object.MemberType.INLINED
    assert seen["members"]["factor"] is opaque_object.MemberType.USE_REAL
    assert seen["members"]["rowwise_usage"] is opaque_object.MemberType.USE_REAL


@pytest.mark.parametrize("error", [ValueError, AttributeError, AssertionError])
def test_errors_of_the_api_are_not_swallowed(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        MemberType = opaque_object.MemberType

        @staticmethod
        def register_opaque_type(cls: type, **options: Any) -> None:
            raise error("unexpected")

    monkeypatch.setattr("mezzotint.tensor.opaque._api", Broken)

    class Mine(_Halves):
        pass

    with pytest.raises(error, match="unexpected"):
        register_value_opaque_quantizer(Mine)
    assert not any(cls is Mine for cls in mz.tensor.opaque._REGISTERED)


def test_a_hybrid_of_stateful_quantizers_is_no_constant() -> None:
    delayed = FORMATS["float8_delayed"].make()
    hybrid = mz.HybridQuantizer(rowwise_quantizer=delayed, columnwise_quantizer=mz.MXFP8Quantizer(E4M3))
    assert not is_value_opaque_quantizer(hybrid)


def test_a_group_is_refused_when_compiling() -> None:
    function, _ = compiled(lambda x, q: q.quantize(x))
    with pytest.raises(Exception, match="amax_reduction_group is object"):
        function(sample((32, 64)), mz.NVFP4Quantizer(amax_reduction_group=object()))
