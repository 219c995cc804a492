"""Activations and column sums on a GPU against the CPU.

Exponentials differ in the last bits: FP32 results by 2^-19 and what cancels, the others by one unit in the last place,
and rarely. What has none is equal byte for byte.
"""

import math
from itertools import product

import pytest
import torch

from mezzotint.kernels.activation import (
    ACTIVATIONS,
    activation_backward,
    activation_forward,
    activation_scale_gradient,
    column_sum,
)
from tests.formats import HIGH
from tests.kernels.test_activation import draw, output_of, parameters, scaled_rows
from tests.values import VIEWS, as_view, raw

pytestmark = pytest.mark.gpu

SHAPES = ((256, 2048), (33, 70), (1, 2), (3, 5, 96), (2, 40002))
EXACT = ("relu", "srelu", "reglu", "sreglu")


def assert_near(got: torch.Tensor, want: torch.Tensor, name: str, atol: float, case: str) -> None:
    got = got.cpu()
    assert (got.shape, got.dtype) == (want.shape, want.dtype), case
    if name in EXACT:
        assert torch.equal(raw(got), raw(want)), case
        return
    rtol = max(torch.finfo(want.dtype).eps, 2.0**-19)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{case}: {m}")
    if want.dtype != torch.float32 and want.numel() > 1000:
        assert (got != want).float().mean() < 0.02, case


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forward_and_backward(name: str) -> None:
    params = parameters(name)
    for number, shape in enumerate(SHAPES):
        dtype = HIGH[(number + len(name)) % 3]
        x, dy = draw(shape, dtype, number), draw(output_of(shape, name), dtype, number + 50)
        bias = draw(shape[-1:], dtype, number + 90) if number % 2 else None
        case = f"{name}, {shape}, {dtype}"
        got = activation_forward(x.cuda(), None if bias is None else bias.cuda(), name, params)
        assert_near(got, activation_forward(x, bias, name, params), name, 1e-5, case)
        got = activation_backward(dy.cuda(), x.cuda(), None if bias is None else bias.cuda(), name, params)
        assert_near(got, activation_backward(dy, x, bias, name, params), name, 1e-4, f"gradient of {case}")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_magnitude(name: str) -> None:
    """FP32 from 2^-40 to 2^7, where a tanh or a sigmoid that cancels would lose small numbers; and specials."""
    params = parameters(name)
    x = torch.exp2(torch.linspace(-40, 7, 4096))
    x = torch.stack((x, -x, x.flip(0), -x.flip(0)))
    got, want = activation_forward(x.cuda(), None, name, params).cpu(), activation_forward(x, None, name, params)
    bound = want.abs() * 2.0**-18 + (1e-6 if name in ("gelu", "geglu") else 1e-30) * x.abs().max()
    assert ((got - want).abs() <= bound).all()
    special = torch.tensor([[math.nan, math.inf, -math.inf, 0.0, -0.0, 1e4, -1e4, 1.0]] * 2)
    got, want = (activation_forward(s, None, name, params).cpu() for s in (special.cuda(), special))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_scales_of_rows(name: str) -> None:
    """The bytes of a multiplication after the activation and before its backward; those of the CPU where it can be."""
    params = parameters(name)
    for number, shape in enumerate(SHAPES):
        dtype = HIGH[(number + len(name)) % 3]
        cpu = draw(output_of(shape, name), dtype, number + 50), draw(shape, dtype, number)
        scales = draw(shape[:-1], dtype if number % 2 else torch.float32, number + 70)
        bias = draw(shape[-1:], dtype, number + 90) if number % 2 else None
        dy, x, on_gpu = (t.cuda() for t in (*cpu, scales))
        moved = None if bias is None else bias.cuda()
        y = activation_forward(x, moved, name, params, on_gpu)
        assert torch.equal(raw(y), raw(scaled_rows(activation_forward(x, moved, name, params), on_gpu))), shape
        dx = activation_backward(dy, x, moved, name, params, on_gpu)
        want = activation_backward(scaled_rows(dy, on_gpu), x, moved, name, params)
        assert torch.equal(raw(dx), raw(want)), shape
        if name in EXACT:
            assert torch.equal(raw(y.cpu()), raw(activation_forward(cpu[1], bias, name, params, scales))), shape
            assert torch.equal(raw(dx.cpu()), raw(activation_backward(*cpu, bias, name, params, scales))), shape


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradient_of_scales(name: str) -> None:
    params = parameters(name)
    for number, shape in enumerate((*SHAPES, (24,), (0, 16), (4, 0), (5000, 34))):
        dtype = HIGH[(number + len(name)) % 3]
        dy, x = draw(output_of(shape, name), dtype, number + 50).cuda(), draw(shape, dtype, number).cuda()
        got = activation_scale_gradient(dy, x, name, params)
        terms = activation_forward(x, None, name, params).double() * dy.double()
        assert (got.shape, got.dtype) == (shape[:-1], torch.float32)
        assert ((got.double() - terms.sum(-1)).abs() <= terms.abs().sum(-1) * 2.0**-19).all(), shape
        assert torch.equal(got, activation_scale_gradient(dy, x, name, params)), "the order of the sum is fixed"


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_strides(name: str) -> None:
    for shape, view in product(((33, 70), (3, 5, 96)), VIEWS):
        x = as_view(draw(shape, torch.bfloat16, 1).cuda(), view)
        dy = as_view(draw(output_of(shape, name), torch.bfloat16, 2).cuda(), view)
        dense, grad = (t.clone(memory_format=torch.contiguous_format) for t in (x, dy))
        assert torch.equal(activation_forward(x, None, name, []), activation_forward(dense, None, name, []))
        got = activation_backward(dy, x, None, name, [])
        assert torch.equal(got, activation_backward(grad, dense, None, name, []))
        torch.testing.assert_close(column_sum(x, torch.float32), column_sum(dense, torch.float32), rtol=1e-5, atol=1e-4)
        scales = as_view(draw(shape[:-1], torch.float32, 3).cuda(), view)
        factors = scales.clone(memory_format=torch.contiguous_format)
        y, dx = activation_forward(x, None, name, [], scales), activation_backward(dy, x, None, name, [], scales)
        assert torch.equal(y, activation_forward(dense, None, name, [], factors))
        assert torch.equal(dx, activation_backward(grad, dense, None, name, [], factors))
        ds = activation_scale_gradient(dy, x, name, [])
        torch.testing.assert_close(ds, activation_scale_gradient(grad, dense, name, []), rtol=1e-5, atol=1e-4)


