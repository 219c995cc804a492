"""Pointwise ops other than norms and activations: they compute in FP32 and round each step once.

    add         round(x + y)
    scale       round(x · factor)
    scale_add   round(round(x · factor) + y)
    dropout     round(x · fl32(1 / (1 - p))) where an element is kept, 0 where it is not, whatever was there
    l2norm      rs = 1 / sqrt(sum(x²) + eps)        y = round(x · rs)        over the last dimension
                with h = x · rs:  dx = round(rs · (dy - h · sum(dy · h)))

`round` is to x's dtype, which the result has; the result is contiguous. `y` has x's shape or is a vector [N] along x's
last dimension; its dtype may be another one. `factor` is taken as an FP32 number.

Dropout keeps element i (of x in row-major order) where the upper 24 bits of its Philox word (`philox.py`) are not less
than round(p · 2^24). The same call on dy, with the same `rng`, is its backward.

These are leaf ops because compilers fuse the operations that they see and leave out the roundings in between.
"""

import torch

from mezzotint.constants import cdiv
from mezzotint.kernels._lib import define, leaf
from mezzotint.kernels.philox import DROPOUT, philox_words


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().float()


def add_reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x (…, N) plus y, which has the same shape or is [N], in x's shape and dtype."""
    return (_dense(x) + _dense(y)).to(x.dtype)


def scale_reference(x: torch.Tensor, factor: float) -> torch.Tensor:
    return (_dense(x) * factor).to(x.dtype)


def scale_add_reference(x: torch.Tensor, factor: float, y: torch.Tensor) -> torch.Tensor:
    """Return x (…, N) times `factor` plus y, which has the same shape or is [N], in x's shape and dtype."""
    return add_reference(scale_reference(x, factor), y)


def keep_limit(p: float) -> int:
    """Return the limit that the 24 random bits of a kept element reach: none do if p is 1, all do if p is 0."""
    return round(p * 2**24)


def keep_factor(p: float) -> float:
    """Return the factor of a kept element, which preserves the expectation."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def dropout_reference(x: torch.Tensor, rng: torch.Tensor, p: float) -> torch.Tensor:
    """Drop elements of x with probability p; `rng` is int64 [2] = (seed, offset), as `draw_rng` returns it."""
    count = x.numel()
    words = philox_words(rng, cdiv(count, 4), DROPOUT).view(-1)[:count].view(x.shape)
    return torch.where(words >> 8 >= keep_limit(p), _dense(x) * keep_factor(p), 0.0).to(x.dtype)


def l2norm_reference(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, x (…, K) divided by its L2 norm, in x's shape and dtype, and rs FP32 (…)."""
    value = _dense(x)
    rs = value.square().sum(-1).add_(eps).rsqrt_()
    return (value * rs[..., None]).to(x.dtype), rs


def l2norm_backward_reference(dy: torch.Tensor, x: torch.Tensor, rs: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x, in its shape and dtype."""
    grad, scale = _dense(dy), rs.contiguous()[..., None]
    h = _dense(x) * scale
    return ((grad - h * (grad * h).sum(-1, keepdim=True)) * scale).to(x.dtype)


# Torch's own CUDA kernels of these two widen what they read to FP32 and round what they write, once, in one launch.
# The inputs are detached, because `out` is refused where a gradient could be asked for.


def _add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.add(x.detach(), y.detach(), out=x.new_empty(x.shape))


def _scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.mul(x.detach(), factor, out=x.new_empty(x.shape))


def _same(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _l2norm_fake(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


add = define("add(Tensor x, Tensor y) -> Tensor", _same, add_reference, _add)

scale = define("scale(Tensor x, float factor) -> Tensor", _same, scale_reference, _scale)

scale_add = leaf(
    "scale_add(Tensor x, float factor, Tensor y) -> Tensor",
    fake=_same,
    cpu=scale_add_reference,
    cuda="pointwise:scale_add",
)

dropout = leaf(
    "dropout(Tensor x, Tensor rng, float p) -> Tensor",
    fake=_same,
    cpu=dropout_reference,
    cuda="pointwise:dropout",
)

l2norm = leaf(
    "l2norm(Tensor x, float eps) -> (Tensor, Tensor)",
    fake=_l2norm_fake,
    cpu=l2norm_reference,
    cuda="pointwise:l2norm",
)

l2norm_backward = leaf(
    "l2norm_backward(Tensor dy, Tensor x, Tensor rs) -> Tensor",
    fake=lambda dy, x, rs: x.new_empty(x.shape),
    cpu=l2norm_backward_reference,
    cuda="pointwise:l2norm_backward",
)
