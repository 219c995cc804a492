"""Quantizers and quantized tensors under `torch.compile(fullgraph=True)`: whole graphs, same bits, no recompiles."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mezzotint as mz
from mezzotint import QuantizedTensorStorage, TensorProto, is_value_opaque_quantizer, to_tensor_proto
from mezzotint.dynamo import register_value_opaque_quantizer
from mezzotint.tensor.opaque import why_unregistered
from mezzotint.tensor.quantizer import quantize, quantize_storage
from tests.quantizer_formats import (
    E4M3,
    E5M2,
    FORMATS,
    Format,
    assert_same_bytes,
    buffers,
    over_formats,
    same_bytes,
    sample,
    snapshot,
)

opaque_object = pytest.importorskip("torch._library.opaque_object")

pytestmark = pytest.mark.compile

# One of each kind: per tensor, stateful, blocks, Hadamard, two formats.
SOME = ("float8_current", "float8_delayed", "mxfp8", "nvfp4_rht_stochastic", "hybrid")

GLOBAL_QUANTIZER: Any = None


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> tuple[Any, Any]:
    """The function compiled whole, and the counter of its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def leaves(value: Any) -> list[Any]:
    """Tensors and plain values inside a result."""
    if isinstance(value, QuantizedTensorStorage):
        return [type(value).__name__, value.get_usages(), *buffers(value).values()]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def assert_same(actual: Any, expected: Any) -> None:
    """Bitwise equality of results, whatever they are made of."""
    actual, expected = leaves(actual), leaves(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            assert torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))
        else:
            assert a == b


