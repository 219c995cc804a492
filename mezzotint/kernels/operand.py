"""One side of a matrix product: a matrix that says how it is quantized.

`data` is (R, C), C contracted. `scale` holds, for each kind, what the format's file lays out for (R, C):

    kind       data                                  scale
    high       FP32, FP16 or BF16 (R, C)             none
    tensor     FP8 codes (R, C)                      FP32 [1]
    row        FP8 codes (R, C)                      FP32 [R]
    block1d    FP8 codes (R, C)                      FP32 (ceil(C/128), rup(R, 4)), entry [block, row]
    block2d    FP8 codes (R, C)                      FP32 (ceil(R/128), rup(ceil(C/128), 4))
    mx         FP8 codes (R, C)                      E8M0 (rup(R, 128), rup(ceil(C/32), 4))
    nv         two E2M1 codes a byte (R, ceil(C/2))  E4M3 (rup(R, 128), rup(ceil(C/16), 4)); amax [1] or [R]

`data` may be a view with any strides. MXFP8's column-wise copy is stored untransposed: it comes as stored, with
`transposed`, or as views `data.t()` and `scale.t()`.
"""

from dataclasses import dataclass, replace

import torch

from mezzotint.constants import (
    E2M1,
    FP4_MAX,
    FP8_TORCH,
    HIGH_PRECISION,
    NVFP4_BLOCK,
    rup,
)
from mezzotint.kernels.float8 import float8_dequantize
from mezzotint.kernels.float8_block import float8_block_dequantize, float8_block_scale_shape
from mezzotint.kernels.float8_rowwise import float8_rowwise_dequantize
from mezzotint.kernels.mxfp8 import mxfp8_dequantize, mxfp8_scale_shape
from mezzotint.kernels.nvfp4 import nvfp4_dequantize, nvfp4_scale_shape

KINDS = ("high", "tensor", "row", "block1d", "block2d", "mx", "nv")


@dataclass(slots=True)
class Operand:
    """A matrix (R, C) and how to read it."""

    data: torch.Tensor
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None  # NVFP4
    kind: str = "high"
    dtype: int = 0  # E4M3, E5M2, E2M1; 0 for "high"
    swizzled: bool = False  # scale bytes in the GEMM's order (mx, nv)
    e4m3_max: int = 448  # NVFP4: what its block scales were mapped to
    transposed: bool = False  # mx: data (C, R) and its scales as stored


def rows(op: Operand) -> int:
    """R."""
    return op.data.shape[1 if op.transposed else 0]


def codes(op: Operand) -> int:
    """C as stored: an odd NVFP4 size, or one that a Hadamard transform filled up, counts its zero codes."""
    size = op.data.shape[0 if op.transposed else 1]
    return 2 * size if op.kind == "nv" else size


def contraction(a: Operand, b: Operand) -> int:
    """The size along which A·Bᵀ contracts. NVFP4 may be longer by zero padding: the shorter one counts."""
    return min(codes(a), codes(b))


def as_stored(op: Operand) -> Operand:
    """MXFP8 given by transposed views → the stored buffers and the flag: no op may depend on strides."""
    if op.kind != "mx" or op.transposed or op.scale is None or op.scale.dim() != 2:
        return op
    # Scale sizes are multiples of 128 and 4: a stride tells which way round they lie.
    if op.scale.stride(0) == 1 and op.scale.stride(1) != 1:
        return replace(op, data=op.data.t(), scale=op.scale.t(), transposed=True)
    return op


def check_operand(op: Operand, name: str) -> None:
    """Raise ValueError where the operand contradicts itself; `name` is the argument's."""
    if op.kind not in KINDS:
        raise ValueError(f"{name}.kind is {op.kind!r}: expected one of {', '.join(KINDS)}")
    if op.data.dim() != 2:
        raise ValueError(f"{name}.data has shape {tuple(op.data.shape)}: expected (rows, contraction)")
    if op.transposed and op.kind != "mx":
        raise ValueError(f"{name}.transposed is for kind 'mx': for {op.kind!r} give the other direction's buffer")
    if op.kind == "high":
        if op.data.dtype not in HIGH_PRECISION:
            raise ValueError(f"{name}.data is {op.data.dtype}: an unquantized operand is FP32, FP16 or BF16")
        return
    types = (E2M1,) if op.kind == "nv" else tuple(FP8_TORCH)
    if op.dtype not in types:
        raise ValueError(f"{name}.dtype is {op.dtype}: kind {op.kind!r} takes {types}")
    if op.data.dtype != torch.uint8:
        raise ValueError(f"{name}.data is {op.data.dtype}: codes are torch.uint8")
    if op.scale is None:
        raise ValueError(f"{name}.scale is missing: kind {op.kind!r} needs {scale_shape(op)}")
    if tuple(op.scale.shape) != scale_shape(op):
        raise ValueError(f"{name}.scale has shape {tuple(op.scale.shape)}: expected {scale_shape(op)}")
    if op.kind == "nv":
        if op.amax is None:
            raise ValueError(f"{name}.amax is missing: NVFP4 needs [1], or [{rows(op)}] when row-scaled")
        if tuple(op.amax.shape) not in ((1,), (rows(op),)):
            raise ValueError(f"{name}.amax has shape {tuple(op.amax.shape)}: expected (1,) or ({rows(op)},)")