def test_column_sum() -> None:
    for number, shape in enumerate((*SHAPES, (5000, 33), (257, 128), (24,), (0, 16), (4, 0))):
        x, out = draw(shape, HIGH[number % 3], number).cuda(), HIGH[number % 2]
        got = column_sum(x, out)
        rows = x.double().reshape(torch.Size(shape[:-1]).numel(), shape[-1])
        bound = rows.abs().sum(0) * 2.0**-20 + rows.sum(0).abs() * torch.finfo(out).eps
        assert (got.shape, got.dtype) == ((shape[-1],), out)
        assert ((got.double() - rows.sum(0)).abs() <= bound).all(), shape
        assert torch.equal(got, column_sum(x, out)), "the order of the sum is fixed"


def test_empty() -> None:
    for shape in ((0, 16), (4, 0)):
        x = torch.empty(shape, device="cuda")
        for name in ("gelu", "swiglu"):
            y = activation_forward(x, None, name, [])
            assert y.shape == output_of(shape, name)
            assert activation_backward(y, x, None, name, []).shape == shape
            scales = torch.ones(shape[:-1], device="cuda")
            assert activation_forward(x, None, name, [], scales).shape == y.shape
            assert activation_backward(y, x, None, name, [], scales).shape == shape
            assert torch.equal(activation_scale_gradient(y, x, name, []), torch.zeros_like(scales))
