"""Groups of matrices in one buffer: members are views with their quantizer's bytes; the whole is what they make."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import GroupedTensor, GroupedTensorStorage, Quantizer
from mezzotint.functional.gemm import multiply
from mezzotint.kernels._lib import Buffers
from tests.quantizer_formats import E4M3, FORMATS, USAGES, Format, assert_same_bytes, over_formats, sample, snapshot

Shapes = tuple[tuple[int, int], ...]

# Ragged rows with a group of none, equal, ragged columns, both ragged, one.
GROUPS: dict[str, Shapes] = {
    "rows": ((32, 48), (0, 48), (5, 48)),
    "equal": ((24, 16), (24, 16)),
    "columns": ((16, 7), (16, 33)),
    "both": ((5, 7), (40, 16)),
    "one": ((33, 17),),
}
over_groups = pytest.mark.parametrize("shapes", GROUPS.values(), ids=list(GROUPS))


def make(shapes: Shapes, quantizer: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    return GroupedTensor.make_grouped_tensor_with_shapes(len(shapes), shapes, quantizer, dtype=dtype)


def samples(shapes: Shapes, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [sample(shape, dtype, seed=place) for place, shape in enumerate(shapes)]


def filled(shapes: Shapes, quantizer: Any = None) -> Any:
    grouped = make(shapes, quantizer)
    torch.manual_seed(0)
    grouped.quantize(samples(shapes))
    return grouped


def put_together(members: list[torch.Tensor], shapes: Shapes) -> torch.Tensor:
    """What the table of `grouped_shapes.py` says, case by case."""
    rows, cols = ({shape[dim] for shape in shapes} for dim in (0, 1))
    if len(rows) > 1 and len(cols) > 1:
        return torch.cat([member.flatten() for member in members])[None]
    if len(rows) > 1:
        return torch.vstack(members)
    return torch.hstack(members) if len(cols) > 1 else torch.stack(members)


# Members


@pytest.mark.cover(1)
@over_formats()
@pytest.mark.parametrize(("rowwise", "columnwise"), USAGES, ids=["rowwise", "columnwise", "both"])
def test_members_have_the_bytes_of_the_quantizer(fmt: Format, rowwise: bool, columnwise: bool) -> None:
    for shapes in GROUPS.values():
        for internal in (False, True) if shapes is GROUPS["rows"] else (True,):
            grouped = filled(shapes, fmt.quantizer(rowwise, columnwise, internal))
            assert type(grouped) is (GroupedTensorStorage if internal else GroupedTensor)
            quantizer = fmt.quantizer(rowwise, columnwise, internal)
            torch.manual_seed(0)
            expected = [quantizer(x) for x in samples(shapes)]
            members = grouped.split_into_quantized_tensors()
            for member, alone in zip(members, expected, strict=True):
                assert type(member) is type(alone)
                assert (member.shape, member.dtype) == (alone.shape, alone.dtype)
                assert_same_bytes(member, alone)
            values = [alone.dequantize() for alone in expected]
            assert torch.equal(grouped.dequantize(), put_together(values, shapes))
            assert grouped.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}


@over_formats()
def test_members_are_all_of_the_buffers(fmt: Format) -> None:
    """They share memory, leave no byte out and do not overlap; writing one writes the whole and no other."""
    grouped = filled(GROUPS["rows"], fmt.quantizer())
    first, _, last = grouped.split_into_quantized_tensors()
    wholes = {name: buffer for name, buffer in grouped._buffers() if buffer.dtype != torch.int64}
    total = sum(b.numel() for m in grouped.split_into_quantized_tensors() for _, b in m._buffers())
    assert total == sum(whole.numel() for whole in wholes.values())
    starts = {whole.untyped_storage().data_ptr() for whole in wholes.values()}
    assert {b.untyped_storage().data_ptr() for _, b in first._buffers()} == starts
    before = snapshot(first)
    for _, buffer in last._buffers():
        buffer.fill_(1)
    assert_same_bytes(first, before)
    assert all(whole[-1].item() == 1 for whole in wholes.values())
    for whole in wholes.values():
        whole.zero_()
    assert all(not buffer.any() for member in (first, last) for _, buffer in member._buffers())


def test_delayed_scaling_sees_the_largest() -> None:
    quantizer = mz.Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), E4M3)
    filled(GROUPS["rows"], quantizer)
    assert quantizer.amax.item() == max(x.abs().max().item() for x in samples(GROUPS["rows"]) if x.numel())


@over_groups
def test_plain_members(shapes: Shapes) -> None:
    grouped = filled(shapes)
    assert type(grouped) is GroupedTensor
    for member, x in zip(grouped.split_into_quantized_tensors(), samples(shapes), strict=True):
        assert torch.equal(member, x)
        member.mul_(2)
    assert torch.equal(grouped.rowwise_data, torch.cat([x.flatten() for x in samples(shapes)]) * 2)
    assert torch.equal(grouped.dequantize(dtype=torch.float32), put_together(samples(shapes), shapes).float() * 2)


@pytest.mark.parametrize("kind", [None, "mxfp8", "float8_current"])
def test_no_op_flag(kind: str | None) -> None:
    grouped = filled(GROUPS["equal"], None if kind is None else FORMATS[kind].quantizer())
    before = snapshot(grouped)
    new = [x * 3 for x in samples(GROUPS["equal"])]
    grouped.quantize(new, noop_flag=torch.ones(1))
    assert_same_bytes(grouped, before)
    grouped.quantize(new, noop_flag=torch.zeros(1))
    values = new if kind is None else [FORMATS[kind].quantize(x).dequantize() for x in new]
    assert torch.equal(grouped.dequantize(), torch.stack(values))


# Shapes


@over_groups
def test_what_is_said_of_shapes(shapes: Shapes) -> None:
    grouped = make(shapes)
    rows, cols = ([shape[dim] for shape in shapes] for dim in (0, 1))
    for dims, sizes in ((grouped.first_dims, rows), (grouped.last_dims, cols)):
        assert dims is None if len(set(sizes)) == 1 else (dims.dtype, dims.tolist()) == (torch.int64, sizes)
    ends = torch.tensor([0, *(m * k for m, k in shapes)]).cumsum(0)
    assert grouped.offsets == ends.tolist()
    is_uniform = len(set(shapes)) == 1
    assert grouped.tensor_offsets is None if is_uniform else torch.equal(grouped.tensor_offsets, ends)
    assert (grouped.num_tensors, grouped.shapes, grouped.tensor_shapes) == (len(shapes), shapes, list(shapes))
    whole = put_together(samples(shapes), shapes)
    assert grouped.shape == whole.shape
    assert grouped.logical_shape == (tuple(whole.flatten(0, 1).shape) if is_uniform else tuple(whole.shape))
    assert grouped.all_same_shape() == is_uniform
    assert grouped.varying_both_dims() == (len(set(rows)) > 1 and len(set(cols)) > 1)
    assert f"num_tensors={len(shapes)}, shapes={list(shapes)}" in repr(grouped)


@over_groups
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_dims_and_logical_shape(shapes: Shapes, as_tensor: bool) -> None:
    """From dims as from shapes; dims that are given and equal are as none."""
    rows, cols = ([shape[dim] for shape in shapes] for dim in (0, 1))
    convert: Any = torch.tensor if as_tensor else list
    reference = make(shapes)
    given = (
        None if reference.first_dims is None else convert(rows),
        None if reference.last_dims is None else convert(cols),
    )
    made = GroupedTensor.make_grouped_tensor(len(shapes), *given, *reference.logical_shape, dtype=torch.bfloat16)
    assert made.shapes == shapes
    made = GroupedTensor.make_grouped_tensor(len(shapes), convert(rows), convert(cols), 1, reference.offsets[-1])
    assert (made.shapes, made.shape, made.dtype) == (shapes, reference.shape, torch.float32)


@pytest.mark.parametrize("shape", [(3, 5), (7,)])
def test_around_memory_that_is_there(shape: tuple[int, ...]) -> None:
    data = sample((4, *shape))
    for internal in (False, True):
        grouped = GroupedTensor.make_grouped_tensor_from_rowwise_data(
            num_tensors=4, tensor_shape=shape, rowwise_data=data, internal=internal
        )
        assert (type(grouped) is GroupedTensorStorage, grouped.shape) == (internal, data.shape)
        grouped.split_into_quantized_tensors()[2].fill_(9)
        assert (data[2] == 9).all()
        assert torch.equal(grouped.dequantize(), data)
        assert grouped.rowwise_data.data_ptr() == data.data_ptr()


# As any storage and quantized tensor


@over_formats("float8_current", "mxfp8", "nvfp4_rht", "hybrid", "identity")
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
def test_saved_and_restored(fmt: Format, internal: bool) -> None:
    grouped = filled(GROUPS["rows"], fmt.quantizer(internal=internal))
    before, values = snapshot(grouped), grouped.dequantize()
    again = type(grouped)._build(grouped.shape, grouped.dtype, grouped.get_metadata())
    assert_same_bytes(again, before)
    file = io.BytesIO()
    torch.save(grouped, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is type(grouped)
    assert_same_bytes(loaded, before)
    assert torch.equal(loaded.dequantize(), values)
    copied = copy.deepcopy(grouped)
    assert_same_bytes(copied, before)
    assert copied.rowwise_data.data_ptr() != grouped.rowwise_data.data_ptr()
    copied.clear()
    assert copied.rowwise_data is None
    with pytest.raises(ValueError, match="holds no rowwise_data: its buffers were let go of"):
        copied.split_into_quantized_tensors()
    tensors, objects = mz.prepare_for_saving(grouped, None)
    assert internal == (len(tensors) > 2)  # a tensor is saved as it is, a storage as its buffers
    (restored, _), rest = mz.restore_from_saved(objects, tensors, return_saved_tensors=True)
    assert rest == []
    assert_same_bytes(restored, before)


@over_formats("float8_current", "float8_delayed", "mxfp8", "nvfp4", "hybrid")
def test_directions_can_be_dropped(fmt: Format) -> None:
    for rowwise in (True, False):
        kept = filled(GROUPS["rows"], fmt.quantizer()).keep(rowwise=rowwise, columnwise=not rowwise)
        expected = filled(GROUPS["rows"], fmt.quantizer(rowwise, not rowwise))
        assert_same_bytes(kept, expected)
        missing = "columnwise" if rowwise else "rowwise"
        with pytest.raises(ValueError, match=rf"{missing}_usage is True and the group holds no such data"):
            kept.update_usage(**{f"{missing}_usage": True})


@over_formats("float8_current", "float8_delayed", "mxfp8", "hybrid")
@over_groups
def test_operations(fmt: Format, shapes: Shapes) -> None:
    """On plain values; what is written is quantized again, member by member."""
    grouped, other = filled(shapes, fmt.quantizer()), make(shapes, fmt.quantizer())
    values = grouped.dequantize()
    assert torch.equal(grouped * 2, values * 2)
    assert_same_bytes(other.copy_(grouped), grouped)  # byte for byte
    other.quantize_(values * 2)
    expected = [fmt.quantizer()(member.dequantize() * 2) for member in grouped.split_into_quantized_tensors()]
    for member, alone in zip(other.split_into_quantized_tensors(), expected, strict=True):
        assert_same_bytes(member, alone)
    assert_same_bytes(grouped.mul_(2), other)
    like = torch.empty_like(grouped)
    assert (type(like), like.shapes, like._quantizer is None) == (GroupedTensor, shapes, False)
    assert type(grouped.new_zeros(2, 3)) is torch.Tensor


@over_formats()
def test_taken_apart(fmt: Format) -> None:
    """Along the first dimension into members, or into groups of some of them, over the same memory."""
    shapes = GROUPS["equal"] * 2
    grouped = filled(shapes, fmt.quantizer())
    members = grouped.split_into_quantized_tensors()
    for found in (grouped.unbind(), grouped.split_into_storages()):
        for part, member in zip(found, members, strict=True):
            assert_same_bytes(part, member)
            assert {b.data_ptr() for _, b in part._buffers()} == {b.data_ptr() for _, b in member._buffers()}
    first, last = grouped.chunk(2)
    for part, expected in ((first, members[:2]), (last, members[2:]), (grouped[1:3], members[1:3])):
        assert (type(part), part.shapes) == (GroupedTensor, shapes[:2])
        for member, other in zip(part.unbind(), expected, strict=True):
            assert_same_bytes(member, other)
    zeros = grouped.new_zeros(2, *shapes[0])
    zeros.copy_(last)
    assert_same_bytes(zeros, last)
    assert type(grouped[:0]) is type(filled(GROUPS["rows"], fmt.quantizer()).chunk(2)[0]) is torch.Tensor


@pytest.mark.parametrize("kind", [None, "mxfp8"])
def test_parameter(kind: str | None) -> None:
    quantizer = None if kind is None else FORMATS[kind].quantizer()
    weight = nn.Parameter(filled(GROUPS["equal"], quantizer))
    assert isinstance(weight, GroupedTensor)
    x = sample((3, 16), torch.bfloat16)
    torch.einsum("mk,gnk->gmn", x, weight).sum().backward()
    assert torch.equal(weight.grad, x.sum(0).expand(2, 24, 16))
    before = weight.dequantize()
    torch.optim.SGD([weight], lr=0.5).step()
    new = before - 0.5 * weight.grad
    expected = new if kind is None else torch.stack([FORMATS[kind].quantize(w).dequantize() for w in new])
    assert torch.equal(weight.dequantize(), expected)


# Compiled


def products(xs: list[torch.Tensor], weight: torch.Tensor, quantizer: Quantizer) -> Any:
    shapes = [tuple(x.shape) for x in xs]
    grouped = GroupedTensorStorage.make_grouped_tensor_with_shapes(len(xs), shapes, quantizer, dtype=xs[0].dtype)
    members = grouped.quantize(xs)
    weight_q = quantizer.quantize(weight)
    made = [multiply(member, weight_q, out_dtype=torch.float32) for member in members]
    return *made, grouped.dequantize(), grouped.rowwise_data, grouped


@pytest.mark.cover(0)
@pytest.mark.compile
@over_formats("float8_delayed", "nvfp4_rht_stochastic")
def test_storage_compiles_whole(fmt: Format) -> None:
    xs, weight = samples(((32, 32), (0, 32), (5, 32))), sample((16, 32), torch.bfloat16)
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(products, fullgraph=True, backend=counter)
    for _ in range(2):
        torch.manual_seed(0)
        *made, grouped = function(xs, weight, fmt.quantizer(internal=True))
        torch.manual_seed(0)
        *expected, alone = products(xs, weight, fmt.quantizer(internal=True))
        assert_same_bytes(grouped, alone)
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert counter.frame_count == 1


@pytest.mark.compile
@over_formats("hybrid")
def test_tensor_compiles_whole(fmt: Format) -> None:
    """As an argument: what is written to it, and to its members, shows in the same graph."""

    def write(xs: list[torch.Tensor], grouped: Any) -> Any:
        first = grouped.quantize(xs)[0]
        before = grouped.dequantize()
        first.quantize_(first.dequantize() * 2)
        grouped.split_into_quantized_tensors()[-1].mul_(3)
        return before, grouped + 1

    xs, counter = samples(GROUPS["rows"]), CompileCounterWithBackend("aot_eager")
    real, eager = (make(GROUPS["rows"], fmt.quantizer()) for _ in range(2))
    made, expected = torch.compile(write, fullgraph=True, backend=counter)(xs, real), write(xs, eager)
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert_same_bytes(real, eager)
    assert counter.frame_count == 1


# What is refused


class Strange(mz.IdentityQuantizer):
    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return {"strange": (shape, torch.float32)}


class Own(mz.IdentityQuantizer):
    custom = True


def around(data: Any, shape: Any = (2, 3), **options: Any) -> Any:
    return GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=2, tensor_shape=shape, rowwise_data=data, **options
    )


by_dims = GroupedTensor.make_grouped_tensor
by_shapes = GroupedTensor.make_grouped_tensor_with_shapes
DATA = torch.zeros(2, 2, 3)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (lambda: by_shapes(0, []), ValueError, r"num_tensors is 0: give a positive int"),
    "count": (lambda: by_shapes(2, [(1, 2)]), ValueError, r"shapes has 1 entries, num_tensors is 2"),
    "rank": (lambda: by_shapes(1, [(1, 2, 3)]), ValueError, r"shapes\[0\] is \(1, 2, 3\): give \(rows, columns\)"),
    "negative": (lambda: by_shapes(1, [(1, -2)]), ValueError, r"shapes\[0\] is \(1, -2\)"),
    "dtype": (lambda: by_shapes(1, [(1, 2)], dtype=torch.int8), TypeError, r"dtype is torch.int8"),
    "quantizer": (lambda: by_shapes(1, [(1, 2)], "mxfp8"), TypeError, r"quantizer is str: give a Quantizer"),
    "custom": (lambda: by_shapes(1, [(1, 2)], Own()), ValueError, r"quantizer is Own, which makes objects of its own"),
    "strange": (lambda: by_shapes(1, [(1, 2)], Strange()), ValueError, r"Strange, which makes a buffer 'strange'"),
    "usages": (
        lambda: by_shapes(1, [(1, 2)], mz.MXFP8Quantizer(E4M3, rowwise=False, columnwise=False)),
        ValueError,
        r"MXFP8Quantizer has rowwise_usage=False and columnwise_usage=False",
    ),
    "logical": (lambda: by_dims(1, None, None, -1, 2), ValueError, r"logical_first_dim is -1"),
    "multiple": (lambda: by_dims(2, None, None, 3, 2), ValueError, r"logical_first_dim is 3, num_tensors 2"),
    "sum": (lambda: by_dims(2, [1, 3], None, 5, 2), ValueError, r"are \(5, 2\): members .* make \(4, 2\)"),
    "flat": (lambda: by_dims(2, [1, 3], [2, 4], 4, 6), ValueError, r"are \(4, 6\): members .* make \(1, 14\)"),
    "dims": (lambda: by_dims(2, [1], None, 1, 2), ValueError, r"first_dims is \[1\]: give 2 sizes"),
    "int32": (
        lambda: by_dims(2, None, torch.tensor([1, 2], dtype=torch.int32), 1, 3),
        ValueError,
        r"last_dims is torch.int32 of shape \(2,\): give int64 \[2\]",
    ),
    "list": (lambda: around([1.0]), TypeError, r"rowwise_data is list: give a torch.Tensor"),
    "elements": (lambda: around(DATA, (2, 4)), ValueError, r"contiguous tensor of 16 elements, 2 times \(2, 4\)"),
    "strided": (
        lambda: around(DATA.mT, (3, 2)),
        ValueError,
        r"has shape \(2, 3, 2\), strides \(6, 1, 3\)",
    ),
    "tensor_shape": (lambda: around(DATA, (1, 2, 3)), ValueError, r"tensor_shape is \(1, 2, 3\)"),
    "another dtype": (lambda: around(DATA, dtype=torch.float16), ValueError, r"dtype is torch.float16, rowwise_data"),
    "one tensor": (
        lambda: make(GROUPS["equal"]).quantize(DATA),
        ValueError,
        r"tensors is one tensor: give a list",
    ),
    "too few": (lambda: make(GROUPS["equal"]).quantize([DATA]), ValueError, r"tensors is 1 tensors: give a list of 2"),
    "no tensor": (
        lambda: make(GROUPS["one"]).quantize([1.0]),
        TypeError,
        r"tensors\[0\] is float: give a torch.Tensor",
    ),
    "shape": (
        lambda: make(GROUPS["equal"]).quantize([DATA[0], DATA[0]]),
        ValueError,
        r"tensors\[0\] has shape \(2, 3\), its member \(24, 16\)",
    ),
    "whole": (
        lambda: make(GROUPS["equal"]).quantize_(DATA),
        ValueError,
        r"tensor has shape \(2, 2, 3\), the group \(2, 24, 16\)",
    ),
    "product": (
        lambda: multiply(filled(GROUPS["equal"]), DATA[0], out_dtype=torch.float32),
        TypeError,
        r"GroupedTensor is no side of one product: multiply its members",
    ),
    "no common": (lambda: make(GROUPS["rows"]).get_common_first_dim(), ValueError, r"first dimensions \[32, 0, 5\]"),
    "nothing left": (
        lambda: filled(GROUPS["equal"]).update_usage(rowwise_usage=False),
        ValueError,
        r"rowwise_usage and columnwise_usage are False",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_codes_without_their_quantizer() -> None:
    """They are not taken for values."""
    grouped = filled(GROUPS["equal"], FORMATS["float8_delayed"].quantizer())
    grouped._quantizer = None
    with pytest.raises(ValueError, match="the quantizer that made them is not here"):
        grouped.dequantize()
