"""One element at a time, all of them: casts of every 16-bit pattern, every code back, scales, order of bytes.

Expected values come from ml_dtypes and from `tests/exact.py`, integer arithmetic that knows nothing of the package.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from mezzotint.constants import E4M3, E5M2, FP8_MAX, FP32_MAX
from mezzotint.kernels import elements
from mezzotint.kernels.float8 import float8_amax, float8_dequantize, float8_quantize_scaled
from mezzotint.kernels.float8_block import float8_block_quantize
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK, hadamard16
from mezzotint.kernels.mxfp8 import mxfp8_dequantize, mxfp8_quantize
from mezzotint.kernels.nvfp4 import nvfp4_dequantize
from mezzotint.kernels.philox import philox_bytes
from mezzotint.kernels.swizzle import swizzle, unswizzle
from tests import exact

FP8 = {"e4m3": E4M3, "e5m2": E5M2}
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e4m3": lambda x: elements.cast_fp8(x.clone(), E4M3),
    "e5m2": lambda x: elements.cast_fp8(x.clone(), E5M2),
    "e2m1": elements.cast_e2m1,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SOME_AMAX = [0.0, 2.0**-149, 1e-40, 2.0**-126, 1e-30, 2.0**-14, 1e-4, 0.3, 1.0, 447.0, 448.0, 57344.0, 65504.0, 1e30]
SOME_AMAX += [float(torch.finfo(torch.bfloat16).max), FP32_MAX, float("inf"), float("nan")]


def ml_cast(x: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(ML_DTYPES[name]).view(np.uint8)


# Casts of every pattern


@pytest.mark.parametrize("patterns", exact.PATTERNS)
@pytest.mark.parametrize("name", CASTS)
def test_cast_of_every_pattern(name: str, patterns: str) -> None:
    x = exact.PATTERNS[patterns]()
    got = CASTS[name](torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(got, exact.encode(x, name))
    top = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[name]
    inside = np.abs(x) <= top  # ml_dtypes does not saturate
    np.testing.assert_array_equal(got[inside], ml_cast(x[inside], name))
    assert inside.sum() > 20000


@pytest.mark.parametrize("patterns", exact.PATTERNS)
@pytest.mark.parametrize("name", FP8)
def test_overflowing_cast_of_every_pattern(name: str, patterns: str) -> None:
    x = exact.PATTERNS[patterns]()
    got = elements.cast_fp8_overflowing(torch.from_numpy(x), FP8[name]).numpy()
    want = ml_cast(x, name)
    nan = np.isnan(want.view(ML_DTYPES[name]).astype(np.float32))
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.isnan(got[nan].view(ML_DTYPES[name]).astype(np.float32)).all()


@pytest.mark.parametrize("patterns", exact.PATTERNS)
def test_e8m0_of_every_pattern(patterns: str) -> None:
    x = exact.PATTERNS[patterns]()
    value = torch.from_numpy(x)
    up = elements.e8m0_up(value).numpy()
    np.testing.assert_array_equal(up, exact.encode_e8m0_up(x))
    np.testing.assert_array_equal(elements.e8m0_nearest(value).numpy(), ml_cast(x, "e8m0"))
    usual = np.isfinite(x) & (np.abs(x) >= 2.0**-127)
    down = elements.e8m0_down(value).numpy()
    np.testing.assert_array_equal(down[usual], np.clip(np.frexp(x[usual].astype(np.float64))[1] - 1 + 127, 0, 254))
    is_power = np.frexp(np.abs(x[usual]))[0] == 0.5
    np.testing.assert_array_equal(np.minimum(down[usual].astype(int) + ~is_power, 254), up[usual])


@pytest.mark.parametrize("patterns", ["bf16", "fp16"])
@pytest.mark.parametrize("name", FP8)
def test_op_casts_every_pattern(name: str, patterns: str) -> None:
    """The whole op with a scale of 1 is the cast."""
    x = exact.PATTERNS[patterns]()
    given = torch.from_numpy(x).to(DTYPES[patterns]).reshape(256, 256)
    data, transpose, scale_inv, amax = float8_quantize_scaled(given, torch.ones(1), FP8[name], True, True)
    want = exact.encode(x, name).reshape(256, 256)
    np.testing.assert_array_equal(data.numpy(), want)
    np.testing.assert_array_equal(transpose.numpy(), want.T)
    assert (scale_inv.item(), amax.item()) == (1.0, float("inf"))


@pytest.mark.parametrize("patterns", ["bf16", "fp16"])
@pytest.mark.parametrize("name", FP8)
def test_mxfp8_scale_of_every_pattern(name: str, patterns: str) -> None:
    """A block of one pattern and zeros: its scale byte is the round-up of fl32(|x| · fl32(1/max)), 0 for NaN."""
    x = exact.PATTERNS[patterns]()
    blocks = torch.zeros(1 << 16, 32, dtype=DTYPES[patterns])
    blocks[:, 5] = torch.from_numpy(x).to(DTYPES[patterns])
    data, scale_inv = mxfp8_quantize(blocks, FP8[name], False, False, False, True, False)
    with np.errstate(invalid="ignore"):
        value = np.abs(np.where(np.isnan(x), np.float32(0), x)) * np.float32(1 / FP8_MAX[FP8[name]])
    byte = exact.encode_e8m0_up(value)
    np.testing.assert_array_equal(scale_inv[:, 0].numpy(), byte)
    with np.errstate(invalid="ignore"):
        scaled = (x * np.ldexp(1.0, 127 - byte.astype(int))).astype(np.float32)
    np.testing.assert_array_equal(data[:, 5].numpy(), exact.encode(scaled, name))


def test_e2m1_thresholds() -> None:
    """Ties to the even code; the neighbours of each midpoint go to their side."""
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    at = [0, 2, 2, 4, 4, 6, 6]
    below, above = np.nextafter(midpoints, np.float32(0)), np.nextafter(midpoints, np.float32(9))
    for sign, bit in ((1, 0), (-1, 8)):
        for values, codes in ((midpoints, at), (below, range(7)), (above, range(1, 8))):
            got = elements.cast_e2m1(torch.from_numpy(sign * values))
            assert got.tolist() == [code | bit for code in codes]


@pytest.mark.parametrize("byte", [0, 1, 127, 128, 255])
def test_stochastic_rounding(byte: int) -> None:
    """floor((|x| + u·step) / step') · step', u = byte / 256; a value that has a code keeps it."""
    x = torch.cat([torch.linspace(-7, 7, 2049), torch.tensor([float("nan"), float("inf"), -0.0])])
    codes = elements.round_e2m1_stochastic(x, torch.full(x.shape, byte, dtype=torch.uint8))
    for value, code in zip(x.tolist(), codes.tolist(), strict=True):
        if value != value:
            assert code == 7
            continue
        a = abs(value)
        t = float(np.float32(a + byte / 256 * (2 if a >= 4 else 1 if a >= 2 else 0.5)))
        step = 2 if t >= 4 else 1 if t >= 2 else 0.5
        magnitude = min(np.floor(t / step) * step, 6) if t < np.inf else 6
        sign = 8 if np.signbit(value) else 0
        assert code == sign | elements.E2M1_VALUES.index(magnitude), value
        if a in elements.E2M1_VALUES:
            assert elements.E2M1_VALUES[code & 7] == a


# Every code back


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-127, 7.6e35])
def test_float8_dequantize_every_code(name: str, transposed: bool, out: str, scale: float) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    scale_inv = torch.tensor([scale], dtype=torch.float32)
    value = exact.decode(codes.T if transposed else codes, name)
    want = torch.from_numpy(exact.fl32(value * scale_inv.double().item()).astype(np.float32)).to(DTYPES[out])
    got = float8_dequantize(torch.from_numpy(codes), scale_inv, FP8[name], transposed, DTYPES[out])
    assert got.dtype == DTYPES[out]
    assert exact.same_bits(got.float().numpy(), want.float().numpy()).all()


@pytest.mark.parametrize("name", FP8)
def test_decode_agrees_with_ml_dtypes(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ML_DTYPES[name]).astype(np.float32)
    assert exact.same_bits(elements.decode_fp8(torch.from_numpy(codes), FP8[name]).numpy(), want).all()
    assert exact.same_bits(exact.decode(codes, name).astype(np.float32), want).all()


def test_e8m0_every_code() -> None:
    byte = np.arange(256, dtype=np.uint8)
    value = exact.decode_e8m0(byte)
    assert exact.same_bits(elements.e8m0_decode(torch.from_numpy(byte)).numpy(), value.astype(np.float32)).all()
    inverse = elements.e8m0_inverse(torch.from_numpy(byte)).numpy()
    assert exact.same_bits(inverse, (1 / value).astype(np.float32)).all()
    np.testing.assert_array_equal(elements.e8m0_up(elements.e8m0_decode(torch.from_numpy(byte))).numpy(), byte)
    np.testing.assert_array_equal(elements.e8m0_down(elements.e8m0_decode(torch.from_numpy(byte)))[1:], byte[1:])


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
def test_mxfp8_dequantize_every_scale_and_code(name: str, columnwise: bool, swizzled: bool) -> None:
    """256 scale bytes, each over all 256 codes (8 blocks of 32)."""
    byte = torch.arange(256, dtype=torch.uint8)
    data = byte.expand(256, 256).contiguous()
    scale_inv = byte[:, None].expand(256, 8).contiguous()
    if columnwise:
        data, scale_inv = data.t().contiguous(), scale_inv.t().contiguous()
    given = swizzle(scale_inv, columnwise) if swizzled else scale_inv
    got = mxfp8_dequantize(data, given, FP8[name], swizzled, columnwise, torch.float32)
    codes = np.arange(256, dtype=np.uint8)
    want = exact.fl32(exact.decode_e8m0(codes)[:, None] * exact.decode(codes, name)[None, :]).astype(np.float32)
    assert exact.same_bits(got.numpy(), want.T if columnwise else want).all()


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("amax", [2688.0, 0.3, 3e-39, 1e35])
def test_nvfp4_dequantize_every_scale_and_code(e4m3_max: int, transposed: bool, swizzled: bool, amax: float) -> None:
    """256 scale bytes, each over all 16 codes: fl32(code · fl32(fl32(sf · amax) · fl32(1/(6E))))."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = elements.pack_fp4(codes).expand(256, 8).contiguous()
    scale_inv = torch.zeros(256, 4, dtype=torch.uint8)
    scale_inv[:, 0] = torch.arange(256)
    given = swizzle(scale_inv) if swizzled else scale_inv
    tensor_amax = torch.tensor([amax], dtype=torch.float32)
    got = nvfp4_dequantize(data, given, tensor_amax, e4m3_max, swizzled, transposed, 16, torch.float32)
    sf, element = exact.decode(np.arange(256, dtype=np.uint8), "e4m3"), exact.decode(codes.numpy(), "e2m1")
    unit = exact.fl32(np.array(1 / (6 * e4m3_max)))
    factor = exact.fl32(exact.fl32(sf * tensor_amax.double().item()) * unit)
    want = exact.fl32(element[None, :] * factor[:, None]).astype(np.float32)
    assert exact.same_bits(got.numpy(), want.T if transposed else want).all()


def test_e2m1_every_code() -> None:
    codes = np.arange(16, dtype=np.uint8)
    want = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert exact.same_bits(elements.decode_e2m1(torch.from_numpy(codes)).numpy(), want).all()
    np.testing.assert_array_equal(elements.cast_e2m1(torch.from_numpy(want)).numpy(), codes)


# amax and the scale it asks for


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("pow2", [False, True], ids=["exact", "pow2"])
@pytest.mark.parametrize("eps", [0.0, 2.0**-12, 1e-30])
@pytest.mark.parametrize("value_for_inf", [FP32_MAX, 3.3895313892515355e38, 65504.0])
def test_scale_from_amax(name: str, pow2: bool, eps: float, value_for_inf: float) -> None:
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 0x7F800000, 4096, dtype=np.uint32).view(np.float32)
    amax = np.concatenate([np.array(SOME_AMAX, np.float32), wide])
    top = FP8_MAX[FP8[name]]
    got = elements.scale_from_amax(torch.from_numpy(amax), top, pow2=pow2, eps=eps, value_for_inf=value_for_inf)
    want = exact.scale_from_amax(amax, top, pow2, eps, value_for_inf)
    assert exact.same_bits(got.numpy(), want).all()
    assert exact.same_bits(elements.div(1.0, got).numpy(), (1.0 / want.astype(np.float64)).astype(np.float32)).all()


