"""Shared parts of the NVFP4 kernels: E2M1 codes, block scales, Philox and the Hadamard transform are computed here.

A 16-block is sixteen tensors of one shape, element i of every block in tensor i: rounding, packing, the transform and
the sums of errors are then elementwise, in registers. Each function gives the bits of `kernels/elements.py`,
`philox.py` or `hadamard.py`. Where it computes them in another way, a comment says why the result is the same.
"""

# mypy: disable-error-code="assignment, var-annotated"
# In a kernel a tuple grows, and its type with it.

import triton
import triton.language as tl

from mezzotint.kernels.triton._jit import INTERPRETED, NARROW_BF16, NARROW_FP16

_FLT_MAX = tl.constexpr(3.4028234663852886e38)


def _asm(*lines: str) -> tl.constexpr:
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


# This rounds eight FP32 to eight E2M1 codes in one word. FP16 with 1.0 at its smallest normal, 2^-14, is E2M1 with nine
# more mantissa bits, subnormals included, so after a truncating conversion (two values an instruction) the code is
# (bits + 256) >> 9: up at and above the middle between two codes. To be nearest even, the middles that go down to an
# even code (0.25, 1.25, 2.5, 5) must first fall below themselves, those that go up to one (0.75, 1.75, 3.5) must not:
#   v + v·c, c = fl32(2/3)·2^-24, rounded once, is the float after v where its mantissa is 1.5 or more, else v;
#   that times (1 - 2^-24) is the float before; the factor 2^-14 comes along.
# min drops NaN and saturates: 0x0EFF is the largest that rounds to 6. It keeps the sign of the converted value: NaN's
# is positive. The upper byte of each half is then s000mmmg: sign, code, the bit that 256 is added to. Those of the even
# and of the odd elements are gathered into a word each, and the rest is done four at a time; what ·8 pushes over the
# edge of a byte stays below the codes.
_PAIRS = ((0, 2), (4, 6), (1, 3), (5, 7))
_NEAREST = _asm(
    ".reg .f32 h<8>; .reg .b32 c, e, o, r<4>, t;",
    "mov.b32 c, 0x0EFF0EFF;",
    *(f"fma.rn.f32 h{i}, ${i + 1}, 0f332AAAAB, ${i + 1}; mul.rn.f32 h{i}, h{i}, 0f387FFFFF;" for i in range(8)),
    *(
        f"cvt.rz.f16x2.f32 r{j}, h{high}, h{low}; min.xorsign.abs.f16x2 r{j}, r{j}, c;"
        for j, (low, high) in enumerate(_PAIRS)
    ),
    "prmt.b32 e, r0, r1, 0x7531; mad.lo.u32 t, e, 8, 0x08080808; lop3.b32 e, t, e, 0x7F7F7F7F, 0xE4;",
    "prmt.b32 o, r2, r3, 0x7531; mad.lo.u32 t, o, 8, 0x08080808; lop3.b32 o, t, o, 0x7F7F7F7F, 0xE4;",
    "shr.u32 e, e, 4; lop3.b32 $0, o, e, 0xF0F0F0F0, 0xE4;",
)

# This turns eight FP32 and eight random bytes into eight codes. fl32(|v| + byte·step/256) reaches the next code if and
# only if the exact sum of |v|, 2^-26 and byte·step/256 does: from 0.25 on the sum of the first and the last is exact
# below the next code, and a multiple of 2^-25; under 0.25 the only code in reach is 0.5, and fl32 rounds up to it from
# 0.5 - 2^-26. So the sum is taken in the truncated FP16 bits, where a step is 512 and the byte counts twice. 0x0E00 is
# 6: nothing above it matters. Truncating twice is truncating once, so |v| + 2^-26 may be truncated with the factor
# 2^-14 in one FMA, which has no |v|: the multiplication before it takes |x|. The signs come from elsewhere, as words p:
# the pairs of _PAIRS or, in `natural` order, of neighbours.


