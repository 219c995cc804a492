"""MXFP6: 32 elements of 6 bits share one E8M0 scale (OCP MX v1.0), which takes 6.25 bits an element.

    E3M2    max 28, emax 4, least normal 0.25, least subnormal 0.0625
    E2M3    max 7.5, emax 2, least normal 1, least subnormal 0.125

Neither has an infinity or a NaN. Scale, rounding, NaN, layout, padding and tiles (`two_d`) are those of `packed_mx.py`,
by the floor rule unless told otherwise. Data holds four codes in three bytes, code i in bits 6i..6i+5 of the
little-endian number that they are; row-wise it is (d0, …, ceil(K/4), 3), column-wise the same on xᵀ, (K, ceil(M/4), 3).
So a block of 32 is 24 bytes, and the bytes of a row lie as those of a dense bit stream.

x is read once. A product of two such tensors is exact in BF16 but for the sum: no scale stands outside of it.
"""

import torch

from mezzotint.constants import DType
from mezzotint.kernels._lib import Buffers, as_matrix, leaf
from mezzotint.kernels.operand import Operand, codes
from mezzotint.kernels.packed_mx import (
    Element,
    encode,
    packed_buffers,
    packed_dequantize_reference,
    packed_dequantized_shape,
    quantize_side,
    register_packed,
    unpacked_values,
)
from mezzotint.kernels.quantize_ops import Unpacking, quantize_ops

E3M2, E2M3 = int(DType.kFloat6E3M2), int(DType.kFloat6E2M3)
MXFP6_ELEMENTS = {E3M2: Element(exponent=3, mantissa=2), E2M3: Element(exponent=2, mantissa=3)}


def mxfp6_buffers(shape: tuple[int, ...], rowwise: bool, columnwise: bool) -> Buffers:
    """Return the buffers of the copies, which are the same for both element types."""
    return packed_buffers(shape, MXFP6_ELEMENTS[E3M2], rowwise, columnwise)


def mxfp6_quantize_reference(
    x: torch.Tensor, dtype: int, floor: bool, two_d: bool, swizzled: bool, rowwise: bool, columnwise: bool
) -> list[torch.Tensor]:
    """Quantize in the wanted directions and return their codes and scale bytes."""
    matrix, element, out = as_matrix(x), MXFP6_ELEMENTS[dtype], []
    for wanted, side, leading in (
        (rowwise, matrix, tuple(x.shape[:-1])),
        (columnwise, matrix.t(), (matrix.shape[1],)),
    ):
        if wanted:
            out += quantize_side(side, leading, element, floor, two_d, swizzled, lambda v: encode(v, element))
    return out


def mxfp6_dequantize_reference(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: int,
    swizzled: bool,
    transposed: bool,
    cols: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantize to (…, cols), or (cols, R) when `transposed`."""
    return packed_dequantize_reference(data, scale_inv, MXFP6_ELEMENTS[dtype], swizzled, transposed, cols, out_dtype)


def _dequantize_fake(data, scale_inv, dtype, swizzled, transposed, cols, out_dtype):
    return data.new_empty(packed_dequantized_shape(data, MXFP6_ELEMENTS[dtype], transposed, cols), dtype=out_dtype)


MXFP6_KIND = "mx6"  # data: four codes in three bytes (R, 3·ceil(C/4)); scale: E8M0 (rup(R, 128), rup(ceil(C/32), 4))


def _values(buffers: dict[str, torch.Tensor], direction: str, dtype: int, *options: bool) -> torch.Tensor:
    return unpacked_values(buffers, direction, MXFP6_ELEMENTS[dtype], swizzled=options[2])


mxfp6_quantize, mxfp6_quantize_ = quantize_ops(
    "mxfp6_quantize",
    "int dtype, bool floor, bool two_d, bool swizzled, bool rowwise, bool columnwise",
    geometry=lambda shape, *options: mxfp6_buffers(shape, *options[-2:]),
    reference=mxfp6_quantize_reference,
    cuda="mxfp6:quantize",
    unpacking=Unpacking(MXFP6_KIND, _values),
)

mxfp6_dequantize = leaf(
    "mxfp6_dequantize(Tensor data, Tensor scale_inv, int dtype, bool swizzled, bool transposed, SymInt cols,"
    " ScalarType out_dtype) -> Tensor",
    fake=_dequantize_fake,
    cpu=mxfp6_dequantize_reference,
    cuda="mxfp6:dequantize",
)


def _dequantize_operand(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize an operand, whose data is (R, bytes); the result is exact in BF16."""
    assert op.scale is not None
    rows, width = op.data.shape
    data, scale = op.data.contiguous().view(rows, width // 3, 3), op.scale.contiguous()
    return mxfp6_dequantize(data, scale, op.dtype, op.swizzled, False, codes(op), dtype)[:, :size]


MXFP6 = register_packed("mxfp6", MXFP6_KIND, MXFP6_ELEMENTS, _dequantize_operand)
