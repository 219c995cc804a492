"""Formats: one record each, registered by the format's file in `kernels/`; everything that differs by format reads it.

An operand of a matrix product carries the name of its kind: how its bytes and scales are read. A format has one kind,
or one for each of its block shapes. "high", a matrix that is not quantized, is a kind of no format.

`kernels/operand.py` checks and decodes operands by their kind, `hw.py` reads which code multiplies which kinds on which
GPU and reports it, `kernels/gemm.py` calls that code. Nothing else in the package knows a format by name but its own
files, the recipes and the public names; `CONTRIBUTING.md` shows how one is added.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CC = tuple[int, int]  # CUDA compute capability (major, minor)

HIGH = "high"  # the kind of what is not quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandKind:
    """How one side of a product is read. Functions take a `kernels.operand.Operand` of (rows, size)."""

    name: str  # as operands and the schemas of the products carry it
    elements: tuple[int, ...]  # numbers of `DType` that its codes may be of
    scale_shape: Callable[[int, int, bool], tuple[int, ...]]  # of (rows, size), and whether `transposed`
    dequantize: Callable[[Any, int, torch.dtype], torch.Tensor]  # (operand, size, dtype) → (rows, size)
    # Without what `factor` puts on the product; None: the same. In BF16 it is exact where the format allows it: that is
    # what GPUs multiply which have no product of the kind.
    exact: Callable[[Any, int, torch.dtype], torch.Tensor] | None = None
    factor: Callable[[Any], torch.Tensor] | None = None  # FP32 [1] or [rows]: scales that stand outside of the sum
    pair_factors: Callable[[Any, Any], list[torch.Tensor | float]] | None = None  # instead, for two of this kind
    packed: tuple[int, int] = (1, 1)  # so many codes lie in so many bytes
    multiple: int = 1  # sizes are equal up to zero codes that fill the last so many
    has_amax: bool = False  # FP32 [1] or [rows] beside the scales
    may_transpose: bool = False  # the column-wise copy is stored untransposed: `Operand.transposed`
    # (a, b, capability, may copy, fast) → (Σ rows, rows of b): many products by one kernel; None where none fits
    grouped: "Callable[[list[Any], list[Any], CC, bool, bool], torch.Tensor | None] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Which code multiplies operands of two kinds, on which GPUs."""

    kind_a: str  # or `hw.ANY`
    kind_b: str
    cc: tuple[CC, CC]  # the first compute capability, and the first one that it no longer serves
    name: str
    how: str = "native"  # or "emulated", "reference"
    why: str
    cuda: tuple[int, int] = (0, 0)  # oldest CUDA build of PyTorch that has it
    product: Callable[..., None] | None = None  # (out, a, b, bias, fast); None: `kernels/gemm.py` has one by the name
    pairs: frozenset[tuple[int, int]] = frozenset()  # element types of a and b that it takes, if not all
    # (a, b, bias, dtype, fast) → D by one call of PyTorch's, which a compiler can take in; None where it is more
    one_call: Callable[[Any, Any, torch.Tensor | None, torch.dtype, bool], torch.Tensor | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFormat:
    """What a format is called, its kinds, and which code multiplies them."""

    name: str  # of its files, in reports and tables
    title: str  # as one writes it
    kinds: tuple[OperandKind, ...]
    products: tuple[tuple[str, str], ...]  # the kinds that fprop, dgrad and wgrad multiply, as D = A·Bᵀ takes them
    backends: tuple[Backend, ...] = ()  # native products; emulated where no row fits


# Filled while the package is imported, and not written after.
FORMATS: dict[str, QuantizedFormat] = {}
KINDS: dict[str, OperandKind] = {}


def register_format(made: QuantizedFormat) -> QuantizedFormat:
    """Enter a format and its kinds."""
    if made.name in FORMATS:
        raise ValueError(f"a format {made.name!r} is registered already: give the new one another name")
    for kind in made.kinds:
        if kind.name in KINDS or kind.name == HIGH:
            raise ValueError(f"{made.name} has a kind {kind.name!r}, which is taken: give it another name")
    known = {kind.name for kind in made.kinds}
    for kinds in (*made.products, *((row.kind_a, row.kind_b) for row in made.backends)):
        if not known.issuperset(kinds):
            raise ValueError(f"{made.name} multiplies {kinds}: its own kinds are {sorted(known)}")
    FORMATS[made.name] = made
    KINDS.update({kind.name: kind for kind in made.kinds})
    return made


def format_of(kind: str) -> QuantizedFormat | None:
    """The format that has this kind; None for "high"."""
    return next((made for made in FORMATS.values() if any(each.name == kind for each in made.kinds)), None)
