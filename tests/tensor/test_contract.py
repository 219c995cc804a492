"""What holds for every format: one suite over `tests/quantizer_formats.py`.

The prototype is the real tensor is the fake one; flatten, save, copy, view, move, pickle and deepcopy keep the bytes;
usages are what they say; quantizing in place, into an output and under a no-op flag give what quantizing gives.
"""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mezzotint as mz
from mezzotint import QuantizedTensor, QuantizedTensorStorage, TensorProto, to_tensor_proto
from mezzotint.dynamo import TensorSpec, to_tensor_spec
from mezzotint.tensor.identity import IdentityTensor
from mezzotint.tensor.quantizer import quantize, quantize_storage
from tests.quantizer_formats import (
    E4M3,
    E5M2,
    FORMATS,
    SHAPES,
    USAGES,
    Format,
    assert_same_bytes,
    buffers,
    over_formats,
    same_bytes,
    sample,
    snapshot,
)

over_usages = pytest.mark.parametrize(("rowwise", "columnwise"), USAGES, ids=["rowwise", "columnwise", "both"])
over_internal = pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])

X = (256, 64)  # two of the largest blocks, so that a row slice can keep the form of every format


def described(quantized: QuantizedTensorStorage) -> dict[str, Any]:
    """Buffer → shape, dtype and device. All are contiguous."""
    assert all(buffer.is_contiguous() for _, buffer in quantized._buffers())
    return {name: (tuple(b.shape), b.dtype, b.device.type) for name, b in quantized._buffers()}


def context_of(quantized: QuantizedTensorStorage) -> dict[str, Any]:
    return quantized.__tensor_flatten__()[1]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


# Prototype = real = fake


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
            assert proto.inner_names() == list(buffers(real)), shape
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
                    shape, dtype, fmt.quantizer(rowwise, columnwise, internal), False, torch.device("cpu")
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
    assert proto == TensorProto((3, 4), torch.float16, None, True, torch.device("cpu"))
    assert not proto.is_quantized
    assert proto.inner_names() == ["data"]
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
        assert set(quantizer.storage_metadata(torch.float32)) <= set(context)


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


# Views, rows, copies


@over_formats()
@over_usages
def test_view_of_leading_dimensions(fmt: Format, rowwise: bool, columnwise: bool) -> None:
    tensor = fmt.quantize(sample((4, 6, 64)), rowwise, columnwise)
    expected = tensor.dequantize()
    for shape in ((24, 64), (2, 2, 6, 64), (-1, 64), (1, 24, 64)):
        for viewed in (tensor.view(shape), tensor.reshape(*shape), tensor.view(*shape)):
            assert type(viewed) is fmt.tensor
            assert torch.equal(viewed.dequantize(), expected.view(shape))
            assert viewed.get_usages() == tensor.get_usages()
    storage = fmt.quantize(sample((4, 6, 64)), rowwise, columnwise, True)
    viewed = storage.view(24, 64)
    assert type(viewed) is fmt.storage
    assert tuple(viewed.shape) == (24, 64)
    assert torch.equal(viewed.dequantize(), expected.view(24, 64))
    assert torch.equal(storage.view((24, -1)).dequantize(), expected.view(24, 64))


@over_formats()
@over_usages
def test_rows(fmt: Format, rowwise: bool, columnwise: bool) -> None:
    tensor = fmt.quantize(sample(X), rowwise, columnwise)
    expected = tensor.dequantize()
    block = fmt.row_block if columnwise else fmt.row_block_rowwise
    for start, stop in ((0, 128), (128, 256), (32, 96), (3, 5), (250, 256), (0, 256), (7, 7)):
        rows = tensor[start:stop]
        whole = (start, stop) == (0, X[0])
        keeps = whole or (block is not None and start % block == 0 and (stop % block == 0 or stop == X[0]))
        if start != stop:
            assert isinstance(rows, fmt.tensor) == keeps, (start, stop)
        values = rows.dequantize() if isinstance(rows, QuantizedTensor) else rows
        assert torch.equal(values, expected[start:stop]), (start, stop)
        if isinstance(rows, QuantizedTensor):
            assert rows.get_usages() == tensor.get_usages()
            assert tuple(rows.shape) == (stop - start, X[1])
    for sizes in (128, [128, 128], [0, 256], [100, 156]):
        parts = tensor.split(sizes)
        values = [p.dequantize() if isinstance(p, QuantizedTensor) else p for p in parts]
        assert [v.shape[0] for v in values] == [v.shape[0] for v in expected.split(sizes)]
        assert torch.equal(torch.cat(values), expected)
    assert [p.shape[0] for p in torch.chunk(tensor, 2)] == [128, 128]


@over_formats()
def test_rows_hold_both_directions(fmt: Format) -> None:
    """What a slice keeps of the column-wise copy is the column-wise copy of those rows."""
    if fmt.row_block is None:
        return
    tensor = fmt.quantize(sample(X))
    rows, columns = tensor[128:256], fmt.quantize(sample(X), False, True)[128:256]
    assert_same_bytes({n: b for n, b in buffers(rows).items() if n in buffers(columns)}, columns)
    assert described(rows) == described(TensorProto((128, X[1]), torch.float32, fmt.make()).create_tensor())
    if fmt.is_value:
        assert to_tensor_proto(rows).inner_names() == list(buffers(rows))


