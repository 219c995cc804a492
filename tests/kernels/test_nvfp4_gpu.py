"""NVFP4 on a GPU: every option against the CPU reference byte for byte, and its arithmetic over every mantissa.

Triton compiles a kernel anew for each dtype, direction, option and kind of size, so options meet each other, and the
shapes of one kind, in the few ways of CASES; what depends on values rotates over the shapes.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, FP32_MAX
from mezzotint.kernels.elements import cast_e2m1, cast_fp8, decode_fp8, div, pack_fp4, round_e2m1_stochastic
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK
from mezzotint.kernels.nvfp4 import (
    nvfp4_amax,
    nvfp4_buffers,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_quantize_,
)
from mezzotint.kernels.triton._jit_fp4 import block_scale, philox16, philox_key, round8, round8_stochastic, sign_pairs
from tests import exact
from tests.values import CONTENTS, VIEWS, as_view, fill, raw

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROW, COL, BOTH = (True, False), (False, True), (True, True)
RNG = (0x1234_5678_9ABC_DEF0, 0xFFFF_FFF0_0000_0007)

# Rows and columns: whole tiles of every kernel, multiples of 16, neither. 57 shapes.
WHOLE = [*product((256, 512), (128, 256, 1024)), (2, 128, 256), (4, 4, 16, 128)]
EVEN = [*product((16, 48, 112, 272), (16, 64, 144, 400)), (2, 64, 48), (3, 16, 16)]
RAGGED = [*product((3, 17, 31, 129, 257), (5, 33, 70, 127, 1001)), (2, 3, 7), (5, 11, 13), (2, 2, 2, 45)]
SMALL = [(1, 1), (1, 300), (300, 1), (17,)]
EMPTY = [(0, 16), (16, 0), (0,), (2, 0, 32), (2, 32, 0)]


def options(**given: Any) -> dict[str, Any]:
    """The op's arguments after the amaxes, up to the usages, in order."""
    plain = {"rng": None, "e4m3_max": 448, "four_over_six": 0, "sign_mask": RANDOM_SIGN_MASK}
    return plain | dict.fromkeys(("two_d", "swizzled", "rht", "row_scaled"), False) | given


CASES = [
    (WHOLE, BF16, BOTH, options(rng=RNG, rht=True, swizzled=True)),
    (WHOLE, BF16, BOTH, options(two_d=True, swizzled=True)),
    (WHOLE, BF16, ROW, options()),
    (WHOLE, FP32, BOTH, options(two_d=True, row_scaled=True, rng=RNG)),
    (WHOLE, BF16, COL, options(rht=True, four_over_six=2, e4m3_max=256)),
    (EVEN, FP16, BOTH, options(rht=True, row_scaled=True)),
    (EVEN, BF16, BOTH, options(four_over_six=1, e4m3_max=256, swizzled=True)),
    (EVEN, FP32, COL, options(rng=RNG, swizzled=True)),
    (EVEN, BF16, ROW, options(rng=RNG, two_d=True, rht=True)),
    (EVEN, FP32, ROW, options(two_d=True, four_over_six=2)),
    (RAGGED, BF16, BOTH, options()),
    (RAGGED, FP16, BOTH, options(two_d=True, rng=RNG, e4m3_max=256)),
    (RAGGED, FP32, COL, options(rht=True, swizzled=True, sign_mask=0)),
    (RAGGED, BF16, BOTH, options(two_d=True, rht=True)),
    (RAGGED, FP32, ROW, options(row_scaled=True, rng=RNG)),
    (RAGGED, FP16, COL, options(two_d=True, four_over_six=1, swizzled=True)),
    (RAGGED, BF16, ROW, options(row_scaled=True, four_over_six=2, e4m3_max=256)),
]


