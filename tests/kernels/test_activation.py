"""Activations and column sums on the CPU: formulas written apart, in FP64, with autograd for the gradients."""

from collections.abc import Callable

import pytest
import torch

from mezzotint.kernels.activation import (
    ACTIVATIONS,
    GATED,
    PARAMETERS,
    activation_backward,
    activation_forward,
    activation_scale_gradient,
    column_sum,
    is_gated,
)
from tests.formats import HIGH
from tests.values import VIEWS, as_view, raw

F = torch.nn.functional
SHAPES = ((0, 32), (1, 16), (16, 0), (5, 34), (3, 4, 64), (2, 0, 8), (24,), (9, 2))

# Of FP64, with torch's own functions where it has them.
EXACT: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
}


def exact(x: torch.Tensor, name: str, params: list[float]) -> torch.Tensor:
    if not is_gated(name):
        return EXACT[name](x)
    x1, x2 = x.chunk(2, -1)
    if name == "clamped_swiglu":
        limit, alpha, offset = params
        a = x1.clamp(max=limit)
        return a * torch.sigmoid(alpha * a) * (torch.clamp(x2, -limit, limit) + offset)
    if name == "situglu":
        beta1, beta2 = params
        return beta1 * torch.tanh(x1 / beta1) * torch.sigmoid(x1) * beta2 * torch.tanh(x2 / beta2)
    return EXACT[GATED[name]](x1) * x2


def parameters(name: str) -> list[float]:
    return list(PARAMETERS.get(name, {}).values())


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def output_of(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 2) if is_gated(name) else shape


