"""FP8 with one scale per row, and per column for the transposed copy, on CUDA: this file has the launches.

Row-wise alone, a program holds whole rows in registers, so x is read once. (Rows of more than 16384 elements are read
twice, the second time mostly from the L2 cache, unless their amaxes are given.)

Column-wise, or both: a column's scale needs all of x, hence two reads, in three launches.
- `partial_kernel` takes strips of 256 rows by 128 columns: column amaxes stay in registers along the strip. It writes
  partial amaxes (strips, K) and (K/128, M), without atomics. Given amaxes stand for those of one strip, or tile.
- `finish_kernel` reduces these, a percent of x, once, to scales and inverse scales.
- `cast_kernel`, with one tile per program, writes both directions. It walks x backwards, because what the first pass
  read last is still in the cache.
A small tensor has few partial amaxes per row and column. There `cast_kernel` reduces them itself: two launches.

A source (`_jit_source.py`) is computed in both passes, or in the first, which then writes it, or before.
"""

from typing import Any

import torch

from mezzotint.constants import cdiv, rup
from mezzotint.kernels._lib import as_matrix
from mezzotint.kernels.float8_rowwise import check_amaxes
from mezzotint.kernels.quantize_ops import SourceCall
from mezzotint.kernels.triton._dequantize import dequantize_tiles
from mezzotint.kernels.triton._jit import for_inf, natural_span
from mezzotint.kernels.triton._jit_groups import are_alike, in_launches, pack
from mezzotint.kernels.triton._jit_rowwise import (
    FEW,
    SMALL,
    WHOLE_ROW,
    cast_kernel,
    finish_config,
    finish_kernel,
    partial_config,
    partial_kernel,
    rows_config,
    rows_kernel,
    tile_config,
)
from mezzotint.kernels.triton._jit_source import Input, read, source_mode
from mezzotint.kernels.triton._launch import scratch
from mezzotint.kernels.triton._produce import finish_source, sum_columns

TAKES_SOURCES = True


