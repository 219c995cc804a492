"""The activation's core with scales of rows: gradients by the chain, quantizations that take it in, one whole graph."""

import pytest
import torch

from mezzotint.functional.activation import (
    ACTIVATION_CORE,
    ActivationFwdArgs,
    activate,
    activation_gradient,
    activation_gradient_quantized,
    activation_quantized,
    activation_setup,
    resolve_activation,
)
from mezzotint.functional.autograd import run_core
from mezzotint.kernels.activation import activation_scale_gradient, is_gated
from mezzotint.tensor.quantize import quantize_scaled
from tests.quantizer_formats import Format, assert_same_bytes, over_formats

NAMES = ("gelu", "swiglu", "clamped_swiglu")
SHAPE = (4, 16, 64)


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(name: str, scales: torch.Tensor | None) -> tuple[ActivationFwdArgs, torch.Tensor]:
    """Of an output in SHAPE, and a gradient of that."""
    width = 2 * SHAPE[-1] if is_gated(name) else SHAPE[-1]
    x = draw((*SHAPE[:-1], width), 0)
    return ActivationFwdArgs(x, *resolve_activation(name, None), scales=scales), draw(SHAPE, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    """Of x and of the scales, in the dtype of each."""
    scales = draw(SHAPE[:-1], 2, dtype).requires_grad_()
    args, dy = arguments(name, scales)
    x = args.x.requires_grad_()
    (y,) = run_core(ACTIVATION_CORE, args, True)
    dx, ds = torch.autograd.grad(y, (x, scales), dy)
    with torch.no_grad():
        plain = activate(ActivationFwdArgs(x, args.name, args.params)).float()
        assert torch.equal(y, (plain * scales.float()[..., None]).to(y.dtype))
        da = (dy.float() * scales.float()[..., None]).to(dy.dtype)
        unscaled = activation_setup(ActivationFwdArgs(x, args.name, args.params), None)
        assert torch.equal(dx, activation_gradient(unscaled, da))
        assert torch.equal(ds, activation_scale_gradient(dy, x, args.name, args.params).to(dtype))
    assert (ds.shape, ds.dtype) == (scales.shape, dtype)


@over_formats()
@pytest.mark.parametrize("name", NAMES)
def test_quantized(fmt: Format, name: str) -> None:
    """Bit for bit what quantizing the core's own result gives, forward and backward."""
    quantizer = fmt.make()
    args, dy = arguments(name, draw(SHAPE[:-1], 2, torch.float32))
    scale = torch.tensor([2.0]) if quantizer.takes_scale() else None
    kept = activation_setup(args, None)
    y, dx = activate(args), activation_gradient(kept, dy)
    for made, want in (
        (lambda: activation_quantized(args, quantizer, scale), y),
        (lambda: activation_gradient_quantized(kept, dy, quantizer, scale, torch.float32), dx),
    ):
        torch.manual_seed(0)  # stochastic rounding draws
        got = made()[0]
        torch.manual_seed(0)
        assert_same_bytes(got, quantize_scaled(want, quantizer, scale)[0])


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("scaled", [False, True])
def test_compiled(scaled: bool) -> None:
    """Eager and compiled: the same bits, of the gradients, too."""

    def step(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        args = ActivationFwdArgs(x, "swiglu", (), scales=scales)
        return run_core(ACTIVATION_CORE, args, True)[0]

    results = []
    for run in (step, torch.compile(step, fullgraph=True)):
        x = draw((8, 64), 0).requires_grad_()
        scales = draw((8,), 1).requires_grad_() if scaled else None
        y = run(x, scales)
        results.append((y, *torch.autograd.grad(y, (x, scales) if scales is not None else (x,), draw((8, 32), 2))))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
