"""MXFP6: in this format 32 elements of 6 bits share one power-of-two scale."""

from typing import Any

import torch

from mezzotint.constants import MX_BLOCK, DType
from mezzotint.kernels._lib import Buffers, as_matrix, matrix_shape
from mezzotint.kernels.mxfp6 import (
    E3M2,
    MXFP6_ELEMENTS,
    MXFP6_KIND,
    mxfp6_buffers,
    mxfp6_dequantize,
    mxfp6_quantize,
    mxfp6_quantize_,
)
from mezzotint.kernels.operand import Operand
from mezzotint.tensor.checks import check_choice
from mezzotint.tensor.packed_mx import SCALE_RULES, PackedMXStorage
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


class MXFP6TensorStorage(PackedMXStorage):
    """This storage holds packed codes (…, K/4, 3) and transposed ones (K, M/4, 3), with E8M0 scale bytes for each.

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`, `columnwise_scale_inv`,
            `fp6_dtype`, `quantizer`, `with_gemm_swizzled_scales`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantizer = mz.MXFP6Quantizer()
        >>> quantizer.internal = True  # bare storages instead of tensors
        >>> x = quantizer(torch.randn(128, 128))
        >>> isinstance(x, mz.MXFP6TensorStorage), isinstance(x, torch.Tensor)
        (True, False)
    """

    _VALUES = (
        ("_fp6_dtype", "fp6_dtype", DType.kFloat6E2M3),
        ("_quantizer", "quantizer", None),
        ("_with_gemm_swizzled_scales", "with_gemm_swizzled_scales", False),
    )
    _ELEMENT = MXFP6_ELEMENTS[E3M2]

    _fp6_dtype: DType

    def _plain_quantizer(self) -> Quantizer:
        return MXFP6Quantizer(self._fp6_dtype)

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        data, scale_inv, columnwise = self._any_side()
        shape = self._logical_shape()
        rows, cols = matrix_shape(shape)
        options = (int(self._fp6_dtype), self._with_gemm_swizzled_scales, columnwise, rows if columnwise else cols)
        return mxfp6_dequantize(data, scale_inv, *options, dtype).reshape(shape)

    def gemm_operand(self, columnwise: bool) -> Operand:
        data, scale_inv = self._side(columnwise)
        return Operand(
            as_matrix(data.flatten(-2) if data.dtype == torch.uint8 else data),  # codes, or unpacked values
            scale_inv,
            kind=MXFP6_KIND,
            dtype=int(self._fp6_dtype),
            swizzled=self._with_gemm_swizzled_scales,
        )


class MXFP6Tensor(MXFP6TensorStorage, QuantizedTensor):
    """An MXFP6 tensor has one E8M0 scale, a power of two, for 32 elements of 6 bits.

    A quantizer makes it. It can be used wherever a tensor can: operations that do not know its format compute with the
    values that it stands for.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`,
            `columnwise_scale_inv`, `fp6_dtype`, `quantizer`, `with_gemm_swizzled_scales`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.MXFP6Quantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.MXFP6Tensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    def _logical_shape(self) -> tuple[int, ...]:
        return tuple(self.shape)


class MXFP6Quantizer(Quantizer):
    """This MXFP6 quantizer has one scale, a power of two, for each block of 32 elements or each tile of 32x32.

    Args:
        fp6_dtype: The element type, `DType.kFloat6E2M3` (the default) or `DType.kFloat6E3M2`.
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies. The default is
            True.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies. The default
            is True.
        with_2d_quantization: Whether square tiles of the tensor share a scale, as is usual for weights. The default is
            False.
        scale_rule: How the scale follows from the amax of a block: "floor" (the default) is the rule of the OCP
            standard, with which the largest elements of a block may saturate; with "roundup" none saturates.

    Raises:
        ValueError: If an option has a value that the format does not have, or two options exclude each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.MXFP6Quantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.MXFP6Tensor), x.shape, x.dtype
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
        fp6_dtype: DType = DType.kFloat6E2M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
        scale_rule: str = "floor",
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType(check_choice("fp6_dtype", fp6_dtype, (DType.kFloat6E2M3, DType.kFloat6E3M2)))
        self.with_2d_quantization = bool(with_2d_quantization)
        self.scale_rule = check_choice("scale_rule", scale_rule, SCALE_RULES)

    def _plan(self) -> tuple[Any, ...]:
        scaling = int(self.dtype), self.scale_rule == "floor", self.with_2d_quantization, self.optimize_for_gemm
        return mxfp6_quantize, (), (*scaling, self.rowwise_usage, self.columnwise_usage)

    def _in_place_op(self) -> Any:
        return mxfp6_quantize_

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return mxfp6_buffers(shape, self.rowwise_usage, self.columnwise_usage)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return MXFP6TensorStorage, MXFP6Tensor

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"fp6_dtype": self.dtype, "with_gemm_swizzled_scales": self.optimize_for_gemm}

    def _layout(self) -> tuple[Any, ...]:
        return (self.with_2d_quantization,)  # with 32x32 tiles one direction can be made from the other

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
