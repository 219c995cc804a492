"""LayerNorm and RMSNorm: they are computed in FP32 and rounded once, at the end, to the input's dtype.

    LayerNorm   mu = mean(x)    rs = rsqrt(mean((x - mu)²) + eps)    y = g · (rs · (x - mu)) + b
    RMSNorm     mu is not used  rs = rsqrt(mean(x²) + eps)           y = g · (rs · x)

g is gamma, or 1 + gamma (in FP32) when `zero_centered`. mu and rs are FP32 [rows]; RMSNorm has mu of size 0. The last
dimension is normalised. Computing the statistics and applying them are two ops, so that a quantization can take in the
second one (`quantize_ops.py`). The statistics can take in the residual sum before the norm, and backward the sum with
the gradient that comes past the norm.
"""

import torch

from mezzotint.kernels._lib import as_matrix, leaf, matrix_shape
from mezzotint.kernels.pointwise import add_reference


def norm_stats_reference(x: torch.Tensor, eps: float, rms: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mu [M], or [0] for RMSNorm, and rs [M] of x (…, K)."""
    value = as_matrix(x).float()
    width = max(value.shape[1], 1)
    if rms:
        return value.new_empty(0), value.square().sum(1).div_(width).add_(eps).rsqrt_()
    mu = value.sum(1).div_(width)
    return mu, (value - mu[:, None]).square_().sum(1).div_(width).add_(eps).rsqrt_()


def norm_add_stats_reference(
    x: torch.Tensor, branch: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return round(x + (branch + bias)), in x's shape and dtype, and its statistics. `branch` has x's shape, `bias` is
    [K]."""
    total = add_reference(x, branch if bias is None else branch.float() + bias.float())
    return total, *norm_stats_reference(total, eps, rms)


def gain(gamma: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """Return the factor of the normalised value, FP32 [K]."""
    return gamma.float() + 1.0 if zero_centered else gamma.float()


def _normalised(x: torch.Tensor, mu: torch.Tensor, rs: torch.Tensor, rms: bool) -> torch.Tensor:
    """Return rs · (x - mu) as a new FP32 tensor (M, K), contiguous as all that is computed from it."""
    value = as_matrix(x).contiguous().float()
    return rs[:, None] * (value if rms else value - mu[:, None])


def norm_apply_reference(
    x: torch.Tensor,
    mu: torch.Tensor,
    rs: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    zero_centered: bool,
    rms: bool,
) -> torch.Tensor:
    """Return y, the norm's output, in x's shape and dtype."""
    y = _normalised(x, mu, rs, rms).mul_(gain(gamma, zero_centered))
    if beta is not None:
        y.add_(beta.float())
    return y.to(x.dtype).view(x.shape)


def norm_backward_reference(
    dy: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rs: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered: bool,
    rms: bool,
    has_beta: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx in x's shape and dtype, and dgamma and dbeta in gamma's (dbeta is empty if there is no beta).

    With h = rs · (x - mu) and d = g · dy: dx = rs · (d - mean(d) - h · mean(d · h)), without mean(d) for RMSNorm.
    """
    grad, h = as_matrix(dy).contiguous().float(), _normalised(x, mu, rs, rms)
    width = max(h.shape[1], 1)
    dgamma = (grad * h).sum(0).to(gamma.dtype)
    dbeta = grad.sum(0).to(gamma.dtype) if has_beta else gamma.new_empty(0)
    d = grad * gain(gamma, zero_centered)
    dx = d - h * (d * h).sum(1, keepdim=True).div_(width)
    if not rms:
        dx -= d.sum(1, keepdim=True).div_(width)
    return dx.mul_(rs[:, None]).to(x.dtype).view(x.shape), dgamma, dbeta


def norm_backward_add_reference(
    dy: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rs: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered: bool,
    rms: bool,
    has_beta: bool,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `norm_backward_reference` does, but round(dx + residual) in place of dx, which is rounded before.
    `residual` has x's shape."""
    dx, dgamma, dbeta = norm_backward_reference(dy, x, mu, rs, gamma, zero_centered, rms, has_beta)
    return add_reference(dx, residual), dgamma, dbeta


def _stats_fake(x: torch.Tensor, eps: float, rms: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, _ = matrix_shape(x.shape)
    return x.new_empty(0 if rms else rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _add_stats_fake(
    x: torch.Tensor, branch: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), *_stats_fake(x, eps, rms)


def _apply_fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rs: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered: bool,
    rms: bool,
    has_beta: bool,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape), gamma.new_empty(gamma.shape if has_beta else 0)


norm_stats = leaf(
    "norm_stats(Tensor x, float eps, bool rms) -> (Tensor, Tensor)",
    fake=_stats_fake,
    cpu=norm_stats_reference,
    cuda="norm:stats",
)

norm_add_stats = leaf(
    "norm_add_stats(Tensor x, Tensor branch, Tensor? bias, float eps, bool rms) -> (Tensor, Tensor, Tensor)",
    fake=_add_stats_fake,
    cpu=norm_add_stats_reference,
    cuda="norm:add_stats",
)

norm_apply = leaf(
    "norm_apply(Tensor x, Tensor mu, Tensor rs, Tensor gamma, Tensor? beta, bool zero_centered, bool rms) -> Tensor",
    fake=_apply_fake,
    cpu=norm_apply_reference,
    cuda="norm:apply",
)

norm_backward = leaf(
    "norm_backward(Tensor dy, Tensor x, Tensor mu, Tensor rs, Tensor gamma, bool zero_centered, bool rms,"
    " bool has_beta) -> (Tensor, Tensor, Tensor)",
    fake=_backward_fake,
    cpu=norm_backward_reference,
    cuda="norm:backward",
)

norm_backward_add = leaf(
    "norm_backward_add(Tensor dy, Tensor x, Tensor mu, Tensor rs, Tensor gamma, bool zero_centered, bool rms,"
    " bool has_beta, Tensor residual) -> (Tensor, Tensor, Tensor)",
    fake=_backward_fake,
    cpu=norm_backward_add_reference,
    cuda="norm:backward",
)
