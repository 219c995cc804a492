"""Pairs of a head's channels, turned: FP32 inside, rounded once.

    forward    y1 = x1 · c1 - x2 · s1        y2 = x2 · c2 + x1 · s2
    inverse    x1 = y1 · c1 + y2 · s2        x2 = y2 · c2 - y1 · s1          the gradient of forward

t is [a, b, h, d] with any strides but the last, cos and sin FP32 [a or 1, b or 1, D], D ≤ d. A pair is (i, i + D/2), or
(2i, 2i + 1) interleaved. Channels from D on pass. The result is dense, in t's dtype.
"""

import torch

from mezzotint.kernels._lib import leaf


def rope_reference(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool
) -> torch.Tensor:
    turned = cos.shape[-1]
    c, s = cos[:, :, None], sin[:, :, None]
    x = t[..., :turned].float()
    y = x * c - _quarter_turn(x * s, interleaved) if inverse else x * c + _quarter_turn(x, interleaved) * s
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    out[..., :turned] = y
    out[..., turned:] = t[..., turned:]
    return out


def _quarter_turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(first, second) of each pair → (-second, first)."""
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((-second, first), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


rope = leaf(
    "rope(Tensor t, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor",
    fake=lambda t, cos, sin, interleaved, inverse: t.new_empty(t.shape),
    cpu=rope_reference,
    cuda="rope:rope",
)