@over_formats()
def test_other_slices_are_plain(fmt: Format) -> None:
    tensor = fmt.quantize(sample((4, 6, 64)))
    expected = tensor.dequantize()
    for index in ((slice(None), slice(0, 3)), (Ellipsis, slice(0, 32)), (0,), (slice(None, None, 2),)):
        assert torch.equal(torch.empty(0).new_tensor(tensor[index].tolist()), expected[index])
    vector = fmt.quantize(sample((33,)))
    assert torch.equal(vector[3:9] + 0, vector.dequantize()[3:9])


@over_formats()
def test_a_part_is_written_by_assignment(fmt: Format) -> None:
    """All of it is quantized again, in both directions; what an index gave before stays as it was."""
    tensor = fmt.quantize(sample(X))
    for index in (slice(0, 128), 3, (slice(None), slice(8, 40)), (Ellipsis, 0)):
        dense, rows = tensor.dequantize(), tensor[128:]
        before = (rows + 0).clone()
        value = 100 * torch.randn_like(dense[index])
        dense[index] = value
        torch.manual_seed(1)
        tensor[index] = value
        assert_same_bytes(tensor, fmt.quantize(dense, seed=1))
        assert index == 3 or fmt.tensor is IdentityTensor or torch.equal(rows + 0, before)
    parameter = torch.nn.Parameter(tensor)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter[3] = 1.0
    with torch.no_grad():
        parameter[:] = 0.0
    assert not parameter.dequantize().any()


@over_formats()
def test_rows_are_no_way_to_write(fmt: Format) -> None:
    """They would leave the tensor with scales, or columns, of what it was."""
    tensor = fmt.quantize(sample(X))
    before, rows = snapshot(tensor), tensor[:128]
    if isinstance(rows, IdentityTensor):
        rows.zero_()
        assert not tensor.dequantize()[:128].any()
        assert tensor.dequantize()[128:].any()
        return
    if isinstance(rows, QuantizedTensor):
        for write in (rows.zero_, lambda: rows.copy_(torch.ones(128, X[1])), lambda: tensor.split(128)[1].mul_(2.0)):
            with pytest.raises(ValueError, match=r"is a slice \(128, 64\) of one of shape \(256, 64\), and a copy"):
                write()
        rows.clone().zero_()
        rows.detach().quantize_(torch.ones(128, X[1]))
    assert_same_bytes(before, tensor)
    tensor.view(2, 128, X[1]).fill_(1.0)
    assert torch.equal(tensor.dequantize(), torch.ones(X))


