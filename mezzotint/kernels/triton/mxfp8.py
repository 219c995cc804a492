"""MXFP8 on CUDA: E8M0 scales cover 32 elements along rows, along columns, or 32x32 tiles.

One launch reads x once, and uses no shared memory beyond a few scales.

For blocks along rows alone (`_rows_kernel`) a program takes a few long rows, so that scale bytes are written as whole
sectors.

For blocks along columns, both directions, and 32x32 tiles (`_groups_kernel`) a program holds 32 rows, each of its warps
a group of BN columns of them (see `_grouped`). Both kinds of amaxes then stay within a warp, and the codes of both
directions, neither of which is transposed, come from the same registers. Programs cover the padding of the scales and
write it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, E5M2, cdiv, rup
from mezzotint.kernels.quantize_ops import SourceCall
from mezzotint.kernels.triton._jit import (
    ahead,
    cast_fp8,
    decode_fp8,
    drop_nan,
    e8m0_decode,
    e8m0_from_amax,
    e8m0_inverse,
    eights,
    store_tile,
    swizzled,
    tile_of,
)
from mezzotint.kernels.triton._jit_source import (
    load,
    load_input,
    produce,
    produce_halves,
    read,
    source_mode,
    store_sums,
)
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import (
    ACTIVATION,
    BACKWARD,
    NORM,
    RMSNORM,
    SCALED,
    SCALED_BACKWARD,
    finish_source,
)

TAKES_SOURCES = True


def tile_config(
    two_d: bool, rowwise: bool, columnwise: bool, sourced: bool = False, halves: bool = False
) -> dict[str, int]:
    """Return the tile: for rows alone BM rows by BN columns, else 32 rows by BN columns for each warp. For EIGHTS see
    `eights`.

    A source needs registers of its own, hence fewer elements for each thread; of halves it holds two tiles.
    """
    if not two_d and not columnwise:
        return {"BM": 8, "BN": 1024, "num_warps": 4}
    if halves:
        return {"BN": 32, "num_warps": 8, "EIGHTS": False}
    if not two_d and not rowwise and not sourced:
        return {"BN": 128, "num_warps": 4, "EIGHTS": True}
    return {"BN": 64, "num_warps": 8, "EIGHTS": False}


def dequantize_config() -> dict[str, int]:
    """Return the tile of the dequantization."""
    return {"BM": 32, "BN": 128, "num_warps": 2}


@triton.jit
def _grouped(GROUPS: tl.constexpr, LANES: tl.constexpr):
    """Return (row, group) of each row of a tile that holds the 32 rows of GROUPS groups of columns.

    A warp covers LANES rows of the tile at once, and the layout gives the next rows to the next warp. Counted this way,
    these are the same rows in the next group: a warp holds its group whole.
    """
    t = tl.arange(0, 32 * GROUPS)
    return t // (LANES * GROUPS) * LANES + t % LANES, t // LANES % GROUPS


@triton.jit
def _max_of_groups(tile, GROUPS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Reduce (32 · GROUPS, WIDTH) to amaxes (GROUPS, WIDTH), first over what a thread holds, then over its lanes."""
    return tl.max(tl.max(tl.reshape(tile, [32 // LANES, GROUPS, LANES, WIDTH]), 0), 1)


@triton.jit
def _to_rows(groups, GROUPS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Repeat (GROUPS, WIDTH) for the rows of each group, as (32 · GROUPS, WIDTH)."""
    tile = tl.broadcast_to(groups[None, :, None, :], [32 // LANES, GROUPS, LANES, WIDTH])
    return tl.reshape(tile, [32 * GROUPS, WIDTH])


@triton.jit
def _side_by_side(tile, GROUPS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Reorder (32 · GROUPS, WIDTH) to (32, GROUPS · WIDTH), the groups of a row as neighbours, as in memory."""
    rows = tl.permute(tl.reshape(tile, [32 // LANES, GROUPS, LANES, WIDTH]), (0, 2, 1, 3))
    return tl.reshape(rows, [32, GROUPS * WIDTH])


@triton.jit
def _to_columns(blocks, HIGH: tl.constexpr, BN: tl.constexpr):
    """Repeat each entry of (HIGH, BN // 32) for its 32 columns, as (HIGH, BN)."""
    return tl.reshape(tl.broadcast_to(blocks[:, :, None], [HIGH, BN // 32, 32]), [HIGH, BN])


@triton.jit
def _as_held(data, code, byte, DTYPE: tl.constexpr):
    """Return the codes as `data` holds them: as bytes, or unpacked as the values that they stand for, which have the
    scale `byte`."""
    if data.dtype.element_ty == tl.uint8:
        return code
    else:
        return (decode_fp8(code, DTYPE) * e8m0_decode(byte)).to(data.dtype.element_ty)


@Fast
@triton.jit
def _rows_kernel(
    x,
    data,
    scales,
    noop,
    given,
    M,
    K,
    stride,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    FLOOR: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EVEN: tl.constexpr,
):
    if noop is not None and tl.load(noop) == 1.0:
        return
    # Padded sizes: rows to 128, columns to 128, hence blocks of 32 to 4.
    high = (M + 127) // 128 * 128
    wide = (K + 127) // 128 * 128
    row, col = tile_of(tl.program_id(0), high, wide, BM, BN, 1)
    r = row * BM + tl.arange(0, BM)
    c = col * BN + tl.arange(0, BN)
    value = load_input(x, given, r, c, M, K, stride, SOURCE, EVEN, False)
    store_sums(given, value, row, c, K, SOURCE)
    blocks = tl.reshape(value, [BM, BN // 32, 32])
    byte = e8m0_from_amax(drop_nan(tl.max(tl.abs(blocks), 2)), DTYPE, FLOOR)
    code = cast_fp8(blocks * e8m0_inverse(byte)[:, :, None], DTYPE)
    held = _as_held(data, code, byte[:, :, None], DTYPE)
    store_tile(data, tl.reshape(held, [BM, BN]), r, c, M, K, EVEN)
    j = col * (BN // 32) + tl.arange(0, BN // 32)
    to = swizzled(r[:, None], j[None, :], wide // 128) if SWIZZLED else r[:, None] * (wide // 32) + j[None, :]
    # A block of zeros has byte 0: padding comes out as it must.
    tl.store(scales + to, byte.to(tl.uint8), mask=(r < high)[:, None] & (j < wide // 32)[None, :])


@Fast
@triton.jit(do_not_specialize=["zero"])
def _groups_kernel(
    x,
    data,
    scales,
    col_data,
    col_scales,
    noop,
    given,
    M,
    K,
    stride,
    zero,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    FLOOR: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    GROUPS: tl.constexpr,
    BN: tl.constexpr,
    EVEN: tl.constexpr,
):
    if noop is not None and tl.load(noop) == 1.0:
        return
    high = (M + 127) // 128 * 128
    wide = (K + 127) // 128 * 128
    LANES: tl.constexpr = 512 // BN if zero is None else 256 // BN
    BLOCKS: tl.constexpr = BN // 32
    PARTS: tl.constexpr = 2 if SOURCE is not None and SOURCE[0] == "halves" else 1
    N = K // 2 if PARTS == 2 else wide
    row, place = tile_of(tl.program_id(0), high, N, 32, BN * GROUPS, 1)
    r, group = _grouped(GROUPS, LANES)
    r += row * 32
    first = place * (BN * GROUPS) + group * BN
    n = tl.arange(0, BN)
    cols = first[:, None] + n[None, :]
    if SOURCE is None:
        at = x + (r * stride + first)[:, None] + n[None, :]
        tile = load(at, None if EVEN else (r < M)[:, None] & (cols < K))
    elif PARTS == 2:
        ACT: tl.constexpr = SOURCE[1]
        tile, second = produce_halves(x, given, r, cols, M, N, stride, ACT, EVEN)
    else:
        tile = produce(x, given, r, cols, M, K, stride, SOURCE, EVEN)
    for part in tl.static_range(PARTS):
        window = part * (N // (BN * GROUPS)) + place
        first = window * (BN * GROUPS) + group * BN
        mask = (r < M)[:, None] & (first[:, None] + n[None, :] < K)
        value = (tile if part == 0 else second).to(tl.float32)
        if SOURCE is not None and given[0] is not None:
            c = window * (BN * GROUPS) + tl.arange(0, BN * GROUPS)
            sums = tl.sum(tl.sum(tl.reshape(value, [32 // LANES, GROUPS, LANES, BN]), 0), 1)
            tl.store(given[0] + row * K + c, tl.reshape(sums, [BN * GROUPS]), mask=c < K)
        blocks = tl.reshape(value, [32 * GROUPS, BLOCKS, 32])
        to = (r * K + first)[:, None] + (n if zero is None else eights(n, zero))[None, :]

        if TWO_D:
            top = _max_of_groups(tl.max(tl.abs(blocks), 2), GROUPS, LANES, BLOCKS)
            byte = e8m0_from_amax(drop_nan(top), DTYPE, FLOOR)
            row_byte = _to_rows(byte, GROUPS, LANES, BLOCKS)
            col_byte = _to_columns(byte, GROUPS, BN)
            code = cast_fp8(blocks * e8m0_inverse(row_byte)[:, :, None], DTYPE)
            if data is not None:
                held = _as_held(data, code, row_byte[:, :, None], DTYPE)
                _store(data + to, tl.reshape(held, [32 * GROUPS, BN]), mask, EVEN)
            if col_data is not None:
                held = _as_held(col_data, code, row_byte[:, :, None], DTYPE)
                _store(col_data + to, tl.reshape(held, [32 * GROUPS, BN]), mask, EVEN)
        else:
            if data is not None:
                row_byte = e8m0_from_amax(drop_nan(tl.max(tl.abs(blocks), 2)), DTYPE, FLOOR)
                code = cast_fp8(blocks * e8m0_inverse(row_byte)[:, :, None], DTYPE)
                held = _as_held(data, code, row_byte[:, :, None], DTYPE)
                _store(data + to, tl.reshape(held, [32 * GROUPS, BN]), mask, EVEN)
            if col_data is not None:
                col_byte = e8m0_from_amax(drop_nan(_max_of_groups(tl.abs(value), GROUPS, LANES, BN)), DTYPE, FLOOR)
                code = cast_fp8(value * _to_rows(e8m0_inverse(col_byte), GROUPS, LANES, BN), DTYPE)
                held = _as_held(col_data, code, _to_rows(col_byte, GROUPS, LANES, BN), DTYPE)
                _store(col_data + to, held, mask, EVEN)

        # A block of zeros has byte 0, so padding comes out as it must, except where a 32x32 tile is cut.
        if data is not None:
            i = row * 32 + tl.arange(0, 32)
            j = window * (GROUPS * BLOCKS) + tl.arange(0, GROUPS * BLOCKS)
            byte = _side_by_side(row_byte, GROUPS, LANES, BLOCKS)
            if TWO_D:
                byte = tl.where((i < M)[:, None], byte, 0)
            to = swizzled(i[:, None], j[None, :], wide // 128) if SWIZZLED else i[:, None] * (wide // 32) + j[None, :]
            tl.store(scales + to, byte.to(tl.uint8), mask=(j < wide // 32)[None, :])
        if col_data is not None:
            c = window * (BN * GROUPS) + tl.arange(0, BN * GROUPS)
            byte = tl.reshape(col_byte, [BN * GROUPS])
            if TWO_D:
                byte = tl.where(c < K, byte, 0)
            to = swizzled(c, row, high // 128) if SWIZZLED else row * wide + c
            tl.store(col_scales + to, byte.to(tl.uint8), mask=c < wide)


@triton.jit
def _store(at, tile, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=mask)


@Fast
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
    r = row * BM + tl.arange(0, BM)
    c = col * BN + tl.arange(0, BN)
    at = r[:, None] * K + c[None, :]
    mask = (r < M)[:, None] & (c < K)[None, :]
    value = decode_fp8(tl.load(data + at, mask=mask, other=0), DTYPE)
    if COLUMNWISE:
        # A tile is one block high.
        to = swizzled(c, row, high // 128) if SWIZZLED else row * wide + c
        value *= e8m0_decode(tl.load(scales + to, mask=c < wide, other=0).to(tl.int32))[None, :]
    else:
        j = col * (BN // 32) + tl.arange(0, BN // 32)
        to = swizzled(r[:, None], j[None, :], wide // 128) if SWIZZLED else r[:, None] * (wide // 32) + j[None, :]
        value *= _to_columns(e8m0_decode(tl.load(scales + to).to(tl.int32)), BM, BN)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


def quantize(
    x: torch.Tensor | SourceCall,
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
    """Write the wanted directions of x. Buffers of BF16 are what `unpacked` names: they get values, not codes."""
    halves = config or tile_config(two_d, rowwise, columnwise, halves=True)
    source = read(x, source_mode(x, "blocks of 32", halves["BN"] * halves["num_warps"] if columnwise else 0))
    x, M, K = source.x, source.M, source.K
    if M * K == 0 or not out:
        return
    data, scales = out[:2] if rowwise else (None, None)
    col_data, col_scales = out[-2:] if columnwise else (None, None)
    options = dict(config or tile_config(two_d, rowwise, columnwise, source.kind is not None, source.columns() < K))
    constants = {
        "SOURCE": source.kind,
        "DTYPE": dtype,
        "FLOOR": floor,
        "SWIZZLED": swizzled,
        "enable_fp_fusion": False,
    }
    rows, cols = rup(M, 128), rup(K, 128)
    if not two_d and not columnwise:
        high, wide = options["BM"], options["BN"]
        even = rows == M and K % max(wide, 128) == 0
        grid = (cdiv(rows, high) * cdiv(cols, wide),)
        partials = source.partials(cdiv(rows, high))
        given = source.given(partials)
        _rows_kernel[grid](x, data, scales, noop, given, M, K, x.stride(0), **constants, **options, EVEN=even)
        finish_source(source, partials)
        return
    zero = 0 if options.pop("EIGHTS") else None
    groups = options["num_warps"]
    wide = options["BN"] * groups
    partials = source.partials(rows // 32)
    _groups_kernel[(rows // 32 * cdiv(source.columns() if source.columns() < K else cols, wide),)](
        x,
        data,
        scales,
        col_data,
        col_scales,
        noop,
        source.given(partials),
        M,
        K,
        x.stride(0),
        zero,
        TWO_D=two_d,
        GROUPS=groups,
        **constants,
        **options,
        EVEN=rows == M and K % wide == 0,
    )
    finish_source(source, partials)


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: int,
    swizzled: bool,
    columnwise: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype(fl32(2^(b-127) · code)) in the logical shape."""
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
    pointers: str,
    dtype: int,
    floor: bool,
    two_d: bool,
    swizzled: bool,
    even: bool,
    given: str | None = None,
    kind: tuple[Any, ...] | None = None,
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    _, data, _, *rest = pointers.split()
    constants: dict[str, Any] = {"DTYPE": dtype, "FLOOR": floor, "SWIZZLED": swizzled, "EVEN": even}
    constants["SOURCE"] = kind
    if len(rest) == 1:
        return ahead(_rows_kernel, pointers, given, **constants, **tile_config(False, True, False))
    halves = kind is not None and kind[0] == "halves"
    options = tile_config(two_d, data != "-", rest[0] != "-", kind is not None, halves)
    if not options.pop("EIGHTS"):
        constants["zero"] = None
    return ahead(_groups_kernel, pointers, given, **constants, **options, TWO_D=two_d, GROUPS=options["num_warps"])


_BACK = dequantize_config()

AHEAD = [
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, False, False, True),
    _case("fp16 u8 u8 u8 u8 fp32", E5M2, False, False, True, False),
    _case("fp32 u8 u8 -", E4M3, True, False, True, False),
    _case("bf16 u8 u8 -", E4M3, False, False, False, True),
    _case("bf16 - - u8 u8 -", E4M3, False, False, False, True),
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, True, True, False),
    _case("fp32 u8 u8 - - fp32", E5M2, True, True, False, True),
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, False, False, True, NORM, ("norm", True)),
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, False, False, True, ACTIVATION, ("activation", "silu", True)),
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, False, False, True, BACKWARD, ("activation_backward", "gelu")),
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, False, False, True, BACKWARD, ("halves", "silu")),
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, False, False, True, SCALED, ("activation", "silu", True)),
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, False, False, True, SCALED_BACKWARD, ("halves", "silu")),
    _case("bf16 u8 u8 -", E4M3, False, False, False, False, BACKWARD, ("activation_backward", "gelu")),
    _case("bf16 - - u8 u8 -", E4M3, False, False, False, False, BACKWARD, ("halves", "silu")),
    _case("bf16 u8 u8 u8 u8 -", E4M3, False, True, True, True, RMSNORM, ("norm", False)),
    _case("bf16 bf16 u8 -", E4M3, False, False, False, True),
    _case("bf16 bf16 u8 u8 u8 -", E4M3, False, False, False, True, ACTIVATION, ("activation", "silu", True)),
    _case("bf16 bf16 u8 bf16 u8 -", E4M3, False, False, False, True),
    _case("bf16 - - bf16 u8 -", E4M3, False, True, False, True),
    ahead(_dequantize_kernel, "u8 u8 bf16", DTYPE=E4M3, SWIZZLED=False, COLUMNWISE=False, **_BACK),
    ahead(_dequantize_kernel, "u8 u8 fp32", DTYPE=E5M2, SWIZZLED=True, COLUMNWISE=False, **_BACK),
    ahead(_dequantize_kernel, "u8 u8 fp16", DTYPE=E4M3, SWIZZLED=True, COLUMNWISE=True, **_BACK),
]
