"""MXFP4: 32 E2M1 elements share one E8M0 scale (OCP MX v1.0), which takes 4.25 bits an element.

E2M1 is {0, 0.5, 1, 1.5, 2, 3, 4, 6} and their negatives: max 6, emax 2, no infinity, no NaN. Scale, rounding, NaN,
layout, padding and tiles (`two_d`) are those of `packed_mx.py`, by the floor rule unless told otherwise. Data holds two
codes a byte, the even index in the low nibble; row-wise it is (d0, …, ceil(K/2)), column-wise the same on xᵀ, (K,
ceil(M/2)).

- `rht`: the column-wise copy is of the Hadamard-transformed xᵀ (`hadamard.py`), two transforms a block. A ragged M is
  filled with zeros up to a multiple of 16 first, and the column-wise data keeps that size, because the transform mixes.
- `rng` (seed, offset): the codes are rounded stochastically. The random bytes are drawn for 16 elements at a time
  (`philox.py`), counted along rows whose last block is whole.

x is read once. A product of two such tensors is exact in BF16 but for the sum: no scale stands outside of it.
"""

from typing import Any

import torch

from mezzotint.constants import E2M1
from mezzotint.kernels._lib import Buffers, as_matrix, leaf
from mezzotint.kernels.elements import round_e2m1_stochastic
from mezzotint.kernels.hadamard import hadamard16
from mezzotint.kernels.operand import Operand, codes
from mezzotint.kernels.packed_mx import (
    Cast,
    Element,
    encode,
    packed_buffers,
    packed_dequantize_reference,
    packed_dequantized_shape,
    quantize_side,
    register_packed,
    unpacked_values,
)
from mezzotint.kernels.philox import philox_bytes
from mezzotint.kernels.quantize_ops import Unpacking, quantize_ops

MXFP4_ELEMENT = Element(exponent=2, mantissa=1)
HADAMARD = 16  # elements that one transform mixes


def mxfp4_buffers(shape: tuple[int, ...], rht: bool, rowwise: bool, columnwise: bool) -> Buffers:
    """Return the buffers of the copies: packed codes and scale bytes of each direction."""
    return packed_buffers(shape, MXFP4_ELEMENT, rowwise, columnwise, HADAMARD if rht else 1)


def _transposed(x: torch.Tensor, rht: bool, sign_mask: int) -> torch.Tensor:
    """Return xᵀ: (M, K) becomes (K, M), or with `rht` the transformed (K, rup(M, 16))."""
    if not rht:
        return x.t().contiguous()
    rows = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % HADAMARD))
    return hadamard16(rows.t().contiguous(), sign_mask)


def _cast(rng: torch.Tensor | None, direction: int) -> Cast:
    """Return the function that rounds to codes: to nearest even or, with `rng`, stochastically."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        if rng is None:
            return encode(value, MXFP4_ELEMENT)
        return round_e2m1_stochastic(value, philox_bytes(rng, value.numel() // 16, direction).view(value.shape))

    return cast


def mxfp4_quantize_reference(
    x: torch.Tensor,
    rng: torch.Tensor | None,
    sign_mask: int,
    floor: bool,
    two_d: bool,
    swizzled: bool,
    rht: bool,
    rowwise: bool,
    columnwise: bool,
) -> list[torch.Tensor]:
    """Quantize in the wanted directions and return their codes and scale bytes."""
    matrix, out = as_matrix(x), []
    if rowwise:
        out += quantize_side(matrix, tuple(x.shape[:-1]), MXFP4_ELEMENT, floor, two_d, swizzled, _cast(rng, 0))
    if columnwise:
        side = _transposed(matrix, rht, sign_mask)
        out += quantize_side(side, (side.shape[0],), MXFP4_ELEMENT, floor, two_d, swizzled, _cast(rng, 1))
    return out


def mxfp4_dequantize_reference(
    data: torch.Tensor, scale_inv: torch.Tensor, swizzled: bool, transposed: bool, cols: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize to (…, cols), or (cols, R) when `transposed`; a Hadamard transform is not undone."""
    return packed_dequantize_reference(data, scale_inv, MXFP4_ELEMENT, swizzled, transposed, cols, out_dtype)


def _dequantize_fake(data, scale_inv, swizzled, transposed, cols, out_dtype):
    return data.new_empty(packed_dequantized_shape(data, MXFP4_ELEMENT, transposed, cols), dtype=out_dtype)


MXFP4_KIND = "mx4"  # data: two codes a byte (R, ceil(C/2)); scale: E8M0 bytes (rup(R, 128), rup(ceil(C/32), 4))


def _values(buffers: dict[str, torch.Tensor], direction: str, *options: Any) -> torch.Tensor:
    return unpacked_values(buffers, direction, MXFP4_ELEMENT, swizzled=options[4])


mxfp4_quantize, mxfp4_quantize_ = quantize_ops(
    "mxfp4_quantize",
    "Tensor? rng, int sign_mask, bool floor, bool two_d, bool swizzled, bool rht, bool rowwise, bool columnwise",
    geometry=lambda shape, *options: mxfp4_buffers(shape, *options[-3:]),
    reference=mxfp4_quantize_reference,
    cuda="mxfp4:quantize",
    unpacking=Unpacking(MXFP4_KIND, _values),
)

mxfp4_dequantize = leaf(
    "mxfp4_dequantize(Tensor data, Tensor scale_inv, bool swizzled, bool transposed, SymInt cols,"
    " ScalarType out_dtype) -> Tensor",
    fake=_dequantize_fake,
    cpu=mxfp4_dequantize_reference,
    cuda="mxfp4:dequantize",
)


def _dequantize_operand(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize an operand; the result is exact in BF16."""
    assert op.scale is not None
    data, scale = op.data.contiguous(), op.scale.contiguous()
    return mxfp4_dequantize(data, scale, op.swizzled, False, codes(op), dtype)[:, :size]


MXFP4 = register_packed("mxfp4", MXFP4_KIND, {E2M1: MXFP4_ELEMENT}, _dequantize_operand)
