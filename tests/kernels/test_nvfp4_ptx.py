"""The PTX that rounds, packs and scales NVFP4 on a GPU, run instruction by instruction in NumPy against the reference.

No GPU is needed: each instruction that the texts use is modelled below, its rounding and its NaN rules as PTX documents
them. `rcp.approx` is modelled as rounded correctly: what the hardware approximates instead is tested on a GPU.
"""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mezzotint.constants import E4M3, FP32_MAX
from mezzotint.kernels.elements import cast_e2m1, cast_fp8, decode_fp8, div, pack_fp4, round_e2m1_stochastic
from mezzotint.kernels.triton import _jit_fp4
from tests import exact

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


def fma_toward_zero(a: Words, b: Words, c: Words) -> Words:
    """With a product that is a number of 64 bits, as by a power of two."""
    return bits(toward_zero(f32(a).astype(np.longdouble) * f32(b) + f32(c), F32))


def fma_halves(a: Words, b: Words, c: Words, dtype: torch.dtype) -> Words:
    """x · 1 - 0 of two 16-bit floats; what is NaN becomes 0x7FFF."""
    one = int(torch.ones(1, dtype=dtype).view(torch.int16))
    assert set(b.view(np.uint16)) == {one}
    assert set(c.view(np.uint16)) == {0x8000}
    x = a.view(np.uint16)
    nan = torch.from_numpy(x.view(np.int16).copy()).view(dtype).isnan().numpy()
    return np.where(nan, np.uint16(0x7FFF), x).view(U32)


def reciprocal(a: Words) -> Words:
    """No subnormal reaches it, nor is one its result."""
    x = np.abs(f32(a))
    assert np.all((x == 0) | (x >= 2.0**-126) & (x < 2.0**126) | np.isnan(x))
    return bits(F32(1) / f32(a))


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "abs.f32": lambda a: a & U32(0x7FFFFFFF),
    "neg.f32": lambda a: a ^ U32(0x80000000),
    "mul.rn.f32": lambda a, b: bits(f32(a) * f32(b)),
    "fma.rn.f32": fma,
    "add.rz.f32": lambda a, b: bits(toward_zero(f32(a).astype(np.longdouble) + f32(b), F32)),
    "min.f32": lambda a, b: bits(np.fmin(f32(a), f32(b))),
    "fma.rz.f32": fma_toward_zero,
    "rcp.approx.ftz.f32": reciprocal,
    "cvt.rz.f16x2.f32": half_toward_zero,
    "abs.f16x2": lambda a: a & U32(0x7FFF7FFF),
    "min.f16x2": lambda a, b: pack(np.fmin(f16x2(a), f16x2(b))),
    "min.xorsign.abs.f16x2": lambda a, b: (
        pack(np.fmin(np.abs(f16x2(a)), np.abs(f16x2(b)))) | ((a ^ b) & U32(0x80008000))
    ),
    "fma.rn.bf16x2": lambda a, b, c: fma_halves(a, b, c, torch.bfloat16),
    "fma.rn.f16x2": lambda a, b, c: fma_halves(a, b, c, torch.float16),
    "cvt.rn.satfinite.e4m3x2.f32": e4m3x2,
    "cvt.rn.f16x2.e4m3x2": f16_from_e4m3,
    "cvt.f32.f16": lambda a: bits(a.astype(np.uint16).view(F16).astype(F32)),
    "cvt.u32.u16": lambda a: a & U32(0xFFFF),
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.wide.u32": lambda a, b: a.astype(np.uint64) * b,
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
            whole = value(halves[3])
            width = 32 if whole.dtype == np.uint64 else 16
            registers[halves[1]] = (whole & whole.dtype.type((1 << width) - 1)).astype(U32)
            registers[halves[2]] = (whole >> whole.dtype.type(width)).astype(U32)
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


def stochastic(x: np.ndarray, factor: np.ndarray, byte: np.ndarray, natural: bool) -> Words:
    """x (n, 8), factor (n,), byte (n, 8): the code words that the kernel makes, signs taken from the upper halves."""
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)] if natural else _jit_fp4._PAIRS
    halves = (x * factor[:, None]).view(U32) >> 16
    halves[np.isnan(x)] = 0x7FFF  # `neighbours`, or the cast to BF16 before
    signs = [halves[:, low] | halves[:, high] << 16 for low, high in pairs]
    noise = byte.view(U32)
    text = _jit_fp4._STOCHASTIC_NATURAL if natural else _jit_fp4._STOCHASTIC
    return run(text.value, [*x.T, factor, noise[:, 0], noise[:, 1], *signs], 1)[0]


def magnitudes(codes: Words) -> np.ndarray:
    """(n,) words → (n, 8) codes without their signs."""
    return (codes[:, None] >> np.arange(0, 32, 4, dtype=U32)) & 7


