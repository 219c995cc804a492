"""The element types once more, in numpy and plain integer arithmetic, written apart from the package's own code.

A finite FP32 number is `significand · 2^exponent` with integers; a cast rounds the integer.
"""

import numpy as np

# name → (mantissa bits, exponent bias, code of the largest value, code of NaN)
SMALL_FLOATS = {"e4m3": (3, 7, 0x7E, 0x7F), "e5m2": (2, 15, 0x7B, 0x7F), "e2m1": (1, 1, 0x7, 0x7)}
FLT_MAX = np.finfo(np.float32).max
SIGN_BIT = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 0x8}


def all_bf16() -> np.ndarray:
    """Every bfloat16 pattern in order, as FP32."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def all_fp16() -> np.ndarray:
    """Every float16 pattern in order, as FP32."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


PATTERNS = {"bf16": all_bf16, "fp16": all_fp16}


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """|x| = significand · 2^exponent; and the exponent of its leading bit. Infinity and NaN: meaningless."""
    bits = x.view(np.uint32).astype(np.int64)
    field, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    significand = np.where(field == 0, fraction, fraction | 1 << 23)
    exponent = np.maximum(field, 1) - 150
    leading = exponent + np.frexp(significand.astype(np.float64))[1] - 1
    return significand, exponent, leading


def encode(x: np.ndarray, name: str) -> np.ndarray:
    """FP32 → codes: nearest, ties to even, saturating; NaN → the format's NaN code (E2M1: +6)."""
    mantissa_bits, bias, top, nan_code = SMALL_FLOATS[name]
    significand, exponent, leading = split(x)
    binade = np.maximum(leading, 1 - bias)
    shift = np.minimum(binade - mantissa_bits - exponent, 40)  # 40: everything is below half a unit
    assert (shift > 0).all(), "FP32 has more bits than the format"
    units, rest = significand >> shift, significand & ((1 << shift) - 1)
    half = np.int64(1) << (shift - 1)
    units += (rest > half) | ((rest == half) & (units & 1 == 1))
    codes = np.minimum(((binade - 1 + bias) << mantissa_bits) + units, top)
    codes = np.where(np.isinf(x), top, codes) | np.where(np.signbit(x), SIGN_BIT[name], 0)
    return np.where(np.isnan(x), nan_code, codes).astype(np.uint8)


def encode_e8m0_up(x: np.ndarray) -> np.ndarray:
    """FP32 → byte of the smallest power of two ≥ |x| in [2^-127, 2^127]; NaN → 255."""
    significand, _, leading = split(x)
    is_power = significand & (significand - 1) == 0
    byte = np.clip(np.where(is_power, leading, leading + 1) + 127, 0, 254)
    byte = np.where(significand == 0, 0, np.where(np.isinf(x), 254, byte))
    return np.where(np.isnan(x), 255, byte).astype(np.uint8)


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """Codes → float64, exact."""
    mantissa_bits, bias, top, _ = SMALL_FLOATS[name]
    magnitude = codes.astype(np.int64) & (SIGN_BIT[name] - 1)
    field, fraction = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    significand = np.where(field == 0, fraction, fraction | 1 << mantissa_bits)
    value = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - bias - mantissa_bits)
    value = np.where(magnitude > top, np.inf if name == "e5m2" else np.nan, value)
    if name == "e5m2":
        value = np.where(magnitude > 0x7C, np.nan, value)
    return np.where(codes & SIGN_BIT[name], -value, value)


def decode_e8m0(byte: np.ndarray) -> np.ndarray:
    """Byte → float64 2^(byte-127); 255 is NaN."""
    return np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(np.int64) - 127))


def fl32(x: np.ndarray) -> np.ndarray:
    """One rounding to FP32, kept in float64.

    Of the float64 product (exact) or quotient (53 ≥ 2·24 + 2 bits) of two FP32 numbers it is as good as one rounding.
    """
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float64)


def same_bits(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """FP32 equal bit for bit; any NaN equals any other."""
    assert got.dtype == want.dtype == np.float32
    assert got.shape == want.shape
    return (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))


def scale_from_amax(amax: np.ndarray, top: float, pow2: bool, eps: float, value_for_inf: float) -> np.ndarray:
    """FP32 amax → FP32 scale, by numerics.md, section 1, one number at a time."""
    scales = np.empty(amax.shape, np.float32)
    for i, value in enumerate(amax):
        floor = np.float32(eps) if value < np.float32(eps) else value
        if floor == 0 or not np.isfinite(floor):
            scales[i] = 1.0
            continue
        scale = fl32(np.float64(top) / np.float64(floor))
        scale = np.float64(value_for_inf) if np.isinf(scale) else scale
        scales[i] = np.ldexp(1.0, np.frexp(scale)[1] - 1) if pow2 else scale
    return scales


def swizzled_address(i: np.ndarray, j: np.ndarray, blocks: int) -> np.ndarray:
    """Where the scale byte of outer index i and block j lies; `blocks` is their count, a multiple of 4."""
    return (i // 128 * (blocks // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4


def hadamard16_matrix(sign_mask: int) -> np.ndarray:
    """R = diag(s) · H16 / 4 in float64: y = x @ R."""
    index = np.arange(16)
    parity = np.vectorize(lambda n: n.bit_count() % 2)(index[:, None] & index[None, :])
    signs = np.where(sign_mask >> index & 1, -1.0, 1.0)
    return signs[:, None] * np.where(parity, -1.0, 1.0) * 0.25


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 10) -> tuple[int, ...]:
    """Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", in Python's integers."""
    (c0, c1, c2, c3), (k0, k1), word = counter, key, 0xFFFFFFFF
    for _ in range(rounds):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & word, a >> 32 ^ c3 ^ k1, a & word
        k0, k1 = k0 + 0x9E3779B9 & word, k1 + 0xBB67AE85 & word
    return c0, c1, c2, c3


