"""FP8 with one scale per row, and per column for the transposed copy, on CUDA.

Row-wise alone: a program holds whole rows in registers, so x is read once (rows of more than 16384 elements: twice,
the second time mostly from the L2 cache, but for given row maxima, which no GPU has run yet).

Column-wise, or both: a column's scale needs all of x, hence three launches and two reads.
1. `_partial_kernel`, strips of 256 rows by 128 columns: column maxima stay in registers along the strip. It leaves
   partial maxima (strips, K) and (K/128, M): no atomics. Given maxima are those of one strip, or tile.
2. `_finish_kernel` reduces these, a percent of x, once, to scales and inverse scales.
3. `_cast_kernel`, one tile per program, writes both directions. It walks x backwards: what the first pass read last is
   still in the cache.
A source (`_jit_source.py`) is computed in both passes, or in the first, which then writes it, or before.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, E5M2, cdiv
from mezzotint.kernels.float8_rowwise import check_amaxes
from mezzotint.kernels.quantize_ops import Made
from mezzotint.kernels.triton._dequantize import dequantize_tiles
from mezzotint.kernels.triton._jit import (
    ahead,
    cast_fp8,
    drop_nan,
    for_inf,
    inverse,
    natural_span,
    scale_from_amax,
    spread,
    store_tile,
    store_transposed,
    tile_of,
)
from mezzotint.kernels.triton._jit_source import Input, load_halves, load_input, read, store_sums, way
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import (
    ACTIVATION,
    BACKWARD,
    NORM,
    RMSNORM,
    SCALED_BACKWARD,
    finish_source,
    sum_columns,
)

TAKES_SOURCES = True
WHOLE_ROW = 16384  # the longest row that is held in registers


def rows_config(K: int) -> dict[str, int]:
    """Rows per program, their padded length, and threads for 32 to 64 elements each."""
    BK = min(max(triton.next_power_of_2(K), 128), WHOLE_ROW)
    BM = max(1, 2048 // BK)
    return {"BM": BM, "BK": BK, "num_warps": min(8, max(1, BM * BK // 1024))}


def partial_config(kind: tuple[Any, ...] | None = None) -> dict[str, int]:
    """Rows at a time, fewer where an activation needs registers, columns, rows per strip, and loads under way."""
    BM = 32 if kind is None or kind[0] == "norm" else 16
    return {"BM": BM, "BN": 128, "STRIP": 256, "STAGES": 3, "num_warps": 4}


def finish_config() -> dict[str, int]:
    """Partials at a time, scales per program."""
    return {"BP": 64, "BS": 32, "num_warps": 4}


def tile_config(rowwise: bool, halves: bool = False) -> dict[str, int]:
    """Tile of the two-way cast, and of the transposed one alone; of halves a smaller one: a program holds two."""
    if halves:
        return {"BM": 64, "BN": 64, "GROUP": 8, "num_warps": 4}
    if rowwise:
        return {"BM": 64, "BN": 128, "GROUP": 8, "num_warps": 8}
    return {"BM": 256, "BN": 64, "GROUP": 1, "num_warps": 8}


@Fast
@triton.jit
def _rows_kernel(
    x,
    data,
    scale_inv,
    noop,
    row_amax,
    given,
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
    """BM rows, in one piece (WHOLE) or BK columns at a time, twice; once where their maxima are given."""
    if noop is not None and tl.load(noop) == 1.0:
        return
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
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
        tl.store(to + c[None, :], cast_fp8(value * scale[:, None], DTYPE), mask=high & (c < K)[None, :])
    else:
        for start in range(0, tl.cast(K, tl.int64), BK):
            mask = high & (start + c < K)[None, :]
            value = load_input(x, given, r, start + c, M, K, stride, SOURCE, False, False)
            tl.store(to + start + c[None, :], cast_fp8(value * scale[:, None], DTYPE), mask=mask)


@Fast
@triton.jit
def _partial_kernel(
    x,
    rows,
    cols,
    out,
    noop,
    given,
    M,
    K,
    stride,
    SOURCE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """rows[column tile, r] and cols[strip, c]: maxima within a strip of STRIP rows by BN columns.

    `out`, or None: (M, K), what a source makes, for the second pass to read.
    """
    if noop is not None and tl.load(noop) == 1.0:
        return
    PARTS: tl.constexpr = 2 if SOURCE is not None and SOURCE[0] == "halves" else 1
    N = K // PARTS
    strip, tile = tile_of(tl.program_id(0), M, N, STRIP, BN, 1)
    c = tile * BN + tl.arange(0, BN)
    tops = tl.zeros([BM, BN], tl.float32)
    second_tops = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, STRIP, BM, num_stages=STAGES):  # loads run ahead of the maxima
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
    """(count, size) partial maxima → `size` scales and inverses, the given block of BS of them."""
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
def _finish_kernel(
    rows,
    cols,
    row_scale,
    col_scale,
    row_inv,
    col_inv,
    noop,
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
    """The first programs finish rows, where these are asked for, the others columns."""
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    if row_inv is None:
        _finish(cols, strips, col_scale, col_inv, K, pid, eps, DTYPE, POW2, FOR_INF, BP, BS)
    else:
        first = tl.cdiv(M, BS)
        if pid < first:
            _finish(rows, tiles, row_scale, row_inv, M, pid, eps, DTYPE, POW2, FOR_INF, BP, BS)
        else:
            _finish(cols, strips, col_scale, col_inv, K, pid - first, eps, DTYPE, POW2, FOR_INF, BP, BS)


@Fast
@triton.jit
def _cast_kernel(
    x,
    data,
    transpose,
    row_scale,
    col_scale,
    noop,
    given,
    M,
    K,
    stride,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    if noop is not None and tl.load(noop) == 1.0:
        return
    PARTS: tl.constexpr = 2 if SOURCE is not None and SOURCE[0] == "halves" else 1
    N = K // PARTS
    row, tile = tile_of(tl.num_programs(0) - 1 - tl.program_id(0), M, N, BM, BN, GROUP)
    r = row * BM + spread(BM, SPAN)
    first, second = load_halves(x, given, r, tile * BN + tl.arange(0, BN), M, K, stride, SOURCE, EVEN, False)
    for part in tl.static_range(PARTS):
        col = part * (N // BN) + tile
        c = col * BN + tl.arange(0, BN)
        value = (first if part == 0 else second).to(tl.float32)
        store_sums(given, value, row, c, K, SOURCE)
        if data is not None:
            scale = tl.load(row_scale + r, mask=r < M, other=0.0)
            store_tile(data, cast_fp8(value * scale[:, None], DTYPE), r, c, M, K, EVEN)
        scale = tl.load(col_scale + c, mask=c < K, other=0.0)
        store_transposed(transpose, cast_fp8(value * scale[None, :], DTYPE), row, col, M, K, BM, BN, SPAN, EVEN)


def quantize(
    x: torch.Tensor | Made,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    row_amax: torch.Tensor | None,
    col_amax: torch.Tensor | None,
    dtype: int,
    pow2: bool,
    eps: float,
    rowwise: bool,
    columnwise: bool,
    config: dict[str, int] | None = None,
) -> None:
    """`config` overrides the cast's, or with row-wise alone the only kernel's."""
    check_amaxes(row_amax, col_amax, x.shape)
    row_amax = None if row_amax is None else row_amax.contiguous()
    kind = "rowwise" if columnwise else "rows" if x.shape[-1] <= WHOLE_ROW else "long rows"
    width = max(partial_config()["BN"], (config or tile_config(rowwise, halves=True)).get("BN", 0))
    how = way(x, kind, width if columnwise else 0)
    source = read(x, how)
    x, M, K = source.x, source.M, source.K
    data, row_inv = out[:2] if rowwise else (None, None)
    scaling = {"DTYPE": dtype, "POW2": pow2, "FOR_INF": for_inf(torch.float32, pow2)}
    if not columnwise:
        if rowwise and M:
            options = config or rows_config(K)
            grid = (cdiv(M, options["BM"]),)
            _rows_kernel[grid](
                x,
                data,
                row_inv,
                noop,
                row_amax,
                source.given(),
                M,
                K,
                x.stride(0),
                eps or None,
                SOURCE=source.kind,
                **scaling,
                WHOLE=options["BK"] >= K,
                **options,
                enable_fp_fusion=False,
            )
        if source.sums is not None:  # a program has too few rows for sums of its own
            sum_columns(source, source.sums)
        return
    transpose, col_inv = out[-2:]
    options = partial_config(source.kind)
    strips, tiles = cdiv(M, options["STRIP"]), cdiv(K, options["BN"])
    sizes = [0 if col_amax is not None else strips * K, K]
    sizes += [0 if row_amax is not None else tiles * M, M] if rowwise else []
    cols, col_scale, *more = x.new_empty(sum(sizes), dtype=torch.float32).split(sizes)
    rows, row_scale = more or (None, None)
    written = x.new_empty(M, K) if how == "first" else None
    wanted = rows if row_amax is None else None, cols if col_amax is None else None
    if strips * tiles and any(each is not None for each in (*wanted, written)):
        _take_maxima(source, *wanted, written, noop)
    if written is not None:
        if source.sums is not None:
            sum_columns(read(written), source.sums)
        source, x = read(written), written
    if col_amax is not None:
        cols, strips = col_amax.contiguous(), 1
    if row_amax is not None and rowwise:
        rows, tiles = row_amax, 1
    finish = finish_config()
    blocks = cdiv(K, finish["BS"]) + (cdiv(M, finish["BS"]) if rowwise else 0)
    if blocks:
        _finish_kernel[(blocks,)](
            rows,
            cols,
            row_scale,
            col_scale,
            row_inv,
            col_inv,
            noop,
            M,
            K,
            tiles,
            strips,
            eps or None,
            **scaling,
            **finish,
            enable_fp_fusion=False,
        )
    if M * K:
        options = config or tile_config(rowwise, source.columns() < K)
        options.setdefault("SPAN", natural_span(options["BM"], options["BN"], options["num_warps"]))
        grid = (cdiv(M, options["BM"]) * cdiv(source.columns(), options["BN"]),)
        partials = source.partials(cdiv(M, options["BM"]))
        _cast_kernel[grid](
            x,
            data,
            transpose,
            row_scale,
            col_scale,
            noop,
            source.given(partials),
            M,
            K,
            x.stride(0),
            SOURCE=source.kind,
            DTYPE=dtype,
            **options,
            EVEN=M % options["BM"] == 0 and K % options["BN"] == 0,
            enable_fp_fusion=False,
        )
        finish_source(source, partials)


def _take_maxima(
    source: Input,
    rows: torch.Tensor | None,
    cols: torch.Tensor | None,
    written: torch.Tensor | None,
    noop: torch.Tensor | None,
) -> None:
    """The first pass: partial maxima of rows and columns, and what the source makes, where they are asked for."""
    options = partial_config(source.kind)
    _partial_kernel[(cdiv(source.M, options["STRIP"]) * cdiv(source.columns(), options["BN"]),)](
        source.x,
        rows,
        cols,
        written,
        noop,
        source.given(),
        source.M,
        source.K,
        source.x.stride(0),
        SOURCE=source.kind,
        **options,
        enable_fp_fusion=False,
    )


def amax(x: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """FP32 [M], or [K] `columnwise`: max |x| of each row, or column, NaN dropped."""
    source = read(x)
    x, M, K = source.x, source.M, source.K
    options = partial_config()
    strips, tiles = cdiv(M, options["STRIP"]), cdiv(K, options["BN"])
    count, size = (strips, K) if columnwise else (tiles, M)
    if count == 0:
        return x.new_zeros(size, dtype=torch.float32)
    partials = x.new_empty(count, size, dtype=torch.float32)
    if strips * tiles:
        _take_maxima(source, None if columnwise else partials, partials if columnwise else None, None, None)
    return partials.amax(0)


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: int, transposed: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """dtype(fl32(code · scale_inv)) in the logical shape."""
    return dequantize_tiles(data.contiguous(), scale_inv, dtype, out_dtype, transposed=transposed, along=1, across=0)


_POW2 = {"DTYPE": E4M3, "POW2": True, "FOR_INF": for_inf(torch.float32, True)}
_EXACT = {"DTYPE": E5M2, "POW2": False, "FOR_INF": for_inf(torch.float32, False)}
_TILE, _HALVES = (
    options | {"SPAN": natural_span(options["BM"], options["BN"], options["num_warps"])}
    for options in (tile_config(True), tile_config(True, halves=True))
)

AHEAD = [
    ahead(_rows_kernel, "bf16 u8 fp32 - -", **_POW2, WHOLE=True, **rows_config(4096)),
    ahead(_rows_kernel, "fp32 u8 fp32 fp32 -", **_EXACT, WHOLE=True, **rows_config(100)),
    ahead(_rows_kernel, "fp16 u8 fp32 - -", **_EXACT, WHOLE=False, **rows_config(WHOLE_ROW + 1)),
    ahead(_rows_kernel, "bf16 u8 fp32 - fp32", **_POW2, WHOLE=True, **rows_config(4096)),
    ahead(_rows_kernel, "fp32 u8 fp32 fp32 fp32", **_EXACT, WHOLE=False, **rows_config(WHOLE_ROW + 1)),
    ahead(_partial_kernel, "bf16 fp32 fp32 - -", **partial_config()),
    ahead(_partial_kernel, "fp32 fp32 fp32 - fp32", **partial_config()),
    ahead(_partial_kernel, "fp16 - fp32 - -", **partial_config()),
    ahead(_partial_kernel, "bf16 fp32 - - -", **partial_config()),
    ahead(_finish_kernel, "fp32 fp32 fp32 fp32 fp32 fp32 -", **_POW2, **finish_config()),
    ahead(_finish_kernel, "- fp32 - fp32 - fp32 fp32", **_EXACT, **finish_config()),
    ahead(_cast_kernel, "bf16 u8 u8 fp32 fp32 -", DTYPE=E4M3, **_TILE, EVEN=True),
    ahead(_cast_kernel, "fp32 u8 u8 fp32 fp32 fp32", DTYPE=E5M2, **_TILE, EVEN=False),
    ahead(_cast_kernel, "fp16 - u8 - fp32 -", DTYPE=E4M3, **_TILE, EVEN=False),
    ahead(_rows_kernel, "bf16 u8 fp32 - -", NORM, SOURCE=("norm", True), **_POW2, WHOLE=True, **rows_config(4096)),
    ahead(
        _rows_kernel,
        "bf16 u8 fp32 - -",
        BACKWARD,
        SOURCE=("activation_backward", "silu"),
        **_POW2,
        WHOLE=True,
        **rows_config(4096),
    ),
    ahead(_partial_kernel, "bf16 fp32 fp32 - -", RMSNORM, SOURCE=("norm", False), **partial_config()),
    *(
        ahead(_partial_kernel, f"bf16 fp32 fp32 {out} -", given, SOURCE=kind, **partial_config(kind))
        for out in ("-", "bf16")
        for given, kind in (
            (ACTIVATION, ("activation", "silu", True)),
            (BACKWARD, ("halves", "silu")),
        )
    ),
    *(
        ahead(_cast_kernel, "bf16 u8 u8 fp32 fp32 -", given, SOURCE=kind, DTYPE=E4M3, **_TILE, EVEN=True)
        for given, kind in (
            (NORM, ("norm", False)),
            (ACTIVATION, ("activation", "silu", True)),
            (BACKWARD, ("activation_backward", "gelu")),
        )
    ),
    *(
        ahead(
            _cast_kernel, "bf16 u8 u8 fp32 fp32 -", given, SOURCE=("halves", "silu"), DTYPE=E4M3, **_HALVES, EVEN=True
        )
        for given in (BACKWARD, SCALED_BACKWARD)
    ),
]
