"""This module has the cases that are measured: each format with its options, its leaf op, and
the bytes that it must move.

    bytes = reads · |x| + every buffer that the format's geometry function names

x is read once if scales are given or local to a block, and twice if a scale needs all of x (or all of a column) first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.constants import E4M3
from mezzotint.kernels._lib import Buffers
from mezzotint.kernels.float8 import (
    float8_amax,
    float8_buffers,
    float8_dequantize,
    float8_quantize,
    float8_quantize_scaled,
)
from mezzotint.kernels.float8_block import float8_block_buffers, float8_block_dequantize, float8_block_quantize
from mezzotint.kernels.float8_rowwise import float8_rowwise_buffers, float8_rowwise_dequantize, float8_rowwise_quantize
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK
from mezzotint.kernels.mxfp8 import mxfp8_buffers, mxfp8_dequantize, mxfp8_quantize
from mezzotint.kernels.nvfp4 import nvfp4_buffers, nvfp4_dequantize, nvfp4_quantize

Shape = tuple[int, int]
Named = dict[str, torch.Tensor]

DIRECTIONS = {"row": (True, False), "column": (False, True), "both": (True, True)}
LONGEST_ROW = 16384  # elements that the registers of one program hold
TARGETS = {1: 0.85, 2: 0.80}  # reads of x → the fraction of a copy's bandwidth to reach


@dataclass(frozen=True, slots=True)
class Case:
    """A `Case` is one format with one set of options."""

    name: str
    launch: str  # "module:function" in mezzotint.kernels.triton
    op: Callable[..., Any]
    options: Callable[[bool, bool, torch.device], tuple[Any, ...]]  # what the op takes after x
    buffers: Callable[[Shape, bool, bool], Buffers]
    reads: Callable[[Shape, bool, bool], int]
    # (buffers, whether column-wise, logical shape, output dtype) → the leaf op of dequantization and its arguments
    back: Callable[[Named, bool, Shape, torch.dtype], tuple[Callable[..., Any], tuple[Any, ...]]] | None = None
    directions: tuple[str, ...] = tuple(DIRECTIONS)

    def run(self, x: torch.Tensor, rowwise: bool, columnwise: bool) -> Named:
        """Return the op's outputs by name."""
        out = self.op(x, *self.options(rowwise, columnwise, x.device))
        names = self.buffers((x.shape[0], x.shape[1]), rowwise, columnwise)
        return dict(zip(names, out if isinstance(out, list) else [out], strict=True))

    def jobs(self) -> list[str]:
        """Return the directions of quantization and those of dequantization."""
        return [*self.directions, *(("dequantize row", "dequantize column") if self.back else ())]

    def prepared(self, job: str, x: torch.Tensor) -> "tuple[Callable[[torch.Tensor], Any], int, int]":
        """Return the call to time, the reads of its input and the bytes that it must move."""
        shape = (x.shape[0], x.shape[1])
        row, col = DIRECTIONS[job.removeprefix("dequantize ")]
        if job.startswith("dequantize"):
            assert self.back is not None
            op, args = self.back(self.run(x, row, col), col, shape, x.dtype)
            moved = sum(a.nbytes for a in args if isinstance(a, torch.Tensor)) + x.nbytes
            return lambda _: op(*args), 1, moved
        options = self.options(row, col, x.device)
        return lambda x: self.op(x, *options), self.reads(shape, row, col), self.moved(shape, x.dtype, row, col)

    def moved(self, shape: Shape, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> int:
        """Return the bytes that a quantization must move: x as often as it must be read, and every buffer."""
        out = self.buffers(shape, rowwise, columnwise).values()
        written = sum(math.prod(size) * dtype.itemsize for size, dtype in out)
        return self.reads(shape, rowwise, columnwise) * math.prod(shape) * dtype.itemsize + written


def _once(shape: Shape, rowwise: bool, columnwise: bool) -> int:
    return 1


def _twice(shape: Shape, rowwise: bool, columnwise: bool) -> int:
    return 2


def _row_reads(shape: Shape, rowwise: bool, columnwise: bool) -> int:
    """Return the reads of x: one for rows alone if a row fits into the registers of a program, else two."""
    return 2 if columnwise or shape[1] > LONGEST_ROW else 1


def _side(buffers: Named, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    side = "columnwise" if columnwise else "rowwise"
    return buffers[f"{side}_data"], buffers[f"{side}_scale_inv"]


def amax() -> Case:
    """Return the case that computes max |x| alone."""
    return Case(
        name="amax",
        launch="float8:amax",
        op=float8_amax,
        options=lambda row, col, device: (),
        buffers=lambda shape, row, col: {"amax": ((1,), torch.float32)},
        reads=_once,
        directions=("row",),
    )


def float8_current(name: str = "float8_current") -> Case:
    def back(out: Named, col: bool, shape: Shape, dtype: torch.dtype) -> Any:
        data = out["transpose" if col else "data"]
        return float8_dequantize, (data, out["scale_inv"], E4M3, col, dtype)

    return Case(
        name=name,
        launch="float8:quantize",
        op=float8_quantize,
        options=lambda row, col, device: (None, E4M3, False, 0.0, row, col),
        buffers=float8_buffers,
        reads=_twice,
        back=back,
    )


def float8_delayed(name: str = "float8_delayed", scale: float = 80.0) -> Case:
    return Case(
        name=name,
        launch="float8:quantize_scaled",
        op=float8_quantize_scaled,
        options=lambda row, col, device: (torch.full((1,), scale, device=device), E4M3, row, col),
        buffers=lambda shape, row, col: {**float8_buffers(shape, row, col), "amax": ((1,), torch.float32)},
        reads=_once,
    )


def float8_rowwise(name: str = "float8_rowwise", pow2: bool = True) -> Case:
    return Case(
        name=name,
        launch="float8_rowwise:quantize",
        op=float8_rowwise_quantize,
        options=lambda row, col, device: (None, None, E4M3, pow2, 0.0, row, col),
        buffers=float8_rowwise_buffers,
        reads=_row_reads,
        back=lambda out, col, shape, dtype: (float8_rowwise_dequantize, (*_side(out, col), E4M3, col, dtype)),
    )


def float8_block(name: str, two_d: bool, pow2: bool = True) -> Case:
    return Case(
        name=name,
        launch="float8_block:quantize",
        op=float8_block_quantize,
        options=lambda row, col, device: (E4M3, pow2, 0.0, two_d, row, col),
        buffers=lambda shape, row, col: float8_block_buffers(shape, two_d, row, col),
        reads=_once,
        back=lambda out, col, shape, dtype: (float8_block_dequantize, (*_side(out, col), E4M3, two_d, col, dtype)),
    )


def mxfp8(name: str, two_d: bool = False, floor: bool = False) -> Case:
    def back(out: Named, col: bool, shape: Shape, dtype: torch.dtype) -> Any:
        return mxfp8_dequantize, (*_side(out, col), E4M3, False, col, dtype)

    return Case(
        name=name,
        launch="mxfp8:quantize",
        op=mxfp8_quantize,
        options=lambda row, col, device: (E4M3, floor, two_d, False, row, col),
        buffers=mxfp8_buffers,
        reads=_once,
        back=None if two_d else back,  # the same kernel
    )


def nvfp4(name: str, two_d: bool = False, training: bool = False) -> Case:
    """Return a case of NVFP4; `training` adds the Hadamard transform of the column-wise copy and stochastic
    rounding, as gradients have them."""

    def back(out: Named, col: bool, shape: Shape, dtype: torch.dtype) -> Any:
        top = out["amax_columnwise" if col else "amax_rowwise"]
        return nvfp4_dequantize, (*_side(out, col), top, 448, False, col, shape[0 if col else 1], dtype)

    def options(row: bool, col: bool, device: torch.device) -> tuple[Any, ...]:
        rng = torch.tensor([1234, 0], dtype=torch.int64, device=device) if training else None
        mask = RANDOM_SIGN_MASK if training else 0
        return (None, None, rng, 448, 0, mask, two_d, False, training, False, row, col)

    return Case(
        name=name,
        launch="nvfp4:quantize",
        op=nvfp4_quantize,
        options=options,
        buffers=lambda shape, row, col: nvfp4_buffers(shape, training, False, row, col),
        reads=_twice,
        back=None if two_d or training else back,  # the same kernel
    )


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        amax(),
        float8_current(),
        float8_delayed(),
        float8_rowwise(),
        float8_block("float8_block_1d", two_d=False),
        float8_block("float8_block_2d", two_d=True),
        mxfp8("mxfp8"),
        mxfp8("mxfp8_2d", two_d=True),
        nvfp4("nvfp4"),
        nvfp4("nvfp4_2d", two_d=True),
        nvfp4("nvfp4_rht_sr", training=True),
    )
}


def chosen(filters: str | None) -> list[Case]:
    """Return the cases whose names contain a part of the comma-separated `filters`, or all of them without any."""
    parts = [part.strip() for part in (filters or "").split(",") if part.strip()]
    found = [case for name, case in CASES.items() if not parts or any(part in name for part in parts)]
    if not found:
        raise SystemExit(f"no format matches {filters!r}: there are {', '.join(CASES)}")
    return found