def scale_shape(op: Operand) -> tuple[int, ...]:
    """What the shape of `op.scale` must be."""
    if op.kind == "tensor":
        return (1,)
    if op.kind == "row":
        return (rows(op),)
    if op.kind == "mx":
        return mxfp8_scale_shape(op.data.shape[0], op.data.shape[1], op.transposed)
    if op.kind == "nv":
        return nvfp4_scale_shape(rows(op), codes(op))
    return float8_block_scale_shape(rows(op), codes(op), op.kind == "block2d")


def check_pair(a: Operand, b: Operand, name_a: str = "a", name_b: str = "b") -> None:
    """Raise ValueError where A·Bᵀ makes no sense."""
    check_operand(a, name_a)
    check_operand(b, name_b)
    size_a, size_b = codes(a), codes(b)
    if a.kind == "nv" or b.kind == "nv":  # a last half byte or half block is zero codes
        size_a, size_b = rup(size_a, NVFP4_BLOCK), rup(size_b, NVFP4_BLOCK)
    if size_a != size_b:
        raise ValueError(f"{name_a} and {name_b} contract over {codes(a)} and {codes(b)}: expected the same size")
    for op, name in ((a, name_a), (b, name_b)):
        for field, tensor in (("data", op.data), ("scale", op.scale), ("amax", op.amax)):
            if tensor is not None and tensor.device != a.data.device:
                where = f"{name_a}.data on {a.data.device}"
                raise ValueError(f"{name}.{field} is on {tensor.device}, {where}: expected one device")


def dequantize_operand(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    """(R, size) in `dtype`, as the format's own dequantize gives it."""
    if op.kind == "high":
        return op.data.to(dtype)
    data, scale = op.data.contiguous(), op.scale
    assert scale is not None
    if op.kind == "tensor":
        return float8_dequantize(data, scale, op.dtype, False, dtype)
    if op.kind == "row":
        return float8_rowwise_dequantize(data, scale, op.dtype, False, dtype)
    scale = scale.contiguous()
    if op.kind == "mx":
        value = mxfp8_dequantize(data, scale, op.dtype, op.swizzled, op.transposed, dtype)
        return value.t() if op.transposed else value
    if op.kind == "nv":
        assert op.amax is not None
        value = nvfp4_dequantize(data, scale, op.amax, op.e4m3_max, op.swizzled, False, codes(op), dtype)
        return value[:, :size]
    return float8_block_dequantize(data, scale, op.dtype, op.kind == "block2d", False, dtype)


def exact(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    """(R, size) in BF16 or FP32 without what `factors` puts on the product.

    Exact in BF16: FP8 codes, MXFP8 (but below 2^-133), E2M1 times its block scale, FP8 blocks with
    power-of-two scales. With other scales blocks round once: to FP32 in the reference, to BF16 where emulated.
    """
    if op.kind in ("tensor", "row"):
        return op.data.view(FP8_TORCH[op.dtype]).to(dtype)
    if op.kind == "nv":
        # amax = 6E cancels the unit 1/(6E): dequantize then gives code · block scale, 6 bits wide.
        unit = torch.full((1,), FP4_MAX * op.e4m3_max, dtype=torch.float32, device=op.data.device)
        return dequantize_operand(replace(op, amax=unit), size, torch.bfloat16).to(dtype)
    return dequantize_operand(op, size, dtype)


def factors(a: Operand, b: Operand) -> list[torch.Tensor | float]:
    """What multiplies the FP32 product of the exact values, in order: scalars, (Ra, 1), (1, Rb)."""
    if a.kind == b.kind == "nv":
        assert a.amax is not None
        assert b.amax is not None
        unit = 1.0 / (FP4_MAX * FP4_MAX * a.e4m3_max * b.e4m3_max)
        if a.amax.numel() == 1 and b.amax.numel() == 1:
            return [(a.amax * b.amax) * unit]
        column, row = a.amax.view(-1, 1), b.amax.view(1, -1)
        if a.amax.numel() == 1 or b.amax.numel() == 1:
            return [unit, column * row]
        return [unit, column, row]
    return _own_factor(a, (-1, 1)) + _own_factor(b, (1, -1))


def _own_factor(op: Operand, shape: tuple[int, int]) -> list[torch.Tensor | float]:
    if op.kind == "nv":
        assert op.amax is not None
        return [(op.amax * (1.0 / (FP4_MAX * op.e4m3_max))).view(shape)]
    if op.kind in ("tensor", "row"):
        assert op.scale is not None
        return [op.scale.view(shape)]
    return []
