"""What holds for every format: one suite over `tests/quantizer_formats.py`, in the files `test_contract*.py`.

Here: the prototype is the real tensor is the fake one; values are close; flattening and saving keep the bytes.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mezzotint as mz
from mezzotint import QuantizedTensorStorage, TensorProto, to_tensor_proto
from mezzotint.dynamo import TensorSpec, to_tensor_spec
from tests.quantizer_formats import (
    FORMATS,
    SHAPES,
    USAGES,
    Format,
    assert_same_bytes,
    buffers,
    over_formats,
    sample,
    snapshot,
)
from tests.tensor.contract import described, over_internal, over_usages


def context_of(quantized: QuantizedTensorStorage) -> dict[str, Any]:
    return quantized.__tensor_flatten__()[1]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


# Prototype = real = fake


@pytest.mark.cover(1)
@over_formats()
@over_usages
@over_internal
def test_proto_is_real_is_fake(fmt: Format, rowwise: bool, columnwise: bool, internal: bool) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            real = fmt.quantize(sample(shape, dtype), rowwise, columnwise, internal)
            with FakeTensorMode():
                fake = fmt.quantizer(rowwise, columnwise, internal).quantize(torch.empty(shape, dtype=dtype))
            proto = TensorProto(shape, dtype, fmt.quantizer(rowwise, columnwise, internal))
            made = proto.create_tensor()

            assert type(real) is type(fake) is type(made) is (fmt.storage if internal else fmt.tensor)
            assert proto.inner_names() == tuple(buffers(real)), shape
            assert described(real) == described(fake) == described(made), shape
            for quantized in (real, fake, made):
                assert tuple(quantized.shape) == tuple(quantized.size()) == shape
                assert quantized.dtype == dtype
                assert quantized.device.type == "cpu"
                assert quantized.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
                back = quantized.dequantize()
                assert (tuple(back.shape), back.dtype, back.is_contiguous()) == (shape, dtype, True)
            if fmt.is_value:
                assert context_of(real) == context_of(fake) == context_of(made) == proto.create_metadata(), shape
                assert to_tensor_proto(real) == TensorProto(
                    shape=shape,
                    dtype=dtype,
                    quantizer=fmt.quantizer(rowwise, columnwise, internal),
                    requires_grad=False,
                    device=torch.device("cpu"),
                )
            bytes_held = sum(b.numel() * b.element_size() for b in buffers(real).values())
            assert proto.num_bytes() == bytes_held


@over_formats()
def test_proto_on_another_device(fmt: Format) -> None:
    proto = TensorProto((32, 64), torch.bfloat16, fmt.make(), requires_grad=True, device=torch.device("meta"))
    made = proto.create_tensor()
    assert made.device.type == "meta"
    assert {b.device.type for b in buffers(made).values()} == {"meta"}
    assert made.requires_grad
    assert proto.is_quantized


@over_formats()
def test_proto_owns_its_quantizer(fmt: Format) -> None:
    quantizer = fmt.make()
    proto = TensorProto((32, 64), torch.float32, quantizer)
    quantizer.set_usage(columnwise=False)
    assert proto.quantizer is not quantizer
    assert proto.create_tensor().get_usages() == {"rowwise": True, "columnwise": True}
    proto.update_usage(rowwise_usage=False)
    assert proto.create_tensor().get_usages() == {"rowwise": False, "columnwise": True}
    assert quantizer.rowwise_usage


def test_proto_of_plain_tensors() -> None:
    x = torch.randn(3, 4, dtype=torch.float16, requires_grad=True)
    proto = to_tensor_proto(x)
    assert proto == TensorProto(
        shape=(3, 4), dtype=torch.float16, quantizer=None, requires_grad=True, device=torch.device("cpu")
    )
    assert not proto.is_quantized
    assert proto.inner_names() == ("data",)
    assert proto.num_bytes() == 24
    made = proto.create_tensor()
    assert (made.shape, made.dtype, made.requires_grad) == (x.shape, x.dtype, True)
    assert TensorSpec is TensorProto
    assert to_tensor_spec is to_tensor_proto


@over_formats()
def test_proto_assembles_buffers(fmt: Format) -> None:
    real = fmt.quantize(sample((32, 64)))
    proto = to_tensor_proto(real)
    again = proto.assemble(list(buffers(real).values()))
    assert_same_bytes(again, real)
    assert torch.equal(again.dequantize(), real.dequantize())


@over_formats()
@over_usages
def test_specs_allocation_and_metadata(fmt: Format, rowwise: bool, columnwise: bool) -> None:
    quantizer = fmt.quantizer(rowwise, columnwise).for_dtype(torch.float32)
    for shape in SHAPES:
        specs = quantizer.inner_tensor_specs(shape)
        allocated = quantizer.alloc_tensors(shape, device="meta")
        assert list(specs) == list(allocated)
        for name, (size, dtype) in specs.items():
            assert (tuple(allocated[name].shape), allocated[name].dtype) == (size, dtype)
            assert allocated[name].device.type == "meta"
        context = quantizer.create_metadata(shape, dtype=torch.float32)
        made = fmt.storage.__tensor_unflatten__(allocated, context, shape, None)
        assert type(made) is fmt.tensor
        assert set(quantizer.storage_metadata(torch.float32)) <= set(context["nontensor_kwargs"])
        needing = quantizer.create_metadata(shape, dtype=torch.float32, requires_grad=True)
        assert fmt.storage.__tensor_unflatten__(allocated, needing, shape, None).requires_grad


# Values


@over_formats()
@over_usages
def test_dequantize_is_close(fmt: Format, rowwise: bool, columnwise: bool) -> None:
    for shape in ((64, 128), (2, 16, 64), (40, 49), (33,)):
        x = sample(shape)
        quantized = fmt.quantize(x, rowwise, columnwise)
        back = quantized.dequantize()
        assert back.dtype == torch.float32
        assert type(back) is torch.Tensor
        if rowwise or not fmt.is_transformed:
            assert relative_error(back, x) < fmt.tolerance, shape
        assert quantized.dequantize(dtype=torch.bfloat16).dtype == torch.bfloat16


@over_formats()
def test_directions_agree_with_single_ones(fmt: Format) -> None:
    x = sample((64, 64)).sign() if fmt.is_random else sample((64, 64))  # signs are on the grid: nothing is rounded
    both = fmt.quantize(x)
    held = buffers(both)
    for rowwise, columnwise in USAGES[:2]:
        alone = fmt.quantize(x, rowwise, columnwise)
        assert_same_bytes(alone, {name: held[name] for name in buffers(alone)})


@over_formats()
def test_quantizing_again_gives_the_same_where_it_is_safe(fmt: Format) -> None:
    """Safe: a saved input can be quantized once more for the backward. Random or stateful scaling is not."""
    quantizer = fmt.make()
    assert quantizer.is_requantization_safe() == (fmt.is_value and not fmt.is_random)
    if quantizer.is_requantization_safe():
        assert_same_bytes(quantizer.quantize(sample((64, 64))), quantizer.quantize(sample((64, 64))))


# Flatten and save


@pytest.mark.cover(2)
@over_formats()
@over_usages
@over_internal
def test_flatten_round_trip(fmt: Format, rowwise: bool, columnwise: bool, internal: bool) -> None:
    for shape in SHAPES:
        quantized = fmt.quantize(sample(shape, torch.bfloat16), rowwise, columnwise, internal)
        names, context = quantized.__tensor_flatten__()
        assert names == list(buffers(quantized))
        inner = {name: getattr(quantized, name) for name in names}
        again = type(quantized).__tensor_unflatten__(inner, context, quantized.shape, None)
        assert type(again) is type(quantized)
        assert_same_bytes(again, quantized)
        assert (again.shape, again.dtype) == (quantized.shape, quantized.dtype)
        assert again.get_usages() == quantized.get_usages()
        if fmt.is_value:
            assert again._quantizer == quantized._quantizer
        assert torch.equal(again.dequantize(), quantized.dequantize())


@over_formats()
def test_metadata_makes_the_same_object(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    again = fmt.tensor(tensor.shape, tensor.dtype, **tensor.get_metadata())
    assert all(a is b for a, b in zip(buffers(again).values(), buffers(tensor).values(), strict=True))
    assert torch.equal(again.dequantize(), tensor.dequantize())
    storage = fmt.storage(**tensor.get_metadata(), fake_dtype=tensor.dtype)
    assert_same_bytes(storage, tensor)
    assert storage.dtype == tensor.dtype
    assert torch.equal(storage.dequantize(), tensor.dequantize())


@over_formats()
@over_internal
def test_prepare_and_restore(fmt: Format, internal: bool) -> None:
    quantized = fmt.quantize(sample((32, 64)), True, True, internal)
    before = snapshot(quantized)
    tensors, holder = quantized.prepare_for_saving()
    assert holder is quantized
    assert not buffers(quantized)
    assert len(tensors) == len(fmt.storage._FLATTEN_TENSOR_BUFFERS)
    extra = torch.ones(1)
    assert quantized.restore_from_saved([*tensors, extra]) == [extra]
    assert_same_bytes(quantized, before)
    assert tuple(quantized.shape) == (32, 64)


class _Save(torch.autograd.Function):
    """Saves a plain tensor, a storage, nothing and a quantized tensor, and gives back what it finds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, storage: Any, tensor: Any, found: list[Any]) -> torch.Tensor:
        flat, ctx.tensor_objects = mz.prepare_for_saving(x, storage, None, tensor)
        ctx.save_for_backward(*flat)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.found[:] = mz.restore_from_func_ctx(ctx)
        return grad, None, None, None


