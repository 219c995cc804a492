"""Operands of every kind made from a matrix, and what they stand for in FP64, decoded here without the package's own
dequantization: element types by table, scales by index, swizzled bytes by the documented address."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mezzotint import formats, hw
from mezzotint.constants import E4M3, FP8_TORCH
from mezzotint.kernels.float8 import float8_quantize
from mezzotint.kernels.float8_block import float8_block_quantize
from mezzotint.kernels.float8_rowwise import float8_rowwise_quantize
from mezzotint.kernels.gemm import GENERAL
from mezzotint.kernels.mxfp4 import mxfp4_quantize
from mezzotint.kernels.mxfp6 import E2M3, E3M2, mxfp6_quantize
from mezzotint.kernels.mxfp8 import mxfp8_quantize
from mezzotint.kernels.nvfp4 import nvfp4_quantize
from mezzotint.kernels.operand import Operand
from tests import packed_mx
from tests.formats import ELEMENTS

QUANTIZED = tuple(formats.KINDS)
KINDS = (formats.HIGH, *QUANTIZED)
# Row of the table of products → the function that it calls.
BACKENDS = {row.name: row.product or GENERAL[row.name] for row in hw.gemm_backends()}

E2M1_TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of a quantization; each kind takes what it has."""

    dtype: int
    columnwise: bool = False
    swizzled: bool = False
    pow2: bool = False
    row_scaled: bool = False
    e4m3_max: int = 448

    @property
    def usage(self) -> tuple[bool, bool]:
        """What an op takes for (rowwise, columnwise)."""
        return not self.columnwise, self.columnwise


@dataclass(frozen=True, kw_only=True)
class KindData:
    """What tests know of a kind: how it is made, and read apart from the package; a new kind has an entry in `DATA`."""

    quantize: Callable[[torch.Tensor, Options], Operand]
    decode: Callable[[Operand], torch.Tensor]  # FP64 (R, C), C as stored, of an operand on the CPU
    error: float  # relative, of a product of two normal matrices: what the format owns, some 1.5 times what is seen


def quantize(x: torch.Tensor, kind: str, *, dtype: int | None = None, **options: Any) -> Operand:
    """An operand (R, C) that holds x (R, C), or, column-wise, xᵀ; of E4M3, or what the kind has, unless told."""
    if kind == formats.HIGH:
        return Operand(x.t() if options.get("columnwise") else x)
    elements = formats.KINDS[kind].elements
    chosen = dtype if dtype is not None else E4M3 if E4M3 in elements else elements[0]
    return DATA[kind].quantize(x, Options(dtype=chosen, **options))


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
    op = to(op, "cpu")
    return op.data.double() if op.kind == formats.HIGH else DATA[op.kind].decode(op)


def _quantize_tensor(x: torch.Tensor, o: Options) -> Operand:
    data, scale = float8_quantize(x, None, o.dtype, o.pow2, 0.0, *o.usage)
    return Operand(data, scale, kind="tensor", dtype=o.dtype)


def _quantize_row(x: torch.Tensor, o: Options) -> Operand:
    data, scale = float8_rowwise_quantize(x, None, None, o.dtype, o.pow2, 0.0, *o.usage)
    return Operand(data, scale, kind="row", dtype=o.dtype)


def _quantize_block1d(x: torch.Tensor, o: Options) -> Operand:
    data, scale = float8_block_quantize(x, o.dtype, o.pow2, 0.0, False, *o.usage)
    return Operand(data, scale, kind="block1d", dtype=o.dtype)


def _quantize_block2d(x: torch.Tensor, o: Options) -> Operand:
    data, scale = float8_block_quantize(x, o.dtype, o.pow2, 0.0, True, *o.usage)
    return Operand(data, scale, kind="block2d", dtype=o.dtype)


def _quantize_mx(x: torch.Tensor, o: Options) -> Operand:
    data, scale = mxfp8_quantize(x, o.dtype, False, False, o.swizzled, *o.usage)
    return Operand(data, scale, kind="mx", dtype=o.dtype, swizzled=o.swizzled, transposed=o.columnwise)


def _quantize_nv(x: torch.Tensor, o: Options) -> Operand:
    options = (o.e4m3_max, 0, 0, False, o.swizzled, False, o.row_scaled)
    data, scale, amax = nvfp4_quantize(x, None, None, None, *options, *o.usage)
    return Operand(data, scale, amax, kind="nv", dtype=o.dtype, swizzled=o.swizzled, e4m3_max=o.e4m3_max)


