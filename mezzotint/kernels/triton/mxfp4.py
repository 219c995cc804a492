"""MXFP4 on CUDA: one launch reads x once and writes both directions (`_jit_packed_mx.py`).

A program owns a tile and treats its rows, then its columns, transposed. The columns may be Hadamard-transformed, and
both may be rounded stochastically. The grid covers the padding of the scales.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv, rup
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK
from mezzotint.kernels.mxfp4 import MXFP4_ELEMENT
from mezzotint.kernels.triton._jit import ahead, as_rows, load_tile, rounded, tile_of
from mezzotint.kernels.triton._jit_packed_mx import (
    bits_of,
    hadamard,
    quantize_side,
    tile_config,
)
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton.packed_mx import ahead_dequantize, dequantize_packed

_BITS = bits_of(MXFP4_ELEMENT)


@Fast
@triton.jit
def _quantize_kernel(
    x,
    data,
    scales,
    col_data,
    col_scales,
    rng,
    noop,
    M,
    K,
    stride,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    FLOOR: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    RHT: tl.constexpr,
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
        quantize_side(value, data, scales, rng, r, c, M, K, K, 0, EXPONENT, MANTISSA, FLOOR, TWO_D, SWIZZLED)
    if col_data is not None:
        turned, stored = tl.trans(value), M
        if RHT:
            turned = rounded(hadamard(turned, SIGN_MASK), x.dtype.element_ty)
            stored = (M + 15) // 16 * 16
        quantize_side(
            turned, col_data, col_scales, rng, c, r, K, M, stored, 1, EXPONENT, MANTISSA, FLOOR, TWO_D, SWIZZLED
        )


def quantize(
    x: torch.Tensor,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    rng: torch.Tensor | None,
    sign_mask: int,
    floor: bool,
    two_d: bool,
    swizzled: bool,
    rht: bool,
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
        rng,
        noop,
        M,
        K,
        x.stride(0),
        **_BITS,
        SIGN_MASK=sign_mask if rht else 0,
        FLOOR=floor,
        TWO_D=two_d,
        SWIZZLED=swizzled,
        RHT=rht,
        EVEN=rows == M and cols == K,
        **options,
        enable_fp_fusion=False,
    )


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, swizzled: bool, transposed: bool, cols: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return dtype(q · 2^(b-127)) as (…, cols), or (cols, R) when `transposed`."""
    return dequantize_packed(data, scale_inv, MXFP4_ELEMENT, swizzled, transposed, cols, out_dtype)


def _case(pointers: str, floor: bool, two_d: bool, swizzled: bool, rht: bool, even: bool) -> tuple:
    options: dict[str, Any] = {**_BITS, "FLOOR": floor, "TWO_D": two_d, "SWIZZLED": swizzled, "RHT": rht, "EVEN": even}
    return ahead(_quantize_kernel, pointers, **options, SIGN_MASK=RANDOM_SIGN_MASK, **tile_config())


AHEAD = [
    _case("bf16 u8 u8 u8 u8 - -", True, False, False, False, True),
    _case("bf16 u8 u8 u8 u8 i64 -", True, False, False, True, True),
    _case("fp16 - - u8 u8 - fp32", False, False, True, True, False),
    _case("fp32 u8 u8 - - i64 -", True, False, True, False, False),
    _case("bf16 u8 u8 u8 u8 - -", True, True, True, False, False),
    _case("bf16 bf16 u8 bf16 u8 i64 -", True, False, False, True, True),
    ahead_dequantize("u8 u8 bf16", MXFP4_ELEMENT, False, False),
    ahead_dequantize("u8 u8 fp32", MXFP4_ELEMENT, True, True),
]
