"""FP8 by blocks: each run of 1x128 elements, or each tile of 128x128, has one FP32 scale."""

from collections.abc import Iterable
from typing import Any

import torch

from mezzotint.constants import FP8_BLOCK, DType, cdiv, rup
from mezzotint.kernels._lib import Buffers, as_columns, as_matrix, matrix_shape, padded
from mezzotint.kernels.float8_block import (
    float8_block_buffers,
    float8_block_dequantize,
    float8_block_quantize,
    float8_block_quantize_,
)
from mezzotint.kernels.operand import Operand
from mezzotint.tensor.checks import check_choice, check_epsilon, check_fp8_dtype
from mezzotint.tensor.directions import TwoDirectionStorage, cuts_blocks, matrix_rows, taken
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import Along, QuantizedTensorStorage


class Float8BlockwiseQTensorStorage(TwoDirectionStorage):
    """This storage holds codes in the logical shape and transposed codes (K, *leading), each with its scales in the
    layout that the GEMM reads.

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`, `columnwise_scale_inv`,
            `fp8_dtype`, `quantizer`, `is_2D_scaled`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantizer = mz.Float8BlockQuantizer()
        >>> quantizer.internal = True  # bare storages instead of tensors
        >>> x = quantizer(torch.randn(128, 128))
        >>> isinstance(x, mz.Float8BlockwiseQTensorStorage), isinstance(x, torch.Tensor)
        (True, False)
    """

    _VALUES = (
        ("_fp8_dtype", "fp8_dtype", DType.kFloat8E4M3),
        ("_quantizer", "quantizer", None),
        ("_is_2D_scaled", "is_2D_scaled", True),
    )

    _is_2D_scaled: bool

    def _plain_quantizer(self) -> Quantizer:
        return Float8BlockQuantizer(self._fp8_dtype, block_scaling_dim=2 if self._is_2D_scaled else 1)

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        data, scale_inv, columnwise = self._any_side()
        return float8_block_dequantize(data, scale_inv, int(self._fp8_dtype), self._is_2D_scaled, columnwise, dtype)

    def _derive(self, rowwise: bool, columnwise: bool) -> None:
        """Make the missing direction by a transpose if blocks are 128x128; raise ValueError if they are 1x128.

        With 1x128 the two directions have different blocks.
        """
        if not self._is_2D_scaled:
            super()._derive(rowwise, columnwise)
        data, scale_inv, _ = self._any_side()
        shape = self._logical_shape()
        rows, cols = matrix_shape(shape)
        tiles = cdiv(rows, FP8_BLOCK), cdiv(cols, FP8_BLOCK)
        if columnwise:
            self._columnwise_data = as_matrix(data).t().contiguous().reshape(shape[-1], *shape[:-1])
            self._columnwise_scale_inv = _transposed(scale_inv[: tiles[0], : tiles[1]])
        else:
            self._rowwise_data = data.reshape(cols, rows).t().contiguous().reshape(shape)
            self._rowwise_scale_inv = _transposed(scale_inv[: tiles[1], : tiles[0]])

    def gemm_operand(self, columnwise: bool) -> Operand:
        data, scale_inv = self._side(columnwise)
        codes = as_columns(data) if columnwise else as_matrix(data)
        kind = "block2d" if self._is_2D_scaled else "block1d"
        return Operand(codes, scale_inv, kind=kind, dtype=int(self._fp8_dtype))

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        shape = self._logical_shape()
        rows, _ = matrix_shape(shape)
        first, last = matrix_rows(shape, start, stop)
        if (self._is_2D_scaled or self._columnwise_data is not None) and cuts_blocks(first, last, rows, FP8_BLOCK):
            return None
        blocks = first // FP8_BLOCK, cdiv(last, FP8_BLOCK)
        fields: dict[str, Any] = {}
        if self._rowwise_data is not None and self._rowwise_scale_inv is not None:
            fields["rowwise_data"] = self._rowwise_data[start:stop]
            scales = self._rowwise_scale_inv
            fields["rowwise_scale_inv"] = (
                scales[slice(*blocks)] if self._is_2D_scaled else _padded(scales[:, first:last])
            )
        if self._columnwise_data is not None and self._columnwise_scale_inv is not None:
            fields["columnwise_data"] = self._columnwise_data[:, start:stop].contiguous()
            scales = self._columnwise_scale_inv
            fields["columnwise_scale_inv"] = (
                _padded(scales[:, slice(*blocks)]) if self._is_2D_scaled else scales[slice(*blocks)]
            )
        return fields

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        shape = self._logical_shape()
        rows = matrix_shape(shape)[0]
        blocks = cdiv(rows, FP8_BLOCK)
        return {
            "_rowwise_data": (0, shape[0], 1),
            "_rowwise_scale_inv": (0, blocks, 1) if self._is_2D_scaled else (1, rows, 4),
            "_columnwise_data": (1, shape[0], 1),
            "_columnwise_scale_inv": (1, blocks, 4) if self._is_2D_scaled else (0, blocks, 1),
        }

    def _along_matrix(self) -> dict[str, tuple[Along, Along]]:
        block, is_tiled = FP8_BLOCK, self._is_2D_scaled
        return {
            "_rowwise_data": ((0, 1), (1, 1)),
            "_rowwise_scale_inv": ((0, block), (1, block)) if is_tiled else ((1, 1), (0, block)),
            "_columnwise_data": ((1, 1), (0, 1)),
            "_columnwise_scale_inv": ((1, block), (0, block)) if is_tiled else ((0, block), (1, 1)),
        }

    def _take_rows(self, index: torch.Tensor) -> dict[str, Any] | None:
        """Return these rows with their scales, or None for 128x128 tiles, in which a row has no scale of its own."""
        if self._is_2D_scaled or self._rowwise_data is None or self._rowwise_scale_inv is None:
            return None
        return {
            "rowwise_data": taken(self._rowwise_data, index),
            "rowwise_scale_inv": _padded(self._rowwise_scale_inv.index_select(1, index.clamp(min=0))),
            "columnwise_data": None,
            "columnwise_scale_inv": None,
        }