def dropped_amax(x: np.ndarray, axis: int) -> np.ndarray:
    """max |x| along an axis, NaN dropped; 0 where there is nothing."""
    return np.where(np.isnan(x), np.float32(0), np.abs(x)).max(axis=axis, initial=np.float32(0))


def quantize_rows_fp8(x: np.ndarray, name: str, pow2: bool, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """FP8 with one scale per row (numerics.md, section 9): FP32 (R, C) → codes (R, C), scale_inv [R]."""
    top = {"e4m3": 448.0, "e5m2": 57344.0}[name]
    scale = scale_from_amax(dropped_amax(x, 1), top, pow2, eps, float(FLT_MAX))
    return encode(x * scale[:, None], name), np.float32(1) / scale


def quantize_rows_nvfp4(
    x: np.ndarray,
    tensor_amax: np.ndarray,
    *,
    e4m3_max: int = 448,
    error: str | None = None,
    two_d: bool = False,
    noise: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """NVFP4 along rows (numerics.md, section 6): FP32 (R, C), amax [1] or [R] → codes (R, C), scale bytes (R, C/16).

    R and C are multiples of 16. `error` "mae" or "mse" chooses between four and six; `noise`, one byte per element,
    rounds stochastically.
    """
    f, amax = np.float32, tensor_amax.reshape(-1, 1)
    blocks = x.reshape(x.shape[0], -1, 16)
    top = dropped_amax(blocks, 2)
    if two_d:
        top = np.repeat(top.reshape(-1, 16, top.shape[1]).max(axis=1), 16, axis=0)
    with np.errstate(all="ignore"):  # overflow and division by zero are part of the formulas
        s_enc = np.minimum(f(e4m3_max * 6) / amax, FLT_MAX)
        s_enc = np.where((amax == 0) | (s_enc == 0), f(1), s_enc)

        def attempt(scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            sf = encode(scale, "e4m3")
            factor = np.minimum(f(1) / (decode(sf, "e4m3").astype(f) * (f(1) / s_enc)), FLT_MAX)
            value = blocks * factor[..., None]
            return encode(value, "e2m1") if noise is None else stochastic_e2m1(value, noise.reshape(value.shape)), sf

        if error is None:
            codes, sf = attempt(np.minimum(top * (s_enc * f(1 / 6)), FLT_MAX))
            return codes.reshape(x.shape), sf
        base = top / f(6) * s_enc
        tries = [attempt(np.minimum(base * factor, f(448))) for factor in (f(1.5), f(1))]
        errors = []
        for codes, sf in tries:
            product = decode(codes, "e2m1").astype(f) * decode(sf, "e4m3").astype(f)[..., None]
            delta = product * amax[..., None] / f(6 * e4m3_max) - blocks
            errors.append(_sum_in_order(np.abs(delta) if error == "mae" else delta * delta, two_d))
        four = errors[0] < errors[1]
    codes = np.where(four[..., None], tries[0][0], tries[1][0])
    return codes.reshape(x.shape), np.where(four, tries[0][1], tries[1][1])


def _sum_in_order(delta: np.ndarray, two_d: bool) -> np.ndarray:
    """(R, B, 16) → (R, B): from left to right; over 16 rows as a tree, given to each of them, when `two_d`."""
    total = delta[..., 0]
    for i in range(1, 16):
        total = total + delta[..., i]
    if not two_d:
        return total
    rows = total.reshape(-1, 16, total.shape[1])
    for half in (8, 4, 2, 1):
        rows = rows[:, :half] + rows[:, half:]
    return np.repeat(rows[:, 0], 16, axis=0)


def stochastic_e2m1(value: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """FP32 → E2M1 codes: floor of |value| + noise/256 of a step, on the grid there; NaN → +6."""
    a = np.abs(value).astype(np.float64)
    t = fl32(a + noise / 256 * e2m1_step(a))
    step = e2m1_step(t)
    magnitude = np.minimum(np.floor(t / step) * step, 6.0)
    codes = encode(magnitude.astype(np.float32), "e2m1") | np.where(np.signbit(value), 8, 0).astype(np.uint8)
    return np.where(np.isnan(value), 7, codes).astype(np.uint8)


def e2m1_step(a: np.ndarray) -> np.ndarray:
    return np.where(a >= 4, 2.0, np.where(a >= 2, 1.0, 0.5))


def philox_noise(seed: int, offset: int, blocks: int, direction: int) -> np.ndarray:
    """uint8 (blocks, 16): what the package's stochastic rounding draws."""
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    words = [philox4x32((block, 0, direction, offset & 0xFFFFFFFF), key) for block in range(blocks)]
    return np.array(words, "<u4").view(np.uint8).reshape(blocks, 16)


def pack(codes: np.ndarray) -> np.ndarray:
    """(R, even) codes → bytes, the even index in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4