def _stochastic(natural: bool) -> tl.constexpr:
    signs = (
        "prmt.b32 r0, $12, $13, 0x7351; prmt.b32 r1, $14, $15, 0x7351;",
        "prmt.b32 p, r0, r1, 0x5410; prmt.b32 q, r0, r1, 0x7632;",
    )
    if not natural:
        signs = ("prmt.b32 p, $12, $13, 0x7531; prmt.b32 q, $14, $15, 0x7531;",)
    return _asm(
        ".reg .f32 h<8>; .reg .b32 b, c, e, o, p, q, r<4>;",
        "mov.b32 c, 0x0E000E00;",
        *(
            f"abs.f32 h{i}, ${i + 1}; mul.rn.f32 h{i}, h{i}, $9; fma.rz.f32 h{i}, h{i}, 0f38800000, 0f2B800000;"
            for i in range(8)
        ),
        *(
            f"cvt.rz.f16x2.f32 r{j}, h{high}, h{low}; min.f16x2 r{j}, r{j}, c;"
            f" prmt.b32 b, ${10 + low // 4}, 0, {'0x4341' if low % 2 else '0x4240'}; mad.lo.u32 r{j}, b, 2, r{j};"
            for j, (low, high) in enumerate(_PAIRS)
        ),
        "prmt.b32 e, r0, r1, 0x7531; prmt.b32 o, r2, r3, 0x7531;",
        *signs,
        "shl.b32 e, e, 3; lop3.b32 e, e, p, 0x7F7F7F7F, 0xE4;",
        "shl.b32 o, o, 3; lop3.b32 o, o, q, 0x7F7F7F7F, 0xE4;",
        "shr.u32 e, e, 4; lop3.b32 $0, o, e, 0xF0F0F0F0, 0xE4;",
    )


_STOCHASTIC, _STOCHASTIC_NATURAL = _stochastic(False), _stochastic(True)


# This rounds to E4M3 and back, then takes a reciprocal. `satfinite` saturates, infinity too; it is PTX because Triton's
# own cast before 3.7 goes through FP16 on sm_89. The reciprocal is rcp.rn's, a Newton step on the approximation, but
# without its branch for subnormals, which would keep blocks from overlapping: $5, a power of two, keeps them away from
# the approximation, which flushes them. 1/0 ends as NaN, which min drops: FLT_MAX, as for infinity. No value · s_dec
# reaches 2^126, where the approximation would fail.
_SCALE = _asm(
    ".reg .f32 e, r, v, y; .reg .b16 p, l, h; .reg .b32 q;",
    "cvt.rn.satfinite.e4m3x2.f32 p, 0f00000000, $3; cvt.rn.f16x2.e4m3x2 q, p;",
    "mov.b32 {l, h}, q; cvt.f32.f16 v, l; mul.rn.f32 y, v, $4; mul.rn.f32 y, y, $5; rcp.approx.ftz.f32 r, y;",
    "neg.f32 y, y; fma.rn.f32 e, y, r, 0f3F800000; fma.rn.f32 r, r, e, r; mul.rn.f32 r, r, $5;",
    "min.f32 $2, r, 0f7F7FFFFF; mov.b32 $1, v; cvt.u32.u16 $0, p;",
)

# Philox: both words of a product come from one multiplication. $4..$7 is the counter, $8 and $9 the key.
_PHILOX = _asm(
    ".reg .b32 k, l, m<2>, c<4>; .reg .b64 p;",
    "mov.b32 c0, $4; mov.b32 c1, $5; mov.b32 c2, $6; mov.b32 c3, $7;",
    *(
        f"mul.wide.u32 p, c0, 0xD2511F53; mov.b64 {{m0, m1}}, p; add.u32 k, $9, {i * 0xBB67AE85 & 0xFFFFFFFF};"
        f" lop3.b32 m1, m1, c3, k, 0x96; mov.b32 c3, m0;"
        f" mul.wide.u32 p, c2, 0xCD9E8D57; mov.b64 {{m0, l}}, p; add.u32 k, $8, {i * 0x9E3779B9 & 0xFFFFFFFF};"
        f" lop3.b32 c0, l, c1, k, 0x96; mov.b32 c1, m0; mov.b32 c2, m1;"
        for i in range(10)
    ),
    "mov.b32 $0, c0; mov.b32 $1, c1; mov.b32 $2, c2; mov.b32 $3, c3;",
)

