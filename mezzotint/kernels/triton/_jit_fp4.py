"""What the NVFP4 kernels share: E2M1 codes, their stochastic rounding, block scales, Philox and the Hadamard transform.

A 16-block is sixteen tensors of one shape, element i of every block in tensor i: rounding, packing, the transform and
the sums of errors are then elementwise, in registers. Each function gives the bits of `kernels/elements.py`,
`philox.py` or `hadamard.py`; where the way there differs, a comment says why the result does not.
"""

# mypy: disable-error-code="assignment, var-annotated"
# In a kernel a tuple grows: its type does, too.

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

# Triton's interpreter knows no inline assembly.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_FLT_MAX = tl.constexpr(3.4028234663852886e38)


def _asm(*lines: str) -> tl.constexpr:
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


# Eight FP32 → eight E2M1 codes in one word. FP16 with the value 1.0 at its smallest normal, 2^-14, is E2M1 with nine
# more mantissa bits, subnormals included, so after a truncating conversion (two values an instruction) the code is
# (bits + 256) >> 9: up at and above the middle between two codes. To be nearest even, the middles that go down to an
# even code (0.25, 1.25, 2.5, 5) must first fall below themselves, those that go up to one (0.75, 1.75, 3.5) must not:
#   v + v·c, c = fl32(2/3)·2^-24, rounded once, is the float after v where its mantissa is 1.5 or more, else v;
#   that times (1 - 2^-24) is the float before; the factor 2^-14 comes along.
# min drops NaN and saturates: 0x0EFF is the largest that rounds to 6. The sign is that of the converted value: NaN's is
# positive. Codes are moved to the top of their bytes, and the even and the odd ones of the word gathered from there.
_PAIRS = ((0, 2), (4, 6), (1, 3), (5, 7))
_GATHER = (
    "prmt.b32 n0, n0, n1, 0x7531;",
    "prmt.b32 n2, n2, n3, 0x7531;",
    "shr.u32 n0, n0, 4;",
    "lop3.b32 $0, n2, n0, 0xF0F0F0F0, 0xE4;",
)
_NEAREST = _asm(
    ".reg .f32 h<8>; .reg .b32 a, r, t, n<4>;",
    *(f"fma.rn.f32 h{i}, ${i + 1}, 0f332AAAAB, ${i + 1}; mul.rn.f32 h{i}, h{i}, 0f387FFFFF;" for i in range(8)),
    *(
        f"cvt.rz.f16x2.f32 r, h{high}, h{low}; abs.f16x2 a, r; mov.b32 t, 0x0EFF0EFF; min.f16x2 a, a, t;"
        f" mad.lo.u32 t, a, 8, 0x08000800; lop3.b32 n{j}, t, r, 0x7FFF7FFF, 0xE4;"
        for j, (low, high) in enumerate(_PAIRS)
    ),
    *_GATHER,
)

# Eight FP32 and eight random bytes → eight codes. fl32(|v| + byte·step/256) reaches the next code if and only if the
# exact sum of |v|, 2^-26 and byte·step/256 does: from 0.25 on the sum of the first and the last is exact below the next
# code, and a multiple of 2^-25; under 0.25 the only code in reach is 0.5, and fl32 rounds up to it from 0.5 - 2^-26. So
# the sum is taken in the truncated FP16 bits, where a step is 512 and the byte counts twice. 0x0E00 is 6: nothing above
# it matters. The nibble is moved to the top of its half on the way (·8), and the sign, lost in |v|, is put back.
_STOCHASTIC = _asm(
    ".reg .f32 h<8>; .reg .b32 b, r, s, t, n<4>;",
    *(
        f"abs.f32 h{i}, ${i + 1}; add.rz.f32 h{i}, h{i}, 0f32800000; mul.rn.f32 h{i}, h{i}, 0f38800000;"
        for i in range(8)
    ),
    *(
        f"cvt.rz.f16x2.f32 r, h{high}, h{low}; mov.b32 t, 0x0E000E00; min.f16x2 r, r, t;"
        f" {'shr.u32' if low % 2 else 'shl.b32'} b, ${9 + low // 4}, 4; and.b32 b, b, 0x0FF00FF0;"
        f" mad.lo.u32 t, r, 8, b; prmt.b32 s, ${low + 1}, ${high + 1}, 0x7030;"
        f" lop3.b32 n{j}, t, s, 0x7FFF7FFF, 0xE4;"
        for j, (low, high) in enumerate(_PAIRS)
    ),
    *_GATHER,
)