@pytest.mark.parametrize("natural", [False, True])
def test_stochastic_rounding_of_every_float_and_byte(natural: bool) -> None:
    """For each byte and code, the smallest float that reaches it, and the float before, which does not.

    Each instruction of the text, and each step of the reference, is monotonic in |v|: nothing else can differ.
    """
    byte = np.repeat(np.arange(256, dtype=np.uint8), 8)
    code = np.tile(np.arange(8), 256)  # 0 finds 0.0, which has no float before
    below, first = np.full(byte.size, -1, dtype=np.int64), np.full(byte.size, 0x7F7FFFFF, dtype=np.int64)
    while (first - below).max() > 1:
        middle = (below + first) // 2
        x = torch.from_numpy(np.maximum(middle, 0).astype(np.int32).view(F32))
        reached = round_e2m1_stochastic(x, torch.from_numpy(byte)).numpy() >= code
        first, below = np.where(reached, middle, first), np.where(reached, below, middle)
    for at, less in ((first, False), (below, True)):
        x = np.maximum(at, 0).astype(np.int32).view(F32).reshape(-1, 8)
        got = magnitudes(stochastic(x, np.ones(len(x), dtype=F32), byte.reshape(-1, 8), natural)).reshape(-1)
        assert np.all((got < code) | (code == 0) if less else got >= code)


@pytest.mark.parametrize("natural", [False, True])
def test_stochastic_rounding(natural: bool) -> None:
    rng = np.random.default_rng(0)
    byte = rng.integers(0, 256, 1 << 21).astype(np.uint8)
    code = np.array([0.5, 1, 1.5, 2, 3, 4, 6])[rng.integers(0, 7, byte.size)]
    step = np.where(code > 4, 2.0, np.where(code > 2, 1.0, 0.5))
    decisions = (code - byte * step / 256).astype(F32).view(np.int32)  # where the byte just reaches the next code
    x = np.abs((decisions + rng.integers(-40, 41, byte.size).astype(np.int32)).view(F32))
    x[::3] = rng.uniform(0, 8, x[::3].size).astype(F32)
    x *= rng.choice(np.array([-1, 1], dtype=F32), x.size)
    classes = special()
    x[1::7] = np.resize(classes, x[1::7].size)
    x, byte = in_rows(x), byte.reshape(-1, 8)
    for factor in (np.ones(len(x), dtype=F32), rng.uniform(0.5, 2, len(x)).astype(F32), np.full(len(x), FP32_MAX, F32)):
        with np.errstate(all="ignore"):
            scaled = x * factor[:, None]
            got = stochastic(x, factor, byte, natural)
        expected = pack_fp4(round_e2m1_stochastic(torch.from_numpy(scaled), torch.from_numpy(byte)))
        assert np.array_equal(got, words(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_neighbours_lose_nothing_but_the_sign_of_nan(dtype: torch.dtype) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    text = _jit_fp4._CANONICAL_BF16 if dtype == torch.bfloat16 else _jit_fp4._CANONICAL_FP16
    low, high = run(text.value, [every.view(U32)], 2)
    nan = torch.from_numpy(every.view(np.int16)).view(dtype).isnan().numpy()
    assert np.array_equal(low, high)
    assert np.array_equal(low.view(np.uint16), np.where(nan, 0x7FFF, every))


def test_random_words() -> None:
    """Counters and keys with every bit in use, against the model."""
    rng = np.random.default_rng(0)
    counter, key = rng.integers(0, 1 << 32, (4, 64), dtype=U32), rng.integers(0, 1 << 32, (2, 64), dtype=U32)
    got = run(_jit_fp4._PHILOX.value, [*counter, *key, counter[0]], 4)
    for i in range(64):
        expected = exact.philox4x32(tuple(map(int, counter[:, i])), tuple(map(int, key[:, i])))
        assert tuple(int(word[i]) for word in got) == expected


@pytest.mark.parametrize("exponent", [-128, -127, -120, -20, 0, 20, 116])
def test_block_scale(exponent: int) -> None:
    """Over the reachable exponents of S_dec: fl32(1/FLT_MAX), a subnormal, to fl32(FLT_MAX / 2688)."""
    rng = np.random.default_rng(exponent + 200)
    n = 1 << 18
    s_dec = np.clip(rng.uniform(1, 2, n) * 2.0**exponent, 2.94e-39, FP32_MAX / 2688).astype(F32)
    d = np.abs(rng.standard_normal(n) * 2.0 ** rng.integers(-14, 12, n)).astype(F32)
    d[:4] = 0.0, np.inf, 448.0, 2.0**-10
    away = np.where(s_dec < F32(2.0**-117), F32(2.0**24), F32(1))
    sf, value, factor = run(_jit_fp4._SCALE.value, [d, s_dec, away], 3)
    codes = cast_fp8(torch.from_numpy(d.copy()), E4M3)
    decoded = decode_fp8(codes, E4M3)
    assert np.array_equal(sf, codes.numpy().astype(U32))
    assert np.array_equal(f32(value), decoded.numpy())
    expected = div(1.0, decoded * torch.from_numpy(s_dec)).clamp_max_(FP32_MAX)
    assert np.array_equal(f32(factor), expected.numpy())
