"""FP8 by rows: each row has one scale, and in the column-wise copy each column has one."""

from typing import Any

import torch

from mezzotint.constants import DType
from mezzotint.kernels._lib import Buffers, as_columns, as_matrix, matrix_shape
from mezzotint.kernels.float8_rowwise import (
    float8_rowwise_amax,
    float8_rowwise_buffers,
    float8_rowwise_dequantize,
    float8_rowwise_quantize,
    float8_rowwise_quantize_,
)
from mezzotint.kernels.operand import Operand
from mezzotint.tensor.checks import check_epsilon, check_fp8_dtype
from mezzotint.tensor.directions import TwoDirectionStorage, matrix_rows, taken
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import Along, QuantizedTensorStorage


class Float8RowwiseTensorStorage(TwoDirectionStorage):
    """This storage holds codes in the logical shape with scales [M], and transposed (K, *leading) with scales [K].

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`, `columnwise_scale_inv`,
            `fp8_dtype`, `quantizer`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantizer = mz.Float8RowwiseQuantizer()
        >>> quantizer.internal = True  # bare storages instead of tensors
        >>> x = quantizer(torch.randn(128, 128))
        >>> isinstance(x, mz.Float8RowwiseTensorStorage), isinstance(x, torch.Tensor)
        (True, False)
    """

    _VALUES = (("_fp8_dtype", "fp8_dtype", DType.kFloat8E4M3), ("_quantizer", "quantizer", None))

    def _plain_quantizer(self) -> Quantizer:
        return Float8RowwiseQuantizer(self._fp8_dtype)

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        data, scale_inv, columnwise = self._any_side()
        return float8_rowwise_dequantize(data, scale_inv, int(self._fp8_dtype), columnwise, dtype)

    def gemm_operand(self, columnwise: bool) -> Operand:
        data, scale_inv = self._side(columnwise)
        codes = as_columns(data) if columnwise else as_matrix(data)
        return Operand(codes, scale_inv, kind="row", dtype=int(self._fp8_dtype))

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        """Return rows start..stop. A column's scale covers all rows and stays right for some of them."""
        first, last = matrix_rows(self._logical_shape(), start, stop)
        fields: dict[str, Any] = {}
        if self._rowwise_data is not None and self._rowwise_scale_inv is not None:
            fields["rowwise_data"] = self._rowwise_data[start:stop]
            fields["rowwise_scale_inv"] = self._rowwise_scale_inv[first:last]
        if self._columnwise_data is not None:
            fields["columnwise_data"] = self._columnwise_data[:, start:stop].contiguous()
        return fields

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        """Return what differs between shards of rows. A column's scale covers all rows, so it is equal in all."""
        shape = self._logical_shape()
        rows = matrix_shape(shape)[0]
        return {
            "_rowwise_data": (0, shape[0], 1),
            "_rowwise_scale_inv": (0, rows, 1),
            "_columnwise_data": (1, shape[0], 1),
        }

    def _along_matrix(self) -> dict[str, tuple[Along, Along]]:
        return {
            "_rowwise_data": ((0, 1), (1, 1)),
            "_rowwise_scale_inv": ((0, 1), None),
            "_columnwise_data": ((1, 1), (0, 1)),
            "_columnwise_scale_inv": (None, (0, 1)),
        }

    def _take_rows(self, index: torch.Tensor) -> dict[str, Any] | None:
        """Return these rows with their scales."""
        if self._rowwise_data is None or self._rowwise_scale_inv is None:
            return None
        return {
            "rowwise_data": taken(self._rowwise_data, index),
            "rowwise_scale_inv": self._rowwise_scale_inv.index_select(0, index.clamp(min=0)),
            "columnwise_data": None,
            "columnwise_scale_inv": None,
        }


class Float8RowwiseTensor(Float8RowwiseTensorStorage, QuantizedTensor):
    """An FP8 row-wise tensor has one scale per row.

    A quantizer makes it. It can be used wherever a tensor can: operations that do not know its format compute with the
    values that it stands for.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`,
            `columnwise_scale_inv`, `fp8_dtype`, `quantizer`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.Float8RowwiseQuantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.Float8RowwiseTensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """


class Float8RowwiseQuantizer(Quantizer):
    """This FP8 quantizer gives each row (and, in the column-wise copy, each column) one FP32 scale from its amax.

    Args:
        fp8_dtype: The element type, `DType.kFloat8E4M3` or `DType.kFloat8E5M2`. The default is E4M3.
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies. The default is
            True.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies. The default
            is True.
        force_pow_2_scales: Whether scales are rounded to powers of two. The default is True.
        amax_epsilon: The least amax (largest absolute value) that is assumed. The default is 0.

    Raises:
        ValueError: If an option has a value that the format does not have, or two options exclude each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.Float8RowwiseQuantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.Float8RowwiseTensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    _by_value = True

    dtype: DType
    force_pow_2_scales: bool
    amax_epsilon: float

    def __init__(
        self,
        fp8_dtype: DType = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = True,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = check_fp8_dtype(fp8_dtype)
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.amax_epsilon = check_epsilon(amax_epsilon)

    def _plan(self) -> tuple[Any, ...]:
        options = (
            int(self.dtype),
            self.force_pow_2_scales,
            self.amax_epsilon,
            self.rowwise_usage,
            self.columnwise_usage,
        )
        return float8_rowwise_quantize, ("row_amax", "col_amax"), options

    def _amax_plan(self, dim: int) -> "tuple[Any, ...] | None":
        """Return the plan for the amaxes of columns if the matrix is split along rows, of rows if along columns.

        A split between rows leaves the rows whole and cuts the columns; a split between columns does the opposite.
        """
        is_cut = self.columnwise_usage if dim == 0 else self.rowwise_usage
        return (float8_rowwise_amax, ("col_amax" if dim == 0 else "row_amax",), (dim == 0,)) if is_cut else None

    def _in_place_op(self) -> Any:
        return float8_rowwise_quantize_

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return float8_rowwise_buffers(shape, self.rowwise_usage, self.columnwise_usage)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return Float8RowwiseTensorStorage, Float8RowwiseTensor

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype}

    def is_requantization_safe(self) -> bool:
        return True

    def gather_multiple(self, columnwise: bool) -> int | None:
        return 1
