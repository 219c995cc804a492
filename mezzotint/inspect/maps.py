"""Coarse maps of tensors in a file: this module packs them as 16-bit integers in base64.

A map has 256 cells, and an inspected step has a map of several figures for each tensor. Text of rounded numbers would
take longer to write than the step that is inspected.
"""

import base64
import struct

import torch

from mezzotint.files import bytes_of
from mezzotint.kernels.statistics import ROW_OF

# This maps a figure to how many units make up 1: tenths of a decibel, ten-thousandths of all elements of a cell.
UNITS = {"snr_db": 10, "underflow": 10_000, "saturated": 10_000}
_NONE = -(1 << 15)  # a cell without this figure


def pack_maps(tables: torch.Tensor) -> list[dict[str, str]]:
    """Return the figures of `UNITS` in the 256 cells of each of the tables (n, 16, 256), row by row."""
    count, signal, noise = (tables[:, ROW_OF[name]] for name in ("count", "signal", "noise"))
    made = {"snr_db": 10 * (signal.log10() - noise.log10())}
    made |= {name: tables[:, ROW_OF[name]] / count for name in ("underflow", "saturated")}
    packed = {name: _pack(values * UNITS[name]) for name, values in made.items()}
    return [dict(zip(packed, texts, strict=True)) for texts in zip(*packed.values(), strict=True)]


def _pack(values: torch.Tensor) -> list[str]:
    whole = torch.where(values.isfinite(), values.round(), _NONE).short()
    return [base64.b64encode(bytes_of(row)).decode("ascii") for row in whole]


def unpack_map(packed: dict[str, str]) -> dict[str, list[float | None]]:
    """Return the figures that `pack_map` has packed; None for a cell without the figure."""
    return {name: _unpack(text, UNITS[name]) for name, text in packed.items()}


def _unpack(text: str, units: int) -> list[float | None]:
    whole = struct.iter_unpack("<h", base64.b64decode(text))
    return [None if value == _NONE else value / units for (value,) in whole]
