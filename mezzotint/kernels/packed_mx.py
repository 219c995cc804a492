"""MX formats with elements of 4 and 6 bits: 32 elements share one E8M0 scale, and codes are packed into bytes.

The conversion is that of the OCP Microscaling specification (MX v1.0, section 6.3). The scale of a block is a byte b
that stands for 2^(b-127); the element type has a largest value `max` and that value's exponent `emax`:

    floor:    b = floor(log2 amax) - emax + 127, at least 0: OCP's own rule; the top of a block saturates
    roundup:  one more where amax > max · 2^(floor(log2 amax) - emax), so that nothing saturates
    q = RNE(fl32(x · 2^(127-b))), saturating; the sign of zero is kept. Back: q · 2^(b-127), exact in BF16 and in FP32

A block of zeros has b = 0. Infinity counts as 2^128: b is what that requires, the element saturates, and under the
floor rule it comes back as infinity. The element types have no NaN, but the scale has: a block with a NaN in it has b =
255 and the largest code everywhere, so that all of it comes back as NaN.

Row-wise blocks run along K. Column-wise is the same on xᵀ, from x, hence stored transposed. Scale bytes are (rup(R,
128), rup(ceil(C/32), 4)) for R rows of C, entry [row, block]; padding is 0. With `two_d` one b serves a 32x32 tile and
is written for each of its rows; both directions then hold the same values. The amax of a ragged last block is that of
the elements that exist. With `swizzled` the scale bytes are in the order of Blackwell's GEMM (`swizzle.py`).

Codes are packed along a row: the fewest codes that fill whole bytes make a group, with the first code in the lowest
bits and the bytes in little-endian order. Two codes of 4 bits are a byte, (…, ceil(C/2)); four of 6 bits are three
bytes, (…, ceil(C/4), 3). Codes of a group beyond C are 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mezzotint.constants import MX_BLOCK, cdiv, rup
from mezzotint.formats import OperandKind, QuantizedFormat, register_format
from mezzotint.kernels._lib import Buffers, as_matrix, matrix_shape, padded
from mezzotint.kernels.elements import e8m0_decode, e8m0_inverse, mul_blocks_
from mezzotint.kernels.operand import Operand
from mezzotint.kernels.swizzle import swizzle, unswizzle

_MAGNITUDE, _INF_BITS = 0x7FFFFFFF, 0x7F800000

Cast = Callable[[torch.Tensor], torch.Tensor]  # scaled FP32 → codes


@dataclass(frozen=True, slots=True)
class Element:
    """An `Element` is a float type of a sign, `exponent` and `mantissa` bits, with subnormals, without infinity and
    NaN."""

    exponent: int
    mantissa: int

    @property
    def width(self) -> int:
        """Return the number of bits of a code."""
        return 1 + self.exponent + self.mantissa

    @property
    def top(self) -> int:
        """Return the code of the largest value."""
        return (1 << self.width - 1) - 1

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1

    @property
    def emax(self) -> int:
        """Return the exponent of the largest value."""
        return (1 << self.exponent) - 1 - self.bias

    @property
    def max(self) -> float:
        return (2.0 - 2.0**-self.mantissa) * 2.0**self.emax

    @property
    def group(self) -> int:
        """Return how many codes fill whole bytes."""
        return math.lcm(8, self.width) // self.width

    @property
    def group_bytes(self) -> int:
        return math.lcm(8, self.width) // 8

    def values(self) -> list[float]:
        """Return the value that each code stands for."""
        magnitudes = []
        for code in range(self.top + 1):
            field, fraction = code >> self.mantissa, code % (1 << self.mantissa)
            significand = fraction + (1 << self.mantissa if field else 0)
            magnitudes.append(math.ldexp(significand, max(field, 1) - self.bias - self.mantissa))
        return magnitudes + [-value for value in magnitudes]


def encode(value: torch.Tensor, element: Element) -> torch.Tensor:
    """Cast FP32 to uint8 codes: round to nearest even, saturate, keep the sign of zero, turn NaN into the largest
    positive code."""
    a = value.abs().clamp_max_(element.max)
    bits, drop = a.view(torch.int32), 23 - element.mantissa
    normal = (bits + ((1 << drop - 1) - 1) + (bits >> drop & 1) >> drop) - (127 - element.bias << element.mantissa)
    # Subnormal codes are multiples of the last place of this power of two: adding it rounds to them.
    unit = torch.tensor(2.0 ** (24 - element.bias - element.mantissa), device=value.device)
    subnormal = (a + unit).view(torch.int32) - unit.view(torch.int32)
    code = torch.where(a < 2.0 ** (1 - element.bias), subnormal, normal)
    code += (value.view(torch.int32) < 0).int() << element.width - 1
    return torch.where(value.isnan(), element.top, code).to(torch.uint8)


def decode(codes: torch.Tensor, element: Element, dtype: torch.dtype) -> torch.Tensor:
    """Decode uint8 codes to FP32 or BF16; this is exact."""
    table = torch.tensor(element.values(), dtype=dtype, device=codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def pack(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Pack codes (..., n) into the bytes of their groups, (..., ceil(n/group)); several bytes are a last dimension."""
    size, count = codes.shape[-1], element.group
    if size % count:
        codes = torch.nn.functional.pad(codes, (0, rup(size, count) - size))
    groups = codes.view(*codes.shape[:-1], cdiv(size, count), count).int()
    word = groups[..., 0]
    for i in range(1, count):
        word = word | groups[..., i] << i * element.width
    if element.group_bytes == 1:
        return word.to(torch.uint8)
    return torch.stack([word >> 8 * i & 0xFF for i in range(element.group_bytes)], -1).to(torch.uint8)


