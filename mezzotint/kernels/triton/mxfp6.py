"""MXFP6 on CUDA: one launch reads x once and writes both directions (`_jit_packed_mx.py`).

A program owns a tile and treats its rows, then its columns, transposed. The grid covers the padding of the scales.
"""

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv, rup
from mezzotint.kernels.mxfp6 import E2M3, E3M2, MXFP6_ELEMENTS
from mezzotint.kernels.triton._jit import ahead, as_rows, load_tile, tile_of
from mezzotint.kernels.triton._jit_packed_mx import (
    bits_of,
    quantize_side,
    tile_config,
)
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton.packed_mx import ahead_dequantize, dequantize_packed

_BITS = {dtype: bits_of(element) for dtype, element in MXFP6_ELEMENTS.items()}


@Fast
@triton.jit
def _quantize_kernel(
    x,
    data,
    scales,
    col_data,
    col_scales,
    noop,
    M,
    K,
    stride,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    FLOOR: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    if noop is not None and tl.load(noop) == 1.0:
        return
    row, col = tile_of(tl.program_id(0), (M + 127) // 128 * 128, (K + 127) // 128 * 128, BM, BN, 1)
    r = row * BM + tl.arange(0, BM)
    c = col * BN + tl.arange(0, BN)
    value = load_tile(x, r, c, M, K, stride, EVEN, False)
    if data is not None:
        quantize_side(value, data, scales, None, r, c, M, K, K, 0, EXPONENT, MANTISSA, FLOOR, TWO_D, SWIZZLED)
    if col_data is not None:
        turned = tl.trans(value)
        quantize_side(turned, col_data, col_scales, None, c, r, K, M, M, 1, EXPONENT, MANTISSA, FLOOR, TWO_D, SWIZZLED)


def quantize(
    x: torch.Tensor,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    dtype: int,
    floor: bool,
    two_d: bool,
    swizzled: bool,
    rowwise: bool,
    columnwise: bool,
    unpacked: int = 0,
    config: dict[str, int] | None = None,
) -> None:
    """Write the wanted directions of x. Buffers of BF16, which `unpacked` names, get values instead of codes."""
    x = as_rows(x)
    M, K = x.shape
    if M * K == 0 or not out:
        return
    options = config or tile_config()
    rows, cols = rup(M, 128), rup(K, 128)
    _quantize_kernel[(cdiv(rows, options["BM"]) * cdiv(cols, options["BN"]),)](
        x,
        *(out[:2] if rowwise else (None, None)),
        *(out[-2:] if columnwise else (None, None)),
        noop,
        M,
        K,
        x.stride(0),
        **_BITS[dtype],
        FLOOR=floor,
        TWO_D=two_d,
        SWIZZLED=swizzled,
        EVEN=rows == M and cols == K,
        **options,
        enable_fp_fusion=False,
    )


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: int,
    swizzled: bool,
    transposed: bool,
    cols: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype(q · 2^(b-127)) as (…, cols), or (cols, R) when `transposed`."""
    return dequantize_packed(data, scale_inv, MXFP6_ELEMENTS[dtype], swizzled, transposed, cols, out_dtype)


def _case(pointers: str, dtype: int, floor: bool, two_d: bool, swizzled: bool, even: bool) -> tuple:
    options = {"FLOOR": floor, "TWO_D": two_d, "SWIZZLED": swizzled, "EVEN": even}
    return ahead(_quantize_kernel, pointers, **_BITS[dtype], **options, **tile_config())


AHEAD = [
    _case("bf16 u8 u8 u8 u8 -", E2M3, True, False, False, True),
    _case("fp16 - - u8 u8 fp32", E3M2, False, False, True, False),
    _case("fp32 u8 u8 u8 u8 -", E3M2, True, True, False, False),
    _case("bf16 bf16 u8 u8 u8 -", E2M3, True, False, False, False),
    ahead_dequantize("u8 u8 bf16", MXFP6_ELEMENTS[E2M3], False, False),
    ahead_dequantize("u8 u8 fp32", MXFP6_ELEMENTS[E3M2], True, True),
]