def test_names() -> None:
    """The names of the modules, and SiTU-GLU; the plain sigmoid is there for glu alone."""
    names = "gelu geglu glu qgelu qgeglu relu reglu srelu sreglu silu swiglu clamped_swiglu situglu"
    assert sorted(ACTIVATIONS) == sorted(names.split())


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    ulp, params = torch.finfo(dtype).eps, parameters(name)
    for seed, shape in enumerate(SHAPES):
        x, dy = draw(shape, dtype, seed), draw(output_of(shape, name), dtype, seed + 100)
        y = activation_forward(x, None, name, params)
        dx = activation_backward(dy, x, None, name, params)
        assert (y.shape, y.dtype, dx.shape, dx.dtype) == (dy.shape, dtype, x.shape, dtype)
        precise = x.double().requires_grad_()
        want = exact(precise, name, params)
        (grad,) = torch.autograd.grad(want, precise, dy.double())
        torch.testing.assert_close(y.double(), want, rtol=ulp, atol=4e-6)
        torch.testing.assert_close(dx.double(), grad, rtol=ulp, atol=4e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradient_everywhere(name: str) -> None:
    """The slope over a fine grid, to FP32's precision; corners left out."""
    params = parameters(name)
    grid = torch.linspace(-12, 12, 4801)[1::2]  # not 0, not the limits
    x = torch.stack((grid, grid.flip(0) * 0.9), -1) if is_gated(name) else grid[:, None]
    precise = x.double().requires_grad_()
    (grad,) = torch.autograd.grad(exact(precise, name, params).sum(), precise)
    got = activation_backward(torch.ones(len(grid), 1), x, None, name, params)
    # The other half, up to 11, multiplies what the CPU's tanh leaves of 1 + tanh: on ARM it is off by 4.6e-6.
    torch.testing.assert_close(got.double(), grad, rtol=3e-6, atol=5e-6 if name == "geglu" else 3e-6)


@pytest.mark.parametrize("limit", [7.0, 1.5])
def test_clamped_swiglu_has_no_gradient_past_its_limits(limit: float) -> None:
    x1 = torch.tensor([limit + 1, limit, limit - 0.25, -30.0])
    x2 = torch.tensor([0.5, limit + 1, -limit - 1, -limit])
    x = torch.cat((x1, x2))[None]
    dx = activation_backward(torch.ones(1, 4), x, None, "clamped_swiglu", [limit, 1.702, 1.0])[0]
    assert dx[0] == 0  # clamped from above; never from below
    assert (dx[1:3] != 0).all()
    assert dx[5] == dx[6] == 0  # clamped on both sides
    assert dx[4] != 0
    assert dx[7] != 0  # the limit itself is inside


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("name", ["gelu", "swiglu", "clamped_swiglu"])
def test_bias(name: str, dtype: torch.dtype) -> None:
    """As if it had been added, and rounded, before."""
    x, bias = draw((6, 32), dtype, 1), draw((32,), torch.float32, 2)
    dy, params = draw(output_of((6, 32), name), dtype, 3), parameters(name)
    moved = (x.float() + bias).to(dtype)
    got = activation_forward(x, bias, name, params), activation_backward(dy, x, bias, name, params)
    want = activation_forward(moved, None, name, params), activation_backward(dy, moved, None, name, params)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(raw(a), raw(b))


def scaled_rows(value: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One FP32 product, rounded to the dtype of `value`."""
    return (value.float() * scales.float()[..., None]).to(value.dtype)


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_scales_of_rows(name: str, dtype: torch.dtype) -> None:
    """Bit for bit what a multiplication after the activation, and before its backward, would give."""
    params = parameters(name)
    for seed, shape in enumerate(SHAPES):
        x, dy = draw(shape, dtype, seed), draw(output_of(shape, name), dtype, seed + 100)
        bias = draw(shape[-1:], dtype, seed + 300) if seed % 2 else None
        for scales in (draw(shape[:-1], torch.float32, seed + 200), draw(shape[:-1], dtype, seed + 200)):
            y = activation_forward(x, bias, name, params, scales)
            assert torch.equal(raw(y), raw(scaled_rows(activation_forward(x, bias, name, params), scales)))
            dx = activation_backward(dy, x, bias, name, params, scales)
            assert torch.equal(raw(dx), raw(activation_backward(scaled_rows(dy, scales), x, bias, name, params)))
            assert (y.shape, y.dtype, dx.shape, dx.dtype) == (dy.shape, dtype, x.shape, dtype)
            assert y.is_contiguous()
            assert dx.is_contiguous()


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradient_of_scales(name: str, dtype: torch.dtype) -> None:
    """FP64's sums of what the activation wrote; and autograd's of the whole in FP64."""
    params = parameters(name)
    for seed, shape in enumerate(SHAPES):
        x, dy = draw(shape, dtype, seed), draw(output_of(shape, name), dtype, seed + 100)
        got = activation_scale_gradient(dy, x, name, params)
        assert (got.shape, got.dtype) == (shape[:-1], torch.float32)
        terms = activation_forward(x, None, name, params).double() * dy.double()
        assert ((got.double() - terms.sum(-1)).abs() <= terms.abs().sum(-1) * 2.0**-20).all()
        scales = torch.ones(shape[:-1], dtype=torch.float64, requires_grad=True)
        (want,) = torch.autograd.grad(exact(x.double(), name, params) * scales[..., None], scales, dy.double())
        bound = terms.abs().sum(-1) * torch.finfo(dtype).eps + 4e-6 * dy.double().abs().sum(-1)
        assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_scales_and_strides(name: str, view: str) -> None:
    for shape in ((6, 34), (3, 4, 8)):
        x = as_view(draw(shape, torch.bfloat16, 1), view)
        dy = as_view(draw(output_of(shape, name), torch.bfloat16, 2), view)
        scales = as_view(draw(shape[:-1], torch.float32, 3), view)
        plain, grad, factors = (t.clone(memory_format=torch.contiguous_format) for t in (x, dy, scales))
        y, dx = activation_forward(x, None, name, [], scales), activation_backward(dy, x, None, name, [], scales)
        assert torch.equal(y, activation_forward(plain, None, name, [], factors))
        assert torch.equal(dx, activation_backward(grad, plain, None, name, [], factors))
        ds = activation_scale_gradient(dy, x, name, [])
        assert torch.equal(ds, activation_scale_gradient(grad, plain, name, []))
        assert all(t.is_contiguous() for t in (y, dx, ds))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_strides_do_not_matter(name: str, view: str) -> None:
    for shape in ((6, 34), (3, 4, 8)):
        x = as_view(draw(shape, torch.bfloat16, 1), view)
        dy = as_view(draw(output_of(shape, name), torch.bfloat16, 2), view)
        y, dx = activation_forward(x, None, name, []), activation_backward(dy, x, None, name, [])
        assert y.is_contiguous()
        assert dx.is_contiguous()
        plain, grad = (t.clone(memory_format=torch.contiguous_format) for t in (x, dy))
        assert torch.equal(y, activation_forward(plain, None, name, []))
        assert torch.equal(dx, activation_backward(grad, plain, None, name, []))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_saturated_and_not_a_number(name: str) -> None:
    """Large inputs stay finite; NaN comes through in every activation."""
    params = parameters(name)
    big = torch.tensor([[-1e4, 1e4, -90.0, 90.0]])
    assert activation_forward(big, None, name, params).isfinite().all()
    assert activation_backward(torch.ones(output_of((1, 4), name)), big, None, name, params).isfinite().all()
    assert activation_forward(torch.full((1, 4), float("nan")), None, name, params).isnan().all()


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_column_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """FP32 inside whatever the input, one cast."""
    x = draw(shape, dtype, 4)
    rows = torch.Size(shape[:-1]).numel()
    want = x.double().reshape(rows, shape[-1]).sum(0)
    for out in HIGH:
        got = column_sum(x, out)
        assert (got.shape, got.dtype) == ((shape[-1],), out)
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(out).eps, atol=1e-4)
    for view in VIEWS if x.numel() else ():
        seen = as_view(x, view)
        want = seen.double().reshape(rows, shape[-1]).sum(0)
        torch.testing.assert_close(column_sum(seen, torch.float32).double(), want, rtol=1e-6, atol=1e-4)


def test_column_sum_does_not_round_on_the_way() -> None:
    """4096 times 1.0078125 in BF16 stops growing at 256 when it is summed in BF16."""
    x = torch.full((4096, 3), 1.0078125, dtype=torch.bfloat16)
    assert column_sum(x, torch.float32).tolist() == [4128.0] * 3
