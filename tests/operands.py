"""Operands of every kind made from a matrix, and what they stand for in FP64, decoded here without the package's own
dequantization: element types by table, scales by index, swizzled bytes by the documented address."""

import torch

from mezzotint import formats, hw
from mezzotint.constants import E2M1, E4M3, FP8_TORCH
from mezzotint.kernels.float8 import float8_quantize
from mezzotint.kernels.float8_block import float8_block_quantize
from mezzotint.kernels.float8_rowwise import float8_rowwise_quantize
from mezzotint.kernels.gemm import GENERAL
from mezzotint.kernels.mxfp8 import mxfp8_quantize
from mezzotint.kernels.nvfp4 import nvfp4_quantize
from mezzotint.kernels.operand import Operand

QUANTIZED = tuple(formats.KINDS)
KINDS = (formats.HIGH, *QUANTIZED)
# Row of the table of products → the function that it calls.
BACKENDS = {row.name: row.product or GENERAL[row.name] for row in hw.gemm_backends()}

# Relative Frobenius error of a product of two normal matrices: what the format owns, some 1.5 times what is seen.
FORMAT_ERROR = {"high": 0.01, "tensor": 0.06, "row": 0.06, "block1d": 0.06, "block2d": 0.06, "mx": 0.06, "nv": 0.20}

E2M1_TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def quantize(
    x: torch.Tensor,
    kind: str,
    *,
    dtype: int = E4M3,
    columnwise: bool = False,
    swizzled: bool = False,
    pow2: bool = False,
    row_scaled: bool = False,
    e4m3_max: int = 448,
) -> Operand:
    """An operand (R, C) that holds x (R, C), or, column-wise, xᵀ."""
    way = (not columnwise, columnwise)
    if kind == "high":
        return Operand(x.t() if columnwise else x)
    if kind == "tensor":
        data, scale = float8_quantize(x, None, dtype, pow2, 0.0, *way)
        return Operand(data, scale, kind=kind, dtype=dtype)
    if kind == "row":
        data, scale = float8_rowwise_quantize(x, None, None, dtype, pow2, 0.0, *way)
        return Operand(data, scale, kind=kind, dtype=dtype)
    if kind in ("block1d", "block2d"):
        data, scale = float8_block_quantize(x, dtype, pow2, 0.0, kind == "block2d", *way)
        return Operand(data, scale, kind=kind, dtype=dtype)
    if kind == "mx":
        data, scale = mxfp8_quantize(x, dtype, False, False, swizzled, *way)
        return Operand(data, scale, kind=kind, dtype=dtype, swizzled=swizzled, transposed=columnwise)
    data, scale, amax = nvfp4_quantize(x, None, None, None, e4m3_max, 0, 0, False, swizzled, False, row_scaled, *way)
    return Operand(data, scale, amax, kind=kind, dtype=E2M1, swizzled=swizzled, e4m3_max=e4m3_max)


def swizzled_address(i: torch.Tensor, j: torch.Tensor, blocks: int) -> torch.Tensor:
    """Where the scale of row i and block j lies; `blocks` is padded to 4."""
    tile = (i // 128) * (blocks // 4) + j // 4
    return tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4


def _scale_bytes(op: Operand, rows: int, blocks: int) -> torch.Tensor:
    """(rows, blocks) bytes, compact."""
    assert op.scale is not None
    i, j = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    if op.swizzled:
        width = op.scale.shape[0] if op.transposed else op.scale.shape[1]
        return op.scale.flatten()[swizzled_address(i, j, width)]
    return op.scale[j, i] if op.transposed else op.scale[i, j]


def decode(op: Operand) -> torch.Tensor:
    """FP64 (R, C), C as stored. On the CPU."""
    op = Operand(*(v.cpu() if isinstance(v, torch.Tensor) else v for v in fields(op)))
    if op.kind == "high":
        return op.data.double()
    assert op.scale is not None
    if op.kind == "nv":
        codes = torch.stack((op.data & 15, op.data >> 4), dim=-1).flatten(1).long()
        blocks = torch.arange(codes.shape[1]) // 16
        sf = _scale_bytes(op, codes.shape[0], -(-codes.shape[1] // 16)).view(torch.float8_e4m3fn).double()
        assert op.amax is not None
        return E2M1_TABLE[codes] * sf[:, blocks] * op.amax.double().view(-1, 1) / (6 * op.e4m3_max)
    value = (op.data.t() if op.transposed else op.data).contiguous().view(FP8_TORCH[op.dtype]).double()
    row, col = torch.arange(value.shape[0]), torch.arange(value.shape[1])
    if op.kind in ("tensor", "row"):
        return value * op.scale.double().view(-1, 1)
    if op.kind == "block1d":
        return value * op.scale.double()[col // 128][:, row].t()
    if op.kind == "block2d":
        return value * op.scale.double()[row // 128][:, col // 128]
    byte = _scale_bytes(op, value.shape[0], -(-value.shape[1] // 32)).double()
    return value * torch.exp2(byte - 127)[:, col // 32]


def fields(op: Operand) -> tuple:
    return op.data, op.scale, op.amax, op.kind, op.dtype, op.swizzled, op.e4m3_max, op.transposed


def to(op: Operand, device: str) -> Operand:
    """The operand on another device."""
    return Operand(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in fields(op)))


def product_and_bound(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, share: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 A·Bᵀ + bias, and how far one FP32 accumulation in any order, and one cast, may be from it.

    An unquantized side rounds the other one to its dtype. `share`: of |A|·|B|ᵀ, what a weaker accumulator may lose.
    """
    x, y = decode(a), decode(b)
    size = min(x.shape[1], y.shape[1])
    x, y = x[:, :size], y[:, :size]
    exact = x @ y.t()
    magnitude = x.abs() @ y.abs().t()
    if bias is not None:
        exact, magnitude = exact + bias.cpu().double(), magnitude + bias.cpu().double().abs()
    bound = max(share, (size + 16) * 2.0**-24) * magnitude
    bound = bound + 0.51 * torch.finfo(out_dtype).eps * exact.abs() + 1e-30
    high = [op.data.dtype for op in (a, b) if op.kind == "high"]
    if high and a.kind != b.kind:
        bound = bound + 0.51 * torch.finfo(high[0]).eps * magnitude
    return exact, bound


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
