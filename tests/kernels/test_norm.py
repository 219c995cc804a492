"""LayerNorm and RMSNorm on the CPU: against torch and autograd in FP64, and against one rounding per operation."""

import numpy as np
import pytest
import torch

from mezzotint.kernels.norm import norm_add_stats, norm_apply, norm_backward, norm_backward_add, norm_stats
from mezzotint.kernels.pointwise import add
from tests.formats import HIGH
from tests.values import VIEWS, as_view, raw

EPS = 1e-5
SHAPES = ((0, 16), (1, 16), (16, 0), (7, 1), (5, 33), (3, 4, 64), (2, 0, 8), (24,), (4, 1000))
# (RMSNorm, a beta, zero-centred gamma)
KINDS = {
    "layernorm": (False, True, False),
    "layernorm_zero_centered": (False, True, True),
    "layernorm_no_beta": (False, False, False),
    "rmsnorm": (True, False, False),
    "rmsnorm_zero_centered": (True, False, True),
}


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5).to(dtype)


def in_double(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, rms: bool, zero_centered: bool
) -> torch.Tensor:
    """The norm in FP64, by torch's own functions."""
    g = gamma + 1 if zero_centered else gamma
    if rms:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], g, EPS)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], g, beta, EPS)


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stats(shape: tuple[int, ...], rms: bool, dtype: torch.dtype) -> None:
    x = draw(shape, dtype, 0)
    mu, rs = norm_stats(x, EPS, rms)
    rows = torch.Size(shape[:-1]).numel()
    value = x.double().reshape(rows, shape[-1])
    assert rs.shape == (rows,)
    assert mu.shape == (0 if rms else rows,)
    assert mu.dtype == rs.dtype == torch.float32
    if shape[-1] == 0:
        torch.testing.assert_close(rs, torch.full((rows,), EPS**-0.5))
    elif rms:
        torch.testing.assert_close(rs, (value.square().mean(1) + EPS).rsqrt().float(), rtol=1e-6, atol=0)
    elif rows:
        torch.testing.assert_close(mu, value.mean(1).float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rs, (value.var(1, correction=0) + EPS).rsqrt().float(), rtol=1e-5, atol=0)


