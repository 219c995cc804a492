"""Statistics of a tensor against its quantized copy on CUDA: one launch reads both once.

A program reduces a part of one cell of the map; the parts of a cell are joined by a second launch, in one order. The
histograms are whole numbers that programs add to, in any order. Inside of a program every lane has sums and maxima of
its own, which are reduced once at its end: a reduction of each tile would take longer than the tile's memory.
"""

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.statistics import CELLS, MAXIMA, ROWS, SIDE, SUMS, cell_shape
from mezzotint.kernels.triton._jit import ahead
from mezzotint.kernels.triton._launch import Fast

_SIDE, _CELLS = tl.constexpr(SIDE), tl.constexpr(CELLS)
_COUNTED = len(SUMS) - 2  # sums without the two histograms
_KEPT = tl.constexpr(_COUNTED + len(MAXIMA))
_SUM_ROWS, _BIN_ROWS = tl.constexpr(_COUNTED), tl.constexpr(len(SUMS))
_TILE = 512  # elements at a time: 1024 takes 7 % longer on an H200, 2048 40 %
_FIELD, _MASK = tl.constexpr(20), tl.constexpr(2**20 - 1)  # a lane's counter: an INT64 holds three


def statistics_config(high: int, wide: int) -> dict[str, int]:
    """Return rows and columns at a time, for a cell of `high` rows and `wide` columns."""
    BC = min(256, max(16, triton.next_power_of_2(wide)))
    return {"BR": max(1, _TILE // BC), "BC": BC, "num_warps": 4}


@triton.jit
def _bins(value, counted):
    """Return how many of the counted values of an FP32 tile have each exponent."""
    bits = (value.to(tl.int32, bitcast=True) >> 23) & 0xFF
    flat = tl.reshape(bits, [bits.numel], can_reorder=True)
    return tl.histogram(flat, 256, mask=tl.reshape(counted, [bits.numel], can_reorder=True))


@triton.jit
def _total(value):
    return tl.sum(tl.sum(value, 1), 0).to(tl.float64)


@triton.jit
def _field(packed, index: tl.constexpr):
    """Return the sum over all lanes of one of their packed counters."""
    return _total((packed >> (index * _FIELD)) & _MASK)


@triton.jit
def _top(value):
    return tl.max(tl.max(value, 1), 0).to(tl.float64)


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
    nonfinite = tl.zeros([BR, BC], tl.int64)  # packed: NaN, +inf, -inf
    lost = tl.zeros([BR, BC], tl.int64)  # packed: hidden, broken, underflow
    beyond = tl.zeros([BR, BC], tl.int32)
    signal = tl.zeros([BR, BC], tl.float64)
    noise = tl.zeros([BR, BC], tl.float64)
    amax = tl.full([BR, BC], -float("inf"), tl.float32)
    # The largest |error| / |x|, as a pair: two products compare it with another, without a division.
    worst = tl.full([BR, BC], -float("inf"), tl.float64)
    worst_of = tl.full([BR, BC], 1.0, tl.float64)
    largest = tl.full([BR, BC], -float("inf"), tl.float32)
    smallest = tl.full([BR, BC], -float("inf"), tl.float32)
    before = tl.zeros([256], tl.int32)
    after = tl.zeros([256], tl.int32)
    for row in range(top_row, end_row, BR):
        for col in range(left, end_col, BC):
            r = (row + tl.arange(0, BR).to(tl.int64))[:, None]
            c = (col + tl.arange(0, BC))[None, :]
            inside = (r < end_row) & (c < end_col)
            a = tl.load(x + r * stride + c, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(quantized + r * C + c, mask=inside, other=0.0)
            size, exact = tl.abs(a), a.to(tl.float64)
            finite, held = size < float("inf"), tl.abs(b) < float("inf")
            counted, compared = inside & finite, inside & finite & held
            error = tl.where(compared, exact - b.to(tl.float64), 0.0)
            nonfinite += (inside & (a != a)).to(tl.int64)
            nonfinite += (inside & (a == float("inf"))).to(tl.int64) << _FIELD
            nonfinite += (inside & (a == -float("inf"))).to(tl.int64) << (2 * _FIELD)
            lost += (inside & (finite == 0) & held).to(tl.int64)
            lost += (counted & (held == 0)).to(tl.int64) << _FIELD
            lost += (counted & (a != 0.0) & (b == 0.0)).to(tl.int64) << (2 * _FIELD)
            signal += tl.where(compared, exact * exact, 0.0)
            noise += error * error
            amax = tl.maximum(amax, tl.where(inside & (a == a), size, -float("inf")))
            is_worse = tl.abs(error) * worst_of > worst * tl.abs(exact)
            is_worse = is_worse & compared & (a != 0.0)
            worst = tl.where(is_worse, tl.abs(error), worst)
            worst_of = tl.where(is_worse, tl.abs(exact), worst_of)
            if HAS_SCALE:
                s = tl.load(scale + r * C + c, mask=inside, other=0.0)
                known = inside & (tl.abs(s) < float("inf"))
                edge = tl.cast(top, tl.float64) * s.to(tl.float64)
                beyond += (counted & (tl.abs(exact) > edge)).to(tl.int32)
                largest = tl.maximum(largest, tl.where(known, s, -float("inf")))
                smallest = tl.maximum(smallest, tl.where(known, -s, -float("inf")))
            before += _bins(a, counted & (a != 0.0))
            after += _bins(b, inside & held & (b != 0.0))
    rows, cols = tl.maximum(end_row - top_row, 0), tl.maximum(end_col - left, 0)
    at = parts + part.to(tl.int64) * _KEPT * _CELLS + cell
    tl.store(at, (rows * cols).to(tl.float64))
    for k in tl.static_range(3):
        tl.store(at + (1 + k) * _CELLS, _field(nonfinite, k))
        tl.store(at + (4 + k) * _CELLS, _field(lost, k))
    tl.store(at + 7 * _CELLS, _total(beyond))
    tl.store(at + 8 * _CELLS, _total(signal))
    tl.store(at + 9 * _CELLS, _total(noise))
    tl.store(at + 10 * _CELLS, _top(amax))
    tl.store(at + 11 * _CELLS, _top(worst / worst_of))
    tl.store(at + 12 * _CELLS, _top(largest))
    tl.store(at + 13 * _CELLS, _top(smallest))
    b = tl.arange(0, 256)
    tl.atomic_add(bins + b, before, mask=before > 0)
    tl.atomic_add(bins + 256 + b, after, mask=after > 0)


@Fast
@triton.jit
def _join_kernel(parts, bins, table, programs):
    """Write the table FP64 (16, 256): sums, histograms and maxima of the parts FP64 (programs, 14, 256). A program is a
    row."""
    row = tl.program_id(0)
    cell = tl.arange(0, _CELLS)
    if row < _SUM_ROWS:
        total = tl.zeros([_CELLS], tl.float64)
        for part in range(programs):
            total += tl.load(parts + (part * _KEPT + row) * _CELLS + cell)
        tl.store(table + row * _CELLS + cell, total)
    elif row < _BIN_ROWS:
        counts = tl.load(bins + (row - _SUM_ROWS) * _CELLS + cell)
        tl.store(table + row * _CELLS + cell, counts.to(tl.float64))
    else:
        highest = tl.full([_CELLS], -float("inf"), tl.float64)
        for part in range(programs):
            highest = tl.maximum(highest, tl.load(parts + (part * _KEPT + row - 2) * _CELLS + cell))
        tl.store(table + row * _CELLS + cell, highest)


@Fast
@triton.jit
def _add_kernel(table, seen, columns, BL: tl.constexpr):
    """Add what was seen (16, columns) to the table: sums, or the larger maxima. A program is a row."""
    row = tl.program_id(0)
    at = tl.arange(0, BL)
    old = tl.load(table + row * columns + at, mask=at < columns)
    new = tl.load(seen + row * columns + at, mask=at < columns)
    tl.store(table + row * columns + at, tl.where(row < _BIN_ROWS, old + new, tl.maximum(old, new)), mask=at < columns)


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
    table = torch.empty((ROWS, CELLS), dtype=torch.float64, device=x.device)
    _join_kernel[(ROWS,)](parts, bins, table, programs, enable_fp_fusion=False)
    return table


def statistics_add_(table: torch.Tensor, seen: torch.Tensor) -> None:
    """Add what was seen to the table, in place."""
    columns = table.shape[1]
    _add_kernel[(ROWS,)](
        table, seen.contiguous(), columns, BL=triton.next_power_of_2(columns), num_warps=4, enable_fp_fusion=False
    )


AHEAD = (
    ahead(_statistics_kernel, "bf16 fp32 fp32 fp64 i32", HAS_SCALE=True, **statistics_config(512, 256)),
    ahead(_statistics_kernel, "fp32 fp32 fp32 fp64 i32", HAS_SCALE=False, **statistics_config(2, 3)),
    ahead(_statistics_kernel, "fp16 fp32 fp32 fp64 i32", HAS_SCALE=True, **statistics_config(64, 64)),
    ahead(_join_kernel, "fp64 i32 fp64"),
    ahead(_add_kernel, "fp64 fp64", BL=256, num_warps=4),
)
