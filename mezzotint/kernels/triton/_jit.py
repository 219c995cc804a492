"""Shared parts of the FP8 kernels: amax, scales, casts, E8M0 bytes, the order of tiles and of rows are computed here.

Every function gives the bits of its namesake in `kernels/elements.py`. Where it computes them in another way, a comment
says why the result is the same.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, E5M2, FP8_EMAX, FP8_MAX
from mezzotint.kernels._lib import as_matrix

_E5M2 = tl.constexpr(E5M2)
_E4M3_MAX, _E5M2_MAX = tl.constexpr(FP8_MAX[E4M3]), tl.constexpr(FP8_MAX[E5M2])
_E4M3_EMAX, _E5M2_EMAX = tl.constexpr(FP8_EMAX[E4M3]), tl.constexpr(FP8_EMAX[E5M2])

# The casts are PTX because Triton's own cast before 3.7 goes through FP16, toward zero, on sm_89, and so rounds twice.
# `satfinite` saturates, infinity too; NaN becomes 0x7F.
_CAST_E4M3 = tl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
    " mov.b32 $0, {a, b}; }"
)
_CAST_E5M2 = tl.constexpr(_CAST_E4M3.value.replace("e4m3", "e5m2"))

# Triton's interpreter knows no inline assembly.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# These convert to 16 bits, and back, two numbers at a time: one by one they would use a quarter of the multiprocessor's
# units.
NARROW_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
NARROW_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_ROUNDED_BF16 = tl.constexpr(
    "{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xFFFF0000; }"
)
_ROUNDED_FP16 = tl.constexpr(
    "{ .reg .b32 p; .reg .b16 l, h; cvt.rn.f16x2.f32 p, $3, $2; mov.b32 {l, h}, p;"
    " cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
)


@triton.jit
def drop_nan(amax):
    """Return an amax that `tl.max` took of `abs`, with 0 for NaN. `tl.max` passes over NaN, as PTX `max` does, unless
    there is nothing else."""
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def raise_amax(amax, value):
    """Raise amax[0] to max(amax[0], |value|), without NaN. FP32 that are not negative are ordered as their bits are."""
    top = drop_nan(tl.max(tl.abs(value)))
    bits = amax.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(bits, top.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def cast_fp8(value, DTYPE: tl.constexpr):
    """Cast FP32 to uint8 codes: round to nearest even, saturate, turn NaN into 0x7F."""
    asm: tl.constexpr = _CAST_E5M2 if DTYPE == _E5M2 else _CAST_E4M3
    return tl.inline_asm_elementwise(asm, "=r,r,r,r,r", [value], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def narrow(value, TYPE: tl.constexpr):
    """Cast FP32 to TYPE, rounding to nearest even."""
    if INTERPRETED or tl.float32 == TYPE:
        return value.to(TYPE)
    elif tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(NARROW_BF16, "=r,r,r", [value], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(NARROW_FP16, "=r,r,r", [value], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def rounded(value, TYPE: tl.constexpr):
    """Return FP32 as if it had been written as TYPE and read again."""
    if INTERPRETED or tl.float32 == TYPE:
        return value.to(TYPE).to(tl.float32)
    else:
        asm: tl.constexpr = _ROUNDED_BF16 if tl.bfloat16 == TYPE else _ROUNDED_FP16
        return tl.inline_asm_elementwise(asm, "=&r,=r,r,r", [value], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def decode_fp8(code, DTYPE: tl.constexpr):
    """Decode uint8 codes to FP32; this is exact."""
    fp8: tl.constexpr = tl.float8e5 if DTYPE == _E5M2 else tl.float8e4nv
    return code.to(fp8, bitcast=True).to(tl.float32)


@triton.jit
def scale_from_amax(amax, eps, DTYPE: tl.constexpr, POW2: tl.constexpr, FOR_INF: tl.constexpr):
    """Return the FP32 factor that brings `amax` to the format's largest value: 1 for 0, infinity and NaN."""
    if eps is not None:
        eps = tl.cast(eps, tl.float32)
        amax = tl.where(amax < eps, eps, amax)
    bits = amax.to(tl.int32, bitcast=True)
    if POW2:
        # Both maxima are 1.75·2^e: the quotient's exponent takes one more borrow when the mantissa of amax is above
        # 1.75, and never rounds up to the next power of two. No division. FOR_INF is a power of two here.
        emax: tl.constexpr = _E5M2_EMAX if DTYPE == _E5M2 else _E4M3_EMAX
        exponent = 254 + emax - ((bits + 0x1FFFFF) >> 23)
        scale = tl.where(exponent > 254, FOR_INF, (exponent << 23).to(tl.float32, bitcast=True))
    else:
        top: tl.constexpr = _E5M2_MAX if DTYPE == _E5M2 else _E4M3_MAX
        scale = tl.div_rn(top, amax)
        scale = tl.where(scale == float("inf"), FOR_INF, scale)
    # 0, infinity and NaN in one comparison: amax has no sign, and 0 - 1 is the largest of unsigned numbers.
    return tl.where((bits - 1).to(tl.uint32, bitcast=True) >= 0x7F7FFFFF, 1.0, scale)


