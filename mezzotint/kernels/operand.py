"""One side of a matrix product: an `Operand` is a matrix that says how it is quantized.

`data` is (R, C), and the product contracts over C. The operand's kind (`formats.OperandKind`) says what `data` and
`scale` hold; the format's file explains it. "high" is FP32, FP16 or BF16 and has no scale, all others are codes in
torch.uint8.

`data` may be a view with any strides. A column-wise copy that is stored untransposed is given as it is, with
`transposed`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mezzotint.constants import FP8_TORCH, HIGH_PRECISION, rup
from mezzotint.formats import HIGH, KINDS


@dataclass(slots=True)
class Operand:
    """An `Operand` holds a matrix (R, C) and how to read it."""

    data: torch.Tensor  # codes, or their exact values in BF16, as a product that is emulated reads them
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None  # of kinds that have one
    kind: str = HIGH
    dtype: int = 0  # the element type, a number of `DType`; 0 for "high"
    swizzled: bool = False  # scale bytes in the GEMM's order
    e4m3_max: int = 448  # what block scales in E4M3 were mapped to
    transposed: bool = False  # data (C, R) and its scales as stored


def is_unpacked(op: Operand) -> bool:
    """Return whether a quantized operand holds exact values in BF16 instead of codes."""
    return op.kind != HIGH and op.data.dtype == torch.bfloat16


def rows(op: Operand) -> int:
    """Return R, the number of rows."""
    return op.data.shape[1 if op.transposed else 0]


def codes(op: Operand) -> int:
    """Return C as stored: zero codes that pad an odd number of packed codes, or a Hadamard transform, are counted."""
    size = op.data.shape[0 if op.transposed else 1]
    if op.kind == HIGH or is_unpacked(op):
        return size
    count, width = KINDS[op.kind].packed
    return size // width * count


def contraction(a: Operand, b: Operand) -> int:
    """Return the size along which A·Bᵀ contracts: the smaller one, because packed codes may have zero padding."""
    return min(codes(a), codes(b))


def check_operand(op: Operand, name: str) -> None:
    """Raise ValueError if the operand contradicts itself; `name` is that of the argument."""
    if op.kind != HIGH and op.kind not in KINDS:
        raise ValueError(f"{name}.kind is {op.kind!r}: expected one of {', '.join((HIGH, *KINDS))}")
    if op.data.dim() != 2:
        raise ValueError(f"{name}.data has shape {tuple(op.data.shape)}: expected (rows, contraction)")
    if op.transposed and (op.kind == HIGH or not KINDS[op.kind].may_transpose):
        wanted = " or ".join(repr(kind.name) for kind in KINDS.values() if kind.may_transpose)
        raise ValueError(f"{name}.transposed is for kind {wanted}: for {op.kind!r} give the other direction's buffer")
    if op.kind == HIGH:
        if op.data.dtype not in HIGH_PRECISION:
            raise ValueError(f"{name}.data is {op.data.dtype}: an unquantized operand is FP32, FP16 or BF16")
        return
    kind = KINDS[op.kind]
    if op.dtype not in kind.elements:
        raise ValueError(f"{name}.dtype is {op.dtype}: kind {op.kind!r} takes {kind.elements}")
    if op.data.dtype != torch.uint8:
        raise ValueError(f"{name}.data is {op.data.dtype}: codes are torch.uint8")
    if op.scale is None:
        raise ValueError(f"{name}.scale is missing: kind {op.kind!r} needs {scale_shape(op)}")
    if tuple(op.scale.shape) != scale_shape(op):
        raise ValueError(f"{name}.scale has shape {tuple(op.scale.shape)}: expected {scale_shape(op)}")
    if kind.has_amax:
        if op.amax is None:
            raise ValueError(f"{name}.amax is missing: kind {op.kind!r} needs [1], or [{rows(op)}] when row-scaled")
        if tuple(op.amax.shape) not in ((1,), (rows(op),)):
            raise ValueError(f"{name}.amax has shape {tuple(op.amax.shape)}: expected (1,) or ({rows(op)},)")


def scale_shape(op: Operand) -> tuple[int, ...]:
    """Return the shape that `op.scale` must have."""
    return KINDS[op.kind].scale_shape(rows(op), codes(op), op.transposed)


def check_pair(a: Operand, b: Operand, name_a: str = "a", name_b: str = "b") -> None:
    """Raise ValueError if A·Bᵀ makes no sense."""
    check_operand(a, name_a)
    check_operand(b, name_b)
    multiple = max(1 if op.kind == HIGH else KINDS[op.kind].multiple for op in (a, b))
    if rup(codes(a), multiple) != rup(codes(b), multiple):  # a last half byte or half block is zero codes
        raise ValueError(f"{name_a} and {name_b} contract over {codes(a)} and {codes(b)}: expected the same size")
    for op, name in ((a, name_a), (b, name_b)):
        for field, tensor in (("data", op.data), ("scale", op.scale), ("amax", op.amax)):
            if tensor is not None and tensor.device != a.data.device:
                where = f"{name_a}.data on {a.data.device}"
                raise ValueError(f"{name}.{field} is on {tensor.device}, {where}: expected one device")


def dequantize_operand(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the operand as (R, size) in `dtype`, as its format dequantizes it."""
    return op.data.to(dtype) if op.kind == HIGH else KINDS[op.kind].dequantize(op, size, dtype)


def exact_of(op: Operand) -> Callable[[Operand, int, torch.dtype], torch.Tensor]:
    """Return the function that reads an operand as (R, size) in BF16 or FP32, without the factors that `factors` puts
    on the product.

    In BF16 most kinds are exact. FP32 block scales that are no powers of two round once: to FP32 in the reference, to
    BF16 where the product is emulated.
    """
    if is_unpacked(op):
        return _unpacked
    kind = KINDS[op.kind]
    return kind.exact or kind.dequantize


def _unpacked(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    values = op.data.t() if op.transposed else op.data
    return values if values.shape[1] == size and values.dtype == dtype else values[:, :size].to(dtype)


def codes_alone(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the FP8 codes in `dtype`, which is the exact part of a kind whose scales stand outside of the sum."""
    return op.data.view(FP8_TORCH[op.dtype]).to(dtype)


def factors(a: Operand, b: Operand) -> list[torch.Tensor | float]:
    """Return the factors of the FP32 product of the exact values, in order: scalars, (Ra, 1), (1, Rb)."""
    kind = KINDS[a.kind]
    if a.kind == b.kind and kind.pair_factors is not None:
        return kind.pair_factors(a, b)
    found: list[torch.Tensor | float] = []
    for op, shape in ((a, (-1, 1)), (b, (1, -1))):
        factor = KINDS[op.kind].factor
        if factor is not None:
            found.append(factor(op).view(shape))
    return found
