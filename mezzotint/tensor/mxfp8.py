"""MXFP8: in this format 32 elements share one power-of-two scale."""

from typing import Any

import torch

from mezzotint.constants import MX_BLOCK, DType, cdiv
from mezzotint.kernels._lib import Buffers, as_matrix, matrix_shape, padded
from mezzotint.kernels.mxfp8 import (
    mxfp8_buffers,
    mxfp8_dequantize,
    mxfp8_quantize,
    mxfp8_quantize_,
    mxfp8_scale_shape,
)
from mezzotint.kernels.operand import Operand
from mezzotint.tensor.checks import check_choice, check_fp8_dtype
from mezzotint.tensor.directions import TwoDirectionStorage, cuts_blocks, matrix_rows, taken
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import Along, QuantizedTensorStorage


class MXFP8TensorStorage(TwoDirectionStorage):
    """This storage holds codes of each direction in the logical shape, and the E8M0 scale bytes of each direction.

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`, `columnwise_scale_inv`,
            `fp8_dtype`, `quantizer`, `with_gemm_swizzled_scales`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantizer = mz.MXFP8Quantizer()
        >>> quantizer.internal = True  # bare storages instead of tensors
        >>> x = quantizer(torch.randn(128, 128))
        >>> isinstance(x, mz.MXFP8TensorStorage), isinstance(x, torch.Tensor)
        (True, False)
    """

    _VALUES = (
        ("_fp8_dtype", "fp8_dtype", DType.kFloat8E4M3),
        ("_quantizer", "quantizer", None),
        ("_with_gemm_swizzled_scales", "with_gemm_swizzled_scales", False),
    )
    _TRANSPOSED = False

    _with_gemm_swizzled_scales: bool

    def _plain_quantizer(self) -> Quantizer:
        return MXFP8Quantizer(self._fp8_dtype)

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        data, scale_inv, columnwise = self._any_side()
        swizzled = self._with_gemm_swizzled_scales
        return mxfp8_dequantize(data, scale_inv, int(self._fp8_dtype), swizzled, columnwise, dtype)

    def _derive(self, rowwise: bool, columnwise: bool) -> None:
        """Make the missing direction if scales are of 32x32 tiles; raise ValueError if they are not.

        With tiles both directions hold the same codes, and a tile's scale byte once for each of its rows or columns.
        """
        quantizer: Any = self._quantizer
        if quantizer is None or not quantizer.derives_columnwise():
            super()._derive(rowwise, columnwise)
        data, scale_inv = self._side(rowwise)
        rows, cols = matrix_shape(self._logical_shape())
        down, across = cdiv(rows, MX_BLOCK), cdiv(cols, MX_BLOCK)
        tiles = scale_inv[:down, ::MX_BLOCK][:, :across] if rowwise else scale_inv[::MX_BLOCK][:down, :across]
        scales = tiles.repeat_interleave(MX_BLOCK, 0 if rowwise else 1)[:rows, :cols]
        scales = padded(scales, *mxfp8_scale_shape(rows, cols, columnwise)).contiguous()
        if rowwise:
            self._rowwise_data, self._rowwise_scale_inv = data.clone(), scales
        else:
            self._columnwise_data, self._columnwise_scale_inv = data.clone(), scales

    def gemm_operand(self, columnwise: bool) -> Operand:
        """Return one direction as a GEMM takes it. The column-wise copy is not transposed, and its operand says so."""
        data, scale_inv = self._side(columnwise)
        return Operand(
            as_matrix(data),
            scale_inv,
            kind="mx",
            dtype=int(self._fp8_dtype),
            swizzled=self._with_gemm_swizzled_scales,
            transposed=columnwise,
        )

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        shape = self._logical_shape()
        rows, cols = matrix_shape(shape)
        first, last = matrix_rows(shape, start, stop)
        if self._with_gemm_swizzled_scales:
            return None
        if self._columnwise_data is not None and cuts_blocks(first, last, rows, MX_BLOCK):
            return None
        fields: dict[str, Any] = {}
        if self._rowwise_data is not None and self._rowwise_scale_inv is not None:
            fields["rowwise_data"] = self._rowwise_data[start:stop]
            scales = self._rowwise_scale_inv[first:last]
            fields["rowwise_scale_inv"] = padded(scales, *mxfp8_scale_shape(last - first, cols, False))
        if self._columnwise_data is not None and self._columnwise_scale_inv is not None:
            fields["columnwise_data"] = self._columnwise_data[start:stop]
            scales = self._columnwise_scale_inv[first // MX_BLOCK : cdiv(last, MX_BLOCK)]
            fields["columnwise_scale_inv"] = padded(scales, *mxfp8_scale_shape(last - first, cols, True))
        return fields

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        shape = self._logical_shape()
        rows = matrix_shape(shape)[0]
        return {
            "_rowwise_data": (0, shape[0], 1),
            "_rowwise_scale_inv": (0, rows, 128),
            "_columnwise_data": (0, shape[0], 1),
            "_columnwise_scale_inv": (0, cdiv(rows, MX_BLOCK), 4),
        }

    def _along_matrix(self) -> dict[str, tuple[Along, Along]] | None:
        if self._with_gemm_swizzled_scales:
            return None
        return {
            "_rowwise_data": ((0, 1), (1, 1)),
            "_rowwise_scale_inv": ((0, 1), (1, MX_BLOCK)),
            "_columnwise_data": ((0, 1), (1, 1)),
            "_columnwise_scale_inv": ((0, MX_BLOCK), (1, 1)),
        }

    def _take_rows(self, index: torch.Tensor) -> dict[str, Any] | None:
        """Return these rows with their scales."""
        if self._rowwise_data is None or self._rowwise_scale_inv is None or self._with_gemm_swizzled_scales:
            return None
        scales = self._rowwise_scale_inv.index_select(0, index.clamp(min=0))
        shape = mxfp8_scale_shape(index.shape[0], self._rowwise_data.shape[-1], False)
        return {
            "rowwise_data": taken(self._rowwise_data, index),
            "rowwise_scale_inv": padded(scales, *shape),
            "columnwise_data": None,
            "columnwise_scale_inv": None,
        }


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """An MXFP8 tensor has one E8M0 scale, a power of two, for 32 elements.

    A quantizer makes it. It can be used wherever a tensor can: operations that do not know its format compute with the
    values that it stands for.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`,
            `columnwise_scale_inv`, `fp8_dtype`, `quantizer`, `with_gemm_swizzled_scales`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.MXFP8Quantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.MXFP8Tensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """


class MXFP8Quantizer(Quantizer):
    """This MXFP8 quantizer has one scale, a power of two, for each block of 32 elements or each tile of 32x32.

    Args:
        fp8_dtype: The element type, `DType.kFloat8E4M3` or `DType.kFloat8E5M2`. The default is E4M3.
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies. The default is
            True.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies. The default
            is True.
        with_2d_quantization: Whether square tiles of the tensor share a scale, as is usual for weights. The default is
            False.
        scale_rule: How the scale follows from the amax of a block: with "roundup" (the default) nothing saturates;
            "floor" is the rule of the OCP standard.

    Raises:
        ValueError: If an option has a value that the format does not have, or two options exclude each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.MXFP8Quantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.MXFP8Tensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    _by_value = True

    dtype: DType
    with_2d_quantization: bool
    scale_rule: str

    def __init__(
        self,
        fp8_dtype: DType = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
        scale_rule: str = "roundup",
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = check_fp8_dtype(fp8_dtype)
        self.with_2d_quantization = bool(with_2d_quantization)
        self.scale_rule = check_choice("scale_rule", scale_rule, ("roundup", "floor"))

    def _plan(self) -> tuple[Any, ...]:
        scaling = (
            int(self.dtype),
            self.scale_rule == "floor",
            self.with_2d_quantization,
            self.optimize_for_gemm,
        )
        return mxfp8_quantize, (), (*scaling, self.rowwise_usage, self.columnwise_usage)

    def _in_place_op(self) -> Any:
        return mxfp8_quantize_

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return mxfp8_buffers(shape, self.rowwise_usage, self.columnwise_usage)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return MXFP8TensorStorage, MXFP8Tensor

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype, "with_gemm_swizzled_scales": self.optimize_for_gemm}

    def _layout(self) -> tuple[Any, ...]:
        return (self.with_2d_quantization,)  # with 32x32 tiles one direction can be made from the other

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        scale_inv: torch.Tensor,
        fake_dtype: torch.dtype,
        fp8_dtype: DType = DType.kFloat8E4M3,
    ) -> MXFP8Tensor:
        """Return a row-wise tensor around codes and scale bytes that exist already."""
        quantizer = self.with_usage(rowwise=True, columnwise=False)
        fields = {
            "rowwise_data": data,
            "rowwise_scale_inv": scale_inv,
            "fp8_dtype": fp8_dtype,
            "quantizer": quantizer,
        }
        return MXFP8Tensor(data.shape, fake_dtype, **fields)

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        rows, cols = matrix_shape(tuple(inp.shape))
        return rows % MX_BLOCK == 0 and cols % MX_BLOCK == 0

    def is_requantization_safe(self) -> bool:
        return True

    def gather_multiple(self, columnwise: bool) -> int | None:
        if self.optimize_for_gemm:  # the GEMM's order of scales crosses shards
            return None
        return MX_BLOCK if columnwise or self.with_2d_quantization else 1

    def derives_columnwise(self) -> bool:
        return self.with_2d_quantization and not self.optimize_for_gemm