def test_stats_are_centred_first() -> None:
    """E[x²] - E[x]² would lose everything: the variance is 2^-24 of the mean's square."""
    x = 4096.0 + draw((3, 512), torch.float32, 1)
    mu, rs = norm_stats(x, 0.0, False)
    torch.testing.assert_close(mu, x.double().mean(1).float())
    torch.testing.assert_close(rs, x.double().var(1, correction=0).rsqrt().float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("rms", [False, True])
def test_sum_and_stats(rms: bool, dtype: torch.dtype) -> None:
    """The sum in numpy's FP32, branch and bias first, rounded once; bit for bit the statistics of that."""
    for seed, shape in enumerate(SHAPES):
        x = draw(shape, dtype, seed)
        for other in HIGH:
            branch = draw(shape, other, seed + 50)
            for bias in (None, draw(shape[-1:], other, seed + 90)):
                got = norm_add_stats(x, branch, bias, EPS, rms)
                added = branch.float().numpy() if bias is None else branch.float().numpy() + bias.float().numpy()
                total = torch.from_numpy(x.float().numpy() + added).to(dtype)
                for a, b in zip(got, (total, *norm_stats(total, EPS, rms)), strict=True):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype)
                    assert a.is_contiguous()
                    assert torch.equal(raw(a), raw(b))
    for view in VIEWS:
        x, branch = (as_view(draw((3, 4, 64), dtype, seed), view) for seed in (1, 2))
        dense = [t.clone(memory_format=torch.contiguous_format) for t in (x, branch)]
        for a, b in zip(norm_add_stats(x, branch, None, EPS, rms), norm_add_stats(*dense, None, EPS, rms), strict=True):
            assert a.is_contiguous()
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_apply_rounds_once_per_operation(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit: numpy's FP32 operations in the order of the formula, one cast."""
    rms, has_beta, zero_centered = KINDS[kind]
    x, gamma, beta = draw((5, 33), dtype, 2), draw((33,), dtype, 3), draw((33,), dtype, 4)
    mu, rs = norm_stats(x, EPS, rms)
    got = norm_apply(x, mu, rs, gamma, beta if has_beta else None, zero_centered, rms)
    value = x.float().numpy()
    h = rs.numpy()[:, None] * (value if rms else value - mu.numpy()[:, None])
    g = gamma.float().numpy()
    y = h * (g + np.float32(1) if zero_centered else g)
    y = y + beta.float().numpy() if has_beta else y
    assert torch.equal(raw(got), raw(torch.from_numpy(y).to(dtype)))


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[-1]], ids=str)
def test_forward_and_backward(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    """Against FP64 with autograd. Gamma is FP32: the parameters may have another dtype than x."""
    rms, has_beta, zero_centered = KINDS[kind]
    x, dy = draw(shape, dtype, 5), draw(shape, dtype, 6)
    gamma, beta = draw(shape[-1:], torch.float32, 7), draw(shape[-1:], torch.float32, 8) if has_beta else None
    mu, rs = norm_stats(x, EPS, rms)
    y = norm_apply(x, mu, rs, gamma, beta, zero_centered, rms)
    dx, dgamma, dbeta = norm_backward(dy, x, mu, rs, gamma, zero_centered, rms, has_beta)
    assert (y.shape, y.dtype, dx.shape, dx.dtype) == (x.shape, x.dtype, x.shape, x.dtype)
    assert dgamma.dtype == dbeta.dtype == gamma.dtype
    assert dbeta.shape == (gamma.shape if has_beta else (0,))

    exact = [t.double().requires_grad_() for t in (x, gamma, *([beta] if beta is not None else []))]
    want = in_double(exact[0], exact[1], exact[2] if has_beta else None, rms, zero_centered)
    grads = torch.autograd.grad(want, exact, dy.double())
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want, rtol=ulp, atol=1e-5)
    torch.testing.assert_close(dx.double(), grads[0], rtol=ulp, atol=2e-5)
    torch.testing.assert_close(dgamma.double(), grads[1], rtol=1e-5, atol=1e-4)
    if has_beta:
        torch.testing.assert_close(dbeta.double(), grads[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_with_a_residual(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit the backward and a sum after it, which rounds again; the parameters' gradients as before."""
    rms, has_beta, zero_centered = KINDS[kind]
    for seed, shape in enumerate(SHAPES):
        x, dy, gamma = draw(shape, dtype, seed), draw(shape, dtype, seed + 50), draw(shape[-1:], torch.float32, 7)
        args = (dy, x, *norm_stats(x, EPS, rms), gamma, zero_centered, rms, has_beta)
        dx, dgamma, dbeta = norm_backward(*args)
        for other in HIGH:
            residual = draw(shape, other, seed + 90)
            got = norm_backward_add(*args, residual)
            twice = torch.from_numpy(dx.float().numpy() + residual.float().numpy()).to(dtype)
            for a, b in zip(got, (twice, dgamma, dbeta), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                assert a.is_contiguous()
                assert torch.equal(raw(a), raw(b))
            assert torch.equal(raw(got[0]), raw(add(dx, residual)))


@pytest.mark.parametrize("view", VIEWS)
def test_residual_of_any_strides(view: str) -> None:
    for shape in ((5, 33), (3, 4, 64)):
        x, dy, residual = (draw(shape, torch.bfloat16, seed) for seed in range(3))
        args = (dy, x, *norm_stats(x, EPS, True), draw(shape[-1:], torch.float32, 3), False, True, False)
        seen = as_view(residual, view)
        got, want = (norm_backward_add(*args, r)[0] for r in (seen, seen.clone(memory_format=torch.contiguous_format)))
        assert got.is_contiguous()
        assert torch.equal(got, want)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(5, 33), (3, 4, 64)], ids=str)
def test_strides_do_not_matter(shape: tuple[int, ...], view: str) -> None:
    x = as_view(draw(shape, torch.bfloat16, 9), view)
    dy = as_view(draw(shape, torch.bfloat16, 10), view)
    gamma, beta = draw(shape[-1:], torch.float32, 11), draw(shape[-1:], torch.float32, 12)
    for rms in (False, True):
        results = []
        for a, g in ((x, dy), (x.clone(memory_format=torch.contiguous_format), dy.clone())):
            stats = norm_stats(a, EPS, rms)
            y = norm_apply(a, *stats, gamma, beta, True, rms)
            results.append((*stats, y, *norm_backward(g, a, *stats, gamma, True, rms, True)))
        for got, want in zip(*results, strict=True):
            assert got.is_contiguous()
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # sums may run in another order


def test_empty() -> None:
    """No rows: no statistics, gradients of the parameters are zero. No columns: nothing."""
    gamma = torch.ones(8)
    x = torch.empty(0, 8)
    dx, dgamma, dbeta = norm_backward(x, x, *norm_stats(x, EPS, False), gamma, False, False, True)
    assert dx.shape == (0, 8)
    assert torch.equal(dgamma, torch.zeros(8))
    assert torch.equal(dbeta, torch.zeros(8))
    thin = torch.empty(4, 0)
    stats = norm_stats(thin, EPS, False)
    assert norm_apply(thin, *stats, torch.empty(0), None, False, False).shape == (4, 0)
    assert norm_backward(thin, thin, *stats, torch.empty(0), False, False, False)[0].shape == (4, 0)
