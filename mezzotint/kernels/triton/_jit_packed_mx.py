"""Shared parts of the kernels of MX formats with elements of 4 and 6 bits: they quantize one direction, and dequantize.

A direction is a tile (lines, positions) with blocks of 32 along its positions; column-wise it is the transposed tile.
Every function gives the bits of its namesake in `kernels/packed_mx.py`. Maxima are taken of the bits of |x|, which as
integers are ordered as the numbers are, with NaN above all.
"""

import triton
import triton.language as tl

from mezzotint.kernels.packed_mx import Element
from mezzotint.kernels.triton._jit import e8m0_decode, swizzled
from mezzotint.kernels.triton._jit_fp4 import cast_e2m1_stochastic, philox16, philox_key
from mezzotint.kernels.triton._launch import Fast

_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def encode(value, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Cast FP32 to int32 codes: round to nearest even, saturate, keep the sign of zero, turn NaN into the largest
    positive code."""
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    WIDTH: tl.constexpr = 1 + EXPONENT + MANTISSA
    DROP: tl.constexpr = 23 - MANTISSA
    LARGEST: tl.constexpr = (2.0 - 2.0**-MANTISSA) * 2.0 ** ((1 << EXPONENT) - 1 - BIAS)
    UNIT: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    UNIT_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    LEAST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    a = tl.minimum(tl.abs(value), LARGEST)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    subnormal = (a + UNIT).to(tl.int32, bitcast=True) - UNIT_BITS
    code = tl.where(a < LEAST_NORMAL, subnormal, normal)
    sign = (value.to(tl.int32, bitcast=True) >> (32 - WIDTH)) & (1 << (WIDTH - 1))
    return tl.where(value == value, code | sign, (1 << (WIDTH - 1)) - 1)


@triton.jit
def decode(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Decode int32 codes to FP32, exactly: the code's bits on top of a subnormal are the value times 2^(BIAS - 127)."""
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    SIGN: tl.constexpr = 1 << (EXPONENT + MANTISSA)
    BACK: tl.constexpr = 2.0 ** (127 - BIAS)
    bits = ((code & (SIGN - 1)) << (23 - MANTISSA)) | ((code & SIGN) << (31 - EXPONENT - MANTISSA))
    return bits.to(tl.float32, bitcast=True) * BACK


@triton.jit
def scale_byte(top, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FLOOR: tl.constexpr):
    """Return the E8M0 byte, int32, of a block from the largest bits of |x| in it."""
    EMAX: tl.constexpr = (1 << EXPONENT) - (1 << (EXPONENT - 1))
    CARRY: tl.constexpr = 0 if FLOOR else (1 << (23 - MANTISSA)) - 1
    return tl.where(top > _INF_BITS, 255, tl.maximum(((top + CARRY) >> 23) - EMAX, 0))


@triton.jit
def hadamard(x, SIGN_MASK: tl.constexpr):
    """Transform each 16 positions of (lines, positions) by the butterfly of `kernels/hadamard.py`, not yet rounded."""
    BL: tl.constexpr = x.shape[0]
    BC: tl.constexpr = x.shape[1]
    i = tl.arange(0, BC) % 16
    y = x * tl.where((tl.full([BC], SIGN_MASK, tl.int32) >> i) & 1 == 1, -0.0625, 0.0625)[None, :]
    for stage in tl.static_range(4):
        pairs = tl.reshape(y, [BL, BC // (2 << stage), 2, 1 << stage])
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        y = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), [BL, BC])
    return y * 4.0


@triton.jit
def _random_bytes(rng, lines, positions, groups, DIRECTION: tl.constexpr):
    """Return random bytes as uint32 (lines, positions): Philox, 16 positions at a time; `groups` is how many of these a
    line has."""
    BL: tl.constexpr = lines.shape[0]
    BG: tl.constexpr = positions.shape[0] // 16
    first = tl.min(positions, 0) // 16
    index = lines[:, None] * groups + (first + tl.arange(0, BG))[None, :]
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox16(philox_key(rng), low, high, low, DIRECTION)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BL, BG, 4])
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
    return tl.reshape((words[:, :, :, None] >> shifts[None, None, None, :]) & 0xFF, [BL, BG * 16])


