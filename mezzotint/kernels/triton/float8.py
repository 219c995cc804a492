"""FP8 with one scale per tensor on CUDA.

Current scaling, two launches. The first (`float8_amax.py`) leaves a few partial maxima, which every program of the cast
reduces itself (they sit in the L2 cache) instead of waiting for a third launch. The cast walks x backwards: what the
first pass read last is still in the cache. A tensor that one program sees whole takes one launch. A source that is
computed in the first pass leaves the amax of what it writes.

Delayed scaling, one pass: the scale is given, the amax is taken on the way by an atomic maximum.

With a source (`_jit_source.py`) that is inside, both passes compute what they do not read.

The cast reads each element once. Without a transposed copy it is flat, 1-D. With one, a program holds a tile and writes
it in both directions; see `spread` for the order of its rows.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, E5M2, cdiv
from mezzotint.kernels.quantize_ops import Made
from mezzotint.kernels.triton._dequantize import dequantize_tiles
from mezzotint.kernels.triton._jit import (
    ahead,
    as_rows,
    cast_fp8,
    decode_fp8,
    drop_nan,
    for_inf,
    inverse,
    natural_span,
    raise_amax,
    scale_from_amax,
    spread,
    store_tile,
    store_transposed,
    tile_of,
)
from mezzotint.kernels.triton._jit_source import Input, Way, larger, load_halves, read, store_sums, way
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import ACTIVATION, BACKWARD, RMSNORM, SCALED, SCALED_BACKWARD, finish_source
from mezzotint.kernels.triton.activation import amax_of, write_with_amax
from mezzotint.kernels.triton.float8_amax import PARTIALS, amax, amax_partials, source_partials

__all__ = ["PARTIALS", "amax", "amax_partials", "dequantize", "quantize", "quantize_scaled"]

TAKES_SOURCES = True


def flat_config() -> dict[str, int]:
    """Elements per program of the 1-D kernels."""
    return {"BLOCK": 4096, "num_warps": 4}


def tile_config(rowwise: bool, wide: bool = False) -> dict[str, int]:
    """Tile of the two-way cast, and of the transposed one alone; a smaller one where a program reads two of x."""
    if wide:
        return {"BM": 64, "BN": 64, "GROUP": 8, "num_warps": 4}
    if rowwise:
        return {"BM": 64, "BN": 128, "GROUP": 8, "num_warps": 8}
    return {"BM": 256, "BN": 64, "GROUP": 1, "num_warps": 4}


@Fast
@triton.jit
def _clear_kernel(out, noop):
    if tl.load(noop) != 1.0:
        tl.store(out, 0.0)


@triton.jit
def _scale(
    source,
    value,
    count,
    eps,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    SCALED: tl.constexpr,
    BP: tl.constexpr,
):
    """The scale: `source` holds it (SCALED), or the amax (BP = 0), or `count` partial maxima; BP < 0: of `value`."""
    if SCALED:
        return tl.load(source)
    else:
        if BP < 0:
            amax = drop_nan(tl.max(tl.abs(value)))
        elif BP == 0:
            amax = tl.load(source)
        else:
            p = tl.arange(0, BP)
            amax = tl.max(tl.load(source + p, mask=p < count, other=0.0))
        return scale_from_amax(amax, eps, DTYPE, POW2, FOR_INF)


@Fast
@triton.jit
def _cast_kernel(
    x,
    data,
    scale_inv,
    source,
    amax,
    noop,
    numel,
    count,
    eps,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    SCALED: tl.constexpr,
    BP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    block = (pid if SCALED else tl.num_programs(0) - 1 - pid).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < numel, other=0.0).to(tl.float32)
    scale = _scale(source, value, count, eps, DTYPE, POW2, FOR_INF, SCALED, BP)
    if pid == 0:
        tl.store(scale_inv, inverse(scale, POW2 and not SCALED))
    if data is not None:
        tl.store(data + i, cast_fp8(value * scale, DTYPE), mask=i < numel)
    if SCALED:
        raise_amax(amax, value)


@Fast
@triton.jit
def _cast_tile_kernel(
    x,
    data,
    transpose,
    scale_inv,
    source,
    amax,
    noop,
    given,
    M,
    K,
    stride,
    count,
    eps,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    SCALED: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    PARTS: tl.constexpr = 2 if SOURCE is not None and SOURCE[0] == "halves" else 1
    N = K // PARTS
    row, tile = tile_of(pid if SCALED else tl.num_programs(0) - 1 - pid, M, N, BM, BN, GROUP)
    r = row * BM + spread(BM, SPAN)
    first, second = load_halves(x, given, r, tile * BN + tl.arange(0, BN), M, K, stride, SOURCE, EVEN, False)
    scale = _scale(source, first, count, eps, DTYPE, POW2, FOR_INF, SCALED, BP)
    if pid == 0:
        tl.store(scale_inv, inverse(scale, POW2 and not SCALED))
    for part in tl.static_range(PARTS):
        col = part * (N // BN) + tile
        c = col * BN + tl.arange(0, BN)
        value = (first if part == 0 else second).to(tl.float32)
        store_sums(given, value, row, c, K, SOURCE)
        code = cast_fp8(value * scale, DTYPE)
        if data is not None:
            store_tile(data, code, r, c, M, K, EVEN)
        if transpose is not None:
            store_transposed(transpose, code, row, col, M, K, BM, BN, SPAN, EVEN)
    if SCALED:
        raise_amax(amax, first if PARTS == 1 else larger(first, second))


@Fast
@triton.jit
def _dequantize_kernel(data, scale_inv, out, numel, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(data + i, mask=i < numel, other=0)
    value = decode_fp8(code, DTYPE) * tl.load(scale_inv)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < numel)


def _cast(
    source: Input,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    scaling: torch.Tensor,
    rowwise: bool,
    columnwise: bool,
    config: dict[str, int] | None,
    eps: float = 0.0,
    **constants: Any,
) -> None:
    """One launch: a matrix into data, transpose, scale_inv and, with a given scale, amax."""
    data = out[0] if rowwise else None
    transpose = out[rowwise] if columnwise else None
    scale_inv = out[rowwise + columnwise]
    amax = out[-1] if constants["SCALED"] else None
    x, M, K = source.x, source.M, source.K
    numel, count = M * K, scaling.numel()
    # An empty tensor has a scale too: one program, all masked.
    if numel == 0 or (transpose is None and source.kind is None and x.is_contiguous()):
        options = config or flat_config()
        grid = (max(1, cdiv(numel, options["BLOCK"])),)
        _cast_kernel[grid](
            x,
            data,
            scale_inv,
            scaling,
            amax,
            noop,
            numel,
            count,
            eps or None,
            **constants,
            **options,
            enable_fp_fusion=False,
        )
        return
    options = config or tile_config(rowwise, source.is_wide())
    options.setdefault("SPAN", natural_span(options["BM"], options["BN"], options["num_warps"]))
    grid = (cdiv(M, options["BM"]) * cdiv(source.columns(), options["BN"]),)
    partials = source.partials(cdiv(M, options["BM"]))
    _cast_tile_kernel[grid](
        x,
        data,
        transpose,
        scale_inv,
        scaling,
        amax,
        noop,
        source.given(partials),
        M,
        K,
        x.stride(0),
        count,
        eps or None,
        SOURCE=source.kind,
        **constants,
        **options,
        EVEN=M % options["BM"] == 0 and K % options["BN"] == 0,
        enable_fp_fusion=False,
    )
    finish_source(source, partials)


def quantize(
    x: torch.Tensor | Made,
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
    """Current scaling."""
    if isinstance(x, torch.Tensor):
        x = as_rows(x)  # what the cast sees: a copy is contiguous where x was not
    given = amax is not None
    alone = not given and config is None and _fits_one_program(x, rowwise, columnwise)
    how: Way = "before"
    if isinstance(x, Made):
        how = way(x, "delayed" if given or alone else "current", _width(config))
    if isinstance(x, Made) and how == "first":
        (x, amax), how, given = write_with_amax(x), "before", True
    source = read(x, how)
    if alone:
        amax = out[-1]  # not read
        if source.kind is not None:  # the tile that all of x fits in
            config = tile_config(rowwise, source.columns() < source.K)
    elif amax is None:
        if source.kind is None:
            source = source._replace(x=source.x.contiguous())
            amax = amax_partials(source.x, noop)
        elif source.kind[0] == "norm":
            amax = source_partials(source)
        else:
            assert isinstance(x, Made)
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


def _fits_one_program(x: torch.Tensor | Made, rowwise: bool, columnwise: bool) -> bool:
    """Whether the program of the cast sees all of x, and can take the amax itself: no first launch."""
    *rows, K = x.shape
    M, options = math.prod(rows), tile_config(rowwise, wide=isinstance(x, Made))  # the smaller, whatever it is made of
    tile, flat = options["BM"] >= M and options["BN"] >= K, flat_config()["BLOCK"] >= M * K
    if M * K == 0 or columnwise:
        return M * K > 0 and tile
    if isinstance(x, Made):
        return tile and flat  # whether it is taken in or not
    return flat if x.is_contiguous() else tile


def _width(config: dict[str, int] | None) -> int:
    """Of the tiles of halves."""
    return (config or tile_config(True, wide=True)).get("BN", 0)


def quantize_scaled(
    x: torch.Tensor | Made,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    scale: torch.Tensor,
    dtype: int,
    rowwise: bool,
    columnwise: bool,
    config: dict[str, int] | None = None,
) -> None:
    """Delayed scaling: the last buffer is amax."""
    if noop is None:
        out[-1].zero_()
    else:
        _clear_kernel[(1,)](out[-1], noop, num_warps=1, enable_fp_fusion=False)
    constants = {"DTYPE": dtype, "POW2": False, "FOR_INF": 0.0, "SCALED": True, "BP": 0}
    source = read(x, way(x, "delayed", _width(config)))
    _cast(source, out, noop, scale, rowwise, columnwise, config, **constants)


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: int, transposed: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """dtype(fl32(code · scale_inv)) in the logical shape."""
    data = data.contiguous()
    if transposed:
        return dequantize_tiles(data, scale_inv, dtype, out_dtype, transposed=True, along=0, across=0)
    out = torch.empty_like(data, dtype=out_dtype)
    options = flat_config()
    if out.numel():
        grid = (cdiv(out.numel(), options["BLOCK"]),)
        _dequantize_kernel[grid](data, scale_inv, out, out.numel(), DTYPE=dtype, **options, enable_fp_fusion=False)
    return out


_CURRENT = {
    "DTYPE": E4M3,
    "POW2": False,
    "FOR_INF": for_inf(torch.float32, False),
    "SCALED": False,
    "BP": PARTIALS,
}
_GIVEN = {"DTYPE": E5M2, "POW2": True, "FOR_INF": for_inf(torch.float32, True), "SCALED": False, "BP": 0}
_DELAYED = {"DTYPE": E4M3, "POW2": False, "FOR_INF": 0.0, "SCALED": True, "BP": 0}
_TILE, _HALVES = (
    options | {"SPAN": natural_span(options["BM"], options["BN"], options["num_warps"])}
    for options in (tile_config(True), tile_config(True, wide=True))
)

AHEAD = [
    ahead(_clear_kernel, "fp32 fp32"),
    ahead(_cast_kernel, "bf16 u8 fp32 fp32 - -", **_CURRENT, **flat_config()),
    ahead(_cast_kernel, "bf16 u8 fp32 fp32 - -", **{**_CURRENT, "BP": -1}, **flat_config()),
    ahead(_cast_kernel, "fp32 u8 fp32 fp32 - fp32", **_GIVEN, **flat_config()),
    ahead(_cast_kernel, "fp16 u8 fp32 fp32 fp32 -", **_DELAYED, **flat_config()),
    ahead(_cast_tile_kernel, "bf16 u8 u8 fp32 fp32 - -", **_CURRENT, **_TILE, EVEN=True),
    ahead(_cast_tile_kernel, "bf16 u8 u8 fp32 fp32 - -", **{**_CURRENT, "BP": -1}, **_TILE, EVEN=False),
    ahead(_cast_tile_kernel, "fp32 - u8 fp32 fp32 - fp32", **_GIVEN, **_TILE, EVEN=False),
    ahead(_cast_tile_kernel, "fp16 u8 u8 fp32 fp32 fp32 -", **_DELAYED, **_TILE, EVEN=False),
    ahead(_cast_tile_kernel, "bf16 u8 - fp32 fp32 fp32 -", **_DELAYED, **_TILE, EVEN=False),
    *(
        ahead(_cast_tile_kernel, "bf16 u8 u8 fp32 fp32 - -", given, SOURCE=kind, **_CURRENT, **_TILE, EVEN=True)
        for given, kind in (
            (RMSNORM, ("norm", False)),
            (ACTIVATION, ("activation", "gelu", False)),
            (SCALED, ("activation", "silu", True)),
        )
    ),
    *(
        ahead(_cast_tile_kernel, f"bf16 {out} fp32 fp32 fp32 -", BACKWARD, SOURCE=kind, **_DELAYED, **tile, EVEN=even)
        for out, kind, tile, even in (
            ("u8 -", ("activation_backward", "gelu"), _TILE, False),
            ("u8 u8", ("halves", "silu"), _HALVES, True),
            ("- u8", ("halves", "silu"), _HALVES, False),
        )
    ),
    ahead(
        _cast_tile_kernel,
        "bf16 u8 u8 fp32 fp32 - -",
        SCALED_BACKWARD,
        SOURCE=("halves", "silu"),
        **{**_CURRENT, "BP": 0},
        **_HALVES,
        EVEN=True,
    ),
    ahead(_dequantize_kernel, "u8 fp32 bf16", DTYPE=E4M3, **flat_config()),
    ahead(_dequantize_kernel, "u8 fp32 fp32", DTYPE=E5M2, **flat_config()),
]