def test_scale_from_amax_by_hand() -> None:
    def scale(amax: float, **options: Any) -> float:
        options = {"pow2": False, "eps": 0.0} | options
        return elements.scale_from_amax(torch.tensor([amax]), 448.0, **options).item()

    assert scale(448.0) == 1.0
    assert scale(0.0) == scale(float("inf")) == scale(float("nan")) == 1.0
    assert scale(0.0, eps=448.0) == 1.0
    assert scale(0.0, eps=1.0) == 448.0
    assert scale(2.0**-149) == FP32_MAX
    assert scale(2.0**-149, pow2=True) == 2.0**127
    assert scale(2.0**-149, value_for_inf=65504.0, pow2=True) == 2.0**15
    assert scale(3.0, pow2=True) == 128.0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_amax_drops_nan_and_keeps_infinity(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, -3.0, 1.0], [nan, nan, nan], [-inf, nan, 2.0], [-0.0, 0.0, -0.0]], dtype=dtype)
    assert elements.amax(x, 1).tolist() == [3.0, 0.0, inf, 0.0]
    assert elements.amax(x, (0, 1)).item() == inf
    assert elements.amax(x[:2]).item() == 3.0
    assert elements.amax(x[1]).item() == 0.0
    assert elements.amax(x).dtype == torch.float32
    assert float8_amax(x[:2]).tolist() == [3.0]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_amax_of_nothing_is_zero(shape: tuple[int, ...]) -> None:
    assert float8_amax(torch.empty(shape)).tolist() == [0.0]
    assert elements.amax(torch.empty(shape), -1).tolist() == [0.0] * shape[0] if len(shape) == 2 else [0.0]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("pow2", [False, True], ids=["exact", "pow2"])