@over_formats()
def test_clone_and_detach(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    cloned, detached = tensor.clone(), tensor.detach()
    assert type(cloned) is type(detached) is fmt.tensor
    assert_same_bytes(cloned, tensor)
    for name, buffer in buffers(tensor).items():
        assert getattr(detached, name) is buffer
        assert getattr(cloned, name).data_ptr() != buffer.data_ptr()
    assert tensor.contiguous() is tensor
    assert tensor.is_contiguous()
    tensor.requires_grad_()
    assert tensor.clone().requires_grad
    assert not tensor.detach().requires_grad


@over_formats()
def test_make_like_and_to_dtype(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    like = fmt.tensor.make_like(tensor, dtype=torch.bfloat16, requires_grad=True)
    assert (like.dtype, like.requires_grad, type(like)) == (torch.bfloat16, True, fmt.tensor)
    assert like.dequantize().dtype == torch.bfloat16
    other = tensor.to_dtype(torch.float16)
    assert (other.dtype, type(other)) == (torch.float16, fmt.tensor)
    assert_same_bytes(other, tensor)


@over_formats()
@over_usages
def test_copy_of_the_same_form_is_verbatim(fmt: Format, rowwise: bool, columnwise: bool) -> None:
    source = fmt.quantize(sample((32, 64)), rowwise, columnwise)
    target = fmt.quantize(sample((32, 64), seed=1), rowwise, columnwise)
    pointers = {name: b.data_ptr() for name, b in buffers(target).items()}
    assert target.copy_(source) is target
    assert_same_bytes(target, source)
    assert {name: b.data_ptr() for name, b in buffers(target).items()} == pointers
    storage = fmt.quantize(sample((32, 64), seed=1), rowwise, columnwise, True)
    storage.copy_from_storage(source)
    assert_same_bytes(storage, source)


@over_formats()
def test_copy_between_forms_quantizes(fmt: Format) -> None:
    x = sample((32, 64))
    source = fmt.quantize(x)
    for other in FORMATS.values():
        if other.name == fmt.name or other.is_random:
            continue
        target = other.quantize(sample((32, 64), seed=1))
        target.copy_(source)
        expected = other.quantizer().quantize(source.dequantize())
        if _same_meaning(fmt, other):
            assert_same_bytes(target, source)
        else:
            assert_same_bytes(target, expected)


def _same_meaning(a: Format, b: Format) -> bool:
    """Formats whose tensors are read in the same way: their bytes can be copied."""
    groups = (
        {"float8_current", "float8_current_pow2", "float8_delayed"},
        {"mxfp8", "mxfp8_floor"},
        {"nvfp4", "nvfp4_stochastic"},
        {"nvfp4_4over6_mae", "nvfp4_4over6_mse"},
        {"nvfp4_rht", "nvfp4_rht_stochastic"},
        {"hybrid", "hybrid_chained"},
    )
    return any({a.name, b.name} <= group for group in groups)


@over_formats()
def test_copy_with_plain_tensors(fmt: Format) -> None:
    x = sample((32, 64))
    target = fmt.quantize(sample((32, 64), seed=1))
    torch.manual_seed(0)
    target.copy_(x)
    assert_same_bytes(target, fmt.quantize(x))
    torch.manual_seed(0)
    target.copy_(x[0])  # as everywhere in PyTorch, the source is expanded
    assert_same_bytes(target, fmt.quantize(x[:1].expand(32, 64)))
    torch.manual_seed(0)
    target.copy_(x.to(torch.float64))
    assert_same_bytes(target, fmt.quantize(x))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        plain = torch.empty(32, 64, dtype=dtype)
        plain.copy_(target)
        assert torch.equal(plain, target.dequantize(dtype=torch.float32).to(dtype))


@over_formats()
def test_copy_with_other_usages_quantizes(fmt: Format) -> None:
    source = fmt.quantize(sample((32, 64)), True, False)
    target = fmt.quantize(sample((32, 64), seed=1), True, True)
    torch.manual_seed(0)
    target.copy_(source)
    assert target.get_usages() == {"rowwise": True, "columnwise": True}
    assert_same_bytes(target, fmt.quantize(source.dequantize()))


# Devices and dtypes


@over_formats()
def test_moves(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    assert tensor.cpu() is tensor or type(tensor.cpu()) is fmt.tensor
    moved = tensor.to("meta")
    assert type(moved) is fmt.tensor
    assert moved.device.type == "meta"
    assert {b.device.type for b in buffers(moved).values()} == {"meta"}
    assert moved.get_usages() == tensor.get_usages()
    copied = tensor.to("cpu", copy=True)
    assert type(copied) is fmt.tensor
    assert_same_bytes(copied, tensor)
    assert all(getattr(copied, n).data_ptr() != b.data_ptr() for n, b in buffers(tensor).items())
    assert not tensor.is_cuda


@over_formats()
def test_conversion_to_a_dtype_dequantizes(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    for dtype, method in ((torch.bfloat16, "bfloat16"), (torch.float16, "half"), (torch.float32, "float")):
        expected = tensor.dequantize(dtype=dtype)
        converted = getattr(tensor, method)()
        assert type(converted) is torch.Tensor
        assert torch.equal(converted, expected)
        if dtype != tensor.dtype:
            assert torch.equal(tensor.to(dtype), tensor.dequantize().to(dtype))
            assert torch.equal(tensor.to(dtype=dtype), tensor.dequantize().to(dtype))
    assert tensor.to(torch.float32) is tensor
    assert tensor.to("meta", torch.bfloat16).dtype == torch.bfloat16
    narrow = fmt.quantize(100 * sample((32, 64), torch.bfloat16))
    for dtype, expected in ((torch.float32, narrow.float()), (torch.int32, narrow.dequantize().to(torch.int32))):
        assert torch.equal(narrow.to(dtype), expected)
        assert torch.equal(torch.empty(32, 64, dtype=dtype).copy_(narrow), expected)


@over_formats()
def test_empty_likes(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)), True, False)
    like, new = torch.empty_like(tensor), tensor.new_empty((48, 64))
    assert type(like) is type(new) is fmt.tensor
    assert described(like) == described(tensor)
    assert new.shape == (48, 64)
    assert new.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.empty_like(tensor, device="meta").device.type == "meta"
    plain = torch.empty_like(tensor, dtype=torch.int32)
    assert (type(plain), plain.dtype) == (torch.Tensor, torch.int32)
    zeros = torch.zeros_like(tensor)
    assert (type(zeros), zeros.dtype) == (torch.Tensor, tensor.dtype)


# .data


@over_formats()
def test_data(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64))).requires_grad_()
    data = tensor.data
    assert type(data) is fmt.tensor
    assert not data.requires_grad
    assert all(getattr(data, name) is b for name, b in buffers(tensor).items())

    other = fmt.quantize(sample((32, 64), seed=1))
    tensor.data = other
    assert all(getattr(tensor, name) is b for name, b in buffers(other).items())
    assert tensor.requires_grad
    assert tensor.is_leaf

    pointers = {name: b.data_ptr() for name, b in buffers(tensor).items()}
    torch.manual_seed(0)
    tensor.data = sample((32, 64), seed=2)
    assert_same_bytes(tensor, fmt.quantize(sample((32, 64), seed=2)))
    assert {name: b.data_ptr() for name, b in buffers(tensor).items()} == pointers


@over_formats()
def test_data_takes_the_dtype(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64))).requires_grad_()
    tensor.data = fmt.quantize(sample((32, 64), torch.bfloat16))
    assert tensor.dtype == torch.bfloat16
    assert tensor.dequantize().dtype == torch.bfloat16
    assert tensor.requires_grad


