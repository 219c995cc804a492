"""Formats: each has one record, registered by its file in `kernels/`, and everything that differs by format reads it.

An operand of a matrix product carries the name of its kind, which says how its bytes and scales are read. A format has
one kind, or one for each of its block shapes. "high", a matrix that is not quantized, is a kind of no format.

`kernels/operand.py` checks and decodes operands by their kind, `hw.py` reads which code multiplies which kinds on which
GPU and reports it, and `kernels/gemm.py` calls that code. Nothing else in the package knows a format by name, except
its own files, the recipes and the public names; `CONTRIBUTING.md` shows how to add one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CC = tuple[int, int]  # CUDA compute capability (major, minor)

HIGH = "high"  # the kind of unquantized operands


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandKind:
    """An `OperandKind` says how one side of a product, a `kernels.operand.Operand` of (rows, size), is read."""

    name: str  # as in operands and in the schemas of the products
    elements: tuple[int, ...]  # numbers of the `DType`s that its codes may have
    scale_shape: Callable[[int, int, bool], tuple[int, ...]]  # of (rows, size), and whether `transposed`
    dequantize: Callable[[Any, int, torch.dtype], torch.Tensor]  # (operand, size, dtype) → (rows, size)
    # This dequantizes without what `factor` applies to the product; None means the same as `dequantize`. In BF16 it is
    # exact if the format allows it, and GPUs that have no product of the kind multiply that.
    exact: Callable[[Any, int, torch.dtype], torch.Tensor] | None = None
    factor: Callable[[Any], torch.Tensor] | None = None  # FP32 [1] or [rows]: scales that stand outside of the sum
    pair_factors: Callable[[Any, Any], list[torch.Tensor | float]] | None = None  # for two of this kind
    packed: tuple[int, int] = (1, 1)  # how many codes lie in how many bytes
    multiple: int = 1  # sizes may differ by zero codes that fill up to this multiple
    has_amax: bool = False  # FP32 [1] or [rows] beside the scales
    may_transpose: bool = False  # the column-wise copy is stored untransposed (`Operand.transposed`)
    # This computes many products by one kernel: (a, b, capability, may copy, fast) → (Σ rows, rows of b), or None if
    # none fits.
    grouped: "Callable[[list[Any], list[Any], CC, bool, bool], torch.Tensor | None] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A `Backend` says which code multiplies operands of two kinds, on which GPUs."""

    kind_a: str  # or `hw.ANY`
    kind_b: str
    cc: tuple[CC, CC]  # the first compute capability that it serves, and the first that it does not
    name: str
    how: str = "native"  # or "emulated", "reference"
    why: str
    cuda: tuple[int, int] = (0, 0)  # the oldest CUDA build of PyTorch that has it
    product: Callable[..., None] | None = None  # (out, a, b, bias, fast); None: `kernels/gemm.py` has it by name
    pairs: frozenset[tuple[int, int]] = frozenset()  # the element types of a and b that it takes, if not all
    # This computes (a, b, bias, dtype, fast) → D by one call of PyTorch's, which a compiler can optimize; None if it
    # takes more.
    one_call: Callable[[Any, Any, torch.Tensor | None, torch.dtype, bool], torch.Tensor | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFormat:
    """A `QuantizedFormat` says what a format is called, which kinds it has, and which code multiplies them."""

    name: str  # the name of its files, also in reports and tables
    title: str  # the name as people write it
    kinds: tuple[OperandKind, ...]
    products: tuple[tuple[str, str], ...]  # the kinds that fprop, dgrad and wgrad multiply, as D = A·Bᵀ takes them
    backends: tuple[Backend, ...] = ()  # native products; emulated if no row fits


# These are filled while the package is imported, and not written afterwards.
FORMATS: dict[str, QuantizedFormat] = {}
KINDS: dict[str, OperandKind] = {}


def register_format(made: QuantizedFormat) -> QuantizedFormat:
    """Register a format and its kinds; raise ValueError if a name is taken, or if it multiplies kinds of others."""
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
    """Return the format that has this kind, or None for "high"."""
    return next((made for made in FORMATS.values() if any(each.name == kind for each in made.kinds)), None)