def test_block_scale_overflows_to_the_max_of_the_input(dtype: torch.dtype, pow2: bool) -> None:
    """448 / amax is infinite for the smallest numbers of FP32 and BF16; FP16 has none so small, its quotient stays."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.zeros(1, 128, dtype=dtype)
    x[0, 3] = smallest
    scale_inv = float8_block_quantize(x, E4M3, pow2, 0.0, False, True, False)[1][0, 0]
    scale = 448 / smallest if dtype == torch.float16 else torch.finfo(dtype).max
    scale = np.ldexp(1.0, np.frexp(scale)[1] - 1) if pow2 else np.float32(scale)
    assert scale_inv.item() == np.float32(1.0 / np.float64(scale))


# Order of bytes, transform, random bytes


@pytest.mark.parametrize("outer", [128, 384])
@pytest.mark.parametrize("blocks", [4, 20])
@pytest.mark.parametrize("columnwise", [False, True])
def test_swizzle_is_the_documented_address(outer: int, blocks: int, columnwise: bool) -> None:
    scale = torch.randint(0, 256, (outer, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    i, j = np.indices((outer, blocks))
    want = np.zeros(outer * blocks, np.uint8)
    want[exact.swizzled_address(i, j, blocks)] = scale.numpy()
    given = scale.t().contiguous() if columnwise else scale
    got = swizzle(given, columnwise)
    assert got.shape == given.shape
    np.testing.assert_array_equal(got.flatten().numpy(), want)
    assert torch.equal(unswizzle(got, columnwise), given)
    assert torch.equal(swizzle(unswizzle(given, columnwise), columnwise), given)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("sign_mask", [0, RANDOM_SIGN_MASK], ids=["plain", "signs"])
def test_hadamard_is_the_matrix(dtype: torch.dtype, sign_mask: int) -> None:
    """Small integers: every sum is exact, and so is the result in the input's dtype."""
    x = torch.randint(-3, 4, (7, 64), generator=torch.Generator().manual_seed(0)).to(dtype)
    want = x.double().numpy().reshape(-1, 16) @ exact.hadamard16_matrix(sign_mask)
    got = hadamard16(x, sign_mask)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.double().numpy().reshape(-1, 16), want)


