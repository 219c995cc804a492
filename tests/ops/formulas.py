"""Basic operations against their formulas: FP64 of plain PyTorch, or their own roundings where they can be repeated.

Operations compute in FP32 and round their result once to the dtype of activations. `near` allows for that: half a unit
in the last place, and 2e-6 of the largest value for the FP32 before it.
"""

from collections.abc import Callable
from typing import Any

import torch

from mezzotint import ops
from tests.ops.chains import plain

Formula = Callable[..., torch.Tensor]


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """No value is 0."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
    return torch.where(x.abs() < 0.01, 0.01, x).to(dtype)


def near(got: torch.Tensor | None, want: torch.Tensor | None, dtype: torch.dtype) -> None:
    """See above; `want` is FP64."""
    assert got is not None
    assert want is not None
    assert (got.dtype, got.shape) == (dtype, want.shape)
    if not want.numel():
        return
    info = torch.finfo(dtype)
    bound = info.eps / 2 * want.abs() + 2e-6 * want.abs().max() + info.smallest_normal * info.eps
    excess = (got.double() - want).abs() - bound
    assert excess.max() <= 0, f"{excess.max()} over the bound, of {want.abs().max()}"


def run(op: Any, x: torch.Tensor, *extra: Any) -> tuple[Any, torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Output, the gradient that it got, and the gradients of the input, the extra inputs and the parameters."""
    x = x.detach().requires_grad_()
    extra = tuple([e.detach().requires_grad_() if isinstance(e, torch.Tensor) else e for e in extra])
    y = op(x, *extra)
    dy = draw(tuple(y.shape), plain(y).dtype, 7)
    leaves = [x, *[e for e in extra if isinstance(e, torch.Tensor)], *op.parameters()]
    return y.detach(), dy, torch.autograd.grad(y, leaves, dy, allow_unused=True)


def by_formula(formula: Formula, dy: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In FP64: the result, and the gradients of all that is given."""
    leaves = [value.detach().double().requires_grad_() for value in given]
    y = formula(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


def check_formula(op: Any, formula: Formula, x: torch.Tensor, *extra: torch.Tensor) -> None:
    y, dy, grads = run(op, x, *extra)
    given = (x, *extra, *op.parameters())
    want, *gradients = by_formula(formula, dy, *given)
    near(y, want, x.dtype)
    for value, gradient, wanted in zip(given, grads, gradients, strict=True):
        near(gradient, wanted, value.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (0.5 + 0.5 * torch.tanh(x * (0.79788456 + 0.03567741 * x * x)))


def qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def gated(activation: Formula) -> Formula:
    def formula(x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, -1)
        return activation(x1) * x2

    return formula


def clamped_swiglu(x: torch.Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    a = x1.clamp(max=limit)
    return a * torch.sigmoid(alpha * a) * (x2.clamp(-limit, limit) + offset)


def situglu(x: torch.Tensor, beta1: float = 4.0, beta2: float = 25.0) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    return beta1 * torch.tanh(x1 / beta1) * torch.sigmoid(x1) * beta2 * torch.tanh(x2 / beta2)


FORMULAS: dict[str, Formula] = {
    "GELU": gelu,
    "QGELU": qgelu,
    "ReLU": torch.relu,
    "SReLU": lambda x: torch.relu(x) ** 2,
    "SiLU": lambda x: x * torch.sigmoid(x),
    "GLU": gated(torch.sigmoid),
    "GEGLU": gated(gelu),
    "QGEGLU": gated(qgelu),
    "ReGLU": gated(torch.relu),
    "SReGLU": gated(lambda x: torch.relu(x) ** 2),
    "SwiGLU": gated(lambda x: x * torch.sigmoid(x)),
    "ClampedSwiGLU": clamped_swiglu,
    "SiTUGLU": situglu,
}
SCALED = {
    "ScaledSwiGLU": "SwiGLU",
    "ScaledSiTUGLU": "SiTUGLU",
    "ScaledClampedQGeGLU": "ClampedSwiGLU",
    "ScaledSReLU": "SReLU",
}


def make(name: str, **options: Any) -> Any:
    return getattr(ops, name)(**options)
