"""QuantizedTensorStorage: a plain holder of one tensor's quantized buffers, which a GEMM takes and a backward saves.

It holds one or two directions: a copy that is quantized along the rows (row-wise), one along the columns (column-wise).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from mezzotint.kernels.operand import Operand
from mezzotint.tensor.flatten import Flattenable, class_by_name, fill, qualified_name
from mezzotint.tensor.interface import QuantizerLike
from mezzotint.tensor.loading import Specs, check_header, check_loaded, layouts_by
from mezzotint.tensor.printing import described
from mezzotint.tracing import count_write

Along = tuple[int, int] | None  # (dimension, how many rows or columns an entry covers)


class QuantizedTensorStorage(Flattenable):
    """This storage holds the buffers of one or two directions, and is no tensor. Subclasses declare them; the rest
    follows from that.

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: those that the subclass declares.

    Example:
        >>> import mezzotint as mz
        >>> issubclass(mz.MXFP8TensorStorage, mz.QuantizedTensorStorage)
        True
        >>> issubclass(mz.MXFP8Tensor, mz.MXFP8TensorStorage)
        True
    """

    # These attributes make up a direction; a storage has a usage if it holds all of them.
    _ROWWISE: ClassVar[tuple[str, ...]] = ()
    _COLUMNWISE: ClassVar[tuple[str, ...]] = ()
    _COPIES_ROWS: ClassVar[bool] = False  # `_rows` returns both views and copies, or a scale of all rows
    _READS_QUANTIZER: ClassVar[bool] = False  # the buffers mean nothing without the quantizer

    _quantizer: QuantizerLike | None

    def __init__(self, *args: Any, fake_dtype: torch.dtype | None = None, **fields: Any) -> None:
        """Take the declared buffers and values, by keyword or in declared order; `fake_dtype` is the nominal dtype."""
        order = [k for _, k in self._FLATTEN_TENSOR_BUFFERS] + [k for _, k, _ in self._VALUES]
        if len(args) > len(order) or any(name in fields for name in order[: len(args)]):
            raise TypeError(
                f"{type(self).__name__} got {len(args)} positional arguments and {sorted(fields)} by name; it takes "
                f"each of {order} once"
            )
        fields.update(zip(order, args, strict=False))
        self._assign(torch.float32 if fake_dtype is None else fake_dtype, fields)

    @classmethod
    def _build(cls, shape: Any, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
        if shape is not None and len(shape) == 0:
            kwargs = cls._without_dimensions(kwargs)
        made = object.__new__(cls)
        fill(made, dtype, kwargs)
        return made

    @classmethod
    def _without_dimensions(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the constructor kwargs of a tensor without dimensions, which kernels made with one, of one element."""
        return kwargs

    # Format: each of these is written once per format

    def _logical_shape(self) -> tuple[int, ...]:
        """Return the logical shape, from whichever direction is held."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its shape is")

    def gemm_operand(self, columnwise: bool) -> Operand:
        """Return one direction as a GEMM takes it: rows that stay, and the dimension that is contracted."""
        raise NotImplementedError(f"{type(self).__name__} is no operand of a GEMM")

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say how it is dequantized")

    def _derive(self, rowwise: bool, columnwise: bool) -> None:
        """Make a wanted direction from the other if the format can; raise ValueError otherwise."""
        wanted = "row-wise" if rowwise else "column-wise"
        raise ValueError(
            f"{type(self).__name__} holds no {wanted} data and {wanted} data of this format cannot be made from the "
            "other direction: ask the quantizer for it before quantizing (columnwise=True / rowwise=True)"
        )

    def _view(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """Return the constructor kwargs of the same data in another logical shape, or None if the format cannot."""
        return None

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        """Return the constructor kwargs of rows start..stop of the first dimension, or None if blocks would be cut."""
        return None

    def _take_rows(self, index: torch.Tensor) -> dict[str, Any] | None:
        """Return the constructor kwargs of these rows (int64 [n]; -1: zeros) of a matrix, row-wise, or None."""
        return None

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        """Return how shards of rows lie one behind the other: buffer → (dimension, extent of the data in it, multiple
        that it is padded to). Buffers that are not named are equal in all shards."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its shards are put together")

    def _along_matrix(self) -> dict[str, tuple[Along, Along]] | None:
        """Return how the rows and columns of a matrix lie in its buffers, or None if shards are no parts of them.

        The result is buffer → (for rows, for columns), each (dimension, how many of them an entry covers), or None if
        an entry covers all of them, so that it is equal in all shards.
        """
        return None

    def _plain_quantizer(self) -> QuantizerLike | None:
        """Return a quantizer that lays buffers out as the plain values say, or None if the quantizer alone says it."""
        return None

    def _layouts(self, shape: tuple[int, ...]) -> list[list[Specs]]:
        """Return the layouts that buffers of a tensor of this shape may have: by plain values, and by the quantizer.

        What is read from a file must match one layout of each.
        """
        quantizers = (self._plain_quantizer(), self._quantizer)
        return [layouts_by(quantizer, shape, self._dtype) for quantizer in quantizers]

    # What the declaration gives

    @property
    def shape(self) -> torch.Size:
        """Return the logical shape."""
        return torch.Size(self._logical_shape())

    @property
    def device(self) -> torch.device:
        for _, buffer in self._buffers():
            return buffer.device
        raise RuntimeError(f"{type(self).__name__} has no device: it holds no data")

    @property
    def dtype(self) -> torch.dtype:
        """Return the nominal dtype: that of what `dequantize()` returns."""
        return self._dtype

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values in `dtype` (by default the nominal one) and the logical shape."""
        return self._dequantize(self._dtype if dtype is None else dtype)

    def get_usages(self) -> dict[str, bool]:
        """Return which directions are held."""
        return {"rowwise": self._holds(self._ROWWISE), "columnwise": self._holds(self._COLUMNWISE)}

    def _require(self, columnwise: bool) -> None:
        """Raise ValueError unless this direction, which a GEMM is about to read, is held."""
        if not self._holds(self._COLUMNWISE if columnwise else self._ROWWISE):
            wanted = "columnwise" if columnwise else "rowwise"
            raise ValueError(
                f"{type(self).__name__} of shape {tuple(self.shape)} holds no {wanted} data, which this product needs: "
                f"quantize with {wanted}=True, or call update_usage({wanted}_usage=True) where the format can derive it"
            )

    def _holds(self, attributes: tuple[str, ...]) -> bool:
        for name in attributes:  # noqa: SIM110  a loop: this runs several times in each forward
            if getattr(self, name) is None:
                return False
        return True

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop directions that are not wanted, and make a wanted one that is missing if the format can."""
        usages = self.get_usages()
        rowwise = usages["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = usages["columnwise"] if columnwise_usage is None else columnwise_usage
        if rowwise and not usages["rowwise"]:
            self._derive(True, False)
        if columnwise and not usages["columnwise"]:
            self._derive(False, True)
        shared = set(self._ROWWISE) & set(self._COLUMNWISE)
        for wanted, attributes in ((rowwise, self._ROWWISE), (columnwise, self._COLUMNWISE)):
            if not wanted:
                for name in attributes:
                    if name not in shared:
                        setattr(self, name, None)
        if self._quantizer is not None:
            self._quantizer = self._quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)

    def keep(self, *, rowwise: bool, columnwise: bool) -> "QuantizedTensorStorage":
        """Return a new storage of the same buffers with these directions only; raise ValueError if one is missing and
        cannot be made. A user's storage that declares no buffers is returned as it is."""
        if not self._FLATTEN_TENSOR_BUFFERS:
            return self
        dropped = (() if rowwise else self._ROWWISE) + (() if columnwise else self._COLUMNWISE)
        shared = (self._ROWWISE if rowwise else ()) + (self._COLUMNWISE if columnwise else ())
        # This is the short way, for a storage that holds what is asked for, each direction in buffers of its own.
        is_held = (not rowwise or self._holds(self._ROWWISE)) and (not columnwise or self._holds(self._COLUMNWISE))
        if is_held and self._ROWWISE[0] != self._COLUMNWISE[0]:
            fields = {
                kwarg: None if name in dropped and name not in shared else getattr(self, name)
                for name, kwarg, _ in self._FIELDS
            }
            return type(self)._build(self.shape, self._dtype, fields)
        other = type(self)._build(self.shape, self._dtype, self.get_metadata())
        other.update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)
        return other

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], "QuantizedTensorStorage"]:
        """Strip the buffers for `save_for_backward`; return all of them in declared order, and the empty holder."""
        tensors = [getattr(self, attribute) for attribute, _ in self._FLATTEN_TENSOR_BUFFERS]
        self.clear()
        return tensors, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take the buffers back from the front of `tensors`, and return the rest."""
        count = len(self._FLATTEN_TENSOR_BUFFERS)
        for (attribute, _), tensor in zip(self._FLATTEN_TENSOR_BUFFERS, tensors[:count], strict=True):
            setattr(self, attribute, tensor)
        return tensors[count:]

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """Return the code buffers of one or both directions."""
        row, column = getattr(self, self._ROWWISE[0]), getattr(self, self._COLUMNWISE[0])
        if rowwise_data and columnwise_data:
            return row, column
        return row if rowwise_data else column

    def clear(self) -> None:
        """Release every buffer."""
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, None)

    def update_quantizer(self, quantizer: QuantizerLike) -> None:
        """Quantize with a copy of this quantizer from now on."""
        self._quantizer = quantizer.copy()

    def copy_from_storage(self, src: "QuantizedTensorStorage") -> None:
        """Copy every buffer of `src`, which must hold the same ones and mean the same by them."""
        if not self.has_form_of(src):
            raise ValueError(
                f"copy_from_storage needs the same buffers and options: this is {type(self).__name__} of "
                f"{self._described()}, src is {type(src).__name__} of {src._described()}; dequantize src and quantize_ "
                "instead"
            )
        for name, buffer in self._buffers():
            buffer.copy_(getattr(src, name))
        count_write(self)

    def has_form_of(self, other: "QuantizedTensorStorage") -> bool:
        """Return whether both hold the same buffers and mean the same by their bytes."""
        if type(other)._FLATTEN_TENSOR_BUFFERS != self._FLATTEN_TENSOR_BUFFERS:
            return False
        held = {name: buffer.shape for name, buffer in self._buffers()}
        if held != {name: buffer.shape for name, buffer in other._buffers()}:
            return False
        if any(getattr(self, name) != getattr(other, name) for name, _, _ in self._VALUES if name != "_quantizer"):
            return False
        mine, theirs = self._quantizer, other._quantizer
        return mine is None or theirs is None or mine._layout() == theirs._layout()

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> "QuantizedTensorStorage":
        """Quantize `tensor` into these buffers, in place; nothing changes if `noop_flag` is 1."""
        if self._quantizer is None:
            raise ValueError(f"{type(self).__name__} has no quantizer: update_quantizer(q) first")
        self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def view(self, *shape: Any) -> Any:
        """Return the same buffers under another logical shape with the same last dimension."""
        wanted = resolve_shape(shape, self.shape)
        fields = self._view(wanted)
        if fields is None:
            raise ValueError(
                f"{type(self).__name__} of shape {tuple(self.shape)} cannot be viewed as {wanted}: blocks run along "
                "the last dimension, which must stay; dequantize() first"
            )
        return type(self)._build(wanted, self._dtype, {**self.get_metadata(), **fields})

    # Shards of rows, and other parts

    def _shared_buffers(self, dim: int) -> list[torch.Tensor]:
        """Return the held buffers that are equal in all shards of a matrix that is split along `dim`."""
        along = self._along_matrix() or {}
        return [buffer for name, buffer in self._buffers() if name in along and along[name][dim] is None]

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Return the names of the held buffers that differ between shards of rows; the others are equal in all."""
        along = self._along_rows()
        return tuple(name for name, _ in self._buffers() if name in along)

    def fsdp_extract_buffers(self) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Return the buffers that differ between shards, without their padding, and their dimensions and shapes."""
        along, fields = self._along_rows(), self.fsdp_buffer_fields()
        buffers = tuple(getattr(self, name).narrow(along[name][0], 0, along[name][1]) for name in fields)
        shapes = {name: tuple(buffer.shape) for name, buffer in zip(fields, buffers, strict=True)}
        return buffers, {"dims": {name: along[name][0] for name in fields}, "shapes": shapes}

    def fsdp_assign_gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any]) -> None:
        """Write gathered shards into the buffers of this whole tensor, in place, with zeros in their padding."""
        for (name, shape), shards in zip(meta["shapes"].items(), gathered, strict=True):
            dim, whole = meta["dims"][name], getattr(self, name)
            extent = shards.shape[0] // shape[0] * shape[dim]
            joined = shards.view(-1, *shape).movedim(0, dim)
            if whole.shape[dim] != extent:
                whole.zero_()
            whole.narrow(dim, 0, extent).copy_(joined.reshape(*shape[:dim], extent, *shape[dim + 1 :]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return tensors and plain values alone, so that `torch.load(weights_only=True)` works."""
        buffers = {name: getattr(self, name) for name, _ in self._FLATTEN_TENSOR_BUFFERS}
        values = {
            kwarg: int(v) if isinstance(v, int) and not isinstance(v, bool) else v
            for kwarg, v in self._plain_values().items()
        }
        return rebuild_quantized_tensor, (qualified_name(type(self)), tuple(self.shape), self._dtype, buffers, values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._described()})"

    def _described(self) -> str:
        """Return all but the values, which may be fake, as text."""
        return described(self)