def _fp8_values(op: Operand) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP64 codes (R, C), their scales as stored, and the numbers of rows and columns."""
    assert op.scale is not None
    value = (op.data.t() if op.transposed else op.data).contiguous().view(FP8_TORCH[op.dtype]).double()
    scale = op.scale if op.scale.dtype == torch.uint8 else op.scale.double()
    return value, scale, torch.arange(value.shape[0]), torch.arange(value.shape[1])


def _decode_outer(op: Operand) -> torch.Tensor:
    value, scale, _, _ = _fp8_values(op)
    return value * scale.view(-1, 1)


def _decode_block1d(op: Operand) -> torch.Tensor:
    value, scale, row, col = _fp8_values(op)
    return value * scale[col // 128][:, row].t()


def _decode_block2d(op: Operand) -> torch.Tensor:
    value, scale, row, col = _fp8_values(op)
    return value * scale[row // 128][:, col // 128]


def _decode_mx(op: Operand) -> torch.Tensor:
    value, _, _, col = _fp8_values(op)
    byte = _scale_bytes(op, value.shape[0], -(-value.shape[1] // 32)).double()
    return value * torch.exp2(byte - 127)[:, col // 32]


def _decode_nv(op: Operand) -> torch.Tensor:
    assert op.amax is not None
    codes = torch.stack((op.data & 15, op.data >> 4), dim=-1).flatten(1).long()
    blocks = torch.arange(codes.shape[1]) // 16
    sf = _scale_bytes(op, codes.shape[0], -(-codes.shape[1] // 16)).view(torch.float8_e4m3fn).double()
    return E2M1_TABLE[codes] * sf[:, blocks] * op.amax.double().view(-1, 1) / (6 * op.e4m3_max)


def _quantize_mx4(x: torch.Tensor, o: Options) -> Operand:
    data, scale = mxfp4_quantize(x, None, 0, True, False, o.swizzled, False, *o.usage)
    return Operand(data, scale, kind="mx4", dtype=o.dtype, swizzled=o.swizzled)


def _decode_mx4(op: Operand) -> torch.Tensor:
    codes = torch.stack((op.data & 15, op.data >> 4), dim=-1).flatten(1).long()
    byte = _scale_bytes(op, codes.shape[0], -(-codes.shape[1] // 32)).double()
    return E2M1_TABLE[codes] * torch.exp2(byte - 127)[:, torch.arange(codes.shape[1]) // 32]


def _quantize_mx6(x: torch.Tensor, o: Options) -> Operand:
    data, scale = mxfp6_quantize(x, o.dtype, True, False, o.swizzled, *o.usage)
    return Operand(data.flatten(1), scale, kind="mx6", dtype=o.dtype, swizzled=o.swizzled)


def _decode_mx6(op: Operand) -> torch.Tensor:
    size = op.data.shape[1] // 3 * 4
    elem = {E3M2: "e3m2", E2M3: "e2m3"}[op.dtype]
    codes = ELEMENTS[elem].codes(op.data, len(op.data), size)
    byte = _scale_bytes(op, len(op.data), -(-size // 32)).double()
    value = torch.from_numpy(packed_mx.decode(codes.numpy(), elem))
    return value * torch.exp2(byte - 127)[:, torch.arange(size) // 32]


DATA = {
    "tensor": KindData(quantize=_quantize_tensor, decode=_decode_outer, error=0.06),
    "row": KindData(quantize=_quantize_row, decode=_decode_outer, error=0.06),
    "block1d": KindData(quantize=_quantize_block1d, decode=_decode_block1d, error=0.06),
    "block2d": KindData(quantize=_quantize_block2d, decode=_decode_block2d, error=0.06),
    "mx": KindData(quantize=_quantize_mx, decode=_decode_mx, error=0.06),
    "mx4": KindData(quantize=_quantize_mx4, decode=_decode_mx4, error=0.25),
    "mx6": KindData(quantize=_quantize_mx6, decode=_decode_mx6, error=0.10),
    "nv": KindData(quantize=_quantize_nv, decode=_decode_nv, error=0.20),
}
HIGH_ERROR = 0.01


def error_of(*kinds: str) -> float:
    """What the product of these may be off by."""
    return max(HIGH_ERROR if kind == formats.HIGH else DATA[kind].error for kind in kinds)


def empty(kind: str, rows: int, size: int, columnwise: bool = False) -> Operand:
    """An operand by shape alone: a quantizer may refuse an empty matrix."""
    like = quantize(torch.ones(8, 8), kind, columnwise=columnwise)
    if kind == formats.HIGH:
        return Operand(torch.ones(rows, size))
    known = formats.KINDS[kind]
    count, width = known.packed
    stored = (size, rows) if like.transposed else (rows, -(-size // count) * width)
    assert like.scale is not None
    scale = torch.ones(known.scale_shape(rows, size, like.transposed), dtype=like.scale.dtype)
    return replace(like, data=torch.ones(stored, dtype=torch.uint8), scale=scale)


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
