"""MXFP8 on CUDA: E8M0 scales over 32 elements along rows, along columns, or over 32x32 tiles.

One launch, one read of x, no shared memory beyond a few scales. A program holds BM x BN elements; the rows are dealt to
warps so that a warp holds whole 32-row groups (see `_grouped`), and a thread 16 neighbours of a row: both kinds of
maxima stay within a warp, and the codes of both directions, neither of which is transposed, come from the same
registers. Programs cover the padding of the scales, too, and write it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, E5M2, cdiv, rup
from mezzotint.kernels.triton._jit import (
    ahead,
    as_rows,
    cast_fp8,
    decode_fp8,
    drop_nan,
    e8m0_decode,
    e8m0_from_amax,
    e8m0_inverse,
    swizzled,
    tile_of,
)


def tile_config(two_d: bool, rowwise: bool, columnwise: bool) -> dict[str, int]:
    """Tile: BM rows, a multiple of 32 that divides 128, by BN columns, likewise; best with BM = 32 · num_warps."""
    if two_d or columnwise:
        return {"BM": 64, "BN": 128, "GROUP": 1, "num_warps": 2}
    return {"BM": 32, "BN": 128, "GROUP": 1, "num_warps": 2}


def dequantize_config() -> dict[str, int]:
    """Tile of the way back."""
    return {"BM": 32, "BN": 128, "num_warps": 2}


@triton.jit
def _grouped(BM: tl.constexpr, BN: tl.constexpr):
    """The rows of a tile, ordered (row within a pass over the group, group, row of lanes).

    A warp that holds 16 columns per thread covers 512 // BN rows at once, and the layout gives the next rows to the
    next warp. Counted this way, these are rows of the next group of 32.
    """
    LANES: tl.constexpr = 512 // BN
    GROUPS: tl.constexpr = BM // 32
    t = tl.arange(0, BM)
    return t // LANES % GROUPS * 32 + t // (LANES * GROUPS) * LANES + t % LANES


@triton.jit
def _max_of_groups(tile, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr):
    """(BM, WIDTH), rows as `_grouped` orders them, → (BM // 32, WIDTH)."""
    LANES: tl.constexpr = 512 // BN
    return tl.max(tl.max(tl.reshape(tile, [32 // LANES, BM // 32, LANES, WIDTH]), 2), 0)


@triton.jit
def _to_rows(groups, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr):
    """(BM // 32, WIDTH) → (BM, WIDTH), rows as `_grouped` orders them."""
    LANES: tl.constexpr = 512 // BN
    tile = tl.broadcast_to(groups[None, :, None, :], [32 // LANES, BM // 32, LANES, WIDTH])
    return tl.reshape(tile, [BM, WIDTH])


@triton.jit
def _to_columns(blocks, HIGH: tl.constexpr, BN: tl.constexpr):
    """(HIGH, BN // 32) → (HIGH, BN)."""
    return tl.reshape(tl.broadcast_to(blocks[:, :, None], [HIGH, BN // 32, 32]), [HIGH, BN])


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
    DTYPE: tl.constexpr,
    FLOOR: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
):
    if noop is not None and tl.load(noop) == 1.0:
        return
    # Padded sizes: rows and columns of x to 128, hence blocks of 32 along either to 4.
    high = (M + 127) // 128 * 128
    wide = (K + 127) // 128 * 128
    row, col = tile_of(tl.program_id(0), high, wide, BM, BN, GROUP)
    r = row * BM + _grouped(BM, BN)
    c = col * BN + tl.arange(0, BN)
    mask = (r < M)[:, None] & (c < K)[None, :]
    value = tl.load(
        x + r[:, None] * stride + c[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    at = r[:, None] * K + c[None, :]
    blocks = tl.reshape(value, [BM, BN // 32, 32])

    if TWO_D:
        top = _max_of_groups(tl.max(tl.abs(blocks), 2), BM, BN, BN // 32)
        byte = e8m0_from_amax(drop_nan(top), DTYPE, FLOOR)
        row_byte = _to_rows(byte, BM, BN, BN // 32)
        col_byte = _to_columns(byte, BM // 32, BN)
        code = tl.reshape(cast_fp8(blocks * e8m0_inverse(row_byte)[:, :, None], DTYPE), [BM, BN])
        if data is not None:
            tl.store(data + at, code, mask=mask)
        if col_data is not None:
            tl.store(col_data + at, code, mask=mask)
    else:
        if data is not None:
            row_byte = e8m0_from_amax(drop_nan(tl.max(tl.abs(blocks), 2)), DTYPE, FLOOR)
            code = cast_fp8(blocks * e8m0_inverse(row_byte)[:, :, None], DTYPE)
            tl.store(data + at, tl.reshape(code, [BM, BN]), mask=mask)
        if col_data is not None:
            col_byte = e8m0_from_amax(drop_nan(_max_of_groups(tl.abs(value), BM, BN, BN)), DTYPE, FLOOR)
            tl.store(
                col_data + at,
                cast_fp8(value * _to_rows(e8m0_inverse(col_byte), BM, BN, BN), DTYPE),
                mask=mask,
            )

    # A block of zeros has byte 0, so padding comes out as it must, except where a 32x32 tile is cut.
    if data is not None:
        j = col * (BN // 32) + tl.arange(0, BN // 32)
        to = (
            swizzled(r[:, None], j[None, :], wide // 128)
            if SWIZZLED
            else r[:, None] * (wide // 32) + j[None, :]
        )
        if TWO_D:
            row_byte = tl.where((r < M)[:, None], row_byte, 0)
        tl.store(scales + to, row_byte.to(tl.uint8))
    if col_data is not None:
        j = row * (BM // 32) + tl.arange(0, BM // 32)
        to = swizzled(c[None, :], j[:, None], high // 128) if SWIZZLED else j[:, None] * wide + c[None, :]
        if TWO_D:
            col_byte = tl.where((c < K)[None, :], col_byte, 0)
        tl.store(col_scales + to, col_byte.to(tl.uint8))


@triton.jit
def _dequantize_kernel(
    data,
    scales,
    out,
    M,
    K,
    DTYPE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    high = (M + 127) // 128 * 128
    wide = (K + 127) // 128 * 128
    row, col = tile_of(tl.program_id(0), M, K, BM, BN, 1)
    r = row * BM + _grouped(BM, BN)
    c = col * BN + tl.arange(0, BN)
    at = r[:, None] * K + c[None, :]
    mask = (r < M)[:, None] & (c < K)[None, :]
    value = decode_fp8(tl.load(data + at, mask=mask, other=0, eviction_policy="evict_first"), DTYPE)
    if COLUMNWISE:
        j = row * (BM // 32) + tl.arange(0, BM // 32)
        to = swizzled(c[None, :], j[:, None], high // 128) if SWIZZLED else j[:, None] * wide + c[None, :]
        value *= _to_rows(e8m0_decode(tl.load(scales + to).to(tl.int32)), BM, BN, BN)
    else:
        j = col * (BN // 32) + tl.arange(0, BN // 32)
        to = (
            swizzled(r[:, None], j[None, :], wide // 128)
            if SWIZZLED
            else r[:, None] * (wide // 32) + j[None, :]
        )
        value *= _to_columns(e8m0_decode(tl.load(scales + to).to(tl.int32)), BM, BN)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


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
    config: dict[str, int] | None = None,
) -> None:
    x = as_rows(x)
    M, K = x.shape
    if M * K == 0 or not out:
        return
    data, scales = out[:2] if rowwise else (None, None)
    col_data, col_scales = out[-2:] if columnwise else (None, None)
    options = config or tile_config(two_d, rowwise, columnwise)
    _quantize_kernel[(rup(M, 128) // options["BM"] * (rup(K, 128) // options["BN"]),)](
        x,
        data,
        scales,
        col_data,
        col_scales,
        noop,
        M,
        K,
        x.stride(0),
        DTYPE=dtype,
        FLOOR=floor,
        TWO_D=two_d,
        SWIZZLED=swizzled,
        **options,
        enable_fp_fusion=False,
    )


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: int,
    swizzled: bool,
    columnwise: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """dtype(fl32(2^(b-127) · code)) in the logical shape."""
    data = data.contiguous()
    out = torch.empty_like(data, dtype=out_dtype)
    if out.numel() == 0:
        return out
    K = data.shape[-1]
    M = data.numel() // K
    options = dequantize_config()
    _dequantize_kernel[(cdiv(M, options["BM"]) * cdiv(K, options["BN"]),)](
        data,
        scale_inv.contiguous(),
        out,
        M,
        K,
        DTYPE=dtype,
        SWIZZLED=swizzled,
        COLUMNWISE=columnwise,
        **options,
        enable_fp_fusion=False,
    )
    return out


def _case(
    pointers: str, dtype: int, floor: bool, two_d: bool, swizzled: bool
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    _, data, _, col_data, *_ = pointers.split()
    options = tile_config(two_d, data != "-", col_data != "-")
    constants = {"DTYPE": dtype, "FLOOR": floor, "TWO_D": two_d, "SWIZZLED": swizzled}
    return ahead(_quantize_kernel, pointers, **constants, **options)


_BACK = dequantize_config()

AHEAD = [
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, False, False),
    _case("fp16 u8 u8 u8 u8 fp32", E5M2, False, False, True),
    _case("fp32 u8 u8 - - -", E4M3, True, False, True),
    _case("bf16 u8 u8 - - -", E4M3, False, False, False),
    _case("bf16 - - u8 u8 -", E4M3, False, False, False),
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, True, True),
    _case("fp32 u8 u8 - - fp32", E5M2, True, True, False),
    ahead(_dequantize_kernel, "u8 u8 bf16", DTYPE=E4M3, SWIZZLED=False, COLUMNWISE=False, **_BACK),
    ahead(_dequantize_kernel, "u8 u8 fp32", DTYPE=E5M2, SWIZZLED=True, COLUMNWISE=False, **_BACK),
    ahead(_dequantize_kernel, "u8 u8 fp16", DTYPE=E4M3, SWIZZLED=True, COLUMNWISE=True, **_BACK),
]