def unpack(packed: torch.Tensor, element: Element, size: int) -> torch.Tensor:
    """Unpack the bytes that `pack` made into (..., size) codes."""
    word = packed.int()
    if element.group_bytes > 1:
        parts = word
        word = parts[..., 0]
        for i in range(1, element.group_bytes):
            word = word | parts[..., i] << 8 * i
    mask = (1 << element.width) - 1
    codes = torch.stack([word >> i * element.width & mask for i in range(element.group)], -1)
    return codes.flatten(-2)[..., :size].to(torch.uint8)


def packed_scale_shape(rows: int, cols: int) -> tuple[int, int]:
    """Return the shape of the scale bytes of a (rows, cols) matrix with blocks along its rows."""
    return rup(rows, 128), rup(cdiv(cols, MX_BLOCK), 4)


def packed_shape(leading: tuple[int, ...], size: int, element: Element) -> tuple[int, ...]:
    """Return the shape of the packed bytes of rows of `size` codes."""
    bytes_each = () if element.group_bytes == 1 else (element.group_bytes,)
    return (*leading, cdiv(size, element.group), *bytes_each)


def packed_buffers(
    shape: tuple[int, ...], element: Element, rowwise: bool, columnwise: bool, multiple: int = 1
) -> Buffers:
    """Return the buffers of the copies: packed codes and scale bytes of each direction. Rows of the column-wise data
    are filled up to a multiple of `multiple` codes."""
    rows, cols = matrix_shape(shape)
    buffers: Buffers = {}
    if rowwise:
        buffers["rowwise_data"] = (packed_shape(shape[:-1], cols, element), torch.uint8)
        buffers["rowwise_scale_inv"] = (packed_scale_shape(rows, cols), torch.uint8)
    if columnwise:
        buffers["columnwise_data"] = (packed_shape((cols,), rup(rows, multiple), element), torch.uint8)
        buffers["columnwise_scale_inv"] = (packed_scale_shape(cols, rows), torch.uint8)
    return buffers


def scale_byte(top: torch.Tensor, element: Element, floor: bool) -> torch.Tensor:
    """Return the E8M0 byte of a block, from the largest bits of |x| in it, int32. As integers magnitudes are ordered,
    with NaN above all."""
    # A mantissa above that of `max` carries into the exponent.
    carry = 0 if floor else (1 << 23 - element.mantissa) - 1
    byte = ((top + carry >> 23) - element.emax).clamp_min_(0)
    return torch.where(top > _INF_BITS, 255, byte).to(torch.uint8)


