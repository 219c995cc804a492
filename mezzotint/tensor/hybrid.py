"""Hybrid quantization: each direction has a format of its own, for example MXFP8 forward and NVFP4 for the weight
gradient."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from mezzotint.kernels._lib import Buffers
from mezzotint.kernels.operand import Operand
from mezzotint.tensor.checks import check_choice
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer, assemble
from mezzotint.tensor.storage import Along, QuantizedTensorStorage

_SLOTS = 6  # the most buffers that one storage declares
_ROW = tuple(f"_rowwise_{i}" for i in range(_SLOTS))
_COLUMN = tuple(f"_columnwise_{i}" for i in range(_SLOTS))


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """This storage holds the buffers of two storages by position; the quantizer says which storages they are.

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `rowwise_0` to `rowwise_5`, `columnwise_0` to `columnwise_5`, `quantizer`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> parts = {"rowwise_quantizer": mz.NVFP4Quantizer(), "columnwise_quantizer": mz.MXFP8Quantizer()}
        >>> quantizer = mz.HybridQuantizer(**parts)
        >>> quantizer.internal = True  # bare storages instead of tensors
        >>> x = quantizer(torch.randn(128, 128))
        >>> isinstance(x, mz.HybridQuantizedTensorStorage), isinstance(x, torch.Tensor)
        (True, False)
    """

    _FLATTEN_TENSOR_BUFFERS: ClassVar[tuple[tuple[str, str], ...]] = tuple((n, n[1:]) for n in (*_ROW, *_COLUMN))
    _VALUES = (("_quantizer", "quantizer", None),)
    _ROWWISE = _ROW
    _COLUMNWISE = _COLUMN
    _COPIES_ROWS = True

    _quantizer: Any

    _READS_QUANTIZER = True

    # The slots do not record an odd size, nor leading dimensions, so a storage keeps the shape that it was made for.
    _made_for: Any = None

    @classmethod
    def _build(cls, shape: Any, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
        made = super()._build(shape, dtype, kwargs)
        made._made_for = None if shape is None else tuple(shape)
        return made

    def _known_shape(self) -> tuple[int, ...] | None:
        return self._made_for

    def _holds(self, attributes: tuple[str, ...]) -> bool:
        return getattr(self, attributes[0]) is not None

    def _part(self, columnwise: bool, internal: bool = True) -> Any:
        """Return one direction as a storage of its own format, or as a tensor if not `internal`."""
        self._require(columnwise)
        quantizer = self._quantizer._part(columnwise)
        slots = (getattr(self, slot) for slot in (_COLUMN if columnwise else _ROW))
        held = [buffer for buffer in slots if buffer is not None]
        return assemble(held, quantizer, internal, self._known_shape(), self._dtype)

    @property
    def rowwise_storage(self) -> QuantizedTensorStorage | None:
        """Return the row-wise direction, as a tensor if this is a tensor, else as a storage; None if it is not held."""
        return self._part(False, not isinstance(self, torch.Tensor)) if self._holds(_ROW) else None

    @property
    def columnwise_storage(self) -> QuantizedTensorStorage | None:
        """Return the column-wise direction, as a tensor if this is one, else as a storage; None if it is not held."""
        return self._part(True, not isinstance(self, torch.Tensor)) if self._holds(_COLUMN) else None

    # These are Transformer Engine's names.
    rowwise_sub_storage, columnwise_sub_storage = rowwise_storage, columnwise_storage
    _rowwise_storage, _columnwise_storage = rowwise_storage, columnwise_storage

    def _require(self, columnwise: bool) -> None:
        if not self._holds(_COLUMN if columnwise else _ROW):
            wanted = "columnwise" if columnwise else "rowwise"
            raise ValueError(f"{type(self).__name__} holds no {wanted} data: quantize with {wanted}=True")

    def _logical_shape(self) -> tuple[int, ...]:
        known = self._known_shape()
        return self._part(not self._holds(_ROW))._logical_shape() if known is None else known

    def _view(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        return self._of_parts(lambda part: part._view(shape))

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        return self._of_parts(lambda part: part._rows(start, stop))

    def _of_parts(self, change: Callable[[QuantizedTensorStorage], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Return the slots with each direction's fields changed by `change`, or None if one direction cannot."""
        slots: dict[str, Any] = {}
        for columnwise, names in ((False, _ROW), (True, _COLUMN)):
            if not self._holds(names):
                continue
            fields = change(self._part(columnwise))
            if fields is None:
                return None
            _, kwargs, _ = self._quantizer._part(columnwise)._holder(True)
            slots.update({slot[1:]: fields[k] for slot, k in zip(names, kwargs, strict=False) if k in fields})
        return slots

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        return self._by_slot(lambda part: part._along_rows()) or {}

    def _along_matrix(self) -> dict[str, tuple[Along, Along]] | None:
        return self._by_slot(lambda part: part._along_matrix())

    def _by_slot(self, asked: Callable[[QuantizedTensorStorage], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Return, by slot, what each direction says of its buffers, or None if one of them says None."""
        found: dict[str, Any] = {}
        for columnwise, slots in ((False, _ROW), (True, _COLUMN)):
            if self._holds(slots):
                each = asked(self._part(columnwise))
                if each is None:
                    return None
                names = [f"_{name}" for name in self._quantizer._part(columnwise)._buffer_names()]
                found.update({slot: each[name] for slot, name in zip(slots, names, strict=False) if name in each})
        return found

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self._part(not self._holds(_ROW))._dequantize(dtype)

    def gemm_operand(self, columnwise: bool) -> Operand:
        return self._part(columnwise).gemm_operand(columnwise)


class HybridQuantizedTensor(HybridQuantizedTensorStorage, QuantizedTensor):
    """A hybrid tensor is in two formats, one for each direction.

    A quantizer makes it. It can be used wherever a tensor can: operations that do not know its format compute with the
    values that it stands for.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `rowwise_0` to `rowwise_5`, `columnwise_0` to
            `columnwise_5`, `quantizer`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> parts = {"rowwise_quantizer": mz.NVFP4Quantizer(), "columnwise_quantizer": mz.MXFP8Quantizer()}
        >>> x = mz.HybridQuantizer(**parts)(torch.randn(128, 128))
        >>> isinstance(x, mz.HybridQuantizedTensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    def _known_shape(self) -> tuple[int, ...] | None:
        return tuple(self.shape)


class HybridQuantizer(Quantizer):
    """This quantizer is made of two, one for each direction.

    Args:
        rowwise_quantizer: The quantizer of the row-wise copy.
        columnwise_quantizer: The quantizer of the column-wise copy.
        columnwise_source: What the column-wise copy is quantized from: "original" (the default), the source, or
            "rowwise_dequantized", the values that the row-wise copy dequantizes to.

    Raises:
        TypeError: If one of them is no quantizer.
        ValueError: If there is no such source.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> parts = {"rowwise_quantizer": mz.NVFP4Quantizer(), "columnwise_quantizer": mz.MXFP8Quantizer()}
        >>> x = mz.HybridQuantizer(**parts)(torch.randn(128, 128))
        >>> isinstance(x, mz.HybridQuantizedTensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    _by_value = True

    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer
    columnwise_source: str

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        for name, part in (
            ("rowwise_quantizer", rowwise_quantizer),
            ("columnwise_quantizer", columnwise_quantizer),
        ):
            if not isinstance(part, Quantizer):
                raise TypeError(f"{name} is {type(part).__name__}: give a Quantizer (IdentityQuantizer for none)")
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = check_choice(
            "columnwise_source", columnwise_source, ("original", "rowwise_dequantized")
        )
        self._rebuild_derived_state()

    def _rebuild_derived_state(self) -> None:
        """Copy the two parts, so that a copy shares nothing, and changes of the given quantizers do not show here."""
        self.rowwise_quantizer = self.rowwise_quantizer.copy()
        self.columnwise_quantizer = self.columnwise_quantizer.copy()

    def _is_value(self) -> bool:
        are_values = self.rowwise_quantizer._is_value() and self.columnwise_quantizer._is_value()
        return are_values and Quantizer._is_value(self)  # torch 2.11 does not trace super()

    def _worked_out(self) -> dict[Any, Any]:
        """Return an empty cache: nothing is kept, because the parts may be assigned to."""
        return {}

    def _part(self, columnwise: bool) -> Quantizer:
        """Return the quantizer of one direction, set to make that direction only."""
        if columnwise:
            return self.columnwise_quantizer.with_usage(rowwise=False, columnwise=True)
        return self.rowwise_quantizer.with_usage(rowwise=True, columnwise=False)

    def _parts(self) -> tuple[Quantizer | None, Quantizer | None, Any]:
        """Return row-wise part, column-wise part, and the quantizer that the latter's source goes through, if any."""
        chained = self._part(False) if self.columnwise_source == "rowwise_dequantized" else None
        rowwise = self._part(False) if self.rowwise_usage else None
        return rowwise, self._part(True) if self.columnwise_usage else None, chained

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        described: Buffers = {}
        for wanted, columnwise, prefix in (
            (self.rowwise_usage, False, "rowwise"),
            (self.columnwise_usage, True, "columnwise"),
        ):
            if wanted:
                parts = self._part(columnwise)._describe_buffers(shape).values()
                described.update({f"{prefix}_{i}": part for i, part in enumerate(parts)})
        return described

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return HybridQuantizedTensorStorage, HybridQuantizedTensor

    def for_dtype(self, dtype: torch.dtype) -> Quantizer:
        made: Any = self.copy()
        made.rowwise_quantizer = made.rowwise_quantizer.for_dtype(dtype)
        made.columnwise_quantizer = made.columnwise_quantizer.for_dtype(dtype)
        return made

    @property
    def with_amax_reduction(self) -> bool:
        return any(
            getattr(q, "with_amax_reduction", False) for q in (self.rowwise_quantizer, self.columnwise_quantizer)
        )

    def _layout(self) -> tuple[Any, ...]:
        parts = (self.rowwise_quantizer, self.columnwise_quantizer)
        return tuple((type(q), q.storage_metadata(), q._layout()) for q in parts)

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        return self.rowwise_quantizer.is_quantizable(inp) and self.columnwise_quantizer.is_quantizable(inp)

    def get_columnwise_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        return self.columnwise_quantizer.get_columnwise_shape(shape)

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> tuple[int, ...]:
        return (self.columnwise_quantizer if columnwise else self.rowwise_quantizer).get_scale_shape(shape, columnwise)

    def is_requantization_safe(self) -> bool:
        return self.rowwise_quantizer.is_requantization_safe() and self.columnwise_quantizer.is_requantization_safe()

    def supports_only_rowwise_all_gather(self) -> bool:
        return False

    def gather_multiple(self, columnwise: bool) -> int | None:
        return self._part(columnwise).gather_multiple(columnwise)