def label(case: Any) -> str:
    shapes, dtype, usage, opts = case
    kind = {id(WHOLE): "whole", id(EVEN): "even", id(RAGGED): "ragged"}[id(shapes)]
    way = {ROW: "row", COL: "column", BOTH: "both"}[usage]
    on = (f"{name}{value}" if name[0] in "ef" else name for name, value in opts.items() if value)
    return "-".join((kind, str(dtype)[6:], way, *(name for name in on if name not in ("sign_mask", "e4m3_max448"))))


def call(op: Any, x: torch.Tensor, opts: dict[str, Any], usage: tuple[bool, bool], amax: Any = (None, None)) -> Any:
    rest = {**opts, "rng": None if opts["rng"] is None else _signed(opts["rng"]).to(x.device)}
    given = (None if top is None else top.to(x.device) for top in amax)
    return op(x, *given, *rest.values(), *usage)


def _signed(rng: tuple[int, int]) -> torch.Tensor:
    return torch.tensor([value - (1 << 64) if value >> 63 else value for value in rng])


def assert_same(
    x: torch.Tensor,
    on_cuda: torch.Tensor,
    opts: dict[str, Any],
    usage: tuple[bool, bool],
    note: str = "",
    amax: Any = (None, None),
) -> None:
    names = nvfp4_buffers(tuple(x.shape), opts["rht"], opts["row_scaled"], *usage)
    want, got = call(nvfp4_quantize, x, opts, usage, amax), call(nvfp4_quantize, on_cuda, opts, usage, amax)
    for name, expected, buffer in zip(names, want, got, strict=True):
        case = f"{name} of {tuple(x.shape)}, {x.dtype} {note}"
        assert (buffer.shape, buffer.dtype) == (expected.shape, expected.dtype), case
        assert_bytes(buffer, expected, case)


def assert_bytes(got: torch.Tensor, want: torch.Tensor, case: str) -> None:
    got, want = raw(got.cpu()), raw(want.cpu())
    wrong = (got != want).nonzero().view(-1)
    assert not len(wrong), f"{case}: {len(wrong)} of {len(want)} bytes differ, first {wrong[:8].tolist()}"


@pytest.mark.parametrize("case", CASES, ids=label)
def test_options(case: Any) -> None:
    shapes, dtype, usage, opts = case
    for index, shape in enumerate(shapes):
        content = CONTENTS[index % len(CONTENTS)]
        x = fill(shape, dtype, content, index)
        assert_same(x, x.cuda(), opts, usage, content)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_special_values(dtype: torch.dtype) -> None:
    """Every kind of content, over several tiles."""
    for index, content in enumerate(CONTENTS):
        x = fill((272, 144), dtype, content, index)
        assert_same(x, x.cuda(), options(), BOTH, content)


@pytest.mark.parametrize("content", ["mixed", "subnormal", "dtype_max"])
def test_special_values_transformed_and_stochastic(content: str) -> None:
    x = fill((512, 256), BF16, content, 1)
    assert_same(x, x.cuda(), options(rng=RNG, rht=True, swizzled=True), BOTH, content)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("rng", [None, RNG])
def test_nan_has_no_sign(dtype: torch.dtype, rng: Any) -> None:
    x = fill((256, 128), dtype, "nan", 4)
    bits = raw(x).view(torch.int32 if dtype == FP32 else torch.int16).view(x.shape)
    bits[x.isnan()] |= torch.iinfo(bits.dtype).min
    x = bits.view(dtype)
    assert_same(x, x.cuda(), options(rng=rng), BOTH, "negative NaN")


def test_small_and_empty() -> None:
    for shape in SMALL:
        x = fill(shape, BF16, "normal", 5)
        assert_same(x, x.cuda(), options(), BOTH)
    for shape, usage, row_scaled in product(EMPTY, (ROW, BOTH), (False, True)):
        x = torch.empty(shape, dtype=BF16)
        assert_same(x, x.cuda(), options(row_scaled=row_scaled), usage)


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str) -> None:
    for shape in ((256, 128), (33, 70), (2, 3, 48)):
        x = as_view(fill(shape, BF16, "normal", 7).cuda(), view)
        assert_same(x.cpu(), x, options(), BOTH, view)