def quantize_rows(
    x: torch.Tensor, element: Element, floor: bool, two_d: bool, cast: Cast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (R, C) to codes (R, C) and scale bytes (R, ceil(C/32)). `cast` takes (tiles, height, blocks, 32)."""
    rows, cols = x.shape
    height = MX_BLOCK if two_d else 1
    full = rup(rows, height), rup(cols, MX_BLOCK)
    tiles = padded(x, *full).float().contiguous().view(full[0] // height, height, full[1] // MX_BLOCK, MX_BLOCK)
    byte = scale_byte((tiles.view(torch.int32) & _MAGNITUDE).amax((1, 3)), element, floor)
    codes = cast(tiles * e8m0_inverse(byte)[:, None, :, None]).view(full)[:rows, :cols]
    return codes.contiguous(), byte.repeat_interleave(height, 0)[:rows]


def quantize_side(
    x: torch.Tensor, leading: tuple[int, ...], element: Element, floor: bool, two_d: bool, swizzled: bool, cast: Cast
) -> list[torch.Tensor]:
    """Quantize one direction, x (R, C) with R the product of `leading`, to packed codes and padded scale bytes."""
    codes, byte = quantize_rows(x, element, floor, two_d, cast)
    byte = padded(byte, *packed_scale_shape(*x.shape)).contiguous()
    return [pack(codes.view(*leading, x.shape[1]), element), swizzle(byte) if swizzled else byte]


def packed_dequantize_reference(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    element: Element,
    swizzled: bool,
    transposed: bool,
    cols: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype(q · 2^(b-127)) as (…, cols), or (cols, R) when `transposed`; `cols` is the size along the packed
    dimension."""
    codes = unpack(data, element, cols)
    scale = e8m0_decode(unswizzle(scale_inv) if swizzled else scale_inv)
    # Nothing rounds but the result: BF16, which has FP32's exponents, needs no FP32 in between.
    work = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    value = mul_blocks_(decode(as_matrix(codes), element, work), scale.to(work), 1, MX_BLOCK).to(out_dtype)
    return value.t().contiguous() if transposed else value.reshape(codes.shape)


def unpacked_values(
    buffers: dict[str, torch.Tensor], direction: str, element: Element, *, swizzled: bool
) -> torch.Tensor:
    """Return the values of one direction in BF16, which is exact, for all codes that its groups hold."""
    data, scale_inv = buffers[f"{direction}_data"], buffers[f"{direction}_scale_inv"]
    size = data.shape[-1 if element.group_bytes == 1 else -2] * element.group
    return packed_dequantize_reference(data, scale_inv, element, swizzled, False, size, torch.bfloat16)


def packed_dequantized_shape(data: torch.Tensor, element: Element, transposed: bool, cols: int) -> tuple[int, ...]:
    """Return the shape of what `packed_dequantize_reference` returns."""
    leading = data.shape[:-1] if element.group_bytes == 1 else data.shape[:-2]
    return (cols, *leading) if transposed else (*leading, cols)


def register_packed(
    name: str, kind: str, elements: dict[int, Element], dequantize: Callable[[Operand, int, torch.dtype], torch.Tensor]
) -> QuantizedFormat:
    """Register a packed MX format: one kind of operand, whose `elements` (by their numbers of `DType`) have one width.

    An operand has its codes as bytes (R, bytes), and E8M0 scales of `packed_scale_shape`. No GPU multiplies it
    directly.
    """
    first = next(iter(elements.values()))
    return register_format(
        QuantizedFormat(
            name=name,
            title=name.upper(),
            kinds=(
                OperandKind(
                    name=kind,
                    elements=tuple(elements),
                    scale_shape=lambda rows, size, transposed: packed_scale_shape(rows, size),
                    dequantize=dequantize,
                    packed=(first.group, first.group_bytes),
                    multiple=MX_BLOCK,
                ),
            ),
            products=((kind, kind),) * 3,
        )
    )
