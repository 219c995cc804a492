"""Statistics of a quantization: this module counts what it does to a matrix. `mezzotint.inspect` builds on its leaf op.

The op compares x (R, C) with x̂, the values of its quantized copy, and returns FP64 (16, 256). The numbers in the rows
of `SUMS` add up, of those in the rows of `MAXIMA` the largest counts: so two results, of microbatches or of ranks, are
joined by adding the first rows and taking the maximum of the second. Counts are whole numbers, exact below 2^53.

All rows but the two histograms are a map: the matrix is cut into 16 by 16 cells of ceil(R/16) by ceil(C/16) elements,
cell (i, j) at 16·i + j. The figure of the whole matrix is the sum, or the maximum, of its row. Where nothing was seen a
sum is 0 and a maximum -inf. x is finite if it is neither NaN nor an infinity; "compared" are finite x whose x̂ is
finite.

    count       elements
    nan         NaN in x;  posinf, neginf: infinities
    hidden      x is not finite, and x̂ is
    broken      x is finite, and x̂ is not
    underflow   x is finite and not 0, and x̂ is 0
    saturated   x is finite, and |x| > edge · scale: more than half a step beyond the largest value under its scale
    signal      Σ x² of what is compared;  noise: Σ (x - x̂)²
    exponents   of finite x that are not 0, by the eight exponent bits of FP32: bin b > 0 counts 2^(b-127) ≤ |x| <
                2^(b-126), bin 0 what is below 2^-126;  quantized: the same of x̂
    amax        max |x| without NaN
    relative    max |x - x̂| / |x| of what is compared and not 0
    scale       the largest scale, and in the next row the negative of the smallest one

The scale of an element is the factor of its code. `edge` is the largest value of the element type plus half of the step
that leads there: what is above it would round to a larger value, if there were one.
"""

from collections.abc import Callable

import torch

from mezzotint.constants import DType, cdiv
from mezzotint.formats import KINDS
from mezzotint.kernels._lib import leaf, run_op
from mezzotint.kernels.operand import Operand, dequantize_operand

SIDE = 16  # cells along a dimension
CELLS = SIDE * SIDE  # and bins of a histogram
SUMS = (
    *("count", "nan", "posinf", "neginf", "hidden", "broken", "underflow", "saturated", "signal", "noise"),
    *("exponents", "quantized"),
)
NONFINITE = ("nan", "posinf", "neginf")
MAXIMA = ("amax", "relative", "scale", "negative_scale")
ROWS = len(SUMS) + len(MAXIMA)
ROW_OF = {name: row for row, name in enumerate((*SUMS, *MAXIMA))}

# Each element type has the code of 1, the bits of a code, and the largest value plus half of the step that leads there.
ELEMENTS: dict[int, tuple[int, int, float]] = {
    int(DType.kFloat8E4M3): (0x38, 8, 448.0 + 16.0),
    int(DType.kFloat8E5M2): (0x3C, 8, 57344.0 + 4096.0),
    int(DType.kFloat4E2M1): (0x2, 4, 6.0 + 1.0),
    int(DType.kFloat6E3M2): (0xC, 6, 28.0 + 2.0),
    int(DType.kFloat6E2M3): (0x8, 6, 7.5 + 0.25),
}


def cell_shape(rows: int, cols: int) -> tuple[int, int]:
    """Return the rows and the columns of a cell, at least one each."""
    return max(1, cdiv(rows, SIDE)), max(1, cdiv(cols, SIDE))


