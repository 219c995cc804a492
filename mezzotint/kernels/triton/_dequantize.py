"""Dequantization of FP8 codes with FP32 scales: it serves every format with one scale per tensor, row or block.

    out = dtype(fl32(code · scale))      scale = scale_inv[r // high · along + c // 128 · across]

(r, c) are row and column of the matrix as it is stored. A program reads one tile, no wider than a 128-block, multiplies
it by a column of scales, and writes it as it is or transposed back into the logical shape.
"""

import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, E5M2, cdiv
from mezzotint.kernels.triton._jit import ahead, decode_fp8, tile_of
from mezzotint.kernels.triton._launch import Fast


def tile_config() -> dict[str, int]:
    """Return the tile of the two-dimensional dequantization; BN divides 128."""
    return {"BM": 64, "BN": 128, "num_warps": 4}


@Fast
@triton.jit
def _dequantize_tile_kernel(
    data,
    scale_inv,
    out,
    M,
    K,
    along,
    across,
    HIGH: tl.constexpr,
    DTYPE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row, col = tile_of(tl.program_id(0), M, K, BM, BN, 1)
    r = row * BM + tl.arange(0, BM)
    c = col * BN + tl.arange(0, BN)
    mask = (r < M)[:, None] & (c < K)[None, :]
    code = tl.load(data + r[:, None] * K + c[None, :], mask=mask, other=0)
    scale = tl.load(scale_inv + r // HIGH * along + col * BN // 128 * across, mask=r < M, other=0.0)
    value = (decode_fp8(code, DTYPE) * scale[:, None]).to(out.dtype.element_ty)
    if TRANSPOSED:
        mask = (c < K)[:, None] & (r < M)[None, :]
        tl.store(out + c[:, None] * M + r[None, :], tl.trans(value), mask=mask)
    else:
        tl.store(out + r[:, None] * K + c[None, :], value, mask=mask)


def dequantize_tiles(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: int,
    out_dtype: torch.dtype,
    *,
    transposed: bool,
    along: int,
    across: int,
    high: int = 1,
) -> torch.Tensor:
    """Dequantize `data`, which is contiguous, (d0, …, K) or if `transposed` (K, d0, …), into the logical shape."""
    shape = (*data.shape[1:], data.shape[0]) if transposed else data.shape
    out = data.new_empty(shape, dtype=out_dtype)
    if out.numel() == 0:
        return out
    M = data.shape[0] if transposed else out.numel() // data.shape[-1]
    K = out.numel() // M
    options = tile_config()
    grid = (cdiv(M, options["BM"]) * cdiv(K, options["BN"]),)
    _dequantize_tile_kernel[grid](
        data,
        scale_inv,
        out,
        M,
        K,
        along,
        across,
        HIGH=high,
        DTYPE=dtype,
        TRANSPOSED=transposed,
        **options,
        enable_fp_fusion=False,
    )
    return out


AHEAD = [
    ahead(_dequantize_tile_kernel, "u8 fp32 bf16", HIGH=1, DTYPE=E4M3, TRANSPOSED=True, **tile_config()),
    ahead(_dequantize_tile_kernel, "u8 fp32 fp16", HIGH=128, DTYPE=E5M2, TRANSPOSED=False, **tile_config()),
    ahead(_dequantize_tile_kernel, "u8 fp32 fp32", HIGH=1, DTYPE=E5M2, TRANSPOSED=True, **tile_config()),
]
