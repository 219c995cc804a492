"""LayerNorm and RMSNorm, with the quantization of what they make taken in."""

from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.functional.autograd import Core, GradState, Saved
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.norm import norm_apply, norm_backward, norm_backward_add, norm_stats
from mezzotint.tensor.quantize import quantize_source
from mezzotint.tensor.quantizer import Quantizer


@dataclass(frozen=True)
class NormOptions:
    """gamma is stored minus one when `zero_centered`."""

    eps: float
    zero_centered: bool
    rms: bool


@dataclass(slots=True)
class NormFwdArgs:
    """`x` (…, K), `gamma` [K], `beta` [K] or None."""

    x: torch.Tensor
    gamma: torch.Tensor
    beta: torch.Tensor | None
    options: NormOptions
    grad_state: GradState | None = None


@dataclass(slots=True)
class NormBwdArgs(Saved):
    x: torch.Tensor
    mu: torch.Tensor
    rs: torch.Tensor
    gamma: torch.Tensor
    options: NormOptions
    has_beta: bool

    SAVED = ("x", "mu", "rs", "gamma")


@dataclass(slots=True)
class NormMade:
    mu: torch.Tensor
    rs: torch.Tensor


def norm_forward(a: NormFwdArgs) -> tuple[torch.Tensor, NormMade]:
    """y in x's shape and dtype."""
    options = a.options
    mu, rs = run_op(norm_stats, a.x, options.eps, options.rms)
    y = run_op(norm_apply, a.x, mu, rs, a.gamma, a.beta, options.zero_centered, options.rms)
    return y, NormMade(mu, rs)


def norm_forward_quantized(
    a: NormFwdArgs, quantizer: Quantizer, scale: torch.Tensor | None
) -> tuple[Any, torch.Tensor | None, NormMade]:
    """y in x's shape, quantized in one pass with the norm; its amax where the scale was given."""
    options, x = a.options, a.x
    mu, rs = run_op(norm_stats, x, options.eps, options.rms)
    arguments = (x, mu, rs, a.gamma, a.beta, options.zero_centered, options.rms)
    y_q, amax, _ = quantize_source("norm", arguments, x.shape, x.dtype, quantizer, scale)
    return y_q, amax, NormMade(mu, rs)


def norm_setup(a: NormFwdArgs, made: NormMade) -> NormBwdArgs:
    return NormBwdArgs(a.x, made.mu, made.rs, a.gamma, a.options, a.beta is not None)


def norm_gradients(
    b: NormBwdArgs, dy: Any, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dx, with `residual` added, dgamma, dbeta."""
    options = b.options
    arguments = (dy, b.x, b.mu, b.rs, b.gamma, options.zero_centered, options.rms, b.has_beta)
    if residual is None:
        dx, dgamma, dbeta = run_op(norm_backward, *arguments)
    else:
        dx, dgamma, dbeta = run_op(norm_backward_add, *arguments, residual)
    return dx, dgamma, dbeta if b.has_beta else None


def _forward(a: NormFwdArgs) -> tuple[Any, ...]:
    y, made = norm_forward(a)
    return (y,), (), made


def _backward(b: NormBwdArgs, dy: torch.Tensor) -> tuple[Any, ...]:
    return norm_gradients(b, dy), ()


NORM = Core(_forward, norm_setup, _backward, ("x", "gamma", "beta"))