# E4M3 there and back, then a reciprocal. `satfinite` saturates, infinity too; PTX, because Triton's own cast before 3.7
# goes through FP16 on sm_89. The reciprocal is what rcp.rn does, one Newton step on the hardware's approximation, but
# without its branch for subnormals, which would keep blocks from overlapping: `div.approx` scales those. 1/0 ends as
# NaN, which min drops: FLT_MAX, as for infinity. No value · s_dec reaches 2^126, where the approximation would fail.
_SCALE = _asm(
    ".reg .f32 e, r, v, y; .reg .b16 p, l, h; .reg .b32 q;",
    "cvt.rn.satfinite.e4m3x2.f32 p, 0f00000000, $3; cvt.rn.f16x2.e4m3x2 q, p;",
    "mov.b32 {l, h}, q; cvt.f32.f16 v, l; mul.rn.f32 y, v, $4; div.approx.f32 r, 0f3F800000, y; neg.f32 y, y;",
    "fma.rn.f32 e, y, r, 0f3F800000; fma.rn.f32 r, r, e, r;",
    "min.f32 $2, r, 0f7F7FFFFF; mov.b32 $1, v; cvt.u32.u16 $0, p;",
)

_NARROW_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_NARROW_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_ABSMAX_BF16 = tl.constexpr("max.xorsign.abs.bf16x2 $0, $1, $2;")
_ABSMAX_FP16 = tl.constexpr("max.xorsign.abs.f16x2 $0, $1, $2;")


