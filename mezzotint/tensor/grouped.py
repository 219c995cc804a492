"""GroupedTensor: this tensor holds many matrices of one format in one buffer, with one more buffer for each kind of
scales.

Members lie one behind the other with nothing between them, each laid out as its quantizer would lay it out alone. So a
member is made of views, and writing to it writes to the whole. `.shape` and plain values are those of the members put
together, as `grouped_shapes.py` says.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from mezzotint.kernels.operand import Operand
from mezzotint.tensor.fsdp import gather_members, member_rows, send_members
from mezzotint.tensor.grouped_layout import COLUMN, ROW, check_dtype, check_quantizer, member_buffers
from mezzotint.tensor.grouped_shapes import (
    Shape,
    check_count,
    check_shapes,
    differ,
    divide,
    first_dims,
    join_members,
    last_dims,
    logical_shape,
    member_offsets,
    numel,
    shapes_of_dims,
    whole_shape,
)
from mezzotint.tensor.loading import Specs
from mezzotint.tensor.quantize import assemble, check_noop, update_quantized
from mezzotint.tensor.quantized_tensor import QuantizedTensor, counting_writes
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import count_write

__all__ = ["GroupedTensor", "GroupedTensorStorage"]

_aten = torch.ops.aten


class GroupedTensorStorage(QuantizedTensorStorage):
    """This storage holds flat buffers of all members of a group. `shapes` and the quantizer say what is where; without
    a quantizer, the values are plain.

    `first_dims` and `last_dims` are int64 [num], or None if all are equal. `tensor_offsets` is int64 [num + 1], the
    element at which each member begins, or None if all shapes are equal.

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `data`, `columnwise_data`, `scale_inv`, `columnwise_scale_inv`, `amax`,
            `columnwise_amax`, `first_dims`, `last_dims`, `tensor_offsets`, `shapes`, `quantizer`.

    Example:
        >>> import mezzotint as mz
        >>> make = mz.GroupedTensor.make_grouped_tensor_with_shapes
        >>> group = make(2, [(32, 64), (64, 64)], mz.MXFP8Quantizer(), "cpu")
        >>> isinstance(group, mz.GroupedTensorStorage), group.num_tensors
        (True, 2)
    """

    _quantizer: Quantizer | None
    _FLATTEN_TENSOR_BUFFERS = (
        ("rowwise_data", "data"),
        ("columnwise_data", "columnwise_data"),
        ("scale_inv", "scale_inv"),
        ("columnwise_scale_inv", "columnwise_scale_inv"),
        ("amax_rowwise", "amax"),
        ("amax_columnwise", "columnwise_amax"),
        ("first_dims", "first_dims"),
        ("last_dims", "last_dims"),
        ("tensor_offsets", "tensor_offsets"),
    )
    _VALUES = (("shapes", "shapes", ()), ("_quantizer", "quantizer", None))
    _ROWWISE = ("rowwise_data",)
    _COLUMNWISE = ("columnwise_data",)
    _READS_QUANTIZER = True

    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    scale_inv: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    amax_rowwise: torch.Tensor | None  # not `amax`, which is a method of torch.Tensor
    amax_columnwise: torch.Tensor | None
    first_dims: torch.Tensor | None
    last_dims: torch.Tensor | None
    tensor_offsets: torch.Tensor | None
    shapes: tuple[Shape, ...]

    # Making one

    @staticmethod
    def make_grouped_tensor(
        num_tensors: int,
        first_dims: torch.Tensor | Sequence[int] | None,
        last_dims: torch.Tensor | Sequence[int] | None,
        logical_first_dim: int,
        logical_last_dim: int,
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return an uninitialised group of this logical shape (`grouped_shapes.py`). `first_dims` or `last_dims` is
        None if the members share it.

        The sizes of members are read on the host, so dims on a GPU make it wait. `make_grouped_tensor_with_shapes`
        takes sizes from the host.
        """
        shapes = shapes_of_dims(num_tensors, first_dims, last_dims, logical_first_dim, logical_last_dim)
        return _allocate(shapes, quantizer, device, dtype)

    @staticmethod
    def make_grouped_tensor_with_shapes(
        num_tensors: int,
        shapes: Sequence[Sequence[int]],
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return an uninitialised group of members of these shapes (M_i, K_i)."""
        return _allocate(check_shapes(num_tensors, shapes), quantizer, device, dtype)

    @staticmethod
    def make_grouped_tensor_from_rowwise_data(
        *,
        num_tensors: int,
        tensor_shape: Sequence[int],
        rowwise_data: torch.Tensor,
        dtype: torch.dtype | None = None,
        internal: bool = False,
    ) -> Any:
        """Return a group of plain members of one shape, (M, K) or (n,), over existing memory: nothing is copied."""
        check_count(num_tensors)
        shape = tuple([int(size) for size in tensor_shape])
        if len(shape) not in (1, 2) or any(size < 0 for size in shape):
            raise ValueError(f"tensor_shape is {shape}: give (rows, columns) or (elements,), none of them negative")
        if not isinstance(rowwise_data, torch.Tensor):
            raise TypeError(f"rowwise_data is {type(rowwise_data).__name__}: give a torch.Tensor")
        if rowwise_data.numel() != num_tensors * numel(shape) or not rowwise_data.is_contiguous():
            raise ValueError(
                f"rowwise_data has shape {tuple(rowwise_data.shape)}, strides {rowwise_data.stride()}: give a "
                f"contiguous tensor of {num_tensors * numel(shape)} elements, {num_tensors} times {shape}"
            )
        if dtype not in (None, rowwise_data.dtype):
            raise ValueError(f"dtype is {dtype}, rowwise_data has {rowwise_data.dtype}: members are views of it")
        check_dtype(rowwise_data.dtype)
        buffers = {"data": rowwise_data.detach().view(-1)}
        return _hold((shape,) * num_tensors, None, internal, rowwise_data.dtype, buffers)

    def _layouts(self, shape: tuple[int, ...]) -> list[list[Specs]]:
        """Return the layout of the flat buffers; raise ValueError if `shapes` is malformed or contradicts the dims.

        The sizes of members are recorded twice, in `shapes` and in the tensors of dims, and must agree on the host.
        """
        given = self.shapes
        if not isinstance(given, tuple) or not all(isinstance(each, tuple) for each in given) or not given:
            raise ValueError(f"shapes is {given!r}: give a tuple with the shape of each member")
        if any(len(each) not in (1, 2) or not all(type(n) is int and n >= 0 for n in each) for each in given):
            raise ValueError(f"shapes is {given!r}: members have one or two dimensions, none of them negative")
        check_quantizer(self._quantizer)
        specs: Specs = {
            slot: ((size,), kind) for slot, (size, kind) in _sizes(given, self._quantizer, self._dtype).items()
        }
        for name, values in _dims(given).items():
            held = getattr(self, name)
            if (held is None) != (values is None) or (values is not None and held.tolist() != values):
                raise ValueError(f"{name} is not that of members of shapes {given}: the file is damaged; load another")
            if values is not None:
                specs[name] = ((len(values),), torch.int64)
        return [[specs]]

    # Shapes

    @property
    def num_tensors(self) -> int:
        return len(self.shapes)

    @property
    def tensor_shapes(self) -> list[Shape]:
        """Return `shapes` as a list, under Transformer Engine's name."""
        return list(self.shapes)

    @property
    def quantizer(self) -> Quantizer | None:
        """Return the quantizer of the members, or None if they are plain."""
        return self._quantizer

    @property
    def logical_shape(self) -> tuple[int, int]:
        """Return the shape of all members as one matrix."""
        return logical_shape(self.shapes)

    @property
    def offsets(self) -> list[int]:
        """Return the number of elements before each member, and in all: `tensor_offsets` on the host."""
        return member_offsets(self.shapes)

    def all_same_first_dim(self) -> bool:
        return not differ(first_dims(self.shapes))

    def all_same_last_dim(self) -> bool:
        return not differ(last_dims(self.shapes))

    def all_same_shape(self) -> bool:
        return self.all_same_first_dim() and self.all_same_last_dim()

    def varying_both_dims(self) -> bool:
        return not self.all_same_first_dim() and not self.all_same_last_dim()

    def get_common_first_dim(self) -> int:
        if not self.all_same_first_dim():
            raise ValueError(f"members have first dimensions {first_dims(self.shapes)}: there is none in common")
        return first_dims(self.shapes)[0]

    def get_common_last_dim(self) -> int:
        if not self.all_same_last_dim():
            raise ValueError(f"members have last dimensions {last_dims(self.shapes)}: there is none in common")
        return last_dims(self.shapes)[0]

    def get_dtype(self) -> torch.dtype:
        """Return the nominal dtype."""
        return self._dtype

    def has_data(self) -> bool:
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        return self.columnwise_data is not None

    def _logical_shape(self) -> Shape:
        return whole_shape(self.shapes)

    # Members

    # This is a method and no property: the compiler takes what a property returns for separate arguments, and what is
    # written to them would show in this tensor only when the graph has ended.
    def split_into_quantized_tensors(self) -> list[Any]:
        """Return the members as views of these buffers: plain tensors if there is no quantizer, storages if it is
        internal, else quantized tensors.

        They are outside of autograd: no gradient flows from a member to the group.
        """
        return self._members(self._quantizer is not None and self._quantizer.internal)

    def split_into_storages(self) -> list[Any]:
        """Return the members as storages over these buffers, which GEMMs take, or plain without a quantizer."""
        return self._members(True)

    def _members(self, internal: bool) -> list[Any]:
        quantizer, dtype = self._quantizer, self._dtype
        sizes = {shape: member_buffers(shape, quantizer, dtype) for shape in self.shapes}
        parts = []
        for slot, (_, kind) in sizes[self.shapes[0]].items():
            whole = getattr(self, slot)
            if whole is None:
                raise ValueError(f"{type(self).__name__} holds no {slot}: its buffers were let go of; restore them")
            if whole.dtype != kind:
                raise ValueError(
                    f"{slot} is {whole.dtype}, members of {quantizer} have {kind}: the quantizer that made them is "
                    "not here; a graph carries none that holds tensors, but for groups of an internal one"
                )
            each = [sizes[shape][slot][0] for shape in self.shapes]
            flat = whole.split([numel(size) for size in each])
            parts.append([part.view(size) for part, size in zip(flat, each, strict=True)])
        if quantizer is None:
            return parts[0]
        members = zip(self.shapes, zip(*parts, strict=True), strict=True)
        return [assemble(views, quantizer, internal, shape, dtype) for shape, views in members]

    def quantize(self, tensors: Sequence[torch.Tensor], noop_flag: torch.Tensor | None = None) -> list[Any]:
        """Quantize each tensor into its member (copy it if there is no quantizer), and return the members.

        Nothing changes if `noop_flag` is 1.
        """
        if isinstance(tensors, torch.Tensor) or len(tensors) != self.num_tensors:
            given = "one tensor" if isinstance(tensors, torch.Tensor) else f"{len(tensors)} tensors"
            raise ValueError(f"tensors is {given}: give a list of {self.num_tensors}, one for each member")
        for place, (tensor, shape) in enumerate(zip(tensors, self.shapes, strict=True)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"tensors[{place}] is {type(tensor).__name__}: give a torch.Tensor")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"tensors[{place}] has shape {tuple(tensor.shape)}, its member {shape}")
        if noop_flag is not None:
            check_noop(noop_flag)
        members = self.split_into_quantized_tensors()
        with torch.no_grad():
            for tensor, member in zip(tensors, members, strict=True):
                if self._quantizer is not None:
                    update_quantized(tensor, member, self._quantizer, noop_flag=noop_flag)
                elif noop_flag is None:
                    member.copy_(tensor)
                else:
                    member.copy_(torch.where(noop_flag.view(()) == 1, member, tensor))
        count_write(self)
        return members

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize, in place, one tensor of `.shape` with the values of all members, as from `dequantize()`."""
        if tuple(tensor.shape) != whole_shape(self.shapes):
            raise ValueError(f"tensor has shape {tuple(tensor.shape)}, the group {whole_shape(self.shapes)}")
        self.quantize(divide(tensor, self.shapes), noop_flag)
        return self

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        members = self.split_into_quantized_tensors()
        if self._quantizer is not None:
            members = [member.dequantize(dtype=dtype) for member in members]
        return join_members(members, self.shapes).to(dtype)

    def gemm_operand(self, columnwise: bool) -> Operand:
        raise TypeError(
            f"{type(self).__name__} is no side of one product: multiply its members, split_into_quantized_tensors()"
        )

    # Directions

    def get_usages(self) -> dict[str, bool]:
        asked = {"rowwise": True, "columnwise": False} if self._quantizer is None else self._quantizer.get_usages()
        held = self.has_data() or self.has_columnwise_data()
        return {usage: held and asked[usage] for usage in asked}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop directions that are not wanted; raise ValueError if a wanted one is missing.

        A missing direction is not made from the other, since its members would be no views of one buffer.
        """
        usages = self.get_usages()
        rowwise = usages["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = usages["columnwise"] if columnwise_usage is None else columnwise_usage
        for name, wanted in (("rowwise", rowwise), ("columnwise", columnwise)):
            if wanted and not usages[name]:
                raise ValueError(f"{name}_usage is True and the group holds no such data: make it with {name}=True")
        if not (rowwise or columnwise):
            raise ValueError("rowwise_usage and columnwise_usage are False: nothing would be left; call clear()")
        if self._quantizer is None:
            return
        self._quantizer = self._quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        kept = member_buffers((1, 1), self._quantizer, self._dtype)
        for slot in ROW + COLUMN:
            if slot not in kept:
                setattr(self, slot, None)

    def keep(self, *, rowwise: bool, columnwise: bool) -> "GroupedTensorStorage":
        made = self.copy()
        made.update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)
        return made

    def copy(self) -> Any:
        """Return another holder of the same buffers."""
        return type(self)._build(self.shape, self._dtype, self.get_metadata())

    # Shards of whole members

    def _new(self, count: int) -> Any:
        """Return an uninitialised group of `count` members like these, which have one shape."""
        return _allocate(self.shapes[:1] * count, self._quantizer, self.device, self._dtype)

    def _count_of(self, size: Any) -> int:
        """Return how many members of this group's one shape make up `size`, or 0 if they do not."""
        return size[0] if self.all_same_shape() and tuple(size[1:]) == self.shapes[0] else 0

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        return member_rows(self, start, stop)

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        return {name: (0, buffer.shape[0], 1) for name, buffer in self._buffers()} if self.all_same_shape() else {}

    def has_form_of(self, other: QuantizedTensorStorage) -> bool:
        if not isinstance(other, GroupedTensorStorage) or self.shapes != other.shapes:
            return False
        if self._quantizer is None or other._quantizer is None:
            return self._quantizer is other._quantizer and self._dtype == other._dtype
        mine, theirs = self.split_into_quantized_tensors()[0], other.split_into_quantized_tensors()[0]
        return mine.has_form_of(theirs)

    def _described(self) -> str:
        devices = [f"device='{buffer.device}'" for _, buffer in self._buffers()]
        return (
            f"num_tensors={self.num_tensors}, shapes={self.tensor_shapes}, logical_shape={self.logical_shape}, "
            f"dtype={self._dtype}, {devices[0] if devices else 'no data'}, quantizer={self._quantizer}"
        )


