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
    """This storage holds packed codes (…, K/2) and transposed ones (K, M/2), with E8M0 scale bytes for each.

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`, `columnwise_scale_inv`,
            `fp4_dtype`, `quantizer`, `with_gemm_swizzled_scales`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantizer = mz.MXFP4Quantizer()
        >>> quantizer.internal = True  # bare storages instead of tensors
        >>> x = quantizer(torch.randn(128, 128))
        >>> isinstance(x, mz.MXFP4TensorStorage), isinstance(x, torch.Tensor)
        (True, False)
    """

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
    """An MXFP4 tensor has one E8M0 scale, a power of two, for 32 elements of 4 bits.

    A quantizer makes it. It can be used wherever a tensor can: operations that do not know its format compute with the
    values that it stands for.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`,
            `columnwise_scale_inv`, `fp4_dtype`, `quantizer`, `with_gemm_swizzled_scales`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.MXFP4Quantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.MXFP4Tensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    def _logical_shape(self) -> tuple[int, ...]:
        return tuple(self.shape)


class MXFP4Quantizer(Quantizer):
    """This MXFP4 quantizer has one scale, a power of two, for each block of 32 elements or each tile of 32x32.

    Args:
        fp4_dtype: The element type, of which there is only `DType.kFloat4E2M1`.
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies. The default is
            True.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies. The default
            is True.
        with_rht: Whether the column-wise copy goes through a random Hadamard transform. The default is False.
        with_random_sign_mask: Whether this transform has its random signs. The default is True.
        with_2d_quantization: Whether square tiles of the tensor share a scale, as is usual for weights. The default is
            False.
        stochastic_rounding: Whether values are rounded stochastically, with PyTorch's generator. The default is False.
        scale_rule: How the scale follows from the amax of a block: "floor" (the default) is the rule of the OCP
            standard, with which the largest elements of a block may saturate; with "roundup" none saturates.

    Raises:
        ValueError: If an option has a value that the format does not have, or two options exclude each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.MXFP4Quantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.MXFP4Tensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
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
