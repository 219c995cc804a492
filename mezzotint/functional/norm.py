"""LayerNorm and RMSNorm: this module computes them and their gradients, and quantizes the output in the same pass where
it is asked to.

If a `branch` goes into the residual stream before the norm, x + branch is normalized, in one pass with the sum. The
residual stream goes on behind the norm: its gradient is added where the norm's is computed.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.functional.autograd import Core, GradState, Saved
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.norm import norm_add_stats, norm_apply, norm_backward, norm_backward_add, norm_stats
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.quantize import quantize_source
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.scale_slot import DelayedScale
from mezzotint.tracing import left_to_backward


@dataclass(frozen=True)
class NormOptions(GraphConstant):
    """The options of a norm: `eps`, whether gamma is stored minus one (`zero_centered`), and whether it is RMSNorm
    (`rms`)."""

    eps: float
    zero_centered: bool
    rms: bool


@dataclass(frozen=True)
class Residual(GraphConstant):
    """A `Residual` describes the residual stream that goes past a norm and is returned after it."""

    has_branch: bool  # a branch is added to it before the norm
    bias_dtype: torch.dtype | None  # dtype of the branch's bias if that needs a gradient


@dataclass(slots=True)
class NormFwdArgs:
    """The arguments of a norm's forward: `x` (…, K), `gamma` [K], `beta` [K] or None. `branch` (…, K), in x's dtype,
    and `branch_bias` [K] are added to x first: round(x + (branch + bias))."""

    x: torch.Tensor
    gamma: torch.Tensor
    beta: torch.Tensor | None
    options: NormOptions
    grad_state: GradState | None = None
    branch: torch.Tensor | None = None
    branch_bias: torch.Tensor | None = None


@dataclass(slots=True)
class NormBwdArgs(Saved):
    x: torch.Tensor
    mu: torch.Tensor
    rs: torch.Tensor
    gamma: torch.Tensor
    beta: torch.Tensor | None  # only if backward applies the norm again
    options: NormOptions
    has_beta: bool

    SAVED = ("x", "mu", "rs", "gamma", "beta")


@dataclass(slots=True)
class NormMade:
    x: torch.Tensor  # the norm's input: x, or x + branch
    mu: torch.Tensor
    rs: torch.Tensor


def norm_forward(a: NormFwdArgs) -> tuple[torch.Tensor, NormMade]:
    """Return y in x's shape and dtype, and what backward needs of it."""
    options, made = a.options, _statistics(a)
    y = run_op(norm_apply, made.x, made.mu, made.rs, a.gamma, a.beta, options.zero_centered, options.rms)
    return y, made


def norm_forward_quantized(
    a: NormFwdArgs, quantizer: Quantizer, scale: DelayedScale
) -> tuple[Any, torch.Tensor | None, NormMade]:
    """Return y in x's shape, quantized in one pass with the norm; its amax if `scale` was given; and what backward
    needs."""
    options, made = a.options, _statistics(a)
    arguments = (made.x, made.mu, made.rs, a.gamma, a.beta, options.zero_centered, options.rms)
    y_q, amax, _ = quantize_source("norm", arguments, a.x.shape, a.x.dtype, quantizer, scale)
    return y_q, amax, made


def _statistics(a: NormFwdArgs) -> NormMade:
    options = a.options
    if a.branch is None:
        mu, rs = run_op(norm_stats, a.x, options.eps, options.rms)
        return NormMade(a.x, mu, rs)
    total, mu, rs = run_op(norm_add_stats, a.x, a.branch, a.branch_bias, options.eps, options.rms)
    return NormMade(total, mu, rs)


def norm_setup(a: NormFwdArgs, made: NormMade, *, is_applied_again: bool = False) -> NormBwdArgs:
    return NormBwdArgs(
        x=made.x,
        mu=made.mu,
        rs=made.rs,
        gamma=a.gamma,
        beta=a.beta if is_applied_again else None,
        options=a.options,
        has_beta=a.beta is not None,
    )


def norm_quantized_again(b: NormBwdArgs, quantizer: Quantizer, scale: DelayedScale) -> Any:
    """Compute y (M, K) again in a backward that was set up for it, and return it quantized."""
    options = b.options
    arguments = (b.x, b.mu, b.rs, b.gamma, b.beta, options.zero_centered, options.rms)
    with left_to_backward():
        return quantize_source("norm", arguments, b.x.shape, b.x.dtype, quantizer, scale)[0]


def norm_gradients(
    b: NormBwdArgs, dy: Any, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return dx, with `residual` added if it is given, dgamma and dbeta."""
    options = b.options
    arguments = (dy, b.x, b.mu, b.rs, b.gamma, options.zero_centered, options.rms, b.has_beta)
    if residual is None:
        dx, dgamma, dbeta = run_op(norm_backward, *arguments)
    else:
        dx, dgamma, dbeta = run_op(norm_backward_add, *arguments, residual)
    return dx, dgamma, dbeta if b.has_beta else None


def branch_gradients(residual: Residual | None, dx: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of `branch` and `branch_bias` from `dx`, that of the sum; None where there is none."""
    if residual is None or not residual.has_branch:
        return None, None
    dtype = residual.bias_dtype
    return dx, None if dtype is None else dx.float().sum_to_size(dx.shape[-1]).to(dtype)


def _outputs(a: NormFwdArgs, y: torch.Tensor, made: NormMade) -> tuple[Any, ...]:
    return (y,), ()


def _backward(b: NormBwdArgs, dy: torch.Tensor) -> tuple[Any, ...]:
    return norm_gradients(b, dy), ()


NORM_CORE = Core(norm_forward, _outputs, norm_setup, _backward, ("x", "gamma", "beta"))