@over_formats()
def test_saving_through_autograd(fmt: Format) -> None:
    x = sample((5, 7)).requires_grad_()
    storage = fmt.quantize(sample((5, 7), seed=1), internal=True)
    tensor = fmt.quantize(sample((5, 7), seed=2))
    expected = snapshot(storage), storage.dequantize(), snapshot(tensor)
    found: list[Any] = []
    y = _Save.apply(x, storage, tensor, found)
    assert not buffers(storage)
    y.sum().backward(retain_graph=True)
    for _ in range(2):
        plain, restored, nothing, whole = found
        assert torch.equal(plain, x)
        assert nothing is None
        assert type(restored) is fmt.storage
        assert_same_bytes(restored, expected[0])
        assert torch.equal(restored.dequantize(), expected[1])
        assert type(whole) is fmt.tensor
        assert_same_bytes(whole, expected[2])
        found.clear()
        y.sum().backward(retain_graph=True)


def test_restore_gives_what_is_left() -> None:
    storage = FORMATS["mxfp8"].quantize(sample((32, 32)), internal=True)
    flat, objects = mz.prepare_for_saving(storage, None)
    extra = torch.ones(1)
    (first, second), rest = mz.restore_from_saved(
        tensors=objects, saved_tensors=[*flat, extra], return_saved_tensors=True
    )
    assert first is storage
    assert second is None
    assert rest == [extra]


def test_clear_lets_go() -> None:
    tensor = FORMATS["mxfp8"].quantize(sample((32, 32)))
    tensor.clear()
    assert not buffers(tensor)