@triton.jit
def inverse(scale, POW2: tl.constexpr):
    """Return fl32(1 / scale)."""
    if POW2:
        # 2^k → 2^-k by its exponent; 2^127 has the subnormal inverse 2^-127.
        bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
        return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)
    else:
        return tl.div_rn(1.0, scale)


@triton.jit
def e8m0_from_amax(amax, DTYPE: tl.constexpr, FLOOR: tl.constexpr):
    """Return the E8M0 byte, as int32, of a block's amax (no NaN), by OCP's floor rule or rounded up so that nothing
    saturates."""
    if FLOOR:
        emax: tl.constexpr = _E5M2_EMAX if DTYPE == _E5M2 else _E4M3_EMAX
        return tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - emax, 0)
    else:
        reciprocal: tl.constexpr = 1.0 / (_E5M2_MAX if DTYPE == _E5M2 else _E4M3_MAX)
        return e8m0_up(amax * reciprocal)


@triton.jit
def e8m0_up(value):
    """Return the E8M0 byte, as int32, of the smallest power of two that is not less than `value` (FP32 ≥ 0, no NaN),
    saturating."""
    bits = value.to(tl.int32, bitcast=True)
    byte = tl.minimum((bits + 0x7FFFFF) >> 23, 254)
    return tl.where(bits <= 0x400000, 0, byte)  # up to the subnormal 2^-127


@triton.jit
def e8m0_decode(byte):
    """Decode an E8M0 byte b (int32) to FP32 2^(b-127); 0 is the subnormal 2^-127, 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_inverse(byte):
    """Return 2^(127-b) in FP32 for an E8M0 byte b (int32, at most 254)."""
    return tl.where(byte == 254, 0x00400000, (254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def swizzled(i, j, tiles):
    """Return the byte index of scale (outer i, block j) in the order of Blackwell's GEMM; `tiles` = padded blocks /
    4."""
    return (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4


@triton.jit
def tile_of(pid, M, K, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return (row, column), int64, of a program's tile. GROUP rows of tiles are walked together, column by column."""
    down = tl.cdiv(M, BM)
    across = tl.cdiv(K, BN)
    if GROUP == 1:
        row = pid // across
        col = pid - row * across
    else:
        first = pid // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        rest = pid - first * across
        col = rest // height
        row = first + rest - col * height
    return row.to(tl.int64), col.to(tl.int64)


