"""The norms on a GPU: statistics and gradients against FP64 within FP32's sums, what is pointwise byte for byte."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from mezzotint.kernels.norm import norm_add_stats, norm_apply, norm_backward, norm_backward_add, norm_stats
from mezzotint.kernels.pointwise import add
from tests.formats import HIGH
from tests.kernels.test_norm import EPS, KINDS, draw, in_double
from tests.values import VIEWS, as_view, raw

pytestmark = pytest.mark.gpu

# Whole tiles; ragged; one row; rows that are held in registers, and the two limits above which they are not.
SHAPES = ((256, 1024), (33, 70), (1, 16), (7, 1), (3, 5, 96), (700, 264), (5, 8192), (4, 9000), (3, 32768), (2, 40001))


def assert_sum(got: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype) -> None:
    """An FP32 sum of `terms` (FP64) over dim 0 in any order, cast once."""
    bound = terms.abs().sum(0) * 2.0**-19 + terms.sum(0).abs() * torch.finfo(dtype).eps + 1e-30
    assert ((got.double() - terms.sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stats_and_backward(shape: tuple[int, ...], rms: bool) -> None:
    """Each shape with another dtype of x, gamma in FP32 or in x's."""
    number = SHAPES.index(shape)
    dtype, has_beta = HIGH[number % 3], not rms
    x, dy = draw(shape, dtype, number).cuda(), draw(shape, dtype, number + 50).cuda()
    gamma = draw(shape[-1:], dtype if number % 2 else torch.float32, 3).cuda()
    beta = draw(shape[-1:], gamma.dtype, 4).cuda() if has_beta else None
    mu, rs = norm_stats(x, EPS, rms)
    rows = x.double().reshape(-1, shape[-1])
    if rms:
        assert mu.shape == (0,)
        power = rows.square().mean(1)
    else:
        assert ((mu.double() - rows.mean(1)).abs() <= rows.abs().mean(1) * 2.0**-20).all()
        power = rows.var(1, correction=0)
    assert ((rs.double() * (power + EPS).sqrt() - 1).abs() <= 2.0**-18).all()

    exact = [t.double().requires_grad_() for t in (x, gamma, *([beta] if beta is not None else []))]
    y = in_double(exact[0], exact[1], exact[2] if has_beta else None, rms, True)
    grads = torch.autograd.grad(y, exact, dy.double())
    got = norm_backward(dy, x, mu, rs, gamma, True, rms, has_beta)
    assert [(g.shape, g.dtype) for g in got[:2]] == [(x.shape, dtype), (gamma.shape, gamma.dtype)]
    torch.testing.assert_close(got[0].double(), grads[0], rtol=torch.finfo(dtype).eps, atol=4e-5)
    h = rs.double()[:, None] * (rows if rms else rows - mu.double()[:, None])
    grad = dy.double().reshape(rows.shape)
    assert_sum(got[1], grad * h, gamma.dtype)
    if has_beta:
        assert_sum(got[2], grad, gamma.dtype)
    again = norm_backward(dy, x, mu, rs, gamma, True, rms, has_beta)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "the order of every sum is fixed"