@pytest.mark.parametrize("sign_mask", [0, RANDOM_SIGN_MASK], ids=["plain", "signs"])
def test_hadamard_of_real_numbers(sign_mask: int) -> None:
    """Within one rounding to BF16 of the exact product, and orthogonal."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix = exact.hadamard16_matrix(sign_mask)
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    want = x.double().numpy().reshape(-1, 16) @ matrix
    error = np.abs(hadamard16(x, sign_mask).double().numpy().reshape(-1, 16) - want)
    assert (error <= np.abs(want) * 2.0**-8 + 2.0**-20).all()


def test_hadamard_does_not_overflow_on_the_way() -> None:
    """0.25 · 16 · max overflows, 0.25 · (max - max + ...) does not."""
    top = torch.finfo(torch.bfloat16).max
    row = torch.full((1, 16), top, dtype=torch.bfloat16)
    row[0, 1::2] = -top
    assert hadamard16(row, 0).isinf().nonzero().tolist() == [[0, 1]]
    one = torch.zeros(1, 16, dtype=torch.bfloat16)
    one[0, 3] = top
    assert (hadamard16(one, 0).abs().double() == top / 4).all()


def test_sign_mask_is_the_documented_one() -> None:
    signs = "+++-+------+-+--"
    assert sum(1 << i for i, sign in enumerate(signs) if sign == "-") == RANDOM_SIGN_MASK


@pytest.mark.parametrize("size", [0, 1, 2, 7, 16, 33])
def test_pack_round_trip(size: int) -> None:
    codes = torch.randint(0, 16, (5, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = elements.pack_fp4(codes)
    assert packed.shape == (5, (size + 1) // 2)
    assert torch.equal(elements.unpack_fp4(packed, size), codes)
    assert torch.equal(packed & 15, codes[:, 0::2])
    assert torch.equal((packed >> 4)[:, : size // 2], codes[:, 1::2])
    if size % 2:
        assert (packed[:, -1] >> 4 == 0).all()


def test_philox_known_answer() -> None:
    """The first vector of Random123's own list for philox4x32, 10 rounds: all zero in."""
    words = philox_bytes(torch.zeros(2, dtype=torch.int64), 1, 0).numpy().view("<u4")
    assert words.tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]


@pytest.mark.parametrize("seed", [1, 0x1234_5678_9ABC_DEF0, -1])
@pytest.mark.parametrize("offset", [0, 0xFFFF_FFFF, 7 << 32])
@pytest.mark.parametrize("direction", [0, 1])
def test_philox_bytes(seed: int, offset: int, direction: int) -> None:
    got = philox_bytes(torch.tensor([seed, offset]), 5, direction).numpy().view("<u4")
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    want = [exact.philox4x32((block, 0, direction, offset & 0xFFFFFFFF), key) for block in range(5)]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))
