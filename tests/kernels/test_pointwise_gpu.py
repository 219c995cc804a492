"""Pointwise ops, dropout and L2 normalisation on a GPU: the CPU's bytes, but for sums: those within FP32's bounds."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from mezzotint.kernels.pointwise import add, dropout, l2norm, l2norm_backward, scale, scale_add
from tests.formats import HIGH
from tests.kernels.test_pointwise import RNG, SHAPES, draw
from tests.values import CONTENTS, VIEWS, as_view, fill, raw

pytestmark = pytest.mark.gpu

# Whole tiles, cut ones, more than one of them in each direction.
ALL_SHAPES = (*SHAPES, (256, 2048), (33, 70), (1, 1), (3, 5, 96), (2, 40001), (4099,), (3, 16384))
FACTORS = (1.0, 0.1, -3.0, 0.0, 1e-6, 4096.0, 1 / 3, 1e-45, 1 / 65504)


def same(got: torch.Tensor, want: torch.Tensor, case: object) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), case
    assert got.is_contiguous(), case
    assert torch.equal(raw(got.cpu()), raw(want.cpu())), case


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_every_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(shape, dtype, 0)
    for number, other in enumerate(HIGH):
        factor = FACTORS[(len(shape) + number) % len(FACTORS)]
        for y in (draw(shape, other, 1), *((draw(shape[-1:], other, 2),) if shape else ())):
            case = (shape, dtype, other, y.shape, factor)
            same(add(x.cuda(), y.cuda()), add(x, y), case)
            same(scale_add(x.cuda(), factor, y.cuda()), scale_add(x, factor, y), case)
        same(scale(x.cuda(), factor), scale(x, factor), case)


@pytest.mark.parametrize("content", CONTENTS)
def test_every_content(content: str) -> None:
    """Overflow, subnormal numbers, NaN, -0: as on the CPU, whatever is added or multiplied."""
    for (a, b), factor in zip(product(HIGH, HIGH), FACTORS, strict=True):
        x, y = fill((64, 96), a, content, 1), fill((64, 96), b, content, 2)
        case = (a, b, factor)
        same(add(x.cuda(), y.cuda()), add(x, y), case)
        same(scale(x.cuda(), factor), scale(x, factor), case)
        same(scale_add(x.cuda(), factor, y.cuda()), scale_add(x, factor, y), case)
        same(dropout(x.cuda(), RNG.cuda(), 0.3), dropout(x, RNG, 0.3), case)


@pytest.mark.parametrize("view", VIEWS)
def test_strides(view: str) -> None:
    for shape, dtype in product(((33, 70), (3, 5, 96)), HIGH):
        x, y = (as_view(draw(shape, dtype, seed), view) for seed in (1, 2))
        bias = as_view(draw(shape[-1:], dtype, 3), view)
        # `.cuda()` would make them dense.
        on_gpu = [as_view(t.clone(memory_format=torch.contiguous_format).cuda(), view) for t in (x, y, bias)]
        for index, other in ((1, y), (2, bias)):
            same(add(on_gpu[0], on_gpu[index]), add(x, other), (shape, dtype))
            same(scale_add(on_gpu[0], 0.3, on_gpu[index]), scale_add(x, 0.3, other), (shape, dtype))
        same(scale(on_gpu[0], 0.3), scale(x, 0.3), (shape, dtype))
        same(dropout(on_gpu[0], RNG.cuda(), 0.3), dropout(x, RNG, 0.3), (shape, dtype))
        (normed, rs), dense = l2norm(on_gpu[0], 1e-5), x.contiguous().cuda()
        same(normed, (dense.float() * rs[..., None]).to(dtype), (shape, dtype))
        dx = l2norm_backward(on_gpu[1], on_gpu[0], rs)
        assert dx.is_contiguous()
        want = l2norm_backward(y.contiguous().cuda(), dense, rs)
        torch.testing.assert_close(dx, want, rtol=torch.finfo(dtype).eps * 8, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_dropout(shape: tuple[int, ...], p: float) -> None:
    for number, dtype in enumerate(HIGH):
        x, rng = draw(shape, dtype, number), torch.tensor([-3 - number, 2**40 + number])
        same(dropout(x.cuda(), rng.cuda(), p), dropout(x, rng, p), (shape, dtype))


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in ALL_SHAPES if shape], ids=str)
def test_l2norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Against FP64; y, given rs, to the bit; the order of every sum is fixed."""
    eps = 1e-3
    x, dy = draw(shape, dtype, 4).cuda(), draw(shape, dtype, 5).cuda()
    y, rs = l2norm(x, eps)
    dx = l2norm_backward(dy, x, rs)
    assert (rs.shape, rs.dtype) == (shape[:-1], torch.float32)
    same(y, (x.float() * rs[..., None]).to(dtype), shape)
    precise = x.double().requires_grad_()
    want = precise / (precise.square().sum(-1, keepdim=True) + eps).sqrt()
    (grad,) = torch.autograd.grad(want, precise, dy.double())
    torch.testing.assert_close(rs.double(), (x.double().square().sum(-1) + eps).rsqrt(), rtol=2e-6, atol=0)
    torch.testing.assert_close(dx.double(), grad, rtol=torch.finfo(dtype).eps, atol=4e-5)
    same(l2norm(x, eps)[1], rs, shape)
    same(l2norm_backward(dy, x, rs), dx, shape)


@pytest.fixture(scope="module")
def large() -> Iterator[torch.Tensor]:
    """BF16, 2^31 elements and 128 rows more: an index that is 32 bits wide would wrap."""
    generator = torch.Generator("cuda").manual_seed(0)
    yield torch.randn((1 + 2**10) * 128, 2**14, dtype=torch.bfloat16, device="cuda", generator=generator)
    torch.cuda.empty_cache()


def test_more_elements_than_32_bits_count(large: torch.Tensor) -> None:
    """The last rows alone, and behind 2^31 elements."""
    tail, bias = large[-128:].clone(), torch.rand(2**14, device="cuda")
    for op, args in ((add, (bias,)), (scale, (0.3,)), (scale_add, (0.3, bias))):
        assert torch.equal(op(large, *args)[-128:], op(tail, *args))
    assert torch.equal(scale_add(large, 0.3, large)[-128:], scale_add(tail, 0.3, tail))
    y, rs = l2norm(large, 1e-5)
    few, few_rs = l2norm(tail, 1e-5)
    assert torch.equal(y[-128:], few)
    assert torch.equal(l2norm_backward(large, y, rs)[-128:], l2norm_backward(tail, few, few_rs))


def test_dropout_of_more_elements_than_32_bits_count(large: torch.Tensor) -> None:
    """Two kept of four, everywhere: the words of far elements are those of their place."""
    kept = dropout(large, RNG.cuda(), 0.5) != 0
    first, last = kept[:128], kept[-128:]
    assert not torch.equal(first, last)
    assert abs(last.double().mean() - 0.5) < 0.01
    assert torch.equal(first, dropout(large[:128], RNG.cuda(), 0.5) != 0)