@triton.jit
def cast_e2m1(value):
    """FP32 → int32 codes 0..15, nearest even, saturating; the sign of zero is kept, NaN → 7."""
    a = tl.abs(value)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    code += (value.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(value == value, code, 7)


@triton.jit
def decode_e2m1(code):
    """int32 codes 0..15 → FP32, exact: the code's bits on top of a subnormal are the value times 2^-126."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def decode_e4m3(code):
    """int32 codes 0..255 → FP32, exact, likewise: E4M3 ends where 2^-120 would; 0x7F is NaN."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _step(a):
    return tl.where(a >= 4.0, 2.0, tl.where(a >= 2.0, 1.0, 0.5))


@triton.jit
def _cast_e2m1_stochastic(value, byte):
    a = tl.abs(value)
    t = a + byte.to(tl.float32) * (_step(a) * 0.00390625)
    code = (t >= 0.5).to(tl.int32) + (t >= 1.0).to(tl.int32) + (t >= 1.5).to(tl.int32) + (t >= 2.0).to(tl.int32)
    code += (t >= 3.0).to(tl.int32) + (t >= 4.0).to(tl.int32) + (t >= 6.0).to(tl.int32)
    code += (value.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(value == value, code, 7)


@triton.jit
def pack8(codes):
    """Eight tensors of codes → int32, element i in nibble i."""
    word = codes[0]
    for i in tl.static_range(1, 8):
        word |= codes[i] << (4 * i)
    return word


@triton.jit
def round8(v):
    """Eight FP32 tensors → int32, eight E2M1 codes each."""
    if _INTERPRETED:
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
def round8_stochastic(v, low, high):
    """As `round8`, with the random bytes of elements 0..3 in `low` and of 4..7 in `high`."""
    if _INTERPRETED:
        codes = ()
        for i in tl.static_range(8):
            word = low if i < 4 else high
            codes += (_cast_e2m1_stochastic(v[i], (word >> (i % 4 * 8)) & 0xFF),)
        return pack8(codes)
    else:
        return tl.inline_asm_elementwise(
            _STOCHASTIC,
            "=r,r,r,r,r,r,r,r,r,r,r",
            [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def block_scale(d, s_dec):
    """FP32 d ≥ 0 → its E4M3 byte (int32), the byte's value, the factor min(fl32(1 / fl32(value · s_dec)), FLT_MAX)."""
    if _INTERPRETED:
        # The interpreter's own cast to FP8 is not to be trusted. Below 2^-6 a step is 2^-9, the last bit of 2^14.
        d = tl.minimum(d, 448.0)
        bits = d.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        sf = tl.where(d < 0.015625, (d + 16384.0).to(tl.int32, bitcast=True) & 15, normal)
        value = tl.where(sf < 8, sf.to(tl.float32) * 0.001953125, ((sf + 960) << 20).to(tl.float32, bitcast=True))
        return sf, value, tl.minimum(tl.div_rn(1.0, value * s_dec), _FLT_MAX)
    else:
        return tl.inline_asm_elementwise(
            _SCALE, "=r,=r,=r,r,r", [d, s_dec], dtype=(tl.int32, tl.float32, tl.float32), is_pure=True, pack=1
        )


@triton.jit
def encode_scale(amax, TOP: tl.constexpr):
    """FP32 amax → S_enc = min(fl32(TOP / amax), FLT_MAX), 1 for zero and infinity, and S_dec = fl32(1 / S_enc)."""
    scale = tl.div_rn(TOP, amax)
    scale = tl.where(scale > _FLT_MAX, _FLT_MAX, scale)
    scale = tl.where((amax == 0.0) | (scale == 0.0), 1.0, scale)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def widen(x):
    """→ FP32. BF16 two at a time: Triton would first take a pair apart."""
    if x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    elif _INTERPRETED:  # it loses subnormals
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        asm: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
        return tl.inline_asm_elementwise(asm, "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def narrow(x, like):
    """FP32 → the type of `like`, nearest even, 16-bit types two at a time."""
    if _INTERPRETED and like.dtype == tl.bfloat16:  # it truncates
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif _INTERPRETED or like.dtype == tl.float32:
        return x.to(like.dtype)
    else:
        asm: tl.constexpr = _NARROW_BF16 if like.dtype == tl.bfloat16 else _NARROW_FP16
        return tl.inline_asm_elementwise(asm, "=r,r,r", [x], dtype=like.dtype, is_pure=True, pack=2)


@triton.jit
def _absmax2(a, b):
    """max(|a|, |b|) but for its sign; of NaN and a number, the number. 16-bit types two at a time."""
    if _INTERPRETED or a.dtype == tl.float32:
        return tl.maximum(tl.abs(widen(a)), tl.abs(widen(b)))
    else:
        asm: tl.constexpr = _ABSMAX_BF16 if a.dtype == tl.bfloat16 else _ABSMAX_FP16
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@triton.jit
def absmax(x):
    """FP32 max |x| over a tuple of tensors, NaN dropped."""
    top = x[0]
    for i in tl.static_range(1, len(x)):
        top = _absmax2(top, x[i])
    return tl.maximum(tl.abs(widen(top)), 0.0)


@triton.jit
def absmax16(low, high):
    """Two tensors (A, B, 8) → FP32 (A, B), max |x| over both and over the last dimension, NaN dropped."""
    A: tl.constexpr = low.shape[0]
    B: tl.constexpr = low.shape[1]
    top = _absmax2(low, high)
    for half in tl.static_range(2):
        low, high = tl.split(tl.permute(tl.reshape(top, [A, B, 2, 4 >> half]), (0, 1, 3, 2)))
        top = _absmax2(low, high)
    low, high = tl.split(widen(top))
    return tl.maximum(tl.maximum(tl.abs(low), tl.abs(high)), 0.0)


@triton.jit
def hadamard16(x, SIGN_MASK: tl.constexpr):
    """Sixteen tensors → sixteen of the same type: the butterfly of `kernels/hadamard.py`, in FP32, rounded once."""
    y = ()
    for i in tl.static_range(16):
        y += (widen(x[i]) * (-0.0625 if SIGN_MASK >> i & 1 else 0.0625),)
    for stage in tl.static_range(4):
        z = ()
        for i in tl.static_range(16):
            other = y[i ^ (1 << stage)]
            z += (other - y[i] if i >> stage & 1 else y[i] + other,)
        y = z
    z = ()
    for i in tl.static_range(16):
        z += (narrow(y[i] * 4.0, x[i]),)
    return z


@triton.jit
def philox16(rng, block, DIRECTION: tl.constexpr):
    """rng int64 [2], block index int64 → four uint32 words, the bytes of the block's 16 elements."""
    seed, offset = tl.load(rng), tl.load(rng + 1)
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + DIRECTION
    c3 = tl.zeros_like(c0) + (offset & 0xFFFFFFFF).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def after(block, sf):
    """`block`, held by the threads that hold `sf`, a byte. Else Triton lays Philox out anew and moves four words."""
    return block + (sf >> 8)


@triton.jit
def split8(x):
    """(A, B, 8) → eight tensors (A, B). The eight are one thread's: no data moves."""
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
def scale_index(i, j, tiles, SWIZZLED: tl.constexpr):
    """Byte index of the scale (outer i, block j); `tiles` = padded blocks / 4."""
    if SWIZZLED:
        return (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    else:
        return i * (tiles * 4) + j


def ahead(kernel: Any, pointers: Sequence[str | None], **constants: Any) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """A case of ahead-of-time compilation: element types of the leading arguments in order; the others are counts."""
    signature = {}
    for index, name in enumerate(kernel.arg_names):
        if index >= len(pointers):
            if name not in constants:
                signature[name] = "i32"
        elif pointers[index] is None:
            constants[name] = None
        else:
            signature[name] = f"*{pointers[index]}"
    return kernel, signature, constants
