"""What holds for every format: views, rows, copies, moves and `.data` keep the bytes."""

import pytest
import torch
from torch import nn

from mezzotint import QuantizedTensor, TensorProto, to_tensor_proto
from mezzotint.tensor.identity import IdentityTensor
from tests.quantizer_formats import FORMATS, Format, assert_same_bytes, buffers, over_formats, sample, snapshot
from tests.tensor.contract import described, over_usages

X = (256, 64)  # two of the largest blocks, so that a row slice can keep the form of every format


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
        assert to_tensor_proto(rows).inner_names() == tuple(buffers(rows))


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
    return (a.read_as or a.name) == (b.read_as or b.name)


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


@over_formats()
def test_data_takes_the_shape(fmt: Format) -> None:
    for make in (fmt.quantize, lambda x: x):
        tensor = fmt.quantize(sample((32, 64))).requires_grad_()
        torch.manual_seed(0)
        tensor.data = make(sample((64, 32), torch.bfloat16))
        torch.manual_seed(0)
        expected = fmt.quantize(sample((64, 32), torch.bfloat16))
        assert (tensor.shape, tensor.dtype) == ((64, 32), torch.bfloat16)
        assert tensor.requires_grad
        assert tensor.is_leaf
        assert_same_bytes(tensor, expected)
        assert torch.equal(tensor.dequantize(), expected.dequantize())


@over_formats()
def test_a_module_in_another_dtype(fmt: Format) -> None:
    """The weight stays quantized, under the other dtype."""
    module = nn.Module()
    module.weight = nn.Parameter(fmt.quantize(sample((32, 64))))
    module.bfloat16()
    assert type(module.weight) is fmt.tensor
    assert module.weight.dtype == module.weight.dequantize().dtype == torch.bfloat16


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


@over_formats()
@pytest.mark.parametrize("is_parameter", [False, True])
def test_inference_mode(fmt: Format, is_parameter: bool) -> None:
    """In inference mode a tensor from outside of it gives the same as there, and keeps its form as there."""
    tensor: torch.Tensor = fmt.quantize(sample(X), True, True)
    if is_parameter:
        tensor = nn.Parameter(tensor)
    changes = (
        lambda t: t.detach(),
        lambda t: t.clone(),
        lambda t: t.view(2, 128, 64),
        lambda t: t[:128],
        lambda t: t.to("cpu"),
        lambda t: t.data,
        lambda t: torch.nn.functional.linear(torch.ones(2, 64), t),
        lambda t: t + 1,
    )
    for change in changes:
        outside = change(tensor.detach())
        with torch.inference_mode():
            inside = change(tensor)
            again = change(fmt.quantize(sample(X), True, True))
        for made in (inside, again):
            assert isinstance(made, QuantizedTensor) == isinstance(outside, QuantizedTensor)
            assert made.shape == outside.shape
        values = [made.dequantize() if isinstance(made, QuantizedTensor) else made for made in (inside, outside)]
        assert torch.equal(*values)
