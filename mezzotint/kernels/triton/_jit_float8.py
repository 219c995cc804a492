"""The kernels of FP8 with one scale per tensor: this file has them and their tiles, `float8.py` has the launches."""

import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels.triton._jit import (
    ahead,
    ahead_of_groups,
    as_stored,
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
from mezzotint.kernels.triton._jit_groups import chosen, own_rows
from mezzotint.kernels.triton._jit_source import larger, load_halves, store_sums
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import ACTIVATION, BACKWARD, RMSNORM, SCALED, SCALED_BACKWARD
from mezzotint.kernels.triton.float8_amax import PARTIALS, PARTIALS_EACH


def flat_config() -> dict[str, int]:
    """Return how many elements a program of the 1-D kernels takes."""
    return {"BLOCK": 4096, "num_warps": 4}


def tile_config(rowwise: bool, wide: bool = False) -> dict[str, int]:
    """Return the tile of the two-way cast, or of the transposed one alone; if `wide`, a smaller one, because a program
    reads two tiles of x."""
    if wide:
        return {"BM": 64, "BN": 64, "GROUP": 8, "num_warps": 4}
    if rowwise:
        return {"BM": 64, "BN": 128, "GROUP": 8, "num_warps": 8}
    return {"BM": 256, "BN": 64, "GROUP": 1, "num_warps": 4}


@Fast
@triton.jit
def clear_kernel(out, noop):
    if tl.load(noop) != 1.0:
        tl.store(out, 0.0)


@triton.jit
def _scale(
    source,
    value,
    count,
    eps,
    slot,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    SCALED: tl.constexpr,
    BP: tl.constexpr,
):
    """Return the scale. `source` holds it at `slot` (SCALED), or the amax (BP = 0), or `count` partial amaxes (BP > 0);
    if BP < 0 the amax is that of `value`."""
    if SCALED:
        return tl.load(source if slot is None else source + slot)
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
@triton.jit(do_not_specialize=["slot"])
def cast_kernel(
    x,
    data,
    scale_inv,
    source,
    amax,
    noop,
    numel,
    count,
    eps,
    slot,
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
    scale = _scale(source, value, count, eps, slot, DTYPE, POW2, FOR_INF, SCALED, BP)
    if pid == 0:
        tl.store(scale_inv, inverse(scale, POW2 and not SCALED))
    if data is not None:
        tl.store(data + i, as_stored(cast_fp8(value * scale, DTYPE), data), mask=i < numel)
    if amax is not None:
        raise_amax(amax if slot is None else amax + slot, value)


@Fast
@triton.jit(do_not_specialize=["slot"])
def cast_tile_kernel(
    x,
    data,
    transpose,
    scale_inv,
    source,
    amax,
    noop,
    given,
    groups,
    M,
    K,
    stride,
    count,
    eps,
    slot,
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
    ALIGNED: tl.constexpr,
):
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0) if SCALED else tl.num_programs(0) - 1 - tl.program_id(0)
    if groups is not None:
        x, scale_inv, source = chosen(x, groups, pid), chosen(scale_inv, groups, pid), chosen(source, groups, pid)
        if data is not None:
            data = chosen(data, groups, pid)
        if transpose is not None:
            transpose = chosen(transpose, groups, pid)
        if amax is not None:
            amax = chosen(amax, groups, pid)
        pid, M = own_rows(groups, pid, ALIGNED)
    PARTS: tl.constexpr = 2 if SOURCE is not None and SOURCE[0] == "halves" else 1
    N = K // PARTS
    row, tile = tile_of(pid, M, N, BM, BN, GROUP)
    r = row * BM + spread(BM, SPAN)
    first, second = load_halves(x, given, r, tile * BN + tl.arange(0, BN), M, K, stride, SOURCE, EVEN, False)
    scale = _scale(source, first, count, eps, slot, DTYPE, POW2, FOR_INF, SCALED, BP)
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
    if amax is not None:
        raise_amax(amax if slot is None else amax + slot, first if PARTS == 1 else larger(first, second))


@Fast
@triton.jit
def dequantize_kernel(data, scale_inv, out, numel, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(data + i, mask=i < numel, other=0)
    value = decode_fp8(code, DTYPE) * tl.load(scale_inv)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < numel)


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
    ahead(clear_kernel, "fp32 fp32"),
    ahead(cast_kernel, "bf16 u8 fp32 fp32 - -", **_CURRENT, **flat_config()),
    ahead(cast_kernel, "bf16 fp8e4nv fp32 fp32 - -", **{**_CURRENT, "BP": -1}, **flat_config()),
    ahead(cast_kernel, "fp32 u8 fp32 fp32 - fp32", **_GIVEN, **flat_config()),
    ahead(cast_kernel, "fp16 u8 fp32 fp32 fp32 -", **_DELAYED, **flat_config()),
    ahead(cast_tile_kernel, "bf16 u8 u8 fp32 fp32 - -", **_CURRENT, **_TILE, EVEN=True),
    ahead(cast_tile_kernel, "bf16 fp8e4nv fp8e4nv fp32 fp32 - -", **{**_CURRENT, "BP": -1}, **_TILE, EVEN=False),
    ahead(cast_tile_kernel, "fp32 - fp8e5 fp32 fp32 - fp32", **_GIVEN, **_TILE, EVEN=False),
    ahead(cast_tile_kernel, "fp16 u8 u8 fp32 fp32 fp32 -", **_DELAYED, **_TILE, EVEN=False),
    ahead(cast_tile_kernel, "bf16 u8 - fp32 fp32 fp32 -", **_DELAYED, **_TILE, EVEN=False, slot=None),
    ahead(cast_tile_kernel, "bf16 - u8 fp32 fp32 - -", **_DELAYED, **_TILE, EVEN=True, slot=None),
    *(
        ahead(cast_tile_kernel, "bf16 u8 u8 fp32 fp32 - -", given, SOURCE=kind, **_CURRENT, **_TILE, EVEN=True)
        for given, kind in (
            (RMSNORM, ("norm", False)),
            (ACTIVATION, ("activation", "gelu", False)),
            (SCALED, ("activation", "silu", True)),
        )
    ),
    *(
        ahead(cast_tile_kernel, f"bf16 {out} fp32 fp32 fp32 -", BACKWARD, SOURCE=kind, **_DELAYED, **tile, EVEN=even)
        for out, kind, tile, even in (
            ("u8 -", ("activation_backward", "gelu"), _TILE, False),
            ("u8 u8", ("halves", "silu"), _HALVES, True),
            ("- u8", ("halves", "silu"), _HALVES, False),
        )
    ),
    ahead(
        cast_tile_kernel,
        "bf16 u8 u8 fp32 fp32 - -",
        SCALED_BACKWARD,
        SOURCE=("halves", "silu"),
        **{**_CURRENT, "BP": 0},
        **_HALVES,
        EVEN=True,
    ),
    ahead_of_groups(
        cast_tile_kernel, "bf16 u8 u8 fp32 fp32 - -", **{**_CURRENT, "BP": PARTIALS_EACH}, **_TILE, EVEN=True
    ),
    ahead_of_groups(cast_tile_kernel, "fp32 - u8 fp32 fp32 fp32 -", **_DELAYED, **_TILE, EVEN=False),
    ahead(dequantize_kernel, "u8 fp32 bf16", DTYPE=E4M3, **flat_config()),
    ahead(dequantize_kernel, "u8 fp32 fp32", DTYPE=E5M2, **flat_config()),
]
