"""Quantizers under `torch.compile(fullgraph=True)`: whole graphs, same bits, no recompiles."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint.tensor.quantizer import quantize, quantize_storage
from tests.dynamo.graphs import SOME, assert_same, compiled, firsts, over_every_format, run
from tests.quantizer_formats import E4M3, FORMATS, Format, assert_same_bytes, over_formats, same_bytes, sample

opaque_object = pytest.importorskip("torch._library.opaque_object")

pytestmark = pytest.mark.compile


GLOBAL_QUANTIZER: Any = None


def everything(x: torch.Tensor, quantizer: Any) -> Any:
    """Quantizes into a tensor and a storage, passes buffers on, dequantizes, returns all of it."""
    tensor = quantizer(x)
    storage = quantize_storage(x, quantizer)
    passed_on = [buffer.view(torch.uint8) for _, buffer in storage._buffers()]
    return tensor, tensor.dequantize(), storage, storage.dequantize(dtype=torch.float32), passed_on


# Whole graphs, the same bits


@over_every_format(firsts())
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


@pytest.mark.cover(0)
@over_formats("float8_current", "float8_delayed", "float8_block_2d", "mxfp8_2d", "nvfp4_rht_stochastic", "hybrid")
def test_formats_compile_with_inductor(fmt: Format) -> None:
    x = sample((40, 48), torch.bfloat16)
    function, _ = compiled(everything, "inductor")
    assert_same(run(function, x, fmt.make()), run(everything, x, fmt.make()))


@pytest.mark.cover(0)
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


@over_every_format()
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


@pytest.mark.cover(0)
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


@over_every_format(is_value=True)
def test_equal_quantizers_do_not_recompile(fmt: Format) -> None:
    x = sample((32, 64))
    function, counter = compiled(lambda x, q: q.quantize(x))
    for quantizer in (fmt.make(), fmt.make(), fmt.make().copy(), copy.deepcopy(fmt.make())):
        function(x, quantizer)
    assert counter.frame_count == 1


@pytest.mark.slow
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


@over_every_format()
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