@pytest.mark.gpu
@over_formats()
def test_moves_to_a_gpu_and_back(fmt: Format) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(fmt.quantize(sample((40, 48))))
    module.weight.main_grad = torch.ones(1)
    before = snapshot(module.weight)
    module.to("cuda")
    assert type(module.weight) is fmt.tensor
    assert {b.device.type for b in buffers(module.weight).values()} == {"cuda"}
    assert_same_bytes({n: b.cpu() for n, b in buffers(module.weight).items()}, before)
    assert torch.equal(module.weight.main_grad, torch.ones(1))
    moved = module.weight.detach()
    back = moved.cpu()
    assert type(back) is fmt.tensor
    assert_same_bytes(back, before)
    back.data = moved
    assert back.device.type == "cuda"
    assert {b.device.type for b in buffers(back).values()} == {"cuda"}
    target = fmt.quantize(sample((40, 48), seed=1))
    target.copy_(moved)
    assert_same_bytes(target, before)
    other = FORMATS["mxfp8"].quantize(sample((40, 48), seed=1))
    other.copy_(moved)
    assert other.device.type == "cpu"


# Parameters


@over_formats()
def test_parameter(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    parameter = nn.Parameter(tensor)
    assert type(parameter) is fmt.tensor
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert_same_bytes(parameter, tensor)
    assert not isinstance(tensor, nn.Parameter)
    frozen = nn.Parameter(tensor, requires_grad=False)
    assert isinstance(frozen, nn.Parameter)
    assert not frozen.requires_grad
    assert not isinstance(parameter.detach(), nn.Parameter)
    assert not isinstance(parameter.clone(), nn.Parameter)
    assert not isinstance(parameter.to("meta"), nn.Parameter)


@over_formats()
def test_deepcopy(fmt: Format) -> None:
    parameter = nn.Parameter(fmt.quantize(sample((32, 64))))
    parameter.main_grad = torch.ones(32, 64)
    parameter.grad = torch.full((32, 64), 2.0)
    shared = [parameter, parameter]
    first, second = copy.deepcopy(shared)
    assert first is second
    assert type(first) is fmt.tensor
    assert isinstance(first, nn.Parameter)
    assert first.requires_grad
    assert first.is_leaf
    assert_same_bytes(first, parameter)
    assert all(getattr(first, n).data_ptr() != b.data_ptr() for n, b in buffers(parameter).items())
    assert torch.equal(first.main_grad, parameter.main_grad)
    assert first.main_grad is not parameter.main_grad
    assert torch.equal(first.grad, parameter.grad)
    assert first.grad is not parameter.grad
    assert first._quantizer is not parameter._quantizer
    if fmt.is_value:
        assert first._quantizer == parameter._quantizer
    storage = copy.deepcopy(fmt.quantize(sample((5, 7)), internal=True))
    assert_same_bytes(storage, fmt.quantize(sample((5, 7)), internal=True))
    assert tuple(storage.shape) == (5, 7)


@over_formats()
def test_module_moves_keep_attributes(fmt: Format) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(fmt.quantize(sample((32, 64))))
    module.weight.main_grad = torch.ones(1)
    module.weight.grad = torch.ones(32, 64)
    weight, before = module.weight, snapshot(module.weight)
    for _ in range(2):
        module.to("cpu")
        module.cpu()
        assert module.weight is weight
        assert isinstance(module.weight, nn.Parameter)
        assert type(module.weight) is fmt.tensor
        assert torch.equal(module.weight.main_grad, torch.ones(1))
        assert module.weight.grad is not None
        assert_same_bytes(module.weight, before)
    copied = copy.deepcopy(module)
    assert torch.equal(copied.weight.main_grad, torch.ones(1))
    assert isinstance(copied.weight, nn.Parameter)
    module.weight.grad = None
    module.to("meta")
    assert module.weight.device.type == "meta"
    assert isinstance(module.weight, nn.Parameter)
    assert type(module.weight) is fmt.tensor
    assert module.weight.requires_grad
    assert torch.equal(module.weight.main_grad, torch.ones(1))
    assert [name for name, _ in module.named_parameters()] == ["weight"]


@over_formats()
def test_attributes_survive_moves(fmt: Format) -> None:
    parameter = nn.Parameter(fmt.quantize(sample((32, 64))))
    parameter.main_grad = torch.ones(1)
    for moved in (parameter.cpu(), parameter.to("cpu", copy=True), parameter.to("meta")):
        assert torch.equal(moved.main_grad, torch.ones(1))


@over_formats()
def test_optimizer_step(fmt: Format) -> None:
    parameter = nn.Parameter(fmt.quantize(sample((32, 64))))
    before = parameter.dequantize().detach()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    (parameter * 2.0).sum().backward()
    assert torch.equal(parameter.grad, torch.full((32, 64), 2.0))
    torch.manual_seed(0)
    optimizer.step()
    torch.manual_seed(0)
    quantizer = fmt.make()
    assert_same_bytes(parameter, quantizer.quantize(before - 1.0))
    assert isinstance(parameter, nn.Parameter)


@over_formats()
def test_state_dict_loads_both_ways(fmt: Format) -> None:
    module = nn.Linear(64, 32, bias=False)
    module.weight = nn.Parameter(fmt.quantize(sample((32, 64), seed=1)))
    torch.manual_seed(0)
    module.load_state_dict({"weight": sample((32, 64))})
    assert type(module.weight) is fmt.tensor
    assert_same_bytes(module.weight, fmt.quantize(sample((32, 64))))
    plain = nn.Linear(64, 32, bias=False)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain.weight.detach(), module.weight.dequantize())


# Pickling


