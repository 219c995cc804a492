"""FP8 with one scale per tensor on CUDA: this file has the launches.

Current scaling takes two launches. The first (`float8_amax.py`) writes a few partial amaxes, which every program of the
cast reduces itself (they sit in the L2 cache) instead of waiting for a third launch. The cast walks x backwards,
because what the first pass read last is still in the cache. A tensor that one program sees whole takes one launch. A
source that is computed in the first pass leaves the amax of what it writes.

Delayed scaling takes one pass: the scale is given, and an atomic maximum takes the amax on the way, into a buffer of
its own or, with nothing to clear before, into the history.

With a source (`_jit_source.py`) that is inside, both passes compute what they do not read.

The cast reads each element once. Without a transposed copy it is flat, 1-D. With one, a program holds a tile and writes
it in both directions; see `spread` for the order of its rows.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from mezzotint.constants import cdiv
from mezzotint.kernels._lib import as_matrix, once_in_graphs
from mezzotint.kernels.quantize_ops import SourceCall
from mezzotint.kernels.triton._dequantize import dequantize_tiles
from mezzotint.kernels.triton._jit import as_rows, for_inf, natural_span
from mezzotint.kernels.triton._jit_float8 import (
    cast_kernel,
    cast_tile_kernel,
    clear_kernel,
    dequantize_kernel,
    flat_config,
    tile_config,
)
from mezzotint.kernels.triton._jit_groups import are_alike, in_launches, pack
from mezzotint.kernels.triton._jit_source import Input, SourceMode, read, source_mode
from mezzotint.kernels.triton._produce import finish_source
from mezzotint.kernels.triton.activation import amax_of, write_with_amax
from mezzotint.kernels.triton.float8_amax import (
    PARTIALS,
    PARTIALS_EACH,
    amax,
    amax_partials,
    group_partials,
    source_partials,
)

__all__ = [
    "PARTIALS",
    "amax",
    "amax_partials",
    "dequantize",
    "enter_scaled",
    "quantize",
    "quantize_groups",
    "quantize_scaled",
    "quantize_scaled_groups",
]

TAKES_SOURCES = True


def _cast(
    source: Input,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    scaling: torch.Tensor,
    rowwise: bool,
    columnwise: bool,
    config: dict[str, int] | None,
    eps: float = 0.0,
    amax: torch.Tensor | None = None,
    slot: int | None = None,
    **constants: Any,
) -> None:
    """Cast a matrix in one launch into data, transpose and scale_inv. Raise `amax` if it is given. A given scale and
    `amax` are at `slot`."""
    data = out[0] if rowwise else None
    transpose = out[rowwise] if columnwise else None
    scale_inv = out[rowwise + columnwise]
    x, M, K = source.x, source.M, source.K
    numel, count = M * K, 1 if constants["SCALED"] else scaling.numel()
    # An empty tensor has a scale, too: one program writes it, all of whose elements are masked.
    if numel == 0 or (transpose is None and source.kind is None and x.is_contiguous()):
        options = config or flat_config()
        grid = (max(1, cdiv(numel, options["BLOCK"])),)
        cast_kernel[grid](
            x,
            data,
            scale_inv,
            scaling,
            amax,
            noop,
            numel,
            count,
            eps or None,
            slot,
            **constants,
            **options,
            enable_fp_fusion=False,
        )
        return
    options = config or tile_config(rowwise, source.is_wide())
    options.setdefault("SPAN", natural_span(options["BM"], options["BN"], options["num_warps"]))
    grid = (cdiv(M, options["BM"]) * cdiv(source.columns(), options["BN"]),)
    partials = None if source.sums is None else source.partials(cdiv(M, options["BM"]))
    cast_tile_kernel[grid](
        x,
        data,
        transpose,
        scale_inv,
        scaling,
        amax,
        noop,
        source.given(partials),
        None,
        M,
        K,
        x.stride(0),
        count,
        eps or None,
        slot,
        SOURCE=source.kind,
        **constants,
        **options,
        EVEN=M % options["BM"] == 0 and K % options["BN"] == 0,
        ALIGNED=False,
        enable_fp_fusion=False,
    )
    finish_source(source, partials)


def _cast_groups(
    xs: list[torch.Tensor],
    outs: list[list[torch.Tensor]],
    scaling: Sequence[torch.Tensor],
    rowwise: bool,
    columnwise: bool,
    eps: float = 0.0,
    **constants: Any,
) -> None:
    """Cast contiguous matrices (M_i, K), as many as a launch takes, as `_cast` does one."""
    K = xs[0].shape[1]
    buffers = list(zip(*outs, strict=True))
    options = tile_config(rowwise)
    span = natural_span(options["BM"], options["BN"], options["num_warps"])
    # An empty group has a scale, too: one program writes it, all of whose elements are masked.
    groups = pack([x.shape[0] for x in xs], lambda rows: max(1, cdiv(rows, options["BM"])) * cdiv(K, options["BN"]))
    cast_tile_kernel[(groups.programs,)](
        groups.of(xs),
        groups.of(buffers[0]) if rowwise else None,
        groups.of(buffers[rowwise]) if columnwise else None,
        groups.of(buffers[rowwise + columnwise]),
        groups.of(scaling),
        groups.of(buffers[-1]) if constants["SCALED"] else None,
        None,
        None,
        groups.packed,
        None,
        K,
        K,
        scaling[0].numel(),
        eps or None,
        None,
        SOURCE=None,
        **constants,
        **options,
        SPAN=span,
        **groups.flags(options["BM"], options["BN"], K),
        enable_fp_fusion=False,
    )


def quantize(
    x: torch.Tensor | SourceCall,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    amax: torch.Tensor | None,
    dtype: int,
    pow2: bool,
    eps: float,
    rowwise: bool,
    columnwise: bool,
    config: dict[str, int] | None = None,
) -> None:
    """Quantize with current scaling; `config` overrides the tile of the cast."""
    if isinstance(x, torch.Tensor):
        x = as_rows(x)  # This is what the cast sees: a copy is contiguous even if x was not.
    given = amax is not None
    alone = not given and config is None and _fits_one_program(x, rowwise, columnwise)
    how: SourceMode = "before"
    if isinstance(x, SourceCall):
        how = source_mode(x, "delayed" if given or alone else "current", _width(config))
    if isinstance(x, SourceCall) and how == "first":
        (x, amax), how, given = write_with_amax(x), "before", True
    source = read(x, how)
    if alone:
        amax = out[-1]  # not read
        if source.kind is not None:  # the tile that all of x fits in
            config = tile_config(rowwise, source.columns() < source.K)
    elif amax is None:
        if source.kind is None:
            source = source._replace(x=source.x.contiguous())
            # What backward quantizes again has the amax that forward found.
            amax = once_in_graphs(amax_partials, source.x)(source.x, noop)
        elif source.kind[0] == "norm":
            amax = source_partials(source)
        else:
            assert isinstance(x, SourceCall)
            amax, given = amax_of(x), True
    _cast(
        source,
        out,
        noop,
        amax,
        rowwise,
        columnwise,
        config,
        eps,
        DTYPE=dtype,
        POW2=pow2,
        FOR_INF=for_inf(torch.float32, pow2),
        SCALED=False,
        BP=-1 if alone else 0 if given else PARTIALS,
    )


_ONE_PROGRAM = 1 << 14  # elements: more than any tile has


def _fits_one_program(x: torch.Tensor | SourceCall, rowwise: bool, columnwise: bool) -> bool:
    """Return whether one program of the cast sees all of x, and can take the amax itself, without a first launch."""
    *rows, K = x.shape
    M, options = (
        math.prod(rows),
        tile_config(rowwise, wide=isinstance(x, SourceCall)),
    )  # the smaller, whatever it is made of
    tile, flat = options["BM"] >= M and options["BN"] >= K, flat_config()["BLOCK"] >= M * K
    if M * K == 0 or columnwise:
        return M * K > 0 and tile
    if isinstance(x, SourceCall):
        return tile and flat  # whether it is taken in or not
    return flat if x.is_contiguous() else tile


def _width(config: dict[str, int] | None) -> int:
    """Return the width of the tiles of halves."""
    return (config or tile_config(True, wide=True)).get("BN", 0)


def quantize_scaled(
    x: torch.Tensor | SourceCall,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    scale: torch.Tensor,
    dtype: int,
    rowwise: bool,
    columnwise: bool,
    config: dict[str, int] | None = None,
) -> None:
    """Quantize with delayed scaling; the last buffer is amax."""
    if noop is None:
        out[-1].zero_()
    else:
        clear_kernel[(1,)](out[-1], noop, num_warps=1, enable_fp_fusion=False)
    enter_scaled(x, out, noop, scale, None, out[-1], dtype, rowwise, columnwise, config)


def enter_scaled(
    x: torch.Tensor | SourceCall,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    scales: torch.Tensor,
    slot: int | None,
    history: torch.Tensor | None,
    dtype: int,
    rowwise: bool,
    columnwise: bool,
    config: dict[str, int] | None = None,
) -> None:
    """Quantize with the scale at `slot`, and raise row 0 of the history there to the amax. Without a history no amax is
    taken. The slot None is the first, of scales and a history that have no other."""
    constants = {"DTYPE": dtype, "POW2": False, "FOR_INF": 0.0, "SCALED": True, "BP": 0}
    source = read(x, source_mode(x, "delayed", _width(config)))
    _cast(source, out, noop, scales, rowwise, columnwise, config, amax=history, slot=slot, **constants)


def quantize_groups(
    xs: list[torch.Tensor],
    outs: list[list[torch.Tensor]],
    amaxes: list[torch.Tensor],
    dtype: int,
    pow2: bool,
    eps: float,
    rowwise: bool,
    columnwise: bool,
) -> None:
    """Quantize each of G tensors with current scaling of its own. `amaxes` has that of each, or is empty."""
    if amaxes or not are_alike(xs):
        for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
            quantize(x, out, None, amaxes[i] if amaxes else None, dtype, pow2, eps, rowwise, columnwise)
        return
    scaling = {"DTYPE": dtype, "POW2": pow2, "FOR_INF": for_inf(torch.float32, pow2)}
    xs = [as_matrix(x) for x in xs]
    for part in in_launches(len(xs)):
        partials = group_partials(xs[part])
        rows = partials.unbind()
        _cast_groups(xs[part], outs[part], rows, rowwise, columnwise, eps, **scaling, SCALED=False, BP=PARTIALS_EACH)


def quantize_scaled_groups(
    xs: list[torch.Tensor],
    outs: list[list[torch.Tensor]],
    scales: list[torch.Tensor],
    dtype: int,
    rowwise: bool,
    columnwise: bool,
) -> None:
    """Quantize each of G tensors with delayed scaling of its own."""
    if not are_alike(xs):
        for x, out, scale in zip(xs, outs, scales, strict=True):
            quantize_scaled(x, out, None, scale, dtype, rowwise, columnwise)
        return
    torch._foreach_zero_([out[-1] for out in outs])
    constants = {"DTYPE": dtype, "POW2": False, "FOR_INF": 0.0, "SCALED": True, "BP": 0}
    xs = [as_matrix(x) for x in xs]
    for part in in_launches(len(xs)):
        _cast_groups(xs[part], outs[part], scales[part], rowwise, columnwise, **constants)


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: int, transposed: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return dtype(fl32(code · scale_inv)) in the logical shape."""
    data = data.contiguous()
    if transposed:
        return dequantize_tiles(data, scale_inv, dtype, out_dtype, transposed=True, along=0, across=0)
    out = torch.empty_like(data, dtype=out_dtype)
    options = flat_config()
    if out.numel():
        grid = (cdiv(out.numel(), options["BLOCK"]),)
        dequantize_kernel[grid](data, scale_inv, out, out.numel(), DTYPE=dtype, **options, enable_fp_fusion=False)
    return out
