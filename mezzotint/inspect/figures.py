"""Figures: these are numbers for people to read, which say what quantization did to a tensor.

They follow from a table of sums and maxima that was gathered on the device (`kernels/statistics.py`, where each sum is
defined). There are n elements x, and x̂ is what the quantized copy of x stands for:

    amax                 max |x|, NaN left out
    smallest_scale, largest_scale    of the factors that the codes of elements are multiplied with
    underflow            share of the n elements that are finite, not 0, and became 0
    saturated            share that lay more than half a step beyond the largest value under their scale
    snr_db               10 · log10(Σ x² / Σ (x - x̂)²), infinite if nothing was lost
    mse                  Σ (x - x̂)² / number of elements that are compared: x and x̂ are finite
    relative_error       max |x - x̂| / |x| where x is not 0
    nan, posinf, neginf  how many there are in x
    hidden               how many of those became finite: nobody behind the quantization can see them
    broken               how many finite elements became NaN or infinite
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.kernels.statistics import ROW_OF, SIDE

FIRST_EXPONENT = -127  # the exponent of bin 0, which holds all that is below 2^-126

# These are the figures that are shares, sizes and ratios, and then those that are counts.
MEASURED = (*("amax", "smallest_scale", "largest_scale", "underflow", "saturated", "snr_db", "mse", "relative_error"),)
COUNTED = ("nan", "posinf", "neginf", "hidden", "broken")


@dataclass(frozen=True, slots=True)
class Figures:
    """A `Figures` has the figures of one tensor, or of one cell of its map; None if there was nothing to measure."""

    count: int
    amax: float | None
    smallest_scale: float | None
    largest_scale: float | None
    underflow: float | None
    saturated: float | None
    snr_db: float | None
    mse: float | None
    relative_error: float | None
    nan: int
    posinf: int
    neginf: int
    hidden: int
    broken: int

    @property
    def nonfinite(self) -> int:
        """Return how many elements are NaN or infinite."""
        return self.nan + self.posinf + self.neginf


def figures_of(values: Sequence[float]) -> Figures:
    """Return the figures of one column of a table, 16 numbers on the host."""

    def of(name: str) -> float:
        return values[ROW_OF[name]]

    def largest(name: str) -> float | None:
        return None if of(name) == -math.inf else of(name)

    count = of("count")
    compared = count - of("nan") - of("posinf") - of("neginf") - of("broken")
    smallest = largest("negative_scale")
    return Figures(
        count=int(count),
        amax=largest("amax"),
        smallest_scale=None if smallest is None else abs(smallest),
        largest_scale=largest("scale"),
        underflow=of("underflow") / count if count else None,
        saturated=of("saturated") / count if count else None,
        snr_db=decibels(of("signal"), of("noise")),
        mse=of("noise") / compared if compared else None,
        relative_error=largest("relative"),
        **{name: int(of(name)) for name in COUNTED},
    )


def decibels(signal: float, noise: float) -> float | None:
    """Return 10 · log10(signal / noise), which is infinite without noise, or None without signal."""
    if signal == 0:
        return None
    return math.inf if noise == 0 else 10 * (math.log10(signal) - math.log10(noise))


def exponents_of(table: torch.Tensor) -> dict[int, tuple[int, int]]:
    """Return e → how many elements of x, and of x̂, have 2^e ≤ |·| < 2^(e+1), from the first such e to the last. The
    exponent -127 counts all that is smaller."""
    before, after = table[ROW_OF["exponents"] : ROW_OF["quantized"] + 1].tolist()  # the two rows are neighbours
    used = [b for b, counts in enumerate(zip(before, after, strict=True)) if any(counts)]
    bins = range(used[0], used[-1] + 1) if used else range(0)
    return {b + FIRST_EXPONENT: (int(before[b]), int(after[b])) for b in bins}


def map_of(table: torch.Tensor) -> list[list[Figures]]:
    """Return the figures of each cell of the tensor, 16 rows of 16."""
    columns = table.t().tolist()
    return [[figures_of(columns[SIDE * i + j]) for j in range(SIDE)] for i in range(SIDE)]


def as_plain(figures: Figures) -> dict[str, Any]:
    """Return the figures by name as JSON has them: a number that is not finite becomes None."""
    made: dict[str, Any] = {"count": figures.count}
    for name in (*MEASURED, *COUNTED):
        value = getattr(figures, name)
        made[name] = value if value is None or math.isfinite(value) else None
    return made