_CANONICAL_BF16 = _asm(
    ".reg .b32 o, z; mov.b32 o, 0x3F803F80; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $2, o, z; mov.b32 $1, $0;"
)
_CANONICAL_FP16 = _asm(
    ".reg .b32 o, z; mov.b32 o, 0x3C003C00; mov.b32 z, 0x80008000; fma.rn.f16x2 $0, $2, o, z; mov.b32 $1, $0;"
)
_ABSMAX_BF16 = tl.constexpr("max.xorsign.abs.bf16x2 $0, $1, $2;")
_ABSMAX_FP16 = tl.constexpr("max.xorsign.abs.f16x2 $0, $1, $2;")


@triton.jit
def cast_e2m1(value):
    """Cast FP32 to int32 codes 0..15: round to nearest even, saturate, keep the sign of zero, turn NaN into 7."""
    a = tl.abs(value)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    code += (value.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(value == value, code, 7)


@triton.jit
def decode_e2m1(code):
    """Decode int32 codes 0..15 to FP32, exactly: the code's bits on top of a subnormal are the value times 2^-126."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def decode_e4m3(code):
    """Decode int32 codes 0..255 to FP32, exactly: the code's bits on top of a subnormal are the value times 2^-120;
    0x7F is NaN."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _step(a):
    return tl.where(a >= 4.0, 2.0, tl.where(a >= 2.0, 1.0, 0.5))


@triton.jit
def cast_e2m1_stochastic(value, byte):
    a = tl.abs(value)
    t = a + byte.to(tl.float32) * (_step(a) * 0.00390625)
    code = (t >= 0.5).to(tl.int32) + (t >= 1.0).to(tl.int32) + (t >= 1.5).to(tl.int32) + (t >= 2.0).to(tl.int32)
    code += (t >= 3.0).to(tl.int32) + (t >= 4.0).to(tl.int32) + (t >= 6.0).to(tl.int32)
    code += (value.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(value == value, code, 7)


@triton.jit
def pack8(codes):
    """Pack eight tensors of codes into int32, element i in nibble i."""
    word = codes[0]
    for i in tl.static_range(1, 8):
        word |= codes[i] << (4 * i)
    return word


@triton.jit
def round8(v):
    """Round eight FP32 tensors to int32, eight E2M1 codes each."""
    if INTERPRETED:
        codes = ()
        for i in tl.static_range(8):
            codes += (cast_e2m1(v[i]),)
        return pack8(codes)
    else:
        return tl.inline_asm_elementwise(
            _NEAREST,
            "=r,r,r,r,r,r,r,r,r",
            [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def round8_stochastic(x, factor, low, high, signs, NATURAL: tl.constexpr):
    """Round x · factor as `round8` does, but stochastically, with the random bytes of elements 0..3 in `low` and of
    4..7 in `high`.

    `signs` are four words that hold the signs of x, and no sign where x is NaN: see `sign_pairs` and, if NATURAL,
    `neighbours`.
    """
    if INTERPRETED:
        codes = ()
        for i in tl.static_range(8):
            word = low if i < 4 else high
            codes += (cast_e2m1_stochastic(x[i] * factor, (word >> (i % 4 * 8)) & 0xFF),)
        return pack8(codes)
    else:
        return tl.inline_asm_elementwise(
            _STOCHASTIC_NATURAL if NATURAL else _STOCHASTIC,
            "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], factor, low, high, signs[0], signs[1], signs[2], signs[3]],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _upper_halves(a, b):
    if INTERPRETED:
        return b
    else:
        asm: tl.constexpr = "prmt.b32 $0, $1, $2, 0x7632;"
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def sign_pairs(v):
    """Return the words of the signs of eight FP32 products, whose NaN has no sign."""
    return (
        _upper_halves(v[0], v[2]),
        _upper_halves(v[4], v[6]),
        _upper_halves(v[1], v[3]),
        _upper_halves(v[5], v[7]),
    )


@triton.jit
def neighbours(x):
    """Return pairs of 16-bit elements (…, 8) as int32 of the same shape: the pair (0, 1) twice, (2, 3) twice, …; NaN
    has no sign."""
    if INTERPRETED:
        return x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        # x·1 - 0 is x, but for NaN: any that is computed is the canonical one.
        asm: tl.constexpr = _CANONICAL_BF16 if x.dtype == tl.bfloat16 else _CANONICAL_FP16
        return tl.inline_asm_elementwise(asm, "=&r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2)


@triton.jit
def block_scale(d, s_dec):
    """Return, for FP32 d ≥ 0, its E4M3 byte (int32), the byte's value, and the factor min(fl32(1 / fl32(value ·
    s_dec)), FLT_MAX)."""
    if INTERPRETED:
        # The interpreter's own cast to FP8 is not to be trusted. Below 2^-6 a step is 2^-9, the last bit of 2^14.
        d = tl.minimum(d, 448.0)
        bits = d.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        sf = tl.where(d < 0.015625, (d + 16384.0).to(tl.int32, bitcast=True) & 15, normal)
        value = tl.where(sf < 8, sf.to(tl.float32) * 0.001953125, ((sf + 960) << 20).to(tl.float32, bitcast=True))
        return sf, value, tl.minimum(tl.div_rn(1.0, value * s_dec), _FLT_MAX)
    else:
        return tl.inline_asm_elementwise(
            _SCALE,
            "=r,=r,=r,r,r,r",
            [d, s_dec, tl.where(s_dec < 6.018531076210112e-36, 16777216.0, 1.0)],  # 2^-117 · 2^-9 is still normal
            dtype=(tl.int32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def encode_scale(amax, TOP: tl.constexpr):
    """Return S_enc = min(fl32(TOP / amax), FLT_MAX), 1 for an amax of zero or infinity, and S_dec = fl32(1 / S_enc)."""
    scale = tl.div_rn(TOP, amax)
    scale = tl.where(scale > _FLT_MAX, _FLT_MAX, scale)
    scale = tl.where((amax == 0.0) | (scale == 0.0), 1.0, scale)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def widen(x):
    """Convert to FP32. BF16 is converted two at a time, because Triton would first take a pair apart."""
    if x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    elif INTERPRETED:  # it loses subnormals
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        asm: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
        return tl.inline_asm_elementwise(asm, "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def _narrow(x, TYPE: tl.constexpr):
    """Cast FP32 to TYPE, rounding to nearest even."""
    if INTERPRETED and tl.bfloat16 == TYPE:  # it truncates
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)


@triton.jit
def _narrow_pair(low, high, like):
    """Return two FP32 tensors as int32, both in the 16-bit type of `like`, rounded to nearest even; NaN has no sign."""
    if INTERPRETED:
        low = _narrow(low, like.dtype).to(tl.int16, bitcast=True).to(tl.int32)
        high = _narrow(high, like.dtype).to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 0xFFFF) | (high << 16)
    else:
        asm: tl.constexpr = NARROW_BF16 if like.dtype == tl.bfloat16 else NARROW_FP16
        return tl.inline_asm_elementwise(asm, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def narrow_pairs(y, like):
    """Return sixteen FP32 tensors as eight words of two, paired as `round8_stochastic` takes signs of each eight."""
    words = ()
    for i in tl.static_range(0, 16, 8):
        words += (
            _narrow_pair(y[i], y[i + 2], like),
            _narrow_pair(y[i + 4], y[i + 6], like),
            _narrow_pair(y[i + 1], y[i + 3], like),
            _narrow_pair(y[i + 5], y[i + 7], like),
        )
    return words


@triton.jit
def _widen_pair(word, like):
    """Return the two FP32 tensors, as rounded, that a word of int32 was narrowed from."""
    if like.dtype == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def widen_pairs(words, like):
    """Return the words of `narrow_pairs`, eight or the four of one half, as FP32 tensors in order."""
    values = ()
    for i in tl.static_range(0, len(words), 4):
        v0, v2 = _widen_pair(words[i], like)
        v4, v6 = _widen_pair(words[i + 1], like)
        v1, v3 = _widen_pair(words[i + 2], like)
        v5, v7 = _widen_pair(words[i + 3], like)
        values += (v0, v1, v2, v3, v4, v5, v6, v7)
    return values


@triton.jit
def absmax_pairs(words, like):
    """Return max |y| in FP32 over the words of `narrow_pairs`; NaN is ignored."""
    if INTERPRETED:
        return absmax(widen_pairs(words, like))
    else:
        asm: tl.constexpr = _ABSMAX_BF16 if like.dtype == tl.bfloat16 else _ABSMAX_FP16
        top = words[0]
        for i in tl.static_range(1, 8):
            top = tl.inline_asm_elementwise(asm, "=r,r,r", [top, words[i]], dtype=tl.int32, is_pure=True, pack=1)
        low, high = _widen_pair(top, like)
        return tl.maximum(tl.maximum(tl.abs(low), tl.abs(high)), 0.0)


@triton.jit
def _absmax2(a, b):
    """Return max(|a|, |b|) with any sign; of NaN and a number, the number. 16-bit types are taken two at a time."""
    if INTERPRETED or a.dtype == tl.float32:
        return tl.maximum(tl.abs(widen(a)), tl.abs(widen(b)))
    else:
        asm: tl.constexpr = _ABSMAX_BF16 if a.dtype == tl.bfloat16 else _ABSMAX_FP16
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@triton.jit
def absmax(x):
    """Return max |x| in FP32 over a tuple of tensors; NaN is ignored."""
    top = x[0]
    for i in tl.static_range(1, len(x)):
        top = _absmax2(top, x[i])
    return tl.maximum(tl.abs(widen(top)), 0.0)


@triton.jit
def absmax16(low, high):
    """Return FP32 (A, B), max |x| over two tensors (A, B, 8) and their last dimension; NaN is ignored."""
    A: tl.constexpr = low.shape[0]
    B: tl.constexpr = low.shape[1]
    top = _absmax2(low, high)
    for half in tl.static_range(2):
        low, high = tl.split(tl.permute(tl.reshape(top, [A, B, 2, 4 >> half]), (0, 1, 3, 2)))
        top = _absmax2(low, high)
    low, high = tl.split(widen(top))
    return tl.maximum(tl.maximum(tl.abs(low), tl.abs(high)), 0.0)


@triton.jit
def _first_stage(x, SIGN_MASK: tl.constexpr, SCALE: tl.constexpr):
    """Return the sums and differences of neighbours of sixteen tensors, signed and scaled, as sixteen FP32 tensors."""
    y = ()
    for i in tl.static_range(0, 16, 2):
        first, second = widen(x[i]), widen(x[i + 1]) * (-SCALE if SIGN_MASK >> (i + 1) & 1 else SCALE)
        if x[i].dtype == tl.float32:
            first *= -SCALE if SIGN_MASK >> i & 1 else SCALE
            y += (first + second, first - second)
        else:  # 16-bit x · SCALE is exact, so the sum is the only rounding
            scale = tl.full(first.shape, -SCALE if SIGN_MASK >> i & 1 else SCALE, tl.float32)
            y += (tl.fma(first, scale, second), tl.fma(first, scale, second * -1.0))
    return y


@triton.jit
def _stage(y, STAGE: tl.constexpr):
    z = ()
    for i in tl.static_range(16):
        other = y[i ^ (1 << STAGE)]
        z += (other - y[i] if i >> STAGE & 1 else y[i] + other,)
    return z


@triton.jit
def hadamard16(x, SIGN_MASK: tl.constexpr):
    """Transform sixteen tensors to sixteen FP32 tensors by the butterfly of `kernels/hadamard.py`, not yet rounded to
    the type of x."""
    y = _stage(_stage(_stage(_first_stage(x, SIGN_MASK, 0.0625), 1), 2), 3)
    z = ()
    for i in tl.static_range(16):
        z += (y[i] * 4.0,)
    return z


@triton.jit
def hadamard16_small(x, SIGN_MASK: tl.constexpr):
    """Transform as `hadamard16` does, where no |x| reaches 2^127, so that half of sixteen do not overflow when the
    scale is applied first.

    Powers of two commute with the roundings: x is a multiple of 2^-133, and FP32 has those of 2^-149.
    """
    return _stage(_stage(_stage(_first_stage(x, SIGN_MASK, 0.25), 1), 2), 3)


@triton.jit
def hadamard_absmax(x, SIGN_MASK: tl.constexpr):
    """Return max |y| in FP32 over the transform of sixteen tensors; NaN is ignored.

    Of a + b and a - b, rounded, the larger magnitude is |a| + |b|, rounded; and the roundings and 4 · are monotonic.
    """
    y = _stage(_stage(_first_stage(x, SIGN_MASK, 0.0625), 1), 2)
    top = tl.abs(y[0]) + tl.abs(y[8])
    for i in tl.static_range(1, 8):
        top = tl.maximum(top, tl.abs(y[i]) + tl.abs(y[i + 8]))
    return tl.maximum(top, 0.0)


@triton.jit
def narrow_absmax(top, TYPE: tl.constexpr):
    """Return the amaxes that `hadamard_absmax` found, scaled and rounded as the transform is."""
    top = _narrow(top * 4.0, TYPE)
    if INTERPRETED and tl.bfloat16 == TYPE:  # it loses subnormals
        return (top.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return top.to(tl.float32)


@triton.jit
def philox_key(rng):
    """Return three uint32 of rng int64 [2] = (seed, offset): the key and the counter's last word."""
    seed, offset = tl.load(rng), tl.load(rng + 1)
    return (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32), (offset & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def philox16(key, low, high, like, DIRECTION: tl.constexpr):
    """Return four uint32 words, the bytes of a block's 16 elements, by `philox_key` and block index (two uint32).

    `like` is a tensor that threads hold as they shall hold the words. Without it Triton chooses another layout for
    Philox, and moves the words.
    """
    k0, k1, c3 = key
    if INTERPRETED:
        c0, c1 = low, tl.zeros_like(low) + high
        c2 = tl.zeros_like(c0) + DIRECTION
        c3 += tl.zeros_like(c0)
        for _ in tl.static_range(10):
            p0 = c0.to(tl.uint64) * 0xD2511F53
            p1 = c2.to(tl.uint64) * 0xCD9E8D57
            c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
            c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
            k0 += 0x9E3779B9
            k1 += 0xBB67AE85
        return c0, c1, c2, c3
    else:
        return tl.inline_asm_elementwise(
            _PHILOX,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
            [low, high, DIRECTION, c3, k0, k1, like],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def split8(x):
    """Split (A, B, 8) into eight tensors (A, B). One thread holds the eight, so that no data moves."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [A, B, 4, 2]))
    x04, x26 = tl.split(tl.reshape(even, [A, B, 2, 2]))
    x15, x37 = tl.split(tl.reshape(odd, [A, B, 2, 2]))
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def wide_product(a, b):
    """Return a · b as int64 for 32-bit `a` and the number b, neither negative: one multiplication if b has 32 bits,
    too."""
    if (a * b).dtype == tl.int64:
        return a.to(tl.int64) * b
    else:
        return (a.to(tl.uint32).to(tl.uint64) * tl.cast(b, tl.uint32).to(tl.uint64)).to(tl.int64)


@triton.jit
def scale_index(i, j, tiles, SWIZZLED: tl.constexpr):
    """Return the byte index of the scale (outer i, block j); `tiles` = padded blocks / 4."""
    if SWIZZLED:
        return (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    else:
        return i * (tiles * 4) + j


@triton.jit
def scale_index_in(i0, i, j0, j, tiles, SIZE: tl.constexpr, SWIZZLED: tl.constexpr):
    """Return `scale_index` of (i0 + i, j0 + j), where i0 and j0 are uint32 numbers, i and j int32 tensors.

    i stays below SIZE, a power of two that i0 is a multiple of, and so it is with j: what the scales of a tile have in
    common is then computed once, in numbers.
    """
    if SWIZZLED:
        common = (wide_product(i0 >> 7, tiles) + (j0 >> 2)) * 512
        if SIZE < 128:
            i += (i0 & 127).to(tl.int32)
        j += (j0 & 3).to(tl.int32)
        index = (j >> 2) * 512 + (i & 31) * 16 + ((i >> 5) & 3) * 4 + (j & 3)
        if SIZE <= 128:
            return common + index
        else:
            return common + (wide_product(i >> 7, tiles) * 512 + index)
    else:
        return wide_product(i0, tiles * 4) + j0 + (wide_product(i, tiles * 4) + j)
