"""The kernels of FP8 with one scale per row and per column: this file has them and their tiles.

`float8_rowwise.py` has the launches.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels.triton._jit import (
    ahead,
    ahead_of_groups,
    as_stored,
    cast_fp8,
    drop_nan,
    for_inf,
    inverse,
    natural_span,
    scale_from_amax,
    spread,
    spread_out,
    store_tile,
    store_transposed,
    tile_of,
)
from mezzotint.kernels.triton._jit_groups import chosen, own_rows
from mezzotint.kernels.triton._jit_source import load_halves, load_input, store_sums
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import ACTIVATION, BACKWARD, NORM, RMSNORM, SCALED_BACKWARD

WHOLE_ROW = 16384  # the longest row that is held in registers
# The cast of a small tensor finishes its scales itself: each program reduces at most FEW partial amaxes of each of its
# rows and columns. In a tensor of more than SMALL elements this repeated work takes longer than a launch.
FEW, SMALL = 32, 2**22


def rows_config(K: int) -> dict[str, int]:
    """Return rows per program, their padded length, and as many threads as give each 32 to 64 elements."""
    BK = min(max(triton.next_power_of_2(K), 128), WHOLE_ROW)
    BM = max(1, 2048 // BK)
    return {"BM": BM, "BK": BK, "num_warps": min(8, max(1, BM * BK // 1024))}


def partial_config(kind: tuple[Any, ...] | None = None) -> dict[str, int]:
    """Return rows at a time (fewer if an activation needs registers), columns, rows per strip, and loads under way."""
    BM = 32 if kind is None or kind[0] == "norm" else 16
    return {"BM": BM, "BN": 128, "STRIP": 256, "STAGES": 3, "num_warps": 4}


def finish_config() -> dict[str, int]:
    """Return how many partial amaxes are read at a time, and the scales per program."""
    return {"BP": 64, "BS": 32, "num_warps": 4}


def tile_config(rowwise: bool, halves: bool = False, finishes: bool = False) -> dict[str, int]:
    """Return the tile of the two-way cast, or of the transposed one alone; a smaller one for `halves`, because a
    program holds two, and one with few threads for a program that `finishes` scales, because all threads do that."""
    if finishes:
        return {"BM": 64, "BN": 64, "GROUP": 8, "num_warps": 2}
    if halves:
        return {"BM": 64, "BN": 64, "GROUP": 8, "num_warps": 4}
    if rowwise:
        return {"BM": 64, "BN": 128, "GROUP": 8, "num_warps": 8}
    return {"BM": 256, "BN": 64, "GROUP": 1, "num_warps": 8}


@Fast
@triton.jit
def rows_kernel(
    x,
    data,
    scale_inv,
    noop,
    row_amax,
    given,
    groups,
    M,
    K,
    stride,
    eps,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Quantize BM rows, in one piece (WHOLE) or BK columns at a time: twice, or once if their amaxes are given."""
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    if groups is not None:
        x, data, scale_inv = chosen(x, groups, pid), chosen(data, groups, pid), chosen(scale_inv, groups, pid)
        pid, M = own_rows(groups, pid, False)
    r = pid.to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.arange(0, BK)
    to = data + r[:, None] * K
    high = (r < M)[:, None]
    if WHOLE:
        value = load_input(x, given, r, c, M, K, stride, SOURCE, False, False)
    if row_amax is not None:
        top = tl.load(row_amax + r, mask=r < M, other=0.0)
    elif WHOLE:
        top = tl.max(tl.abs(value), 1)
    else:
        tops = tl.zeros([BM, BK], tl.float32)
        for start in range(0, tl.cast(K, tl.int64), BK):
            value = load_input(x, given, r, start + c, M, K, stride, SOURCE, False, False)
            tops = tl.maximum(tops, tl.abs(value))
        top = tl.max(tops, 1)
    scale = scale_from_amax(drop_nan(top), eps, DTYPE, POW2, FOR_INF)
    tl.store(scale_inv + r, inverse(scale, POW2), mask=r < M)
    if WHOLE:
        code = as_stored(cast_fp8(value * scale[:, None], DTYPE), data)
        tl.store(to + c[None, :], code, mask=high & (c < K)[None, :])
    else:
        for start in range(0, tl.cast(K, tl.int64), BK):
            mask = high & (start + c < K)[None, :]
            value = load_input(x, given, r, start + c, M, K, stride, SOURCE, False, False)
            code = as_stored(cast_fp8(value * scale[:, None], DTYPE), data)
            tl.store(to + start + c[None, :], code, mask=mask)