def rebuild_quantized_tensor(
    name: str,
    shape: Any,
    dtype: torch.dtype,
    buffers: dict[str, Any],
    values: dict[str, Any],
    requires_grad: bool = False,
    is_parameter: bool = False,
) -> Any:
    """Unpickle a storage or tensor: its class by qualified name, tensors and plain values. Safe under `weights_only`.

    Buffers that do not fit the shape raise a ValueError, before a kernel reads them.
    """
    cls: Any = class_by_name(name)
    check_header(cls.__name__, shape, dtype, buffers)
    cls._check_fields(values)
    held = {attribute: None if buffer is None else buffer.contiguous() for attribute, buffer in buffers.items()}
    fields = {kwarg: held.get(attribute) for attribute, kwarg in cls._FLATTEN_TENSOR_BUFFERS}
    made = cls._build(shape, dtype, {**fields, **cls._restore_values(values)})
    check_loaded(made, shape)
    if is_parameter:
        return torch.nn.Parameter(made, requires_grad)
    return made.requires_grad_() if requires_grad else made


def resolve_shape(shape: tuple[Any, ...], current: torch.Size) -> tuple[int, ...]:
    """Return the shape that the arguments of `view` mean, of which at most one is -1."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
    known, elements = 1, 1
    for size in sizes:
        if size != -1:
            known *= size
    for size in current:
        elements *= size
    resolved = tuple(elements // max(known, 1) if size == -1 else size for size in sizes)
    count = 1
    for size in resolved:
        count *= size
    if count != elements:
        raise ValueError(f"shape {sizes} has another number of elements than {tuple(current)}: they must be equal")
    return resolved