@over_formats()
@over_usages
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(fmt: Format, rowwise: bool, columnwise: bool, weights_only: bool) -> None:
    state = {
        "tensor": fmt.quantize(sample((40, 49), torch.bfloat16), rowwise, columnwise),
        "storage": fmt.quantize(sample((3, 5, 7), seed=1), rowwise, columnwise, True),
        "parameter": nn.Parameter(fmt.quantize(sample((32, 64), seed=2), rowwise, columnwise)),
        "plain": torch.ones(3),
    }
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert torch.equal(loaded["plain"], state["plain"])
    for name in ("tensor", "storage", "parameter"):
        expected, found = state[name], loaded[name]
        assert type(found) is type(expected)
        assert_same_bytes(found, expected)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found.dequantize(), expected.dequantize())
        assert type(found._quantizer) is type(expected._quantizer)
        assert found._quantizer.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        if fmt.is_value:
            assert found._quantizer == expected._quantizer
        for attribute, _, _ in fmt.storage._VALUES:
            assert type(getattr(found, attribute)) is type(getattr(expected, attribute)), attribute
        torch.manual_seed(0)
        found.quantize_(torch.zeros(tuple(found.shape)))
        assert not found.dequantize().any()
    assert loaded["parameter"].requires_grad
    assert isinstance(loaded["parameter"], nn.Parameter)
    assert not isinstance(loaded["tensor"], nn.Parameter)


# Operations


@over_formats()
def test_operations_dequantize(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    value = tensor.dequantize()
    for result, expected in (
        (tensor + 1, value + 1),
        (1 - tensor, 1 - value),
        (tensor @ tensor.t(), value @ value.t()),
        (torch.nn.functional.linear(value, tensor), torch.nn.functional.linear(value, value)),
        (tensor.sum(), value.sum()),
        (torch.cat([tensor, tensor]), torch.cat([value, value])),
        (tensor.transpose(0, 1), value.transpose(0, 1)),
        (tensor.view(64, 32) + 0, value.view(64, 32)),
    ):
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
    assert tensor.numel() == value.numel()
    assert tensor.stride() == value.stride()
    assert torch.equal(tensor.expand_as(tensor) + 0, value)


@over_formats()
def test_in_place_operations_quantize_again(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    value = tensor.dequantize()
    pointers = {name: b.data_ptr() for name, b in buffers(tensor).items()}
    for change in (lambda t: t.add_(1), lambda t: t.mul_(torch.full((64,), 0.5)), lambda t: t.zero_()):
        torch.manual_seed(0)
        assert change(tensor) is tensor
        assert_same_bytes(tensor, fmt.quantize(change(value)))
        value = tensor.dequantize()
    torch.manual_seed(0)
    torch.add(sample((32, 64)), 1.0, out=tensor)
    assert_same_bytes(tensor, fmt.quantize(sample((32, 64)) + 1.0))
    torch.manual_seed(0)
    for given in torch._foreach_zero_([tensor]) or ():  # torch 2.11 gives nothing back
        assert given is tensor
    assert not tensor.dequantize().any()
    assert {name: b.data_ptr() for name, b in buffers(tensor).items()} == pointers


# Usages


@over_formats()
@over_internal
def test_usages_are_dropped(fmt: Format, internal: bool) -> None:
    for rowwise, columnwise in USAGES[:2]:
        quantized = fmt.quantize(sample((32, 64)), True, True, internal)
        quantized.update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)
        assert quantized.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert_same_bytes(quantized, fmt.quantize(sample((32, 64)), rowwise, columnwise, internal))
        assert quantized._quantizer.get_usages() == quantized.get_usages()
        assert tuple(quantized.shape) == (32, 64)
        quantized.update_usage()
        assert quantized.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}


@over_formats()
@over_internal
def test_usages_are_derived_or_refused(fmt: Format, internal: bool) -> None:
    for shape in ((160, 144), (40, 48), (5, 7), (2, 16, 64)) if fmt.derives else ((5, 7),):
        for rowwise, columnwise in USAGES[:2]:
            wanted = "columnwise" if rowwise else "rowwise"
            quantized = fmt.quantize(sample(shape), rowwise, columnwise, internal)
            held = snapshot(quantized)
            if wanted in fmt.derives:
                both = fmt.quantize(sample(shape), True, True, internal)
                quantized.update_usage(**{f"{wanted}_usage": True})
                assert_same_bytes(quantized, both)
                assert quantized.get_usages() == {"rowwise": True, "columnwise": True}
                assert quantized._quantizer.get_usages() == quantized.get_usages()
            else:
                with pytest.raises(ValueError, match=r"cannot be made from the other direction.*before quantizing"):
                    quantized.update_usage(**{f"{wanted}_usage": True})
                assert_same_bytes(quantized, held)


@over_formats()
@over_internal
def test_keep(fmt: Format, internal: bool) -> None:
    quantized = fmt.quantize(sample((5, 7)), True, True, internal)
    for rowwise, columnwise in USAGES:
        kept = quantized.keep(rowwise=rowwise, columnwise=columnwise)
        assert type(kept) is type(quantized)
        assert kept.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert all(getattr(quantized, name) is b for name, b in buffers(kept).items())
        assert tuple(kept.shape) == (5, 7)
        assert quantized.get_usages() == {"rowwise": True, "columnwise": True}


