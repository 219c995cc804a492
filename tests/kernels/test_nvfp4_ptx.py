"""The PTX that rounds, packs and scales NVFP4 on a GPU, run instruction by instruction in NumPy against the reference.

No GPU is needed: each instruction that the texts use is modelled below, its rounding and its NaN rules as PTX documents
them. `div.approx` is modelled as rounded correctly: what the hardware approximates instead is tested on a GPU.
"""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mezzotint.constants import E4M3, FP32_MAX
from mezzotint.kernels.elements import cast_e2m1, cast_fp8, decode_fp8, div, pack_fp4, round_e2m1_stochastic
from mezzotint.kernels.triton import _jit_fp4

U32, F32, F16 = np.uint32, np.float32, np.float16
Words = np.ndarray  # every register is 32 bits, uint32


def f32(x: Words) -> np.ndarray:
    return x.view(F32)


def f16x2(x: Words) -> np.ndarray:
    """(n,) words → (n, 2) FP16, the low half first."""
    return x.view(F16).reshape(-1, 2)


def pack(halves: np.ndarray) -> Words:
    return np.ascontiguousarray(halves).view(U32).reshape(-1)


def bits(x: np.ndarray) -> Words:
    """FP32 → bits; the hardware's NaN is 0x7FFFFFFF."""
    return np.where(np.isnan(x), U32(0x7FFFFFFF), x.astype(F32).view(U32))


def fma(a: Words, b: Words, c: Words) -> Words:
    """a·b + c rounded once. The product is exact in FP64; the sum is rounded to odd there, as good as exact."""
    product, addend = f32(a).astype(np.float64) * f32(b), f32(c).astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return bits(np.where((error != 0) & (total.view(np.int64) & 1 == 0), odd, total).astype(F32))


def toward_zero(exact: np.ndarray, to: type) -> np.ndarray:
    nearest = exact.astype(to)
    back = np.where(np.isfinite(nearest), np.abs(nearest.astype(exact.dtype)), np.inf)
    outward = back > np.abs(exact)
    return np.where(outward, np.nextafter(nearest, to(0)), nearest)


def half_toward_zero(high: Words, low: Words) -> Words:
    halves = toward_zero(np.stack((f32(low), f32(high)), axis=-1).astype(np.float64), F16).view(np.uint16)
    nan = np.isnan(np.stack((f32(low), f32(high)), axis=-1))
    return pack(np.where(nan, np.uint16(0x7FFF), halves))


def prmt(a: Words, b: Words, selector: Words) -> Words:
    source = np.stack((a, b), axis=-1).view(np.uint8).reshape(-1, 8)
    picks = [int(selector[0]) >> (4 * i) & 7 for i in range(4)]
    return np.ascontiguousarray(source[:, picks]).view(U32).reshape(-1)


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    out = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            terms = zip((a, b, c), (i >> 2 & 1, i >> 1 & 1, i & 1), strict=True)
            out |= np.bitwise_and.reduce([x if one else ~x for x, one in terms])
    return out


def e4m3x2(high: Words, low: Words) -> Words:
    codes = [cast_fp8(torch.from_numpy(f32(x).copy()), E4M3).numpy().astype(U32) for x in (high, low)]
    return codes[0] << 8 | codes[1]


def f16_from_e4m3(pair: Words) -> Words:
    codes = torch.from_numpy(np.stack((pair & 0xFF, pair >> 8), axis=-1).astype(np.uint8))
    return pack(decode_fp8(codes, E4M3).half().numpy())


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "abs.f32": lambda a: a & U32(0x7FFFFFFF),
    "neg.f32": lambda a: a ^ U32(0x80000000),
    "mul.rn.f32": lambda a, b: bits(f32(a) * f32(b)),
    "fma.rn.f32": fma,
    "add.rz.f32": lambda a, b: bits(toward_zero(f32(a).astype(np.longdouble) + f32(b), F32)),
    "min.f32": lambda a, b: bits(np.fmin(f32(a), f32(b))),
    "div.approx.f32": lambda a, b: bits(f32(a) / f32(b)),
    "cvt.rz.f16x2.f32": half_toward_zero,
    "abs.f16x2": lambda a: a & U32(0x7FFF7FFF),
    "min.f16x2": lambda a, b: pack(np.fmin(f16x2(a), f16x2(b))),
    "cvt.rn.satfinite.e4m3x2.f32": e4m3x2,
    "cvt.rn.f16x2.e4m3x2": f16_from_e4m3,
    "cvt.f32.f16": lambda a: bits(a.astype(np.uint16).view(F16).astype(F32)),
    "cvt.u32.u16": lambda a: a & U32(0xFFFF),
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
}