@pytest.mark.parametrize("kind", KINDS)
def test_apply_is_exact(kind: str) -> None:
    """From the CPU's statistics: the CPU's bytes."""
    rms, has_beta, zero_centered = KINDS[kind]
    for number, shape in enumerate(((256, 1024), (33, 70), (1, 1), (3, 5, 96), (2, 40001))):
        x = draw(shape, HIGH[number % 3], number)
        gamma, beta = draw(shape[-1:], torch.float32, 1), draw(shape[-1:], HIGH[number % 3], 2)
        args = (x, *norm_stats(x, EPS, rms), gamma, beta if has_beta else None)
        got = norm_apply(*(None if a is None else a.cuda() for a in args), zero_centered, rms)
        assert torch.equal(raw(got.cpu()), raw(norm_apply(*args, zero_centered, rms))), shape


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 16), (4, 0), (64, 4096), (8, 5120), (16, 2048)], ids=str)
def test_sum_and_stats(shape: tuple[int, ...], rms: bool) -> None:
    """The CPU's sum, to the bit, whatever the dtypes and strides; its statistics, which another kernel than theirs may
    add up in another order."""
    number = len(str(shape))
    for dtype, other in product(HIGH, HIGH):
        x, branch = draw(shape, dtype, number), draw(shape, other, number + 50)
        for bias in (None, draw(shape[-1:], other, 3)):
            want = norm_add_stats(x, branch, bias, EPS, rms)[0].cuda()
            others = (None if bias is None else bias.cuda(), EPS, rms)
            for view in ("contiguous", "inner", "every_second"):
                got = norm_add_stats(as_view(x.cuda(), view), as_view(branch.cuda(), view), *others)
                case = (dtype, other, bias is None, view)
                for a, b in zip(got, (want, *norm_stats(want, EPS, rms)), strict=True):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype), case
                    torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6, msg=str(case))
                assert torch.equal(raw(got[0]), raw(want)), case


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 16), (4, 0)], ids=str)
def test_backward_with_a_residual(shape: tuple[int, ...], rms: bool) -> None:
    """The bytes of the backward and of a sum after it."""
    number = len(str(shape))
    dtype, other = HIGH[number % 3], HIGH[(number + rms) % 3]
    x, dy = draw(shape, dtype, number).cuda(), draw(shape, dtype, number + 50).cuda()
    residual = draw(shape, other, number + 90).cuda()
    gamma = draw(shape[-1:], torch.float32, 3).cuda()
    args = (dy, x, *norm_stats(x, EPS, rms), gamma, True, rms, not rms)
    dx, *rest = norm_backward(*args)
    for seen in (residual, as_view(residual, "inner"), as_view(residual, "every_second")):
        got = norm_backward_add(*args, seen)
        for a, b in zip(got, (add(dx, residual), *rest), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert torch.equal(raw(a), raw(b))


def test_strides() -> None:
    for shape, view in product(((33, 70), (3, 5, 96)), VIEWS):
        x, dy = (as_view(draw(shape, torch.bfloat16, seed).cuda(), view) for seed in (1, 2))
        gamma = draw(shape[-1:], torch.float32, 3).cuda()
        stats = norm_stats(x, EPS, False)
        dense = x.clone(memory_format=torch.contiguous_format)
        for a, b in zip(stats, norm_stats(dense, EPS, False), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # strides decide who adds what first
        y, want = (norm_apply(a, *stats, gamma, gamma, False, False) for a in (x, dense))
        assert y.is_contiguous()
        assert torch.equal(y, want)
        got = norm_backward(dy, x, *stats, gamma, False, False, True)
        want = norm_backward(dy.clone(memory_format=torch.contiguous_format), dense, *stats, gamma, False, False, True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=torch.finfo(a.dtype).eps * 8, atol=1e-4)


def test_empty() -> None:
    for shape in ((0, 16), (4, 0), (2, 0, 8)):
        x, gamma = torch.empty(shape, device="cuda"), torch.ones(shape[-1], device="cuda")
        mu, rs = norm_stats(x, EPS, False)
        assert mu.shape == rs.shape == (torch.Size(shape[:-1]).numel(),)
        assert norm_apply(x, mu, rs, gamma, gamma, False, False).shape == shape
        dx, dgamma, dbeta = norm_backward(x, x, mu, rs, gamma, False, False, True)
        assert dx.shape == shape
        assert not dgamma.any()
        assert not dbeta.any()


@pytest.fixture(scope="module")
def large() -> Iterator[torch.Tensor]:
    """BF16, 2^31 elements and 128 rows more: an index that is 32 bits wide would wrap."""
    generator = torch.Generator("cuda").manual_seed(0)
    yield torch.randn((1 + 2**10) * 128, 2**14, dtype=torch.bfloat16, device="cuda", generator=generator)
    torch.cuda.empty_cache()


def test_more_elements_than_32_bits_count(large: torch.Tensor) -> None:
    """The last rows alone, and behind 2^31 elements."""
    tail, gamma = large[-128:].clone(), torch.rand(2**14, device="cuda")
    stats, few = norm_stats(large, EPS, True), norm_stats(tail, EPS, True)
    assert torch.equal(stats[1][-128:], few[1])
    total, _, rs = norm_add_stats(large, large, None, EPS, True)
    assert torch.equal(total[-128:], tail + tail)
    assert torch.equal(rs[-128:], norm_add_stats(tail, tail, None, EPS, True)[2])
    del total
    y = norm_apply(large, *stats, gamma, None, False, True)
    assert torch.equal(y[-128:], norm_apply(tail, *few, gamma, None, False, True))
    del y
    dx = norm_backward(large, large, *stats, gamma, False, True, False)[0]
    assert torch.equal(dx[-128:], norm_backward(tail, tail, *few, gamma, False, True, False)[0])
    del dx
    dx = norm_backward_add(large, large, *stats, gamma, False, True, False, large)[0]
    assert torch.equal(dx[-128:], norm_backward_add(tail, tail, *few, gamma, False, True, False, tail)[0])