@over_formats()
def test_data_tensors(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    row, column = tensor.get_data_tensors()
    assert row is tensor.get_data_tensors(columnwise_data=False)
    assert column is tensor.get_data_tensors(rowwise_data=False)
    assert any(row is b for b in buffers(tensor).values())
    assert any(column is b for b in buffers(tensor).values())
    tensor.update_usage(columnwise_usage=False)
    assert tensor.get_data_tensors()[0] is row


@over_formats()
def test_gemm_operands(fmt: Format) -> None:
    for shape in ((32, 64), (2, 16, 64)):
        storage = fmt.quantize(sample(shape), internal=True)
        for columnwise in (False, True):
            operand = storage.gemm_operand(columnwise)
            assert operand.data.dim() == 2


# Quantizing


@over_formats()
def test_the_tensor_holds_a_copy_of_the_quantizer(fmt: Format) -> None:
    for internal in (False, True):
        quantizer = fmt.quantizer(internal=internal)
        for quantized in (quantizer.quantize(sample((32, 64))), quantizer.make_empty((32, 64))):
            assert quantized._quantizer is not quantizer
            quantizer.set_usage(columnwise=False)
            assert quantized._quantizer.columnwise_usage
            assert quantized.get_usages() == {"rowwise": True, "columnwise": True}
            quantizer.set_usage(columnwise=True)
            other = fmt.make()
            quantized.update_quantizer(other)
            assert quantized._quantizer is not other


@over_formats()
def test_quantizing_a_quantized_tensor(fmt: Format) -> None:
    source = FORMATS["mxfp8"].quantize(sample((32, 64)))
    expected = fmt.quantize(source.dequantize())
    for quantized in (source, FORMATS["mxfp8"].quantize(sample((32, 64)), internal=True)):
        assert_same_bytes(fmt.quantize(quantized), expected)
        target = fmt.make().make_empty((32, 64))
        torch.manual_seed(0)
        target.quantize_(quantized)
        assert_same_bytes(target, expected)


@over_formats()
@over_usages
@over_internal
def test_quantizing_in_place(fmt: Format, rowwise: bool, columnwise: bool, internal: bool) -> None:
    for shape in ((32, 64), (3, 5, 7), (0, 64)):
        x = sample(shape)
        expected = fmt.quantize(x, rowwise, columnwise, internal)
        quantizer = fmt.quantizer(rowwise, columnwise, internal)
        target = quantizer.make_empty(shape)
        pointers = {name: b.data_ptr() for name, b in buffers(target).items()}

        def write_by_quantize_(target: Any = target, x: Any = x, **flag: Any) -> Any:
            return target.quantize_(x, **flag)

        def write_by_update(target: Any = target, x: Any = x, quantizer: Any = quantizer, **flag: Any) -> Any:
            return quantizer.update_quantized(x, target, **flag)

        def write_by_out(target: Any = target, x: Any = x, quantizer: Any = quantizer) -> Any:
            return quantizer.quantize(x, out=target)

        for write in (write_by_quantize_, write_by_update, write_by_out):
            for buffer in buffers(target).values():
                buffer.fill_(3)
            torch.manual_seed(0)
            assert write() is target
            assert_same_bytes(target, expected)
        for write in (write_by_quantize_, write_by_update):
            for buffer in buffers(target).values():
                buffer.fill_(3)
            before = snapshot(target)
            write(noop_flag=torch.ones(1))
            assert_same_bytes(target, before)
            torch.manual_seed(0)
            write(noop_flag=torch.zeros(1))
            assert_same_bytes(target, expected)
        assert {name: b.data_ptr() for name, b in buffers(target).items()} == pointers


@over_formats()
def test_update_writes_what_the_target_holds(fmt: Format) -> None:
    """The target's usages decide, whatever the quantizer's are."""
    target = fmt.quantize(sample((32, 64), seed=1), True, False)
    torch.manual_seed(0)
    fmt.make().update_quantized(sample((32, 64)), target)
    assert_same_bytes(target, fmt.quantize(sample((32, 64)), True, False))


@over_formats()
def test_internal_gives_storages(fmt: Format) -> None:
    x = sample((32, 64)).requires_grad_()
    storage = fmt.quantize(x, internal=True)
    assert type(storage) is fmt.storage
    assert not isinstance(storage, torch.Tensor)
    assert_same_bytes(storage, fmt.quantize(x.detach()))
    assert type(fmt.quantizer(internal=True).make_empty((32, 64))) is fmt.storage
    torch.manual_seed(0)
    assert_same_bytes(quantize_storage(x.detach(), fmt.make()), storage)
    assert not any(b.requires_grad for b in buffers(storage).values())


@over_formats()
def test_ways_to_quantize_agree(fmt: Format) -> None:
    x = sample((32, 64))
    expected = fmt.quantize(x)
    for call in (
        lambda q: q(x),
        lambda q: q.quantize(x),
        lambda q: q.quantize_impl(x),
        lambda q: quantize(x, q),
        lambda q: q.multi_quantize([x])[0],
    ):
        torch.manual_seed(0)
        made = call(fmt.make())
        assert type(made) is fmt.tensor
        assert_same_bytes(made, expected)
    assert fmt.make().multi_quantize([]) == []
    assert [t.shape[0] for t in fmt.make().multi_quantize([x, x[:5]])] == [32, 5]
    assert fmt.make().quantize(x, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert fmt.quantizer(internal=True).quantize(x, dtype=torch.bfloat16).dtype == torch.bfloat16


@over_formats()
def test_gradients_are_the_identity(fmt: Format) -> None:
    x = sample((32, 64)).requires_grad_()
    weight = sample((32, 64), seed=1)
    quantized = fmt.quantize(x)
    assert quantized.requires_grad
    assert quantized.grad_fn is not None
    back = quantized.dequantize()
    assert back.requires_grad
    (back * weight).sum().backward()
    assert torch.equal(x.grad, weight)

    leaf = fmt.quantize(sample((32, 64))).requires_grad_()
    (leaf.dequantize() * weight).sum().backward()
    assert torch.equal(leaf.grad, weight)
    leaf.grad = None
    (leaf * weight).sum().backward()
    assert torch.equal(leaf.grad, weight)

    with torch.no_grad():
        assert not fmt.quantize(x).requires_grad
        assert not leaf.dequantize().requires_grad
    assert not fmt.make().quantize_impl(x).requires_grad


@over_formats()
def test_gradients_through_views(fmt: Format) -> None:
    x = sample((4, 8, 64)).requires_grad_()
    fmt.quantize(x).view(32, 64).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 8, 64))
    x.grad = None
    fmt.quantize(x)[1:3].sum().backward()
    assert x.grad.sum() == 2 * 8 * 64