def test_given_amax() -> None:
    """Of both directions or one; below the real one, which saturates the scales, and far above, where they vanish."""
    x = fill((256, 128), BF16, "normal", 3)
    for row, col in product((None, 0.01, 1e6, 0.0), (None, 3.0, float("inf"))):
        amax = [None if top is None else torch.tensor([top]) for top in (row, col)]
        assert_same(x, x.cuda(), options(), BOTH, f"amax {row}, {col}", amax)


def in_place(out: list[torch.Tensor], noop: torch.Tensor, x: torch.Tensor, *rest: Any) -> None:
    nvfp4_quantize_(x, out, noop, *rest)


def test_noop() -> None:
    """1: nothing is written. Anything else: every byte is."""
    x = fill((130, 272), BF16, "normal", 9)
    for opts in (options(), options(row_scaled=True, rng=RNG)):
        want = call(nvfp4_quantize, x, opts, BOTH)
        out = [torch.full((b.nbytes,), 0xA5, dtype=torch.uint8, device="cuda") for b in want]
        typed = [o.view(b.dtype).view(b.shape) for o, b in zip(out, want, strict=True)]
        for noop in (1.0, 0.0):
            flag = torch.tensor([noop], device="cuda")
            call(partial(in_place, typed, flag), x.cuda(), opts, BOTH)
            if noop:
                assert all((o == 0xA5).all() for o in out)
        for buffer, expected in zip(typed, want, strict=True):
            assert_bytes(buffer, expected, str(tuple(expected.shape)))