def quantize(
    x: torch.Tensor | SourceCall,
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
    """Quantize in the wanted directions. `config` is the tile of the cast, or with row-wise alone that of the only
    kernel."""
    check_amaxes(row_amax, col_amax, x.shape)
    row_amax = None if row_amax is None else row_amax.contiguous()
    kind = "rowwise" if columnwise else "rows" if x.shape[-1] <= WHOLE_ROW else "long rows"
    width = max(partial_config()["BN"], (config or tile_config(rowwise, halves=True)).get("BN", 0))
    how = source_mode(x, kind, width if columnwise else 0)
    source = read(x, how)
    scaling = {"DTYPE": dtype, "POW2": pow2, "FOR_INF": for_inf(torch.float32, pow2)}
    if columnwise:
        written = source.x.new_empty(source.M, source.K) if how == "first" else None
        _quantize_columns(source, out, noop, row_amax, col_amax, written, eps, scaling, config)
    else:
        _quantize_rows(source, out, noop, row_amax, eps, scaling, config)


def _quantize_rows(
    source: Input,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    row_amax: torch.Tensor | None,
    eps: float,
    scaling: dict[str, Any],
    config: dict[str, int] | None,
) -> None:
    """Quantize along rows alone, in one launch, if `out` has the buffers; sum columns in another, if that is wanted."""
    if out and source.M:
        data, row_inv = out
        options = config or rows_config(source.K)
        rows_kernel[(cdiv(source.M, options["BM"]),)](
            source.x,
            data,
            row_inv,
            noop,
            row_amax,
            source.given(),
            None,
            source.M,
            source.K,
            source.x.stride(0),
            eps or None,
            SOURCE=source.kind,
            **scaling,
            WHOLE=options["BK"] >= source.K,
            **options,
            enable_fp_fusion=False,
        )
    if source.sums is not None:  # A program has too few rows to sum on its own.
        sum_columns(source, source.sums)


def _quantize_columns(
    source: Input,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    row_amax: torch.Tensor | None,
    col_amax: torch.Tensor | None,
    written: torch.Tensor | None,
    eps: float,
    scaling: dict[str, Any],
    config: dict[str, int] | None,
) -> None:
    """Quantize along columns, and along rows too if `out` has buffers for that. `written` takes what the source makes,
    if the first pass writes it."""
    *row_buffers, transpose, col_inv = out
    data, row_inv = row_buffers or (None, None)
    rowwise, M, K = data is not None, source.M, source.K
    options = partial_config(source.kind)
    strips, tiles = cdiv(M, options["STRIP"]), cdiv(K, options["BN"])
    # Each program of the cast finishes its own scales if these are made of few partial amaxes.
    is_finished_by_cast = 0 < M * K <= SMALL and max(strips, tiles if rowwise else 0) <= FEW
    sizes = [0 if col_amax is not None else strips * K, 0 if is_finished_by_cast else K]
    sizes += [0 if row_amax is not None else tiles * M, 0 if is_finished_by_cast else M] if rowwise else []
    cols, col_scale, *more = scratch(source.x, sizes)
    rows, row_scale = more or (None, None)
    wanted = rows if row_amax is None else None, cols if col_amax is None else None
    if strips * tiles and any(each is not None for each in (*wanted, written)):
        _take_amaxes(source, *wanted, written, noop)
    if written is not None:
        if source.sums is not None:
            sum_columns(read(written), source.sums)
        source = read(written)
    if col_amax is not None:
        cols, strips = col_amax.contiguous(), 1
    if row_amax is not None and rowwise:
        rows, tiles = row_amax, 1
    scales: tuple[torch.Tensor | None, ...] = (rows, cols, row_inv, col_inv)
    counts: tuple[int | None, ...] = (tiles, strips)
    if not is_finished_by_cast:
        _finish(rows, cols, row_scale, col_scale, row_inv, col_inv, noop, M, K, counts, eps, scaling)
        scales, counts = (row_scale, col_scale, None, None), (None, None)
    if M * K:
        tile = config or tile_config(rowwise, source.columns() < K, is_finished_by_cast)
        _cast(source, data, transpose, scales, noop, counts, eps, scaling, tile)


def _finish(
    rows: torch.Tensor | None,
    cols: torch.Tensor,
    row_scale: torch.Tensor | None,
    col_scale: torch.Tensor,
    row_inv: torch.Tensor | None,
    col_inv: torch.Tensor,
    noop: torch.Tensor | None,
    M: int,
    K: int,
    counts: tuple[int | None, ...],
    eps: float,
    scaling: dict[str, Any],
) -> None:
    """Reduce partial amaxes of columns, and of rows if there are any, to scales and inverse scales. `counts` has how
    many each row has, and each column."""
    options = finish_config()
    blocks = cdiv(K, options["BS"]) + (0 if rows is None else cdiv(M, options["BS"]))
    if blocks:
        finish_kernel[(blocks,)](
            rows,
            cols,
            row_scale,
            col_scale,
            row_inv,
            col_inv,
            noop,
            None,
            M,
            K,
            *counts,
            eps or None,
            **scaling,
            **options,
            enable_fp_fusion=False,
        )


def _cast(
    source: Input,
    data: torch.Tensor | None,
    transpose: torch.Tensor,
    scales: tuple[torch.Tensor | None, ...],
    noop: torch.Tensor | None,
    counts: tuple[int | None, ...],
    eps: float,
    scaling: dict[str, Any],
    tile: dict[str, int],
) -> None:
    """Write the codes. `scales` and `counts` are as `cast_kernel` takes them: scales alone, or partial amaxes, the
    buffers of inverse scales, and how many amaxes each row has, and each column."""
    M, K, row_tiles = source.M, source.K, cdiv(source.M, tile["BM"])
    tile = {"SPAN": natural_span(tile["BM"], tile["BN"], tile["num_warps"]), **tile}
    partials = source.partials(row_tiles)
    cast_kernel[(row_tiles * cdiv(source.columns(), tile["BN"]),)](
        source.x,
        data,
        transpose,
        *scales,
        noop,
        source.given(partials),
        None,
        M,
        K,
        source.x.stride(0),
        *counts,
        eps or None,
        SOURCE=source.kind,
        **scaling,
        **tile,
        EVEN=M % tile["BM"] == 0 and K % tile["BN"] == 0,
        ALIGNED=False,
        FEW=FEW,
        enable_fp_fusion=False,
    )
    finish_source(source, partials)


def quantize_groups(
    xs: list[torch.Tensor],
    outs: list[list[torch.Tensor]],
    row_amaxes: list[torch.Tensor],
    col_amaxes: list[torch.Tensor],
    dtype: int,
    pow2: bool,
    eps: float,
    rowwise: bool,
    columnwise: bool,
) -> None:
    """Quantize each of G tensors on its own. The lists of amaxes have those of each, or are empty."""
    if row_amaxes or col_amaxes or xs[0].shape[-1] == 0 or not are_alike(xs):
        for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
            row_amax, col_amax = (amaxes[i] if amaxes else None for amaxes in (row_amaxes, col_amaxes))
            quantize(x, out, None, row_amax, col_amax, dtype, pow2, eps, rowwise, columnwise)
        return
    scaling = {"DTYPE": dtype, "POW2": pow2, "FOR_INF": for_inf(torch.float32, pow2)}
    for part in in_launches(len(xs)):
        matrices = [as_matrix(x) for x in xs[part]]
        if columnwise:
            _quantize_groups(matrices, outs[part], eps, rowwise, scaling)
        elif rowwise:
            _quantize_rows_of_groups(matrices, outs[part], eps, scaling)


def _quantize_rows_of_groups(
    xs: list[torch.Tensor], outs: list[list[torch.Tensor]], eps: float, scaling: dict[str, Any]
) -> None:
    """Quantize contiguous matrices (M_i, K), as many as a launch takes, along their rows alone, in one launch."""
    K = xs[0].shape[1]
    data, row_inv = zip(*outs, strict=True)
    options = rows_config(K)
    groups = pack([x.shape[0] for x in xs], lambda size: cdiv(size, options["BM"]))
    if groups.programs:
        rows_kernel[(groups.programs,)](
            groups.of(xs),
            groups.of(data),
            groups.of(row_inv),
            None,
            None,
            None,
            groups.packed,
            None,
            K,
            K,
            eps or None,
            SOURCE=None,
            **scaling,
            WHOLE=options["BK"] >= K,
            **options,
            enable_fp_fusion=False,
        )


def _quantize_groups(
    xs: list[torch.Tensor], outs: list[list[torch.Tensor]], eps: float, rowwise: bool, scaling: dict[str, Any]
) -> None:
    """Quantize contiguous matrices (M_i, K), as many as a launch takes, by the three launches of `quantize`."""
    sizes, K = [x.shape[0] for x in xs], xs[0].shape[1]
    *row_buffers, transposes, col_inv = zip(*outs, strict=True)
    data, row_inv = row_buffers or (None, None)
    first, finish, cast = partial_config(), finish_config(), tile_config(rowwise)
    strip, tiles = first["STRIP"], cdiv(K, first["BN"])
    cols, col_scale, *more = _workspaces(
        xs[0],
        [cdiv(size, strip) * K for size in sizes],
        [K] * len(xs),
        *([[tiles * size for size in sizes], sizes] if rowwise else ()),
    )
    rows, row_scale = more or (None, None)
    groups = pack(sizes, lambda size: cdiv(size, strip) * tiles)
    if groups.programs:
        partial_kernel[(groups.programs,)](
            groups.of(xs),
            groups.of(rows),
            groups.of(cols),
            None,
            None,
            None,
            groups.packed,
            None,
            K,
            K,
            SOURCE=None,
            **first,
            enable_fp_fusion=False,
        )
    groups = pack(sizes, lambda size: cdiv(K, finish["BS"]) + (cdiv(size, finish["BS"]) if rowwise else 0))
    finish_kernel[(groups.programs,)](
        groups.of(rows),
        groups.of(cols),
        groups.of(row_scale),
        groups.of(col_scale),
        groups.of(row_inv),
        groups.of(col_inv),
        None,
        groups.packed,
        None,
        K,
        tiles,
        strip,
        eps or None,
        **scaling,
        **finish,
        enable_fp_fusion=False,
    )
    groups = pack(sizes, lambda size: cdiv(size, cast["BM"]) * cdiv(K, cast["BN"]))
    if groups.programs:
        cast_kernel[(groups.programs,)](
            groups.of(xs),
            groups.of(data),
            groups.of(transposes),
            groups.of(row_scale),
            groups.of(col_scale),
            None,
            None,
            None,
            None,
            groups.packed,
            None,
            K,
            K,
            None,
            None,
            None,
            SOURCE=None,
            **scaling,
            **cast,
            FEW=FEW,
            SPAN=natural_span(cast["BM"], cast["BN"], cast["num_warps"]),
            **groups.flags(cast["BM"], cast["BN"], K),
            enable_fp_fusion=False,
        )


def _workspaces(like: torch.Tensor, *sizes: list[int]) -> list[list[torch.Tensor]]:
    """Return FP32 parts of one buffer, of these sizes, each at a multiple of 16 bytes."""
    whole = like.new_empty(sum(rup(size, 4) for each in sizes for size in each), dtype=torch.float32)
    parts = iter(whole.split([rup(size, 4) for each in sizes for size in each]))
    return [[next(parts) for _ in each] for each in sizes]


def _take_amaxes(
    source: Input,
    rows: torch.Tensor | None,
    cols: torch.Tensor | None,
    written: torch.Tensor | None,
    noop: torch.Tensor | None,
) -> None:
    """Run the first pass: write the wanted partial amaxes of rows and columns, and what the source makes if wanted."""
    options = partial_config(source.kind)
    partial_kernel[(cdiv(source.M, options["STRIP"]) * cdiv(source.columns(), options["BN"]),)](
        source.x,
        rows,
        cols,
        written,
        noop,
        source.given(),
        None,
        source.M,
        source.K,
        source.x.stride(0),
        SOURCE=source.kind,
        **options,
        enable_fp_fusion=False,
    )


def amax(x: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """Return max |x| of each row, FP32 [M], or if `columnwise` of each column, FP32 [K]; NaN is ignored."""
    source = read(x)
    x, M, K = source.x, source.M, source.K
    options = partial_config()
    strips, tiles = cdiv(M, options["STRIP"]), cdiv(K, options["BN"])
    count, size = (strips, K) if columnwise else (tiles, M)
    if count == 0:
        return x.new_zeros(size, dtype=torch.float32)
    partials = x.new_empty(count, size, dtype=torch.float32)
    if strips * tiles:
        _take_amaxes(source, None if columnwise else partials, partials if columnwise else None, None, None)
    return partials.amax(0)


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: int, transposed: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return dtype(fl32(code · scale_inv)) in the logical shape."""
    return dequantize_tiles(data.contiguous(), scale_inv, dtype, out_dtype, transposed=transposed, along=1, across=0)
