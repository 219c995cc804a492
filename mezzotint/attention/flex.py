"""Attention by PyTorch's FlexAttention: masks that are rules of positions are never a tensor of queries × keys.

A block of keys that no query of a block sees is not computed: a sliding window costs its width, and a packed batch its
sequences. The kernel is made by the compiler, so it serves compiled code on a GPU alone.
"""

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mezzotint.attention.masks import Rule, Side, alibi_bias, allowed

FEWEST_QUERIES = 128  # a block; fewer are no work for it
FEWEST_CHANNELS = 16


def flex_serves(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these heads, [b, h, s, d], are for `flex_attend`."""
    is_large = q.shape[2] >= FEWEST_QUERIES and q.shape[3] >= FEWEST_CHANNELS and v.shape[3] >= FEWEST_CHANNELS
    return torch.compiler.is_compiling() and q.is_cuda and is_large


def flex_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    sides: tuple[Side, Side],
    slopes: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """q [b, h, s_q, d], k [b, g, s_k, d], v [b, g, s_k, e] → [b, h, s_q, e]; a query that sees no key gives 0."""

    def tokens(b: Any, i: Any, j: Any) -> tuple[Side, Side]:
        return _row(sides[0], b, i), _row(sides[1], b, j)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return allowed(rule, *tokens(b, i, j))

    def bias(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        assert slopes is not None
        slope = slopes[0, h] if slopes.shape[0] == 1 else slopes[b, h]
        return score + alibi_bias(slope, *tokens(b, i, j)).to(score.dtype)

    blocks = None
    if rule.hides():
        blocks = create_block_mask(mask, q.shape[0], None, q.shape[2], k.shape[2], q.device)
    made = flex_attention(q, k, v, None if slopes is None else bias, blocks, scale, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(made, torch.Tensor)
    return made


def _row(side: Side, b: Any, i: Any) -> Side:
    """One token; where the sequences of a batch are alike, of the first."""

    def pick(x: torch.Tensor | None) -> Any:
        return None if x is None else x[0, i] if x.shape[0] == 1 else x[b, i]

    return Side(pick(side.position), pick(side.is_token), pick(side.sequence))