def _like_result(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((ROWS, CELLS), dtype=torch.float64)


def tensor_statistics_reference(
    x: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor | None, edge: float
) -> torch.Tensor:
    """Return the table (16, 256) of x (R, C) against the values of its copy, FP32 (R, C). `scale` is FP32 (R, C), or
    None if there is none: then nothing is saturated."""
    a, b = x.double(), quantized.double()
    finite, held = a.isfinite(), b.isfinite()
    compared, size = finite & held, a.abs()
    error = torch.where(compared, a - b, 0.0)
    is_zero = a == 0
    beyond = torch.zeros_like(finite) if scale is None else finite & (size > edge * scale.double())
    sums = [
        torch.ones_like(finite),
        a.isnan(),
        a == float("inf"),
        a == -float("inf"),
        ~finite & held,
        finite & ~held,
        finite & ~is_zero & (b == 0),
        beyond,
        torch.where(compared, a * a, 0.0),
        error * error,
    ]
    lowest = torch.full_like(a, -float("inf"))
    factor = lowest if scale is None else scale.double()
    maxima = [
        torch.where(a.isnan(), lowest, size),
        torch.where(compared & ~is_zero, error.abs() / size, lowest),
        torch.where(factor.isfinite(), factor, lowest),
        torch.where(factor.isfinite(), -factor, lowest),
    ]
    rows = [_cells(each.double(), 0.0, torch.sum) for each in sums]
    rows += [_exponents(x.float()), _exponents(quantized)]
    rows += [_cells(each, -float("inf"), torch.amax) for each in maxima]
    return torch.stack(rows)


def _cells(value: torch.Tensor, empty: float, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Reduce each cell of (R, C), padded with `empty`, and return [256]."""
    rows, cols = value.shape
    high, wide = cell_shape(rows, cols)
    whole = torch.nn.functional.pad(value, (0, SIDE * wide - cols, 0, SIDE * high - rows), value=empty)
    return reduce(whole.view(SIDE, high, SIDE, wide), dim=(1, 3)).reshape(CELLS)


def _exponents(value: torch.Tensor) -> torch.Tensor:
    """Return [256]: how many finite FP32 values that are not 0 have each of the exponents."""
    bits = value.contiguous().view(torch.int32).reshape(-1)
    is_counted = value.isfinite().reshape(-1) & (value != 0).reshape(-1)
    counts = torch.zeros(CELLS, dtype=torch.int64, device=value.device)
    counts.index_add_(0, (bits >> 23) & 0xFF, is_counted.long())
    return counts.double()


tensor_statistics = leaf(
    "tensor_statistics(Tensor x, Tensor quantized, Tensor? scale, float edge) -> Tensor",
    fake=lambda x, quantized, scale, edge: _like_result(x),
    cpu=tensor_statistics_reference,
    cuda="statistics:tensor_statistics",
)


def operand_statistics_reference(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    kind: str,
    dtype: int,
    swizzled: bool,
    e4m3_max: int,
) -> torch.Tensor:
    """Return the table of x (R, C) and its quantized copy, whose fields are those of an `Operand`.

    The scales are found by dequantizing codes that all stand for 1.
    """
    size = x.shape[1]
    op = Operand(data, scale, amax, kind, dtype, swizzled, e4m3_max)
    ones = Operand(_ones_like(data, kind, dtype), scale, amax, kind, dtype, swizzled, e4m3_max)
    values, scales = [dequantize_operand(each, size, torch.float32) for each in (op, ones)]
    return run_op(tensor_statistics, x, values, scales, ELEMENTS[dtype][2])


def _ones_like(data: torch.Tensor, kind: str, dtype: int) -> torch.Tensor:
    """Return codes, packed as `data` is, that all stand for 1."""
    code, bits, _ = ELEMENTS[dtype]
    count, width = KINDS[kind].packed
    group = sum(code << bits * i for i in range(count)).to_bytes(width, "little")
    if width == 1:
        return torch.full_like(data, group[0])
    pattern = torch.tensor(list(group), dtype=torch.uint8, device=data.device)
    return pattern.repeat(data.shape[0], data.shape[1] // width)


operand_statistics = leaf(
    "operand_statistics(Tensor x, Tensor data, Tensor? scale, Tensor? amax, str kind, int dtype, bool swizzled, "
    "int e4m3_max) -> Tensor",
    fake=lambda x, *given: _like_result(x),
    cpu=operand_statistics_reference,
)


def statistics_add_reference(table: torch.Tensor, seen: torch.Tensor) -> None:
    """Merge what was seen, (16, …), into the table of the same shape, in place: add sums, take the larger maxima."""
    count = len(SUMS)
    table[:count].add_(seen[:count])
    table[count:].copy_(torch.maximum(table[count:], seen[count:]))


statistics_add_ = leaf(
    "statistics_add_(Tensor(a!) table, Tensor seen) -> ()",
    fake=lambda table, seen: None,
    cpu=statistics_add_reference,
    cuda="statistics:statistics_add_",
)


def statistics_whole_reference(seen: torch.Tensor) -> torch.Tensor:
    """Return [16], the figures of the whole matrix, of a table (16, 256); a histogram's is how many values it
    counts."""
    count = len(SUMS)
    return torch.cat([seen[:count].sum(1), seen[count:].amax(1)])


statistics_whole = leaf(
    "statistics_whole(Tensor seen) -> Tensor",
    fake=lambda seen: seen.new_empty(seen.shape[0]),
    cpu=statistics_whole_reference,
)


def nonfinite_add_reference(counts: torch.Tensor, x: torch.Tensor) -> None:
    """Add how many elements of x are NaN, +inf and -inf to `counts` int64 [3], in place."""
    counts.add_(torch.stack([x.isnan().sum(), (x == float("inf")).sum(), (x == -float("inf")).sum()]))


nonfinite_add_ = leaf(
    "nonfinite_add_(Tensor(a!) counts, Tensor x) -> ()",
    fake=lambda counts, x: None,
    cpu=nonfinite_add_reference,
)


def empty_statistics(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a table (16, …) in which nothing was seen."""
    table = torch.zeros(shape, dtype=torch.float64, device=device)
    table[len(SUMS) :] = -float("inf")
    return table
