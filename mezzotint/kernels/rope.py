"""Rotary position embedding: pairs of a head's channels are rotated in FP32 and rounded once.

    forward    y1 = x1 · c1 - x2 · s1        y2 = x2 · c2 + x1 · s2
    inverse    x1 = y1 · c1 + y2 · s2        x2 = y2 · c2 - y1 · s1          the gradient of forward

t is [a, b, h, d] with any strides but the last, cos and sin are FP32 [a or 1, b or 1, D], D ≤ d. A pair is (i, i +
D/2), or (2i, 2i + 1) if interleaved. Channels from D on are copied. The result is contiguous, in t's dtype.

`rope_split` takes queries, keys and values out of what one projection wrote, mixed [a, b, blocks · (q + k + v) · d].
The heads of a block lie side by side: its queries, its keys, its values. Either one block has all heads, or each group
of queries is a block with its key and its value. Queries and keys are rotated, values are copied. `rope_join`, its
gradient, rotates back and joins them. `angles` are cos and sin, or those of queries and then those of keys, all of one
shape.
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
    """Return (-second, first) for (first, second) of each pair."""
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((-second, first), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def heads_of(mixed: torch.Tensor, heads: int, kv_heads: int, blocks: int) -> tuple[torch.Tensor, ...]:
    """Return views [a, b, blocks, heads of a block, d] of mixed [a, b, width]: queries, keys, values."""
    channels = mixed.shape[-1] // (heads + 2 * kv_heads)
    sizes = (heads // blocks, kv_heads // blocks, kv_heads // blocks)
    return mixed.view(*mixed.shape[:-1], blocks, sum(sizes), channels).split(sizes, -2)


def rope_split_reference(
    mixed: torch.Tensor, angles: list[torch.Tensor], heads: int, kv_heads: int, blocks: int, interleaved: bool
) -> tuple[torch.Tensor, ...]:
    (cos, sin), (k_cos, k_sin) = angles[:2], angles[-2:]
    q, k, v = (part.flatten(2, 3) for part in heads_of(mixed.contiguous(), heads, kv_heads, blocks))
    return (
        rope_reference(q, cos, sin, interleaved, False),
        rope_reference(k, k_cos, k_sin, interleaved, False),
        v.clone(memory_format=torch.contiguous_format),
    )


def rope_join_reference(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    angles: list[torch.Tensor],
    blocks: int,
    interleaved: bool,
) -> torch.Tensor:
    (cos, sin), (k_cos, k_sin) = angles[:2], angles[-2:]
    q, k = rope_reference(dq, cos, sin, interleaved, True), rope_reference(dk, k_cos, k_sin, interleaved, True)
    out = _mixed_like(dq, dk)
    for to, part in zip(heads_of(out, dq.shape[2], dk.shape[2], blocks), (q, k, dv), strict=True):
        to.copy_(part.reshape(to.shape))
    return out


def _mixed_like(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    a, b, heads, channels = q.shape
    return q.new_empty(a, b, (heads + 2 * k.shape[2]) * channels)


def _split_fake(
    mixed: torch.Tensor, angles: list[torch.Tensor], heads: int, kv_heads: int, blocks: int, interleaved: bool
) -> tuple[torch.Tensor, ...]:
    a, b, width = mixed.shape
    channels = width // (heads + 2 * kv_heads)
    return tuple([mixed.new_empty(a, b, count, channels) for count in (heads, kv_heads, kv_heads)])


rope = leaf(
    "rope(Tensor t, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor",
    fake=lambda t, cos, sin, interleaved, inverse: t.new_empty(t.shape),
    cpu=rope_reference,
    cuda="rope:rope",
)
rope_split = leaf(
    "rope_split(Tensor mixed, Tensor[] angles, int heads, int kv_heads, int blocks, bool interleaved)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_split_fake,
    cpu=rope_split_reference,
    cuda="rope:split",
)
rope_join = leaf(
    "rope_join(Tensor dq, Tensor dk, Tensor dv, Tensor[] angles, int blocks, bool interleaved) -> Tensor",
    fake=lambda dq, dk, dv, angles, blocks, interleaved: _mixed_like(dq, dk),
    cpu=rope_join_reference,
    cuda="rope:join",
)