@triton.jit
def spread(BM: tl.constexpr, SPAN: tl.constexpr):
    """Return the rows of a tile, ordered so that one thread holds SPAN neighbours.

    A layout deals rows to threads round robin. Counted this way, the bytes that a thread holds of one column are
    neighbours in the transposed output, and move through shared memory as a vector instead of one by one.
    """
    t = tl.arange(0, BM)
    if SPAN == 1:
        return t
    else:
        return t % (BM // SPAN) * SPAN + t // (BM // SPAN)


@triton.jit
def spread_out(values, BM: tl.constexpr, SPAN: tl.constexpr):
    """Return BM values, which are in the order of a tile's rows, in the order of `spread`."""
    if SPAN == 1:
        return values
    else:
        return tl.reshape(tl.trans(tl.reshape(values, [BM // SPAN, SPAN])), [BM])


@triton.jit
def transposed(tile, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr):
    """Transpose (BM, BN), whose rows are ordered as by `spread`, into (BN, BM) with its columns in order."""
    if SPAN == 1:
        return tl.trans(tile)
    else:
        runs = tl.reshape(tile, [SPAN, BM // SPAN, BN])
        return tl.reshape(tl.permute(runs, (2, 1, 0)), [BN, BM])


@triton.jit
def eights(index, zero):
    """Return `index`, but let the compiler believe that no more than runs of 8 are aligned.

    A thread holds as many neighbours as its widest access needs: 16 for stores of codes, which is two loads of 16-bit
    elements, each of half a sector. With stores of 8 bytes it holds 8, and loads take whole sectors. `zero` is 0, and
    an argument that is not specialized.
    """
    return tl.multiple_of(index + zero, 8)


@triton.jit
def load_tile(x, r, c, M, K, stride, EVEN: tl.constexpr, ONCE: tl.constexpr):
    """Return x[r, c] as FP32, 0 outside of (M, K).

    EVEN says that no tile is cut: loads without a mask all go out at once. ONCE marks what is read as first to leave
    the cache. That rarely pays, because a thread that holds 16 columns takes half a sector at a time and finds the
    other half there.
    """
    policy: tl.constexpr = "evict_first" if ONCE else ""
    at = x + r[:, None] * stride + c[None, :]
    if EVEN:
        return tl.load(at, eviction_policy=policy).to(tl.float32)
    else:
        mask = (r < M)[:, None] & (c < K)[None, :]
        return tl.load(at, mask=mask, other=0.0, eviction_policy=policy).to(tl.float32)


@triton.jit
def as_stored(code, out):
    """Return codes in the element type of `out`, their bits as they are: a byte, or in a graph FP8."""
    return code.to(out.dtype.element_ty, bitcast=True)


@triton.jit
def store_tile(out, tile, r, c, M, K, EVEN: tl.constexpr):
    """Store a tile, of codes or of the values of `out`, as out[r, c] of an (M, K) matrix."""
    at = out + r[:, None] * K + c[None, :]
    if tile.dtype == tl.uint8:
        tile = as_stored(tile, out)
    if EVEN:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=(r < M)[:, None] & (c < K)[None, :])


@triton.jit
def store_transposed(
    out, tile, row, col, M, K, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr
):
    """Write tile (row, col), rows as `spread` orders them, into the (K, M) matrix `out`."""
    r = row * BM + tl.arange(0, BM)
    c = col * BN + tl.arange(0, BN)
    store_tile(out, transposed(tile, BM, BN, SPAN), c, r, K, M, EVEN)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the (M, K) view of x, copied only if the elements of a row are not neighbours."""
    x = as_matrix(x)
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


@cache
def for_inf(dtype: torch.dtype, pow2: bool) -> float:
    """Return the scale for a quotient that overflows: the maximum of `dtype`, or the power of two below it if
    `pow2`."""
    maximum = torch.finfo(dtype).max
    return 2.0 ** (math.frexp(maximum)[1] - 1) if pow2 else maximum


def natural_span(BM: int, BN: int, num_warps: int, width: int = 16) -> int:
    """Return how many rows of a tile a thread holds when it holds `width` columns: the SPAN that transposes
    cheapest."""
    return max(1, BM * BN // (32 * width * num_warps))


def ahead(
    kernel: Any, pointers: str, given: str | None = None, /, **constexprs: Any
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return a case of ahead-of-time compilation: the kernel, its signature and its constants.

    `pointers` has the element types of the leading arguments in order; "-" is None. The other arguments are counts
    (i32) or, by name, numbers (fp32). `given` has the types of the tuple of that name, "*" in front of a pointer's.
    """
    signature: dict[str, Any] = {}
    types = pointers.split()
    usual = {"SOURCE": None, "groups": None, "ALIGNED": False}
    constexprs = {name: value for name, value in usual.items() if name in kernel.arg_names} | constexprs
    for index, name in enumerate(kernel.arg_names):
        if name in constexprs:
            continue
        if name == "given":
            if given is None:
                constexprs[name] = None
            else:
                signature[name] = tuple("constexpr" if t == "-" else t for t in given.split())
        elif index < len(types):
            if types[index] == "-":
                constexprs[name] = None
            else:
                signature[name] = "*" + types[index]
        else:
            signature[name] = "fp32" if name in ("eps", "top", "factor") else "i32"
    return kernel, signature, constexprs


def ahead_of_groups(kernel: Any, pointers: str, **constexprs: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return a case as `ahead` does, for a launch with two groups; "=" in front of a type is one pointer for both."""
    made = ahead(kernel, pointers.replace("=", ""), **constexprs, ALIGNED=True)
    single = [each.startswith("=") for each in pointers.split()]
    signature: dict[str, Any] = {}
    for index, name in enumerate(kernel.arg_names):
        if name == "groups":
            signature[name] = ("i64", "i64")
        elif name in made[1]:
            kind = made[1][name]
            signature[name] = kind if index >= len(single) or single[index] else (kind, kind)
    constants = {name: value for name, value in made[2].items() if name != "groups"}
    if "M" in signature:
        del signature["M"]
        constants["M"] = None
    return kernel, signature, constants
