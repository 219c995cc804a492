"""Statistics of a tensor against its quantized copy on CUDA: one launch reads both once.

A program reduces a part of one cell of the map; the parts of a cell are joined after the launch, in one order. The
histograms are whole numbers that programs add to, in any order.
"""

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.statistics import CELLS, MAXIMA, SIDE, SUMS, cell_shape
from mezzotint.kernels.triton._jit import ahead
from mezzotint.kernels.triton._launch import Fast

_SIDE, _CELLS = tl.constexpr(SIDE), tl.constexpr(CELLS)
_COUNTED = len(SUMS) - 2  # sums without the two histograms
_KEPT = tl.constexpr(_COUNTED + len(MAXIMA))


def statistics_config(high: int, wide: int) -> dict[str, int]:
    """Return rows and columns at a time, for a cell of `high` rows and `wide` columns."""
    BC = min(256, max(16, triton.next_power_of_2(wide)))
    return {"BR": max(1, 2048 // BC), "BC": BC, "num_warps": 4}


@triton.jit
def _bins(value, counted):
    """Return how many of the counted values of an FP32 tile have each exponent."""
    bits = (value.to(tl.int32, bitcast=True) >> 23) & 0xFF
    flat = tl.reshape(bits, [bits.numel], can_reorder=True)
    return tl.histogram(flat, 256, mask=tl.reshape(counted, [bits.numel], can_reorder=True))


@triton.jit
def _total(value):
    return tl.sum(tl.sum(value.to(tl.float64), 1), 0)


@triton.jit
def _top(value, counted):
    return tl.max(tl.max(tl.where(counted, value, -float("inf")), 1), 0)


@Fast
@triton.jit
def _statistics_kernel(
    x,
    quantized,
    scale,
    parts,
    bins,
    top,
    R,
    C,
    stride,
    high,
    wide,
    part_rows,
    HAS_SCALE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Write parts FP64 (programs of a cell, 14, 256) and add to bins INT32 (2, 256). `top` is the edge. A program is
    (cell, part)."""
    cell, part = tl.program_id(0), tl.program_id(1)
    i, j = cell // _SIDE, cell % _SIDE
    top_row = i.to(tl.int64) * high + part * part_rows
    end_row = tl.minimum(tl.minimum(top_row + part_rows, (i.to(tl.int64) + 1) * high), R)
    left, end_col = j * wide, tl.minimum((j + 1) * wide, C)
    count = tl.zeros([], tl.float64)
    nan, posinf, neginf, hidden, broken, under, over = count, count, count, count, count, count, count
    signal, noise = count, count
    lowest = tl.full([], -float("inf"), tl.float64)
    amax, relative, largest, smallest = lowest, lowest, lowest, lowest
    before = tl.zeros([256], tl.int32)
    after = tl.zeros([256], tl.int32)
    for row in range(top_row, end_row, BR):
        for col in range(left, end_col, BC):
            r = (row + tl.arange(0, BR).to(tl.int64))[:, None]
            c = (col + tl.arange(0, BC))[None, :]
            inside = (r < end_row) & (c < end_col)
            a32 = tl.load(x + r * stride + c, mask=inside, other=0.0).to(tl.float32)
            b32 = tl.load(quantized + r * C + c, mask=inside, other=0.0)
            a, b = a32.to(tl.float64), b32.to(tl.float64)
            size = tl.abs(a)
            finite, held = size < float("inf"), tl.abs(b) < float("inf")
            counted, compared = inside & finite, inside & finite & held
            error = tl.where(compared, a - b, 0.0)
            count += _total(inside)
            nan += _total(inside & (a != a))
            posinf += _total(inside & (a == float("inf")))
            neginf += _total(inside & (a == -float("inf")))
            hidden += _total(inside & (finite == 0) & held)
            broken += _total(counted & (held == 0))
            under += _total(counted & (a != 0.0) & (b == 0.0))
            signal += _total(tl.where(compared, a * a, 0.0))
            noise += _total(error * error)
            amax = tl.maximum(amax, _top(size, inside & (a == a)))
            ratio = tl.abs(error) / tl.where(size > 0.0, size, 1.0)
            relative = tl.maximum(relative, _top(ratio, compared & (a != 0.0)))
            if HAS_SCALE:
                s = tl.load(scale + r * C + c, mask=inside, other=0.0).to(tl.float64)
                known = inside & (tl.abs(s) < float("inf"))
                over += _total(counted & (size > tl.cast(top, tl.float64) * s))
                largest = tl.maximum(largest, _top(s, known))
                smallest = tl.maximum(smallest, _top(-s, known))
            before += _bins(a32, counted & (a != 0.0))
            after += _bins(b32, inside & held & (b != 0.0))
    at = parts + part.to(tl.int64) * _KEPT * _CELLS + cell
    kept = (count, nan, posinf, neginf, hidden, broken, under, over, signal, noise, amax, relative, largest, smallest)
    for k in tl.static_range(_KEPT):
        tl.store(at + k * _CELLS, kept[k])
    b = tl.arange(0, 256)
    tl.atomic_add(bins + b, before, mask=before > 0)
    tl.atomic_add(bins + 256 + b, after, mask=after > 0)


def tensor_statistics(
    x: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor | None, edge: float
) -> torch.Tensor:
    """Return the table (16, 256) of x. Its rows may lie apart; the other tensors are as dequantization makes them."""
    x = x if x.stride(1) == 1 else x.contiguous()
    quantized, scale = quantized.contiguous(), None if scale is None else scale.contiguous()
    rows, cols = x.shape
    high, wide = cell_shape(rows, cols)
    config = statistics_config(high, wide)
    programs = max(1, min(cdiv(high, config["BR"]), 16))
    parts = torch.empty((programs, _COUNTED + len(MAXIMA), CELLS), dtype=torch.float64, device=x.device)
    bins = torch.zeros((2, CELLS), dtype=torch.int32, device=x.device)
    _statistics_kernel[(CELLS, programs)](
        x,
        quantized,
        quantized if scale is None else scale,
        parts,
        bins,
        edge,
        rows,
        cols,
        x.stride(0),
        high,
        wide,
        cdiv(high, programs),
        HAS_SCALE=scale is not None,
        **config,
        enable_fp_fusion=False,
    )
    return torch.cat([parts[:, :_COUNTED].sum(0), bins.double(), parts[:, _COUNTED:].amax(0)])


AHEAD = (
    ahead(_statistics_kernel, "bf16 fp32 fp32 fp64 i32", HAS_SCALE=True, **statistics_config(512, 256)),
    ahead(_statistics_kernel, "fp32 fp32 fp32 fp64 i32", HAS_SCALE=False, **statistics_config(2, 3)),
    ahead(_statistics_kernel, "fp16 fp32 fp32 fp64 i32", HAS_SCALE=True, **statistics_config(64, 64)),
)