def run(function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(0)
    return function(*args)


def everything(x: torch.Tensor, quantizer: Any) -> Any:
    """Quantizes into a tensor and a storage, passes buffers on, dequantizes, returns all of it."""
    tensor = quantizer(x)
    storage = quantize_storage(x, quantizer)
    passed_on = [buffer.view(torch.uint8) for _, buffer in storage._buffers()]
    return tensor, tensor.dequantize(), storage, storage.dequantize(dtype=torch.float32), passed_on


# Whole graphs, the same bits


@over_formats()
def test_every_format_compiles_whole(fmt: Format) -> None:
    x = sample((40, 48), torch.bfloat16)
    function, counter = compiled(everything)
    for rowwise, columnwise in ((True, True), (False, True)):
        real, eager = fmt.quantizer(rowwise, columnwise), fmt.quantizer(rowwise, columnwise)
        assert_same(run(function, x, real), run(everything, x, eager))
        if fmt.name == "float8_delayed":
            assert torch.equal(real.amax, eager.amax)
            assert real.amax.item() == x.abs().max()
    assert counter.frame_count == 2


@over_formats("float8_current", "float8_delayed", "float8_block_2d", "mxfp8_2d", "nvfp4_rht_stochastic", "hybrid")
def test_formats_compile_with_inductor(fmt: Format) -> None:
    x = sample((40, 48), torch.bfloat16)
    function, _ = compiled(everything, "inductor")
    assert_same(run(function, x, fmt.make()), run(everything, x, fmt.make()))


@over_formats(*SOME)
def test_where_the_quantizer_comes_from(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample((32, 64))
    expected = run(everything, x, fmt.make())
    held = fmt.make()
    monkeypatch.setitem(globals(), "GLOBAL_QUANTIZER", fmt.make())

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quantizer = fmt.make()
            self.more = {"input": [fmt.make()]}

        def forward(self, x: torch.Tensor) -> Any:
            return everything(x, self.quantizer), everything(x, self.more["input"][0])

    def from_closure(x: torch.Tensor) -> Any:
        return everything(x, held)

    def from_global(x: torch.Tensor) -> Any:
        return everything(x, GLOBAL_QUANTIZER)

    for function in (from_closure, from_global):
        assert_same(run(compiled(function)[0], x), expected)
    module = Module()
    made = run(compiled(module)[0], x)
    assert_same(made, run(Module(), x))
    assert_same(made[0], expected)


@over_formats(*SOME)
def test_gradients(fmt: Format) -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor, quantizer: Any) -> torch.Tensor:
        return (quantizer.quantize(x).dequantize() * weight).sum() + (quantizer.quantize(x) * weight).sum()

    weight = sample((32, 64), seed=1)
    x = sample((32, 64)).requires_grad_()
    compiled(loss)[0](x, weight, fmt.make()).backward()
    assert torch.equal(x.grad, 2 * weight)


@over_formats(*SOME)
def test_internal_quantizers(fmt: Format) -> None:
    def make(x: torch.Tensor, quantizer: Any) -> Any:
        storage = quantizer.quantize(x)
        return storage, storage.dequantize(), storage.view(-1, 64).dequantize()

    x = sample((4, 8, 64))
    made = run(compiled(make)[0], x, fmt.quantizer(internal=True))
    assert type(made[0]) is fmt.storage
    assert_same(made, run(make, x, fmt.quantizer(internal=True)))


@over_formats()
def test_usages_inside_the_graph(fmt: Format) -> None:
    """Another usage is asked for inside, and the quantizer of that usage used in any way."""

    def one_direction(x: torch.Tensor, quantizer: Any) -> Any:
        rowwise, columnwise = quantizer.with_usage(columnwise=False), quantizer.with_usage(rowwise=False)
        storage = quantize_storage(x, rowwise)
        return storage, storage.dequantize(), quantize(x, columnwise), rowwise.quantize(x), columnwise(x)

    x = sample((32, 64))
    function, counter = compiled(one_direction)
    quantizer = fmt.make()
    assert_same(run(function, x, quantizer), run(one_direction, x, fmt.make()))
    run(function, x, quantizer)
    assert counter.frame_count == 1
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_quantizers_built_inside_the_graph(backend: str) -> None:
    def build(x: torch.Tensor) -> Any:
        quantizer = mz.MXFP8Quantizer(E4M3, columnwise=False)
        storage = quantize_storage(x, quantizer)
        storage.quantize_(x * 2)
        empty = quantizer.make_empty((32, 64))
        quantizer.update_quantized(x, empty)
        rowwise = quantizer.with_usage(columnwise=True)
        return storage, quantize(x, quantizer), quantizer.quantize(x).dequantize(), quantizer(x), empty, rowwise(x)

    x = sample((32, 64))
    function, counter = compiled(build, backend)
    for _ in range(2):
        assert_same(function(x), build(x))
    assert counter.frame_count == 1


@over_formats(*SOME)
def test_multi_quantize_and_views(fmt: Format) -> None:
    def many(x: torch.Tensor, quantizer: Any) -> Any:
        first, second = quantizer.multi_quantize([x, x * 2])
        return first, second.dequantize(), first.view(4, 8, 64).dequantize(), (first + 1), first.clone()

    x = sample((32, 64))
    assert_same(run(compiled(many)[0], x, fmt.make()), run(many, x, fmt.make()))


# Recompiles


@over_formats(is_value=True)
def test_equal_quantizers_do_not_recompile(fmt: Format) -> None:
    x = sample((32, 64))
    function, counter = compiled(lambda x, q: q.quantize(x))
    for quantizer in (fmt.make(), fmt.make(), fmt.make().copy(), copy.deepcopy(fmt.make())):
        function(x, quantizer)
    assert counter.frame_count == 1


def test_other_values_recompile() -> None:
    x = sample((32, 64))
    names = [n for n, f in FORMATS.items() if f.is_value]
    with torch._dynamo.config.patch(recompile_limit=2 * len(names)):
        function, counter = compiled(lambda x, q: q.quantize(x).dequantize())
        for _ in range(2):
            for name in names:
                fmt = FORMATS[name]
                assert_same(run(function, x, fmt.make()), run(lambda x, q: q.quantize(x).dequantize(), x, fmt.make()))
            assert counter.frame_count == len(names)


@pytest.mark.parametrize("attribute", ["rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm"])
def test_assignment_to_a_quantizer_recompiles(attribute: str) -> None:
    """The compiler's guard on an argument is by identity first: the same object with another value must not pass."""

    def make(x: torch.Tensor, quantizer: Any) -> Any:
        return quantizer.quantize(x)

    x = sample((32, 64))
    function, counter = compiled(make)
    quantizer = mz.MXFP8Quantizer(E4M3)
    first = function(x, quantizer)
    setattr(quantizer, attribute, not getattr(quantizer, attribute))
    changed = function(x, quantizer)
    assert_same(changed, make(x, quantizer))
    assert counter.frame_count == 2
    assert type(first) is not type(changed) or not same_bytes(first, changed) or attribute == "optimize_for_gemm"
    # One that equals what the first has become, and one that equals what it was.
    assert_same(function(x, quantizer.copy()), make(x, quantizer))
    assert_same(function(x, mz.MXFP8Quantizer(E4M3)), first)


def test_assignment_recompiles_updates() -> None:
    def update(x: torch.Tensor, target: Any, quantizer: Any) -> Any:
        quantizer.update_quantized(x, target)
        return target.dequantize()

    function, counter = compiled(update)
    quantizer = mz.MXFP8Quantizer(E4M3)
    function(sample((32, 64)), quantizer.make_empty((32, 64)), quantizer)
    quantizer.optimize_for_gemm = True
    target = quantizer.make_empty((32, 64))
    function(sample((32, 64)), target, quantizer)
    assert counter.frame_count == 2
    assert_same_bytes(target, quantizer.quantize(sample((32, 64))))


@over_formats()
def test_dynamic_batch(fmt: Format) -> None:
    def both(x: torch.Tensor, quantizer: Any) -> Any:
        tensor = quantizer.quantize(x)
        return tensor, tensor.dequantize()

    function, counter = compiled(both)
    quantizer = fmt.make()
    for rows in (256, 384, 320, 200, 130):  # more than one block of every format: a size of 1 is a graph of its own
        x = sample((rows, 64))
        assert_same(run(function, x, quantizer), run(both, x, fmt.make()))
    assert counter.frame_count <= 2


@over_formats("mxfp8", "nvfp4")
def test_dynamic_batch_of_three_dimensions(fmt: Format) -> None:
    def leading(x: torch.Tensor, quantizer: Any) -> Any:
        storage = quantize_storage(x.view(-1, x.shape[-1]), quantizer)
        return quantizer.quantize(x).view(-1, x.shape[-1]), storage.view(x.shape).dequantize()

    function, counter = compiled(leading, dynamic=True)
    for shape in ((2, 16, 64), (3, 8, 64), (5, 7, 64), (4, 32, 64)):
        assert_same(function(sample(shape), fmt.make()), leading(sample(shape), fmt.make()))
    assert counter.frame_count == 1


@over_formats("float8_delayed")
def test_stateful_quantizers_follow_their_tensors(fmt: Format) -> None:
    """Scale and amax are read and written at each call, not baked in."""

    def make(x: torch.Tensor, quantizer: Any) -> Any:
        return quantizer.quantize(x)

    function, counter = compiled(make)
    real, eager = fmt.make(), fmt.make()
    for step, scale in enumerate((16.0, 2.0, 64.0)):
        for quantizer in (real, eager):
            quantizer.scale.fill_(scale)
        x = sample((32, 64), seed=step) * (step + 1)
        assert_same(function(x, real), make(x, eager))
        assert torch.equal(real.amax, eager.amax)
    assert counter.frame_count == 1
    calibrate = compiled(lambda x, q: q.calibrate(x))[0]
    calibrate(sample((32, 64)), real)
    assert real.amax.item() == sample((32, 64)).abs().max()


# In place


@over_formats()
def test_updates_show_in_the_same_graph(fmt: Format) -> None:
    """What is written to an argument's buffers shows in the argument at once, however it is read."""

    def update(x: torch.Tensor, target: Any, quantizer: Any) -> Any:
        quantizer.update_quantized(x, target)
        first = target.dequantize()
        quantizer.quantize(x * 4, out=target)
        return first, target + 0, target.detach().dequantize()

    x = sample((32, 64))
    target, expected = fmt.quantize(sample((32, 64), seed=1)), fmt.quantize(sample((32, 64), seed=1))
    real, eager = fmt.make(), fmt.make()
    assert_same(run(compiled(update)[0], x, target, real), run(update, x, expected, eager))
    assert_same_bytes(target, expected)


@over_formats("float8_current", "mxfp8", "nvfp4_rht_stochastic", "hybrid")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_other_writes_show_in_the_same_graph(fmt: Format, backend: str) -> None:
    def write(x: torch.Tensor, target: Any) -> Any:
        target.copy_(x)
        first = target.dequantize()
        target.quantize_(first * 2)
        second = target.dequantize()
        target.add_(1.0)
        return first, second, target.dequantize()

    x = sample((32, 64))
    target, expected = fmt.quantize(sample((32, 64), seed=1)), fmt.quantize(sample((32, 64), seed=1))
    if fmt.is_random:
        x, target, expected = x.sign(), *(t.quantize_(x.sign()) for t in (target, expected))
    assert_same(run(compiled(write, backend)[0], x, target), run(write, x, expected))
    assert_same_bytes(target, expected)


@over_formats(*SOME)
def test_updates_of_storages(fmt: Format) -> None:
    def update(x: torch.Tensor, storage: Any, quantizer: Any) -> Any:
        quantizer.update_quantized(x, storage)
        return storage.dequantize()

    storage = fmt.quantize(sample((32, 64), seed=1), internal=True)
    result = run(compiled(update)[0], sample((32, 64)), storage, fmt.make())
    expected = fmt.quantize(sample((32, 64)))
    assert_same_bytes(storage, expected)
    assert torch.equal(result, expected.dequantize())


@over_formats(*SOME)
def test_updates_under_a_noop_flag(fmt: Format) -> None:
    def update(x: torch.Tensor, target: Any, flag: torch.Tensor, quantizer: Any) -> Any:
        quantizer.update_quantized(x, target, noop_flag=flag)
        return target.dequantize()

    function, counter = compiled(update)
    target = fmt.quantize(sample((32, 64), seed=1))
    before, expected = snapshot(target), fmt.quantize(sample((32, 64)))
    run(function, sample((32, 64)), target, torch.ones(1), fmt.make())
    assert_same_bytes(target, before)
    result = run(function, sample((32, 64)), target, torch.zeros(1), fmt.make())
    assert_same_bytes(target, expected)
    assert torch.equal(result, expected.dequantize())
    assert counter.frame_count == 1


# Quantized arguments and parameters


@over_formats()
def test_quantized_arguments(fmt: Format) -> None:
    def use(tensor: Any, storage: Any) -> Any:
        return tensor.dequantize(), tensor + 1, storage.dequantize(), tensor.view(4, 8, 64), tensor.detach()

    tensor, storage = fmt.quantize(sample((32, 64))), fmt.quantize(sample((32, 64), seed=1), internal=True)
    function, counter = compiled(use)
    assert_same(function(tensor, storage), use(tensor, storage))
    other = fmt.quantize(sample((32, 64), seed=2)), fmt.quantize(sample((32, 64), seed=3), internal=True)
    assert_same(function(*other), use(*other))
    assert counter.frame_count == 1


class _Linear(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


@over_formats(*SOME)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_quantized_parameter(fmt: Format, backend: str) -> None:
    module, eager = (_Linear(fmt.quantize(sample((32, 64)))) for _ in range(2))
    function, counter = compiled(module, backend)
    for step in range(3):
        x = sample((16, 64), seed=step)
        y, expected = function(x), eager(x)
        assert torch.equal(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert type(module.weight.grad) is torch.Tensor
        assert torch.equal(module.weight.grad, eager.weight.grad)
        for m in (module, eager):
            run(torch.optim.SGD(m.parameters(), lr=0.01).step)
            m.zero_grad()
        assert_same_bytes(module.weight, eager.weight)
    assert counter.frame_count == 1
    assert isinstance(module.weight, nn.Parameter)


# Prototypes


@over_formats(is_value=True)
def test_protos_inside_the_graph(fmt: Format) -> None:
    def make(x: torch.Tensor, quantizer: Any) -> Any:
        proto = TensorProto(tuple(x.shape), x.dtype, quantizer)
        tensor = proto.create_tensor()
        quantizer.update_quantized(x, tensor)
        return tensor, tensor.dequantize()

    x = sample((32, 64), torch.bfloat16)
    function, counter = compiled(make)
    expected = run(lambda: fmt.make().quantize(x))
    assert_same(run(function, x, fmt.make()), (expected, expected.dequantize()))
    function(x, fmt.make())
    assert counter.frame_count == 1


@over_formats(*SOME, "float8_block_2d", "identity")
def test_empty_tensors_of_any_batch_in_the_graph(fmt: Format) -> None:
    def make(x: torch.Tensor, quantizer: Any) -> Any:
        return TensorProto(tuple(x.shape), x.dtype, quantizer).create_tensor(), quantizer.make_empty(tuple(x.shape))

    function, counter = compiled(make)
    quantizer = fmt.make()
    for rows in (256, 384, 320, 130):
        x = sample((rows, 64))
        for made, expected in zip(function(x, quantizer), make(x, quantizer), strict=True):
            assert type(made) is type(expected)
            assert made.shape == expected.shape
            assert type(made._quantizer) is type(quantizer)
            assert [(n, b.shape, b.dtype) for n, b in made._buffers()] == [
                (n, b.shape, b.dtype) for n, b in expected._buffers()
            ]
    assert counter.frame_count == 2


@over_formats(*SOME, "float8_block_2d", "identity")
def test_protos_of_quantized_tensors_in_the_graph(fmt: Format) -> None:
    """Of an argument, of one direction of it, and of a tensor that the graph made."""

    def describe(tensor: Any, rows: Any, x: torch.Tensor, quantizer: Any) -> Any:
        protos = [to_tensor_proto(t) for t in (tensor, rows, quantizer.quantize(x))]
        usages = [(p.quantizer.rowwise_usage, p.quantizer.columnwise_usage, p.quantizer.internal) for p in protos]
        return usages, [p.inner_names() for p in protos], [p.num_bytes() for p in protos], protos[1].create_tensor()

    function, counter = compiled(describe)
    for rows in (256, 384, 320):
        x = sample((rows, 64))
        arguments = fmt.quantize(x), fmt.quantize(x, True, False), x, fmt.make()
        (*made, tensor), (*expected, eager) = function(*arguments), describe(*arguments)
        assert made == expected
        assert made[0] == [(True, True, False), (True, False, False), (True, True, False)]
        assert (type(tensor), tensor.shape) == (fmt.tensor, eager.shape)
    assert counter.frame_count == 2


def test_protos_of_tensors_in_the_graph() -> None:
    def describe(x: torch.Tensor, quantizer: Any) -> Any:
        proto = to_tensor_proto(x)
        storage = quantize_storage(x, quantizer)
        again = to_tensor_proto(storage)
        return x * len(proto.inner_names()), again.create_tensor().shape, again.num_bytes()

    x = sample((32, 64))
    result = compiled(describe)[0](x, mz.MXFP8Quantizer(E4M3))
    expected = describe(x, mz.MXFP8Quantizer(E4M3))
    assert torch.equal(result[0], expected[0])
    assert result[1:] == expected[1:]


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