@over_formats()
def test_make_empty(fmt: Format) -> None:
    made = fmt.make().make_empty((32, 64), dtype=torch.bfloat16, requires_grad=True)
    assert (type(made), made.dtype, tuple(made.shape)) == (fmt.tensor, torch.bfloat16, (32, 64))
    assert made.requires_grad
    assert made.is_leaf
    assert fmt.make().make_empty([5, 7], device="meta").device.type == "meta"
    assert fmt.make().make_empty((5, 7)).dtype == torch.float32


@over_formats()
def test_shapes_of_codes_and_scales(fmt: Format) -> None:
    """The capability methods say what the buffers have."""
    for shape in ((256, 64), (40, 48), (5, 7), (2, 16, 64)):
        for columnwise in (False, True):
            quantizer = fmt.quantizer(not columnwise, columnwise)
            tensor = quantizer.quantize(sample(shape))
            data = tensor.get_data_tensors(not columnwise, columnwise)
            if columnwise:
                assert tuple(quantizer.get_columnwise_shape(shape)) == tuple(data.shape)
            if fmt.has_scales and not fmt.name.startswith("hybrid"):
                scales = [b for n, b in buffers(tensor).items() if n.endswith("scale_inv")]
                assert tuple(quantizer.get_scale_shape(shape, columnwise)) == tuple(scales[0].shape)
    if not fmt.has_scales:
        with pytest.raises(ValueError, match="has no scales"):
            fmt.make().get_scale_shape((32, 64), False)


def test_scale_shape_of_a_hybrid_is_that_of_its_parts() -> None:
    quantizer = FORMATS["hybrid"].make()
    assert quantizer.get_scale_shape((256, 64), False) == FORMATS["mxfp8"].make().get_scale_shape((256, 64), False)
    assert quantizer.get_scale_shape((256, 64), True) == FORMATS["nvfp4"].make().get_scale_shape((256, 64), True)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("float8_current", (5, 7), True),
        ("float8_block_2d", (256, 128), True),
        ("float8_block_2d", (256, 64), False),
        ("mxfp8", (2, 16, 64), True),
        ("mxfp8", (33, 64), False),
        ("mxfp8", (32, 48), False),
        ("nvfp4", (16, 16), True),
        ("nvfp4", (8, 16), False),
        ("identity", (5, 7), True),
        ("hybrid", (16, 64), False),
        ("hybrid", (32, 64), True),
        ("hybrid", (33, 64), False),
    ],
)
def test_is_quantizable(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert FORMATS[name].make().is_quantizable(sample(shape)) is expected


def test_capabilities() -> None:
    rowwise_only = {n for n, f in FORMATS.items() if f.make().supports_only_rowwise_all_gather()}
    assert rowwise_only == {"float8_current", "float8_current_e5m2", "float8_current_pow2", "float8_delayed"}
    with pytest.raises(NotImplementedError, match="export the dequantized model"):
        FORMATS["mxfp8"].make().onnx_quantize(sample((32, 64)))
    with pytest.raises(NotImplementedError, match="export the dequantized model"):
        FORMATS["mxfp8"].make().onnx_dequantize(sample((32, 64)))


# Tensors around data that exists


@over_formats("float8_current", "float8_delayed", "float8_current_e5m2")
@over_internal
def test_float8_from_data(fmt: Format, internal: bool) -> None:
    source = fmt.quantize(sample((2, 16, 64)))
    quantizer = fmt.make()
    for usage in (True, False):
        quantizer.set_usage(rowwise=usage, columnwise=True)
        made = quantizer.create_tensor_from_data(source._data, torch.bfloat16, not internal, internal)
        assert type(made) is (fmt.storage if internal else fmt.tensor)
        assert made.get_usages() == {"rowwise": True, "columnwise": False}
        assert made._data.data_ptr() == source._data.data_ptr()
        assert made.dtype == torch.bfloat16
        assert tuple(made.shape) == (2, 16, 64)
        assert internal or made.requires_grad
    if fmt.name == "float8_delayed":
        assert torch.equal(made.dequantize(dtype=torch.float32), source.dequantize())
    else:
        assert torch.equal(made._scale_inv, torch.ones(1))
    typed = source._data.view(torch.float8_e4m3fn)
    assert quantizer.create_tensor_from_data(typed)._data.dtype == torch.uint8


def test_mxfp8_from_data() -> None:
    source = FORMATS["mxfp8_e5m2"].quantize(sample((32, 64)))
    made = mz.MXFP8Quantizer(E5M2).create_tensor_from_data(
        source._rowwise_data, source._rowwise_scale_inv, torch.float32, E5M2
    )
    assert made.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(made.dequantize(), source.dequantize())


def test_nvfp4_shapes_of_packed_bytes() -> None:
    assert mz.NVFP4Quantizer.convert_shape_for_fp4((3, 32)) == (3, 16)
    assert mz.NVFP4Quantizer.convert_shape_for_fp4([3, 33]) == (3, 17)


def test_float8_transpose() -> None:
    tensor = FORMATS["float8_current"].quantize(sample((32, 64)))
    assert not tensor._transpose_invalid
    tensor.remove_caches()
    assert tensor._transpose_invalid
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}


