"""MXFP4: in this format 32 E2M1 elements share one power-of-two scale."""

from typing import Any

import torch

from mezzotint.constants import MX_BLOCK, DType, cdiv
from mezzotint.kernels._lib import Buffers, as_matrix, matrix_shape
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK
from mezzotint.kernels.mxfp4 import (
    MXFP4_ELEMENT,
    MXFP4_KIND,
    mxfp4_buffers,
    mxfp4_dequantize,
    mxfp4_quantize,
    mxfp4_quantize_,
)
from mezzotint.kernels.operand import Operand
from mezzotint.tensor.checks import check_choice
from mezzotint.tensor.packed_mx import SCALE_RULES, PackedMXStorage
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


class MXFP4TensorStorage(PackedMXStorage):
    """This storage holds packed codes (…, K/2) and transposed ones (K, M/2), with E8M0 scale bytes for each."""

    _VALUES = (
        ("_fp4_dtype", "fp4_dtype", DType.kFloat4E2M1),
        ("_quantizer", "quantizer", None),
        ("_with_gemm_swizzled_scales", "with_gemm_swizzled_scales", False),
    )
    _ELEMENT = MXFP4_ELEMENT

    _fp4_dtype: DType

    def _plain_quantizer(self) -> Quantizer:
        """Return a quantizer with this layout: with the Hadamard transform if the column-wise codes are padded.

        The transform pads the columns if the rows are no whole groups, and no plain value records that it was applied.
        """
        rows, data = matrix_shape(self._logical_shape())[0], self._columnwise_data
        is_filled = data is not None and data.dim() == 2 and data.shape[1] != cdiv(rows, 2)
        return MXFP4Quantizer(self._fp4_dtype, with_rht=is_filled)

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the row-wise copy, or, without one, the column-wise copy with its Hadamard transform."""
        data, scale_inv, columnwise = self._any_side()
        shape = self._logical_shape()
        rows, cols = matrix_shape(shape)
        swizzled, size = self._with_gemm_swizzled_scales, rows if columnwise else cols
        return mxfp4_dequantize(data, scale_inv, swizzled, columnwise, size, dtype).reshape(shape)

    def gemm_operand(self, columnwise: bool) -> Operand:
        data, scale_inv = self._side(columnwise)
        return Operand(
            as_matrix(data),
            scale_inv,
            kind=MXFP4_KIND,
            dtype=int(self._fp4_dtype),
            swizzled=self._with_gemm_swizzled_scales,
        )


class MXFP4Tensor(MXFP4TensorStorage, QuantizedTensor):
    """An MXFP4 tensor has one E8M0 scale for 32 elements of 4 bits."""

    def _logical_shape(self) -> tuple[int, ...]:
        return tuple(self.shape)


class MXFP4Quantizer(Quantizer):
    """This MXFP4 quantizer uses blocks of 32, or 32x32 tiles (`with_2d_quantization`, for weights).

    `scale_rule` is "floor", the rule of the OCP specification, or "roundup", with which nothing saturates. `with_rht`
    says whether the column-wise copy is Hadamard-transformed, `with_random_sign_mask` whether the transform has its
    random signs. `stochastic_rounding` draws from torch's generator. `optimize_for_gemm` makes scales in the GEMM's
    order.
    """

    _by_value = True

    dtype: DType
    with_rht: bool
    with_random_sign_mask: bool
    with_2d_quantization: bool
    stochastic_rounding: bool
    scale_rule: str

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_rht: bool = False,
        with_random_sign_mask: bool = True,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        scale_rule: str = "floor",
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType(check_choice("fp4_dtype", fp4_dtype, (DType.kFloat4E2M1,)))
        self.with_rht = bool(with_rht)
        self.with_random_sign_mask = bool(with_random_sign_mask)
        self.with_2d_quantization = bool(with_2d_quantization)
        self.stochastic_rounding = bool(stochastic_rounding)
        self.scale_rule = check_choice("scale_rule", scale_rule, SCALE_RULES)
        if self.with_rht and self.with_2d_quantization:
            raise ValueError("with_rht=True and with_2d_quantization=True do not go together: turn one of them off")

    def _sign_mask(self) -> int:
        return RANDOM_SIGN_MASK if self.with_random_sign_mask else 0

    def _plan(self) -> tuple[Any, ...]:
        options = (
            self._sign_mask(),
            self.scale_rule == "floor",
            self.with_2d_quantization,
            self.optimize_for_gemm,
            self.with_rht,
            self.rowwise_usage,
            self.columnwise_usage,
        )
        return mxfp4_quantize, ("rng!" if self.stochastic_rounding else "rng",), options

    def _in_place_op(self) -> Any:
        return mxfp4_quantize_

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return mxfp4_buffers(shape, self.with_rht, self.rowwise_usage, self.columnwise_usage)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return MXFP4TensorStorage, MXFP4Tensor

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"fp4_dtype": self.dtype, "with_gemm_swizzled_scales": self.optimize_for_gemm}

    def _layout(self) -> tuple[Any, ...]:
        return self.with_rht, self._sign_mask() if self.with_rht else 0, self.with_2d_quantization

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        rows, cols = matrix_shape(tuple(inp.shape))
        return rows % MX_BLOCK == 0 and cols % MX_BLOCK == 0

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    def gather_multiple(self, columnwise: bool) -> int | None:
        if self.optimize_for_gemm:  # the GEMM's order of scales crosses shards
            return None
        return MX_BLOCK if columnwise or self.with_2d_quantization else 1

    def derives_columnwise(self) -> bool:
        return self.with_2d_quantization and not self.optimize_for_gemm and not self.stochastic_rounding
