"""Quantizers in graphs that a user writes, changes in place, or has where PyTorch does not know of values."""

import enum
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer
from mezzotint.dynamo.trace import _close_gaps, _compare_with_snapshots, _know_quantizers
from tests.dynamo.graphs import assert_same, compiled
from tests.dynamo.test_opaque import a_users_op
from tests.quantizer_formats import E4M3, E5M2, FORMATS, sample

pytestmark = pytest.mark.compile


# Assignments outside of the graph


def current(**options: Any) -> Any:
    return mz.Float8CurrentScalingQuantizer(E4M3, **options)


def hybrid() -> Any:
    return mz.HybridQuantizer(rowwise_quantizer=mz.MXFP8Quantizer(E4M3), columnwise_quantizer=mz.NVFP4Quantizer())


def stateful() -> Any:
    delayed = FORMATS["float8_delayed"].make()
    return mz.HybridQuantizer(rowwise_quantizer=delayed, columnwise_quantizer=mz.MXFP8Quantizer(E4M3))


def set_dtype(quantizer: Any, dtype: Any = E5M2) -> None:
    quantizer.dtype = dtype


CHANGES = {
    "usage": (lambda: mz.MXFP8Quantizer(E4M3), lambda q: q.set_usage(columnwise=False)),
    "dtype": (lambda: mz.MXFP8Quantizer(E4M3), set_dtype),
    "scales": (current, lambda q: setattr(q, "force_pow_2_scales", True)),
    "rule": (lambda: mz.MXFP8Quantizer(E4M3), lambda q: setattr(q, "scale_rule", "floor")),
    "part": (hybrid, lambda q: set_dtype(q.rowwise_quantizer)),
    "identity": (mz.IdentityQuantizer, lambda q: set_dtype(q, torch.float16)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_by_the_next_call(name: str) -> None:
    make, change = CHANGES[name]
    quantizer, x = make(), sample((32, 64)) * 3

    def use(x: torch.Tensor, quantizer: Any) -> Any:
        tensor = quantizer(x)
        return tensor, tensor.dequantize()

    function, counter = compiled(use)
    first = use(x, quantizer)
    assert_same(function(x, quantizer), first)
    change(quantizer)
    changed = use(x, quantizer)
    assert_same(function(x, quantizer), changed)
    assert counter.frame_count == 2
    with pytest.raises(AssertionError):
        assert_same(changed, first)
    # What it was, and what it is: there is a graph of each.
    assert_same(function(x, make()), first)
    assert_same(function(x, quantizer.copy()), changed)
    assert counter.frame_count == 2


@pytest.mark.parametrize("make", [stateful, lambda: FORMATS["float8_delayed"].make()], ids=["hybrid", "delayed"])
def test_a_change_of_what_is_no_value_is_seen(make: Any) -> None:
    quantizer, x = make(), sample((32, 64))
    function, counter = compiled(lambda x, q: q(x))
    assert_same(function(x, quantizer), make()(x))
    quantizer.set_usage(columnwise=False)
    assert_same(function(x, quantizer), make().with_usage(columnwise=False)(x))
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", ["usage", "scales", "part"])
def test_a_change_is_seen_by_an_op_that_takes_it(name: str) -> None:
    make, change = CHANGES[name]
    seen: list[Any] = []
    quantizer, x = make(), sample((32, 64))
    with a_users_op(type(quantizer), "mezzotint_changed", lambda x, q: seen.append(q) or x * 2) as op:
        function, counter = compiled(lambda x, q: op(x, q))
        function(x, quantizer)
        before = quantizer.copy()
        assert seen[-1] == before
        change(quantizer)
        function(x, quantizer)
        assert seen[-1] == quantizer
        assert seen[-1] != before
        assert seen[-1] is not quantizer
        function(x, before)
        assert seen[-1] == before
        assert counter.frame_count == 2


def test_a_change_between_forward_and_backward() -> None:
    """The graph of backward, which is made later, has the quantizer of forward."""

    def body(x: torch.Tensor, quantizer: mz.MXFP8Quantizer) -> torch.Tensor:
        return quantizer.quantize(x).dequantize()

    op = torch.library.custom_op("mezzotint_late::round_trip", body, mutates_args=())
    op.register_fake(lambda x, quantizer: torch.empty_like(x))

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.quantizer = inputs[1]

    op.register_autograd(lambda ctx, grad: (op(grad, ctx.quantizer), None), setup_context=keep)
    quantizer, x, grad = mz.MXFP8Quantizer(E4M3), sample((32, 64)).requires_grad_(), sample((32, 64), seed=1)
    function = torch.compile(lambda x, q: op(x, q), fullgraph=True)
    expected = quantizer.quantize(grad).dequantize()
    y = function(x, quantizer)
    set_dtype(quantizer)
    y.backward(grad)
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    assert not torch.equal(expected, quantizer.quantize(grad).dequantize())


# Assignments inside of the graph


def assign(q: Any) -> None:
    q.dtype = E5M2


@pytest.mark.parametrize("change", [lambda q: q.set_usage(columnwise=False), assign], ids=["set_usage", "assignment"])
def test_a_quantizer_from_outside_is_not_changed_inside(change: Any) -> None:
    def use(x: torch.Tensor, quantizer: Any) -> Any:
        change(quantizer)
        return quantizer(x)

    quantizer = mz.MXFP8Quantizer(E4M3)
    with pytest.raises(Exception, match=r"(?s)assignment to a quantizer.*q.with_usage\(columnwise=False\) or q.copy"):
        compiled(use)[0](sample((32, 64)), quantizer)
    assert quantizer == mz.MXFP8Quantizer(E4M3)


def test_a_quantizer_from_inside_is_changed_inside() -> None:
    seen: list[Any] = []

    def use(x: torch.Tensor, quantizer: Any) -> Any:
        made = quantizer.copy()
        y = op(x, made)
        made.set_usage(columnwise=False)
        made.dtype = E5M2
        return op(y, made), made(x)

    quantizer, x = mz.MXFP8Quantizer(E4M3), sample((32, 64))
    with a_users_op(mz.MXFP8Quantizer, "mezzotint_inside", lambda x, q: seen.append(q) or x * 2) as op:
        _, tensor = compiled(use)[0](x, quantizer)
    assert seen[-2:] == [mz.MXFP8Quantizer(E4M3), mz.MXFP8Quantizer(E5M2, columnwise=False)]
    assert_same(tensor, mz.MXFP8Quantizer(E5M2, columnwise=False)(x))
    assert quantizer == mz.MXFP8Quantizer(E4M3)


# A user's classes


class Fixed(mz.Quantizer):
    """Fixed point, by methods of its own that take, and give, tensors."""

    def __init__(self, bits: int) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.bits = bits

    def step(self) -> torch.Tensor:
        return torch.full((1,), 2.0**-self.bits)

    def rounded(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return (x / step).round() * step

    def _quantize(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.rounded(x, self.step())]

    def _update(self, src: torch.Tensor, buffers: list[torch.Tensor], noop_flag: torch.Tensor | None) -> None:
        buffers[0].copy_(self._quantize(src)[0])

    def _describe_buffers(self, shape: tuple[int, ...]) -> Any:
        return {"hp_data": (shape, torch.float32)}

    def _classes(self) -> Any:
        return mz.IdentityTensorStorage, mz.IdentityTensor


@pytest.mark.cover(0)
@pytest.mark.parametrize("is_registered", [False, True])
def test_a_users_methods_are_traced(is_registered: bool) -> None:
    class Mine(Fixed):
        pass

    if is_registered:
        register_value_opaque_quantizer(Mine)
    assert is_value_opaque_quantizer(Mine(3)) == is_registered

    def use(x: torch.Tensor, quantizer: Any) -> Any:
        rows = quantizer.with_usage(columnwise=False)
        empty = quantizer.make_empty(tuple(x.shape))
        quantizer.update_quantized(x, empty)
        return quantizer(x), rows.quantize(x), quantizer.rounded(x, rows.step()), rows.bits, empty

    function, counter = compiled(use)
    for rows in (32, 48, 64):
        x = sample((rows, 64))
        assert_same(function(x, Mine(3)), use(x, Mine(3)))
        assert function(x, Mine(3))[0]._quantizer.bits == 3
    assert counter.frame_count == 2
    quantizer = Mine(3)
    function(x, quantizer)
    quantizer.bits = 1
    assert_same(function(x, quantizer), use(x, Mine(1)))


@register_value_opaque_quantizer
class MXFP8Quantizer(mz.MXFP8Quantizer):
    """A user's class with the name of one of ours."""


class DType(enum.Enum):
    """A user's enum with the name of one of ours."""

    kFloat8E4M3 = "mine"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_classes_of_one_name_in_one_graph(backend: str) -> None:
    seen: list[Any] = []

    def keep(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
        seen.append(quantizer)
        return x * 2

    ours, users = mz.MXFP8Quantizer(E4M3), MXFP8Quantizer(E4M3)
    tagged = mz.MXFP8Quantizer(E4M3)
    tagged.tag = DType.kFloat8E4M3  # type: ignore[attr-defined]
    with (
        a_users_op(mz.MXFP8Quantizer, "mezzotint_names", keep) as op,
        a_users_op(MXFP8Quantizer, "mezzotint_users_names", keep) as users_op,
    ):
        compiled(lambda x: op(users_op(op(x, ours), users), tagged), backend)[0](sample((32, 64)))
    assert seen[-3:] == [ours, users, tagged]
    assert [type(q) for q in seen[-3:]] == [type(ours), type(users), type(tagged)]


def test_an_attribute_that_is_no_value_is_refused_when_compiling() -> None:
    quantizer = mz.MXFP8Quantizer(E4M3)
    quantizer.group = object()  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=r"MXFP8Quantizer.group is object: a quantizer is a value of plain"):
        compiled(lambda x, q: q(x))[0](sample((32, 64)), quantizer)


# A PyTorch that has a part of the API, or none

PARTIAL = {
    "refuses": "def register(cls, **options): raise RuntimeError('no opaque types in this build')",
    "has another signature": "def register(cls, *, typ): raise AssertionError('must not get here')",
}


@pytest.mark.cover(0)
@pytest.mark.parametrize("name", PARTIAL)
def test_import_where_the_api_is_partial(name: str) -> None:
    script = f"""
        import torch
        from torch._library import opaque_object
        real = opaque_object.register_opaque_type
        {PARTIAL[name]}
        opaque_object.register_opaque_type = register
        import mezzotint as mz
        opaque_object.register_opaque_type = real
        from mezzotint.cli.doctor import _show
        from mezzotint.trainer.console import make_console
        quantizer = mz.MXFP8Quantizer(mz.DType.kFloat8E4M3)
        assert quantizer == mz.MXFP8Quantizer(mz.DType.kFloat8E4M3) and not mz.is_value_opaque_quantizer(quantizer)
        x = torch.randn(32, 64)
        linear = mz.Linear(64, 32, device="cpu")
        with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
            linear(x).sum().backward()
        made = torch.compile(lambda x, q: q(x).dequantize(), fullgraph=True, backend="eager")(x, quantizer)
        assert torch.equal(made, quantizer(x).dequantize())
        _show(make_console(), "cpu", [], [], [])
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:mezzotint", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reason = "no opaque types in this build" if name == "refuses" else "members"
    said = " ".join(done.stdout.split())
    assert "quantizers are no constants in graphs here" in said
    assert reason in said


def test_a_dynamo_without_what_we_patch_is_left_alone() -> None:
    class Variable:
        def var_getattr(self) -> None: ...

    before = dict(vars(Variable))
    _close_gaps(Variable, lambda cls, name: False)
    _close_gaps(object, lambda cls, name: False)
    assert dict(vars(Variable)) == before
    for close in (_compare_with_snapshots, _know_quantizers):
        close(SimpleNamespace())  # type: ignore[arg-type]
    _compare_with_snapshots(SimpleNamespace(GuardBuilder=object))  # type: ignore[arg-type]