@triton.jit
def _pack(codes, WIDTH: tl.constexpr):
    """Pack int32 (lines, positions) into (lines, groups): two codes of 4 bits, or four of 6, the first lowest."""
    BL: tl.constexpr = codes.shape[0]
    BC: tl.constexpr = codes.shape[1]
    even, odd = tl.split(tl.reshape(codes, [BL, BC // 2, 2]))
    words = even | (odd << WIDTH)
    if WIDTH == 6:
        even, odd = tl.split(tl.reshape(words, [BL, BC // 4, 2]))
        words = even | (odd << 12)
    return words


@triton.jit
def _unpack(words, WIDTH: tl.constexpr):
    """Undo `_pack`: return the codes of the groups."""
    BL: tl.constexpr = words.shape[0]
    BG: tl.constexpr = words.shape[1]
    if WIDTH == 4:
        return tl.reshape(tl.join(words & 15, words >> 4), [BL, BG * 2])
    else:
        pairs = tl.reshape(tl.join(words & 0xFFF, words >> 12), [BL, BG * 2])
        return tl.reshape(tl.join(pairs & 63, pairs >> 6), [BL, BG * 4])


@triton.jit
def quantize_side(
    value,
    data,
    scales,
    rng,
    lines,
    positions,
    L,
    C,
    stored,
    DIRECTION: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    FLOOR: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
):
    """Write one direction of a tile: FP32 `value` at `lines` < L and `positions` < C, which is 0 elsewhere.

    `stored` is how many codes a line of `data` holds, C or more. What lies beyond has the scale 0, which is the
    padding.
    """
    BL: tl.constexpr = value.shape[0]
    BC: tl.constexpr = value.shape[1]
    WIDTH: tl.constexpr = 1 + EXPONENT + MANTISSA
    GROUP: tl.constexpr = 2 if WIDTH == 4 else 4
    BYTES: tl.constexpr = 1 if WIDTH == 4 else 3
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(tl.reshape(bits, [BL, BC // 32, 32]), 2)
    if TWO_D:
        tile = tl.max(tl.reshape(top, [BL // 32, 32, BC // 32]), 1)
        top = tl.reshape(tl.broadcast_to(tile[:, None, :], [BL // 32, 32, BC // 32]), [BL, BC // 32])
    byte = scale_byte(top, EXPONENT, MANTISSA, FLOOR)
    factor = tl.where(byte == 255, _NAN_BITS, (254 - byte) << 23).to(tl.float32, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [BL, BC // 32, 32]), [BL, BC])
    blocks = (C + 31) // 32
    if rng is None:
        codes = encode(value * factor, EXPONENT, MANTISSA)
    else:
        codes = cast_e2m1_stochastic(value * factor, _random_bytes(rng, lines, positions, blocks * 2, DIRECTION))
    codes = tl.where((positions < stored)[None, :], codes, 0)
    first = tl.min(positions, 0)
    groups = (stored + GROUP - 1) // GROUP
    if data.dtype.element_ty == tl.uint8:
        words = _pack(codes, WIDTH)
        group = first // GROUP + tl.arange(0, BC // GROUP)
        at = data + (lines[:, None] * groups + group[None, :]) * BYTES
        mask = (lines < L)[:, None] & (group < groups)[None, :]
        for i in tl.static_range(BYTES):
            tl.store(at + i, ((words >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)
    else:  # unpacked: the values that the codes stand for (this has not run on real hardware)
        scale = tl.broadcast_to(e8m0_decode(byte)[:, :, None], [BL, BC // 32, 32])
        values = (decode(codes, EXPONENT, MANTISSA) * tl.reshape(scale, [BL, BC])).to(data.dtype.element_ty)
        at = data + lines[:, None] * (groups * GROUP) + positions[None, :]
        tl.store(at, values, mask=(lines < L)[:, None] & (positions < groups * GROUP)[None, :])
    if TWO_D:
        byte = tl.where((lines < L)[:, None], byte, 0)
    j = first // 32 + tl.arange(0, BC // 32)
    tiles = (blocks + 3) // 4
    to = swizzled(lines[:, None], j[None, :], tiles) if SWIZZLED else lines[:, None] * (tiles * 4) + j[None, :]
    mask = (lines < (L + 127) // 128 * 128)[:, None] & (j < tiles * 4)[None, :]
    tl.store(scales + to, byte.to(tl.uint8), mask=mask)


@Fast
@triton.jit
def dequantize_kernel(
    data,
    scales,
    out,
    R,
    C,
    per_row,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Dequantize the program's tile of (R, C); `per_row` is the number of groups of codes, more than C takes if rows
    are filled up."""
    WIDTH: tl.constexpr = 1 + EXPONENT + MANTISSA
    GROUP: tl.constexpr = 2 if WIDTH == 4 else 4
    BYTES: tl.constexpr = 1 if WIDTH == 4 else 3
    across = (C + BN - 1) // BN
    pid = tl.program_id(0)
    r = (pid // across).to(tl.int64) * BM + tl.arange(0, BM)
    start = (pid % across).to(tl.int64) * BN
    group = start // GROUP + tl.arange(0, BN // GROUP)
    at = data + (r[:, None] * per_row + group[None, :]) * BYTES
    mask = (r < R)[:, None] & (group < per_row)[None, :]
    words = tl.load(at, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, BYTES):
        words |= tl.load(at + i, mask=mask, other=0).to(tl.int32) << (8 * i)
    value = decode(_unpack(words, WIDTH), EXPONENT, MANTISSA)
    b = start // 32 + tl.arange(0, BN // 32)
    blocks = (C + 31) // 32
    tiles = (blocks + 3) // 4
    to = swizzled(r[:, None], b[None, :], tiles) if SWIZZLED else r[:, None] * (tiles * 4) + b[None, :]
    byte = tl.load(scales + to, mask=(r < R)[:, None] & (b < blocks)[None, :], other=0).to(tl.int32)
    scale = tl.broadcast_to(e8m0_decode(byte)[:, :, None], [BM, BN // 32, 32])
    value = (value * tl.reshape(scale, [BM, BN])).to(out.dtype.element_ty)
    c = start + tl.arange(0, BN)
    if TRANSPOSED:
        tl.store(out + c[:, None] * R + r[None, :], tl.trans(value), mask=(c < C)[:, None] & (r < R)[None, :])
    else:
        tl.store(out + r[:, None] * C + c[None, :], value, mask=(r < R)[:, None] & (c < C)[None, :])


def bits_of(element: Element) -> dict[str, int]:
    """Return the element type as constants of a kernel."""
    return {"EXPONENT": element.exponent, "MANTISSA": element.mantissa}


def tile_config() -> dict[str, int]:
    """Return the tile of the cast: whole 32x32 tiles in both directions."""
    return {"BM": 64, "BN": 64, "num_warps": 4}


def dequantize_config() -> dict[str, int]:
    """Return the tile of the dequantization, in codes."""
    return {"BM": 32, "BN": 128, "num_warps": 4}