def test_amax() -> None:
    """Flat and by tiles, one vector and one number, around one block per program."""
    for shape, rht, row_scaled in product(((33, 70), (512, 1024), (8192, 520)), (False, True), (False, True)):
        x = fill(shape, BF16, "mixed", 2)
        for view, usage in product(("contiguous", "inner"), (ROW, COL, BOTH)):
            args = (rht, RANDOM_SIGN_MASK, row_scaled, *usage)
            got = nvfp4_amax(as_view(x.cuda(), view), *args)
            for top, expected in zip(got, nvfp4_amax(x, *args), strict=True):
                assert_bytes(top, expected, f"{shape}, {view}, {args}")


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
def test_dequantize(out_dtype: torch.dtype) -> None:
    """Every code and scale, NaN included, both ways."""
    generator = torch.Generator().manual_seed(0)
    for rows, cols, swizzled, transposed, vector in product(
        (128, 37), (256, 77), (False, True), (False, True), (False, True)
    ):
        data = torch.randint(0, 256, (rows, (cols + 1) // 2), dtype=torch.uint8, generator=generator)
        width = -(-cols // 64) * 4
        scale = torch.randint(0, 256, (-(-rows // 128) * 128, width), dtype=torch.uint8, generator=generator)
        amax = torch.rand(rows if vector else 1, generator=generator) * 100
        args = (448 if vector else 256, swizzled, transposed, cols, out_dtype)
        got = nvfp4_dequantize(data.cuda(), scale.cuda(), amax.cuda(), *args)
        assert_bytes(got, nvfp4_dequantize(data, scale, amax, *args), f"{rows}x{cols}, {args}")


@pytest.fixture(scope="module")
def large() -> Iterator[torch.Tensor]:
    """BF16, 2^31 elements and 128 rows more: an index that is 32 bits wide would wrap."""
    generator = torch.Generator("cuda").manual_seed(0)
    yield torch.randn((1 + 2**10) * 128, 2**14, dtype=BF16, device="cuda", generator=generator)
    torch.cuda.empty_cache()


def test_more_elements_than_32_bits_count(large: torch.Tensor) -> None:
    """Rows at the start, in the middle and past 2^31, each against the reference of these rows alone."""
    opts, amax = options(rht=True), (torch.tensor([5.0]), torch.tensor([6.0]))
    row, row_scale, col, col_scale, *_ = call(nvfp4_quantize, large, opts, BOTH, amax)
    rows = len(large)
    for first in (0, rows // 256 * 128, rows - 128):
        some = slice(first, first + 128)
        want = call(nvfp4_quantize, large[some].cpu(), opts, BOTH, amax)
        got = row[some], row_scale[some], col[:, first // 2 :][:, :64], col_scale[:, first // 16 :][:, :8]
        for index, buffer in enumerate(got):
            assert_bytes(buffer, want[index], f"buffer {index}, rows from {first}")
    top = nvfp4_amax(large, False, 0, False, True, True)
    assert [t.item() for t in top] == [large.abs().amax().item()] * 2


def test_random_bytes_past_32_bits_of_elements(large: torch.Tensor) -> None:
    """The last row's codes with the bytes that belong to its blocks."""
    opts, amax = options(rng=RNG), (torch.tensor([6.0]),) * 2
    data, *_ = call(nvfp4_quantize, large, opts, ROW, amax)
    x, blocks = large[-1:].cpu(), large.shape[1] // 16
    sf = cast_fp8(x.float().view(blocks, 16).abs().amax(1) * (448.0 * torch.tensor(1 / 6)), E4M3)
    factor = div(1.0, decode_fp8(sf, E4M3) * div(1.0, torch.tensor([448.0])))
    noise = philox((len(large) - 1) * blocks + torch.arange(blocks), 0)
    codes = round_e2m1_stochastic(x.float().view(blocks, 16) * factor[:, None], noise)
    assert_bytes(data[-1], pack_fp4(codes), "the last row")


def philox(block: torch.Tensor, direction: int) -> torch.Tensor:
    """The model's bytes (blocks, 16) for RNG."""
    key = (RNG[0] & 0xFFFFFFFF, RNG[0] >> 32)
    counters = ((b & 0xFFFFFFFF, b >> 32, direction, RNG[1] & 0xFFFFFFFF) for b in block.tolist())
    words = torch.tensor([exact.philox4x32(counter, key) for counter in counters])
    return ((words[..., None] >> torch.arange(0, 32, 8)) & 0xFF).to(torch.uint8).flatten(1)


@triton.jit
def _round_kernel(x, noise, out, NATURAL: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = ()
    for j in tl.static_range(8):
        v += (tl.load(x + i * 8 + j),)
    if noise is None:
        tl.store(out + i, round8(v))
    else:
        # Pairs of neighbours are what `sign_pairs` makes of this order.
        signs = sign_pairs((v[0], v[4], v[1], v[5], v[2], v[6], v[3], v[7]) if NATURAL else v)
        low, high = tl.load(noise + i * 2), tl.load(noise + i * 2 + 1)
        tl.store(out + i, round8_stochastic(v, 1.0, low, high, signs, NATURAL))


@triton.jit
def _scale_kernel(d, s_dec, sf, value, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code, decoded, multiplier = block_scale(tl.load(d + i), tl.load(s_dec + i))
    tl.store(sf + i, code.to(tl.uint8))
    tl.store(value + i, decoded)
    tl.store(factor + i, multiplier)


@triton.jit
def _philox_kernel(rng, block, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    counter = tl.load(block + i)
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox16(philox_key(rng), low, high, low, 1)
    for j in tl.static_range(4):
        word = w0 if j == 0 else (w1 if j == 1 else (w2 if j == 2 else w3))
        tl.store(out + i * 4 + j, word)


def patterns(low: float, high: float) -> torch.Tensor:
    """Every FP32 from `low` up to `high`, on the GPU."""
    first, last = (int(torch.tensor(v).view(torch.int32)) for v in (low, high))
    return torch.arange(first, last, dtype=torch.int32, device="cuda").view(FP32)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nearest_rounding_of_every_float(sign: float) -> None:
    """From 2^-4 to 16, where every decision falls."""
    x = patterns(2.0**-4, 16.0) * sign
    out = torch.empty(x.numel() // 8, dtype=torch.int32, device="cuda")
    _round_kernel[(out.numel() // 1024,)](x, None, out, NATURAL=False, BLOCK=1024, enable_fp_fusion=False)
    assert torch.equal(out.view(torch.uint8), pack_fp4(cast_e2m1(x)))


@pytest.mark.parametrize("seed", range(4))
def test_stochastic_rounding_where_it_decides(seed: int) -> None:
    """Values within a few units of the point where their byte just reaches the next code."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randint(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (1 << 22,), device="cuda", generator=generator, dtype=torch.int32)

    noise = randint(0, 256).to(torch.uint8)
    code = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")[randint(0, 7)]
    step = torch.where(code > 4, 2.0, torch.where(code > 2, 1.0, 0.5))
    x = code - noise.float() * step / 256
    x = (x.view(torch.int32) + randint(-3, 4) * (8**seed)).view(FP32).nan_to_num() * (1 - 2.0 * randint(0, 2))
    out = torch.empty(x.numel() // 8, dtype=torch.int32, device="cuda")
    for natural in (False, True):
        args = (x, noise.view(torch.int32), out, natural)
        _round_kernel[(out.numel() // 1024,)](*args, BLOCK=1024, enable_fp_fusion=False)
        assert torch.equal(out.view(torch.uint8), pack_fp4(round_e2m1_stochastic(x, noise)))


@pytest.mark.parametrize("exponent", [-128, -127, -126, -100, 0, 100, 116])
def test_reciprocal_of_every_mantissa(exponent: int) -> None:
    """d = 1 has the scale 1, so the factor is 1 / S_dec; below 2^-126 there are fewer mantissas."""
    top = min(2.0 ** (exponent + 1), FP32_MAX / 2688)
    s_dec = patterns(2.0**exponent, top)
    s_dec = s_dec[: s_dec.numel() // 1024 * 1024]
    check_scale(torch.ones_like(s_dec), s_dec)


@pytest.mark.parametrize("exponent", [-128, -120, 0, 110])
def test_scale_of_every_kind(exponent: int) -> None:
    generator = torch.Generator("cuda").manual_seed(exponent + 200)
    n = 1 << 22
    s_dec = (torch.rand(n, device="cuda", generator=generator, dtype=torch.float64) + 1) * 2.0**exponent
    d = patterns(2.0**-12, 1000.0)
    d = d[torch.randint(0, d.numel(), (n,), device="cuda", generator=generator)]
    d[:3] = torch.tensor([0.0, float("inf"), FP32_MAX])
    check_scale(d, s_dec.float())


def check_scale(d: torch.Tensor, s_dec: torch.Tensor) -> None:
    sf, value, factor = torch.empty_like(d, dtype=torch.uint8), torch.empty_like(d), torch.empty_like(d)
    _scale_kernel[(d.numel() // 1024,)](d, s_dec, sf, value, factor, BLOCK=1024, enable_fp_fusion=False)
    codes = cast_fp8(d.clone(), E4M3)
    decoded = decode_fp8(codes, E4M3)
    assert torch.equal(sf, codes)
    assert torch.equal(value, decoded)
    assert torch.equal(factor, div(1.0, decoded * s_dec).clamp_max_(FP32_MAX))


def test_random_bytes_of_far_blocks() -> None:
    block = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**33 + 5, 2**40 + 3, 2**62])
    out = torch.empty(8, 4, dtype=torch.int32, device="cuda")
    _philox_kernel[(1,)](_signed(RNG).cuda(), block.cuda(), out, BLOCK=8)
    assert_bytes(out.view(torch.uint8), philox(block, 1), "philox")