def test_hybrid_parts() -> None:
    tensor = FORMATS["hybrid"].quantize(sample((32, 64)))
    assert_same_bytes(tensor.rowwise_storage, FORMATS["mxfp8"].quantize(sample((32, 64)), True, False))
    assert_same_bytes(tensor.columnwise_storage, FORMATS["nvfp4"].quantize(sample((32, 64)), False, True))
    chained = FORMATS["hybrid_chained"].quantize(sample((32, 64)))
    between = FORMATS["mxfp8"].quantize(sample((32, 64)), True, False).dequantize()
    assert_same_bytes(chained.columnwise_storage, FORMATS["nvfp4"].quantize(between, False, True))
    assert not same_bytes(chained.columnwise_storage, tensor.columnwise_storage)
    tensor.update_usage(rowwise_usage=False)
    assert tensor.rowwise_storage is None
    assert tensor.columnwise_storage is not None


def test_sources_of_a_hybrid_matter_without_the_rowwise_copy() -> None:
    """The column-wise copy of a chained hybrid goes through the row-wise format even where that copy is not kept."""
    chained = FORMATS["hybrid_chained"]
    both, alone = chained.quantize(sample((32, 64))), chained.quantize(sample((32, 64)), False, True)
    assert_same_bytes(both.columnwise_storage, alone.columnwise_storage)


# Randomness


@over_formats(is_random=True)
def test_stochastic_rounding_follows_the_generator(fmt: Format) -> None:
    x = sample((64, 64))
    assert_same_bytes(fmt.quantize(x, seed=3), fmt.quantize(x, seed=3))
    assert not same_bytes(fmt.quantize(x, seed=3), fmt.quantize(x, seed=4))
    torch.manual_seed(3)
    quantizer = fmt.make()
    first, second = quantizer.quantize(x), quantizer.quantize(x)
    assert not same_bytes(first, second)


# Delayed scaling


def test_delayed_amax_is_the_running_maximum() -> None:
    quantizer = FORMATS["float8_delayed"].make()
    for largest, expected in ((2.0, 2.0), (5.0, 5.0), (3.0, 5.0)):
        quantizer.quantize(torch.tensor([[largest, -1.0]]))
        assert quantizer.amax.item() == expected
    target = quantizer.make_empty((1, 2))
    quantizer.update_quantized(torch.tensor([[-7.0, 1.0]]), target)
    assert quantizer.amax.item() == 7.0
    quantizer.update_quantized(torch.tensor([[-9.0, 1.0]]), target, noop_flag=torch.ones(1))
    assert quantizer.amax.item() == 7.0
    target.quantize_(torch.tensor([[11.0, 1.0]]))  # the tensor's copy writes to the same amax
    assert quantizer.amax.item() == 11.0
    quantizer.copy().quantize(torch.tensor([[13.0, 1.0]]))
    assert quantizer.amax.item() == 13.0
    quantizer.with_usage(columnwise=False).quantize(torch.tensor([[17.0, 1.0]]))
    assert quantizer.amax.item() == 17.0


def test_delayed_scale_is_taken_at_the_cast() -> None:
    quantizer = FORMATS["float8_delayed"].make()
    x = sample((32, 64))
    tensor = quantizer.quantize(x)
    expected = tensor.dequantize()
    quantizer.scale.fill_(2.0)
    assert torch.equal(tensor.dequantize(), expected)
    assert tensor._scale_inv.item() == 1 / 16
    tensor.quantize_(x)
    assert tensor._scale_inv.item() == 0.5
    other = quantizer.quantize(x)
    quantizer.scale.fill_(4.0)
    assert other._scale_inv.item() == 0.5


def test_delayed_calibration() -> None:
    quantizer = FORMATS["float8_delayed"].make()
    quantizer.calibrate(torch.tensor([[1.0, -6.0]]))
    assert quantizer.amax.item() == 6.0
    assert quantizer.scale.item() == 16.0
    for fmt in FORMATS.values():
        fmt.make().calibrate(sample((32, 64)))  # the others take it and need nothing


def test_delayed_quantizers_are_themselves_only() -> None:
    scale, amax = torch.ones(1), torch.zeros(1)
    first, second = (mz.Float8Quantizer(scale, amax, E4M3) for _ in range(2))
    assert first != second
    assert first == first
    assert len({first, second}) == 2
    assert first.copy() != first
    assert first.copy().scale is scale
    assert "Float8Quantizer" in repr(first)
    assert not first._is_value()
