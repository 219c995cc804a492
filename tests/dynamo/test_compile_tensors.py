"""Quantized tensors under `torch.compile(fullgraph=True)`: updates, arguments, parameters, prototypes."""

from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import TensorProto, to_tensor_proto
from mezzotint.tensor.quantizer import quantize_storage
from tests.dynamo.graphs import SOME, assert_same, compiled, over_every_format, run
from tests.quantizer_formats import E4M3, Format, assert_same_bytes, over_formats, sample, snapshot

opaque_object = pytest.importorskip("torch._library.opaque_object")

pytestmark = pytest.mark.compile


# In place


@over_every_format()
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


@pytest.mark.cover(0)
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


@over_every_format()
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


@pytest.mark.cover(1)
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


@over_every_format(is_value=True)
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


@pytest.mark.cover(0)
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


@pytest.mark.cover(0)
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