def _padded(scales: torch.Tensor) -> torch.Tensor:
    """Pad the rows of scales to a multiple of 4 columns, as the GEMM reads them."""
    return padded(scales, scales.shape[0], rup(scales.shape[1], 4)).contiguous()


def _transposed(scales: torch.Tensor) -> torch.Tensor:
    return _padded(scales.t())


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, QuantizedTensor):
    """An FP8 block tensor has one scale per block.

    A quantizer makes it. It can be used wherever a tensor can: operations that do not know its format compute with the
    values that it stands for.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`,
            `columnwise_scale_inv`, `fp8_dtype`, `quantizer`, `is_2D_scaled`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.Float8BlockQuantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.Float8BlockwiseQTensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """


class Float8BlockQuantizer(Quantizer):
    """This FP8 quantizer has one scale for each block of 1x128 elements or each tile of 128x128.

    Args:
        fp8_dtype: The element type, `DType.kFloat8E4M3` or `DType.kFloat8E5M2`. The default is E4M3.
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies. The default is
            True.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies. The default
            is True.
        amax_epsilon: The least amax (largest absolute value) that is assumed for a block. The default is 0.
        force_pow_2_scales: Whether scales are rounded to powers of two. The default is True.
        block_scaling_dim: 1 for blocks of 1x128, as is usual for activations and gradients, or 2 (the default) for
            tiles of 128x128, as is usual for weights.

    Raises:
        ValueError: If an option has a value that the format does not have, or two options exclude each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.Float8BlockQuantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.Float8BlockwiseQTensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    _by_value = True

    dtype: DType
    amax_epsilon: float
    force_pow_2_scales: bool
    block_scaling_dim: int
    block_len: int

    def __init__(
        self,
        fp8_dtype: DType = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = check_fp8_dtype(fp8_dtype)
        self.amax_epsilon = check_epsilon(amax_epsilon)
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.block_scaling_dim = check_choice("block_scaling_dim", block_scaling_dim, (1, 2))
        self.block_len = FP8_BLOCK

    def _plan(self) -> tuple[Any, ...]:
        scaling = int(self.dtype), self.force_pow_2_scales, self.amax_epsilon, self.block_scaling_dim == 2
        return float8_block_quantize, (), (*scaling, self.rowwise_usage, self.columnwise_usage)

    def _in_place_op(self) -> Any:
        return float8_block_quantize_

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return float8_block_buffers(shape, self.block_scaling_dim == 2, self.rowwise_usage, self.columnwise_usage)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return Float8BlockwiseQTensorStorage, Float8BlockwiseQTensor

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype, "is_2D_scaled": self.block_scaling_dim == 2}

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        rows, cols = matrix_shape(tuple(inp.shape))
        return rows % FP8_BLOCK == 0 and cols % FP8_BLOCK == 0

    def is_requantization_safe(self) -> bool:
        return True

    def gather_multiple(self, columnwise: bool) -> int | None:
        return FP8_BLOCK if columnwise or self.block_scaling_dim == 2 else 1

    def derives_columnwise(self) -> bool:
        return self.block_scaling_dim == 2

    def get_columnwise_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        size = tuple(shape)
        return (size[-1], *size[:-1])