def run(text: str, inputs: list[np.ndarray], outputs: int) -> list[Words]:
    """Run the PTX `text`: $0, $1, … are the outputs, then the inputs."""
    registers = {f"${outputs + i}": np.ascontiguousarray(x).view(U32) for i, x in enumerate(inputs)}
    size = inputs[0].size

    def value(operand: str) -> Words:
        if operand in registers:
            return registers[operand]
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(size, number, dtype=U32)

    for statement in re.sub(r"^\{|\}$", "", text.strip()).split(";"):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        name, rest = statement.split(None, 1)
        if halves := re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest):
            registers[halves[1]] = value(halves[3]) & U32(0xFFFF)
            registers[halves[2]] = value(halves[3]) >> 16
            continue
        target, *operands = (operand.strip() for operand in rest.split(","))
        with np.errstate(all="ignore"):
            registers[target] = INSTRUCTIONS[name](*map(value, operands))
    return [registers[f"${i}"] for i in range(outputs)]


def words(packed: torch.Tensor) -> Words:
    """(n, 4) bytes → (n,) words."""
    return packed.contiguous().numpy().view(U32).reshape(-1)


def special() -> np.ndarray:
    """Every class of FP32: zeros, subnormals, NaN of both signs, infinities, large values."""
    positive = np.array(
        [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=U32
    )
    return np.tile(np.concatenate((positive, positive | U32(0x80000000))), 8).view(F32)


def around(centers: np.ndarray, ulps: int) -> np.ndarray:
    """The FP32 values up to `ulps` units in the last place from each center, with both signs."""
    near = centers.astype(F32).view(np.int32)[:, None] + np.arange(-ulps, ulps + 1, dtype=np.int32)
    near = near.reshape(-1).clip(0).view(F32)
    return np.concatenate((near, -near))


def in_rows(x: np.ndarray) -> np.ndarray:
    """Cut to a multiple of 8 → (n, 8)."""
    return np.ascontiguousarray(x[: x.size // 8 * 8].reshape(-1, 8))


def finite_patterns() -> np.ndarray:
    """A stride through all patterns from 2^-4 to 16, where every decision falls."""
    low, high = (int(F32(v).view(U32)) for v in (2.0**-4, 16.0))
    return np.arange(low, high, 53, dtype=U32).view(F32)


def test_nearest_rounding() -> None:
    middles = around(np.array([0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8]), 300)
    x = in_rows(np.concatenate((finite_patterns(), -finite_patterns(), middles, special())))
    (got,) = run(_jit_fp4._NEAREST.value, list(x.T), 1)
    assert np.array_equal(got, words(pack_fp4(cast_e2m1(torch.from_numpy(x)))))


def test_stochastic_rounding() -> None:
    rng = np.random.default_rng(0)
    byte = rng.integers(0, 256, 1 << 21).astype(np.uint8)
    code = np.array([0.5, 1, 1.5, 2, 3, 4, 6])[rng.integers(0, 7, byte.size)]
    step = np.where(code > 4, 2.0, np.where(code > 2, 1.0, 0.5))
    decisions = (code - byte * step / 256).astype(F32).view(np.int32)  # where the byte just reaches the next code
    x = np.abs((decisions + rng.integers(-40, 41, byte.size).astype(np.int32)).view(F32))
    x[::3] = rng.uniform(0, 8, x[::3].size).astype(F32)
    x *= rng.choice(np.array([-1, 1], dtype=F32), x.size)
    classes = special()
    x[1::7] = np.resize(np.where(np.isnan(classes), F32(np.nan), classes), x[1::7].size)  # FMUL's NaN is positive
    x = in_rows(x)
    byte = byte.reshape(-1, 8)
    noise = byte.view(U32)
    (got,) = run(_jit_fp4._STOCHASTIC.value, [*x.T, noise[:, 0], noise[:, 1]], 1)
    expected = pack_fp4(round_e2m1_stochastic(torch.from_numpy(x), torch.from_numpy(byte)))
    assert np.array_equal(got, words(expected))


@pytest.mark.parametrize("exponent", [-128, -127, -120, -20, 0, 20, 116])
def test_block_scale(exponent: int) -> None:
    """Over the reachable exponents of S_dec: fl32(1/FLT_MAX), a subnormal, to fl32(FLT_MAX / 2688)."""
    rng = np.random.default_rng(exponent + 200)
    n = 1 << 18
    s_dec = np.clip(rng.uniform(1, 2, n) * 2.0**exponent, 2.94e-39, FP32_MAX / 2688).astype(F32)
    d = np.abs(rng.standard_normal(n) * 2.0 ** rng.integers(-14, 12, n)).astype(F32)
    d[:4] = 0.0, np.inf, 448.0, 2.0**-10
    sf, value, factor = run(_jit_fp4._SCALE.value, [d, s_dec], 3)
    codes = cast_fp8(torch.from_numpy(d.copy()), E4M3)
    decoded = decode_fp8(codes, E4M3)
    assert np.array_equal(sf, codes.numpy().astype(U32))
    assert np.array_equal(f32(value), decoded.numpy())
    expected = div(1.0, decoded * torch.from_numpy(s_dec)).clamp_max_(FP32_MAX)
    assert np.array_equal(f32(factor), expected.numpy())