class GroupedTensor(GroupedTensorStorage, QuantizedTensor):
    """A `GroupedTensor` is a group of tensors as one tensor, such as the weights of experts. Operations use the plain
    values, as for any quantized tensor.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `data`, `columnwise_data`, `scale_inv`,
            `columnwise_scale_inv`, `amax`, `columnwise_amax`, `first_dims`, `last_dims`, `tensor_offsets`, `shapes`,
            `quantizer`.

    Example:
        >>> import mezzotint as mz
        >>> make = mz.GroupedTensor.make_grouped_tensor_with_shapes
        >>> group = make(2, [(32, 64), (32, 64)], mz.MXFP8Quantizer(), "cpu")
        >>> len(group.split_into_quantized_tensors())
        2
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = kwargs or {}
        if func is _aten.empty_like.default:
            dtype, device = options.get("dtype") or args[0].dtype, options.get("device") or args[0].device
            return _allocate(args[0].shapes, args[0]._quantizer, device, dtype)
        if func in (_aten.new_empty.default, _aten.new_zeros.default):
            count = args[0]._count_of(args[1])
            if count and func is _aten.new_zeros.default:
                made = args[0]._new(count)
                for _, buffer in made._buffers():
                    buffer.zero_()
                return made
            # The result is plain, because the size does not say how it is grouped.
            return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **options)
        if func is _aten.unbind.int and args[0].all_same_shape() and args[1:] in ((), (0,)):
            with nullcontext() if args[0]._quantizer is None else counting_writes():
                return args[0].split_into_quantized_tensors()
        return super().__torch_dispatch__(func, types, args, kwargs)

    # FSDP2: this tensor is a shard of some members

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: torch.Size, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return send_members(self, mesh, orig_size, module)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return gather_members(self._new, all_gather_outputs, metadata, out)


# Buffers


def _allocate(
    shapes: tuple[Shape, ...], quantizer: Quantizer | None, device: Any, dtype: torch.dtype | None
) -> "GroupedTensorStorage":
    """Return a holder of uninitialised buffers."""
    dtype = torch.float32 if dtype is None else dtype
    check_dtype(dtype)
    check_quantizer(quantizer)
    kwargs = dict(GroupedTensorStorage._FLATTEN_TENSOR_BUFFERS)
    sizes = _sizes(shapes, quantizer, dtype)
    buffers = {kwargs[slot]: torch.empty(size, dtype=kind, device=device) for slot, (size, kind) in sizes.items()}
    internal = quantizer is not None and quantizer.internal
    return _hold(shapes, quantizer, internal, dtype, buffers)


def _sizes(
    shapes: tuple[Shape, ...], quantizer: Quantizer | None, dtype: torch.dtype
) -> dict[str, tuple[int, torch.dtype]]:
    """Return the number of elements and the dtype of each buffer."""
    sizes: dict[str, tuple[int, torch.dtype]] = {}
    for shape in shapes:
        for slot, (size, kind) in member_buffers(shape, quantizer, dtype).items():
            before, _ = sizes.get(slot, (0, kind))
            sizes[slot] = before + numel(size), kind
    return sizes


def _dims(shapes: tuple[Shape, ...]) -> dict[str, list[int] | None]:
    """Return first dimensions, last dimensions and offsets of the members, each None if it does not differ."""
    first, last = first_dims(shapes), last_dims(shapes)
    dims = {"first_dims": first if differ(first) else None, "last_dims": last if differ(last) else None}
    return {**dims, "tensor_offsets": member_offsets(shapes) if differ(first) or differ(last) else None}


def _hold(
    shapes: tuple[Shape, ...],
    quantizer: Quantizer | None,
    internal: bool,
    dtype: torch.dtype,
    fields: dict[str, Any],
) -> Any:
    """Return buffers and shapes as a storage or a tensor, with a copy of the quantizer."""
    device = fields[next(iter(fields))].device
    for name, values in _dims(shapes).items():
        fields[name] = None if values is None else torch.tensor(values, dtype=torch.int64, device=device)
    fields["shapes"] = shapes
    # As in `assemble`, a quantizer that holds tensors is no constant of a graph, and is set on the finished object.
    is_constant = quantizer is not None and quantizer._is_constant()
    if is_constant:
        fields["quantizer"] = quantizer.copy()  # type: ignore[union-attr]
    cls: Any = GroupedTensorStorage if internal else GroupedTensor
    made = cls._build(whole_shape(shapes), dtype, fields)
    if quantizer is not None and not is_constant:
        made._quantizer = quantizer.copy()
    return made