@Fast
@triton.jit
def partial_kernel(
    x,
    rows,
    cols,
    out,
    noop,
    given,
    groups,
    M,
    K,
    stride,
    SOURCE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write rows[column tile, r] and cols[strip, c], the amaxes within a strip of STRIP rows by BN columns.

    `out`, unless it is None, gets what a source makes, (M, K), for the second pass to read.
    """
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    if groups is not None:
        x, cols = chosen(x, groups, pid), chosen(cols, groups, pid)
        if rows is not None:
            rows = chosen(rows, groups, pid)
        pid, M = own_rows(groups, pid, False)
    PARTS: tl.constexpr = 2 if SOURCE is not None and SOURCE[0] == "halves" else 1
    N = K // PARTS
    strip, tile = tile_of(pid, M, N, STRIP, BN, 1)
    c = tile * BN + tl.arange(0, BN)
    tops = tl.zeros([BM, BN], tl.float32)
    second_tops = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, STRIP, BM, num_stages=STAGES):  # loads run ahead of the amaxes
        r = strip * STRIP + start + tl.arange(0, BM)
        first, second = load_halves(x, given, r, c, M, K, stride, SOURCE, False, False)
        if cols is not None:
            tops = tl.maximum(tops, tl.abs(first.to(tl.float32)))
            if PARTS == 2:
                second_tops = tl.maximum(second_tops, tl.abs(second.to(tl.float32)))
        for part in tl.static_range(PARTS):
            value = first if part == 0 else second
            if rows is not None:
                top = drop_nan(tl.max(tl.abs(value.to(tl.float32)), 1))
                tl.store(rows + (part * (N // BN) + tile) * M + r, top, mask=r < M)
            if out is not None:
                store_tile(out, value.to(out.dtype.element_ty), r, part * N + c, M, K, False)
    if cols is not None:
        tl.store(cols + strip * K + c, tl.max(tops, 0), mask=c < N)
        if PARTS == 2:
            tl.store(cols + strip * K + N + c, tl.max(second_tops, 0), mask=c < N)


@triton.jit
def _finish(
    partials,
    count,
    scales,
    inverses,
    size,
    block,
    eps,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    BP: tl.constexpr,
    BS: tl.constexpr,
):
    """Write block `block` of BS scales and their inverses, of `size` in all, from (count, size) partial amaxes."""
    s = block.to(tl.int64) * BS + tl.arange(0, BS)
    tops = tl.zeros([BP, BS], tl.float32)
    for start in range(0, count, BP):
        p = start + tl.arange(0, BP).to(tl.int64)
        mask = (p < count)[:, None] & (s < size)[None, :]
        tops = tl.maximum(tops, tl.load(partials + p[:, None] * size + s[None, :], mask=mask, other=0.0))
    scale = scale_from_amax(tl.max(tops, 0), eps, DTYPE, POW2, FOR_INF)
    tl.store(scales + s, scale, mask=s < size)
    tl.store(inverses + s, inverse(scale, POW2), mask=s < size)


@Fast
@triton.jit
def finish_kernel(
    rows,
    cols,
    row_scale,
    col_scale,
    row_inv,
    col_inv,
    noop,
    groups,
    M,
    K,
    tiles,
    strips,
    eps,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    BP: tl.constexpr,
    BS: tl.constexpr,
):
    """Write the scales: the first programs finish rows, if these are wanted, the others columns. With groups `strips`
    is the height of one."""
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    if groups is not None:
        cols, col_scale, col_inv = (
            chosen(cols, groups, pid),
            chosen(col_scale, groups, pid),
            chosen(col_inv, groups, pid),
        )
        if row_inv is not None:
            rows, row_scale = chosen(rows, groups, pid), chosen(row_scale, groups, pid)
            row_inv = chosen(row_inv, groups, pid)
        pid, M = own_rows(groups, pid, False)
        strips = tl.cdiv(M, strips)
    if row_inv is None:
        _finish(cols, strips, col_scale, col_inv, K, pid, eps, DTYPE, POW2, FOR_INF, BP, BS)
    else:
        first = tl.cdiv(M, BS)
        if pid < first:
            _finish(rows, tiles, row_scale, row_inv, M, pid, eps, DTYPE, POW2, FOR_INF, BP, BS)
        else:
            _finish(cols, strips, col_scale, col_inv, K, pid - first, eps, DTYPE, POW2, FOR_INF, BP, BS)


@triton.jit
def _scales(
    tops,
    count,
    inverses,
    at,
    size,
    writes,
    eps,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    FEW: tl.constexpr,
):
    """Return the scales at `at`, of `size` in all: as `tops` has them, or, if inverses are wanted, from (count, size)
    partial amaxes. The program that `writes` writes the inverses."""
    if inverses is None:
        scale = tl.load(tops + at, mask=at < size, other=0.0)
    else:
        p = tl.arange(0, FEW)
        mask = (at < size)[:, None] & (p < count)[None, :]
        top = drop_nan(tl.max(tl.load(tops + at[:, None] + p[None, :] * size, mask=mask, other=0.0), 1))
        scale = scale_from_amax(top, eps, DTYPE, POW2, FOR_INF)
        if writes:
            tl.store(inverses + at, inverse(scale, POW2), mask=at < size)
    return scale


@Fast
@triton.jit
def cast_kernel(
    x,
    data,
    transpose,
    rows,
    cols,
    row_inv,
    col_inv,
    noop,
    given,
    groups,
    M,
    K,
    stride,
    tiles,
    strips,
    eps,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    FEW: tl.constexpr,
):
    """Cast a tile in both directions, or only transposed. `rows` and `cols` are their scales, or, if inverse scales are
    wanted of this kernel, partial amaxes, at most FEW each."""
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if groups is not None:
        x, transpose, cols = chosen(x, groups, pid), chosen(transpose, groups, pid), chosen(cols, groups, pid)
        if data is not None:
            data, rows = chosen(data, groups, pid), chosen(rows, groups, pid)
        pid, M = own_rows(groups, pid, ALIGNED)
    PARTS: tl.constexpr = 2 if SOURCE is not None and SOURCE[0] == "halves" else 1
    N = K // PARTS
    row, tile = tile_of(pid, M, N, BM, BN, GROUP)
    r = row * BM + spread(BM, SPAN)
    first, second = load_halves(x, given, r, tile * BN + tl.arange(0, BN), M, K, stride, SOURCE, EVEN, False)
    if data is not None:
        at = row * BM + tl.arange(0, BM)
        row_scale = _scales(rows, tiles, row_inv, at, M, tile == 0, eps, DTYPE, POW2, FOR_INF, FEW)
        row_scale = spread_out(row_scale, BM, SPAN)
    for part in tl.static_range(PARTS):
        col = part * (N // BN) + tile
        c = col * BN + tl.arange(0, BN)
        value = (first if part == 0 else second).to(tl.float32)
        store_sums(given, value, row, c, K, SOURCE)
        if data is not None:
            store_tile(data, cast_fp8(value * row_scale[:, None], DTYPE), r, c, M, K, EVEN)
        col_scale = _scales(cols, strips, col_inv, c, K, row == 0, eps, DTYPE, POW2, FOR_INF, FEW)
        store_transposed(transpose, cast_fp8(value * col_scale[None, :], DTYPE), row, col, M, K, BM, BN, SPAN, EVEN)


_POW2 = {"DTYPE": E4M3, "POW2": True, "FOR_INF": for_inf(torch.float32, True)}
_EXACT = {"DTYPE": E5M2, "POW2": False, "FOR_INF": for_inf(torch.float32, False)}
_TILE, _HALVES, _FINISHES = (
    options | {"SPAN": natural_span(options["BM"], options["BN"], options["num_warps"])}
    for options in (tile_config(True), tile_config(True, halves=True), tile_config(True, finishes=True))
)
_SCALED = {"tiles": None, "strips": None, "eps": None, "FEW": FEW}  # the cast after `finish_kernel`

AHEAD = [
    ahead(rows_kernel, "bf16 u8 fp32 - -", **_POW2, WHOLE=True, **rows_config(4096)),
    ahead(rows_kernel, "fp32 fp8e4nv fp32 fp32 -", **_EXACT, WHOLE=True, **rows_config(100)),
    ahead(rows_kernel, "fp16 fp8e5 fp32 - -", **_EXACT, WHOLE=False, **rows_config(WHOLE_ROW + 1)),
    ahead(rows_kernel, "bf16 u8 fp32 - fp32", **_POW2, WHOLE=True, **rows_config(4096)),
    ahead(rows_kernel, "fp32 u8 fp32 fp32 fp32", **_EXACT, WHOLE=False, **rows_config(WHOLE_ROW + 1)),
    ahead(partial_kernel, "bf16 fp32 fp32 - -", **partial_config()),
    ahead(partial_kernel, "fp32 fp32 fp32 - fp32", **partial_config()),
    ahead(partial_kernel, "fp16 - fp32 - -", **partial_config()),
    ahead(partial_kernel, "bf16 fp32 - - -", **partial_config()),
    ahead_of_groups(rows_kernel, "bf16 u8 fp32 - -", **_POW2, WHOLE=True, **rows_config(4096)),
    ahead_of_groups(partial_kernel, "bf16 fp32 fp32 - -", **partial_config()),
    ahead_of_groups(finish_kernel, "fp32 fp32 fp32 fp32 fp32 fp32 -", **_EXACT, **finish_config()),
    ahead_of_groups(cast_kernel, "bf16 u8 u8 fp32 fp32 - - -", **_POW2, **_TILE, **_SCALED, EVEN=True),
    ahead_of_groups(cast_kernel, "fp32 - u8 - fp32 - - -", **_EXACT, **_TILE, **_SCALED, EVEN=False),
    ahead(finish_kernel, "fp32 fp32 fp32 fp32 fp32 fp32 -", **_POW2, **finish_config()),
    ahead(finish_kernel, "- fp32 - fp32 - fp32 fp32", **_EXACT, **finish_config()),
    ahead(cast_kernel, "bf16 u8 u8 fp32 fp32 - - -", **_POW2, **_TILE, **_SCALED, EVEN=True),
    ahead(cast_kernel, "fp32 u8 u8 fp32 fp32 - - fp32", **_EXACT, **_TILE, **_SCALED, EVEN=False),
    ahead(cast_kernel, "fp16 - u8 - fp32 - - -", **_POW2, **_TILE, **_SCALED, EVEN=False),
    ahead(cast_kernel, "bf16 u8 u8 fp32 fp32 fp32 fp32 -", **_POW2, **_FINISHES, FEW=FEW, EVEN=True),
    ahead(cast_kernel, "fp32 - u8 - fp32 - fp32 fp32", **_EXACT, **_FINISHES, FEW=FEW, EVEN=False),
    ahead(rows_kernel, "bf16 u8 fp32 - -", NORM, SOURCE=("norm", True), **_POW2, WHOLE=True, **rows_config(4096)),
    ahead(
        rows_kernel,
        "bf16 u8 fp32 - -",
        BACKWARD,
        SOURCE=("activation_backward", "silu"),
        **_POW2,
        WHOLE=True,
        **rows_config(4096),
    ),
    ahead(partial_kernel, "bf16 fp32 fp32 - -", RMSNORM, SOURCE=("norm", False), **partial_config()),
    *(
        ahead(partial_kernel, f"bf16 fp32 fp32 {out} -", given, SOURCE=kind, **partial_config(kind))
        for out in ("-", "bf16")
        for given, kind in (
            (ACTIVATION, ("activation", "silu", True)),
            (BACKWARD, ("halves", "silu")),
        )
    ),
    *(
        ahead(cast_kernel, "bf16 u8 u8 fp32 fp32 - - -", given, SOURCE=kind, **_POW2, **_TILE, **_SCALED, EVEN=True)
        for given, kind in (
            (NORM, ("norm", False)),
            (ACTIVATION, ("activation", "silu", True)),
            (BACKWARD, ("activation_backward", "gelu")),
        )
    ),
    *(
        ahead(cast_kernel, pointers, given, SOURCE=("halves", "silu"), **_POW2, **options, EVEN=True)
        for given in (BACKWARD, SCALED_BACKWARD)
        for pointers, options in (
            ("bf16 u8 u8 fp32 fp32 - - -", _HALVES | _SCALED),
            ("bf16 u8 u8 fp32 fp32 fp32 fp32 -", _FINISHES | {"FEW": FEW}),
        )
    ),
]
