"""Pointwise ops, dropout and L2 normalisation on the CPU, against formulas written apart in numpy and FP64.

One FP32 operation of FP32 numbers is that of FP64 rounded to FP32: 53 bits are enough for one rounding to be as good
as two. The rounding to 16 bits is numpy's or ml_dtypes'.
"""

import math
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzotint.kernels import pointwise
from mezzotint.kernels.philox import DROPOUT, draw_rng
from mezzotint.kernels.pointwise import add, dropout, l2norm, l2norm_backward, scale, scale_add
from tests import exact
from tests.formats import HIGH
from tests.values import CONTENTS, VIEWS, as_view, fill, raw

SHAPES = ((), (1,), (24,), (0,), (7, 1), (5, 33), (0, 16), (16, 0), (3, 4, 64), (2, 0, 8), (2, 3, 2, 5))
RNG = torch.tensor([0x1234_5678_9ABC_DEF0, 0x7_0000_0007])
NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def rounded(value: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """One FP32 operation's result, in FP64, rounded to FP32 and then to `dtype`; as FP64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(value).astype(np.float32).astype(NUMPY[dtype]).astype(np.float64)


def same(got: torch.Tensor, want: np.ndarray | torch.Tensor, x: torch.Tensor) -> None:
    """x's shape and dtype, dense, every byte; NaN is NaN."""
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    assert got.is_contiguous()
    expected = want if isinstance(want, torch.Tensor) else torch.from_numpy(np.array(want)).to(x.dtype)
    assert torch.equal(raw(got), raw(expected))


@st.composite
def operands(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and y of its shape or along its last dimension: any values, strides, dtypes."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 16, 33]), min_size=1, max_size=3)))
    kinds, views, dtypes = st.sampled_from(CONTENTS), st.sampled_from(VIEWS), st.sampled_from(HIGH)
    x = as_view(fill(shape, draw(dtypes), draw(kinds), draw(st.integers(0, 99))), draw(views))
    other = shape[-1:] if draw(st.booleans()) else shape
    return x, as_view(fill(other, draw(dtypes), draw(kinds), draw(st.integers(0, 99))), draw(views))


@given(operands(), st.sampled_from([1.0, 0.1, -3.0, 0.0, 1e-6, 4096.0, 1 / 3]))
@settings(max_examples=150)
def test_add_and_scale_round_once_each(pair: tuple[torch.Tensor, torch.Tensor], factor: float) -> None:
    """The factor's FP32 number is what counts. Torch's own kernels, which CUDA has for two of them, agree."""
    x, y = pair
    with np.errstate(over="ignore", invalid="ignore"):
        total = rounded(wide(x) + wide(y), x.dtype)
        scaled = rounded(wide(x) * np.float64(np.float32(factor)), x.dtype)
        both = rounded(scaled + wide(y), x.dtype)
    same(add(x, y), total, x)
    same(scale(x, factor), scaled, x)
    same(scale_add(x, factor, y), both, x)
    same(pointwise._add(x, y), total, x)
    same(pointwise._scale(x, factor), scaled, x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape: tuple[int, ...]) -> None:
    for dtype, other in product(HIGH, HIGH):
        x, y = draw(shape, dtype, 0), draw(shape, other, 1)
        same(add(x, y), rounded(wide(x) + wide(y), dtype), x)
        same(scale_add(x, 0.3, y), add(scale(x, 0.3), y), x)
        if shape:
            bias = draw(shape[-1:], other, 2)
            same(add(x, bias), add(x, bias.expand(shape)), x)
            same(scale_add(x, 0.3, bias), add(scale(x, 0.3), bias), x)


def test_torchs_kernels_take_parameters() -> None:
    """A leaf op has no gradient of its own, and runs where its arguments could have one."""
    x = draw((5, 33), torch.bfloat16, 0).requires_grad_()
    bias = torch.nn.Parameter(draw((33,), torch.float32, 1))
    same(pointwise._add(x, bias), add(x, bias).detach(), x)
    same(pointwise._scale(x, 0.3), scale(x, 0.3).detach(), x)


def test_scale_add_rounds_twice() -> None:
    """1 + 2^-8 lies between two BF16 numbers; what is added decides which way only if it is not rounded first."""
    x = torch.tensor([1.0], dtype=torch.bfloat16)
    tiny = torch.tensor([2.0**-7], dtype=torch.bfloat16)
    factor = 1 + 2.0**-8
    assert scale_add(x, factor, tiny) == 1 + 2.0**-7
    assert (x.float() * factor + tiny.float()).to(torch.bfloat16) == 1 + 2.0**-6


def words_of(count: int, rng: torch.Tensor) -> np.ndarray:
    """The random word of each element, in Python's integers."""
    seed, offset = (int(v) for v in rng)
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    blocks = [exact.philox4x32((i, 0, DROPOUT, offset & 0xFFFFFFFF), key) for i in range((count + 3) // 4)]
    return np.array(blocks, np.int64).reshape(-1)[:count]


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(shape, dtype, 3)
    words = words_of(x.numel(), RNG).reshape(shape)
    for p in (0.0, 0.1, 0.5, 0.75, 1.0):
        keep = words / 2**32 >= p
        value = rounded(wide(x) * np.float64(np.float32(1 / (1 - p) if p < 1 else 0)), dtype)
        same(dropout(x, RNG, p), np.where(keep, value, 0.0), x)
    same(dropout(x, RNG, 0.0), x, x)
    assert dropout(x, RNG, 0.0) is not x


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_dropout_rate(p: float) -> None:
    """Of n elements n · (1 - p) are kept, within five standard deviations; expectation and neighbours, too."""
    n = 1 << 18
    sigma = math.sqrt(p * (1 - p) / n)
    ones = torch.ones(n)
    for seed in range(3):
        y = dropout(ones, torch.tensor([seed, 1]), p)
        kept = (y != 0).double()
        assert abs(kept.mean() - (1 - p)) <= 5 * sigma
        assert abs(y.double().mean() - 1) <= 5 * sigma / (1 - p) + 1e-6
        for step in (1, 4, 64):
            together = (kept[step:] * kept[:-step]).mean()
            assert abs(together - (1 - p) ** 2) <= 10 * sigma
    (a, b) = (dropout(ones, torch.tensor([0, offset]), p) != 0 for offset in (1, 2))
    assert abs((a & b).double().mean() - (1 - p) ** 2) <= 10 * sigma


def test_dropout_drops_what_is_not_finite() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0] * 64)
    y = dropout(x, RNG, 0.5)
    gone = torch.from_numpy(words_of(256, RNG) < 2**31)
    assert torch.equal(raw(y[gone]), raw(torch.zeros(int(gone.sum()))))
    assert torch.equal(raw(y[~gone]), raw(x[~gone]))
    assert torch.equal(raw(dropout(x, RNG, 1.0)), raw(torch.zeros(256)))


@pytest.mark.parametrize("view", VIEWS)
def test_dropout_backward_and_strides(view: str) -> None:
    """The gradient is dropped where x was; an element's number is its row-major place, whatever the strides."""
    rng = draw_rng(torch.zeros(1))
    for shape in ((6, 34), (3, 4, 8), (7, 3)):
        x = as_view(draw(shape, torch.bfloat16, 1), view)
        dense = x.clone(memory_format=torch.contiguous_format)
        same(dropout(x, rng, 0.4), dropout(dense, rng, 0.4), x)
        ones = torch.ones(shape, dtype=torch.bfloat16)
        kept, grad = dropout(dense.fill_(1), rng, 0.4) != 0, dropout(ones, rng, 0.4)
        assert torch.equal(grad, torch.where(kept, ones * torch.tensor(1 / 0.6), 0).to(torch.bfloat16))


ROWS = tuple(shape for shape in SHAPES if shape)


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_l2norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Against FP64 with autograd; y, given rs, to the bit."""
    eps = 1e-3
    x, dy = draw(shape, dtype, 4), draw(shape, dtype, 5)
    y, rs = l2norm(x, eps)
    dx = l2norm_backward(dy, x, rs)
    assert (rs.shape, rs.dtype) == (shape[:-1], torch.float32)
    same(y, rounded(wide(x) * wide(rs)[..., None], dtype), x)
    same(dx, dx, x)
    precise = x.double().requires_grad_()
    want = precise / (precise.square().sum(-1, keepdim=True) + eps).sqrt()
    (grad,) = torch.autograd.grad(want, precise, dy.double())
    torch.testing.assert_close(rs.double(), (x.double().square().sum(-1) + eps).rsqrt(), rtol=1e-6, atol=0)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want, rtol=ulp, atol=1e-6)
    torch.testing.assert_close(dx.double(), grad, rtol=ulp, atol=2e-5)


def test_l2norm_of_nothing() -> None:
    """Of zeros eps is left; of no columns, too."""
    y, rs = l2norm(torch.zeros(2, 3), 1e-4)
    assert not y.any()
    torch.testing.assert_close(rs, torch.full((2,), 100.0))
    torch.testing.assert_close(l2norm(torch.empty(2, 0), 1e-4)[1], torch.full((2,), 100.0))
    torch.testing.assert_close(l2norm_backward(torch.ones(2, 3), y, rs), torch.full((2, 3), 100.0))


@pytest.mark.parametrize("view", VIEWS)
def test_l2norm_strides(view: str) -> None:
    for shape in ((5, 33), (3, 4, 64)):
        x, dy = (as_view(draw(shape, torch.bfloat16, seed), view) for seed in (1, 2))
        dense, grad = (t.clone(memory_format=torch.contiguous_format) for t in (x, dy))
        y, rs = l2norm(x, 1e-5)
        same(y, l2norm(dense, 1e-5)[0], x)
        same(l2norm_backward(dy, x, rs), l2norm_backward(grad, dense, rs), x)
