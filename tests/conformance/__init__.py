"""What is compared exhaustively, a file per format: `rows(device)` gives the lines of the conformance page.

Expected bytes are computed apart from the package, by `tests/exact.py` or `ml_dtypes`. `bench/conformance.py` takes
every file of this folder.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import torch

from mezzotint.constants import E4M3, E5M2
from tests import exact

FP8 = {"e4m3": E4M3, "e5m2": E5M2}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. An item is an element, a packed pair of them, a scale; between two devices, a byte."""

    format: str
    inputs: str
    against: str
    items: int
    mismatches: int

    @property
    def family(self) -> str:
        return self.format.split()[0]

    def cells(self) -> tuple[str, ...]:
        return self.format, self.inputs, self.against, f"{self.items:,}", f"{self.mismatches:,}"


def count(got: torch.Tensor, want: np.ndarray) -> tuple[int, int]:
    """Items and mismatches; bytes as they are, FP32 by its bits with any NaN equal to any other."""
    actual = got.cpu().numpy()
    assert actual.shape == want.shape, f"{actual.shape} instead of {want.shape}"
    wrong = ~exact.same_bits(actual, want) if want.dtype == np.float32 else actual != want
    return wrong.size, int(wrong.sum())


def patterns(device: str) -> Iterator[tuple[str, np.ndarray, torch.Tensor]]:
    """What the page calls it, every 16-bit pattern as FP32, and the same in its own dtype on the device."""
    for name, values in exact.PATTERNS.items():
        x = values()
        yield f"every {name.upper()} pattern", x, torch.from_numpy(x).to(device).to(DTYPES[name])


def format_rows(device: str) -> Iterator[Row]:
    """The rows of every file here."""
    for module in iter_modules(__path__):
        yield from import_module(f"{__name__}.{module.name}").rows(device)
