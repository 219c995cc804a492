"""Sliding windows by PyTorch's FlexAttention: a block of keys that no query of a block sees is not computed.

The kernel is made by the compiler, so this serves only compiled code on a GPU. Only masks that follow from the indices
of query and key come here: a mask that reads a tensor which the graph makes, as lengths need it, is not compiled by
torch 2.11 without gradients. Nor does Dynamo trace it inside of a checkpoint.
"""

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mezzotint.attention.masks import Rule, Side, allowed

FEWEST_QUERIES = 128  # the size of a block; fewer are not worth it
FEWEST_CHANNELS = 16


def flex_serves(q: torch.Tensor, v: torch.Tensor, rule: Rule) -> bool:
    """Return whether heads of the shapes of q and v, [b, h, s, d], and this rule are for `flex_attend`."""
    is_large = q.shape[2] >= FEWEST_QUERIES and q.shape[3] >= FEWEST_CHANNELS and v.shape[3] >= FEWEST_CHANNELS
    is_window = not rule.has_padding and not rule.is_arbitrary and rule.left >= 0
    # The kernel is made by the compiler: eager code would compute all scores, step by step.
    return torch.compiler.is_compiling() and q.is_cuda and is_large and is_window


def flex_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, scale: float) -> torch.Tensor:
    """Return the attention [b, h, s_q, e] of q [b, h, s_q, d], k [b, g, s_k, d] and v [b, g, s_k, e]; a query that sees
    no key gives 0."""
    shift = k.shape[2] - q.shape[2] if rule.is_bottom_right else 0

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return allowed(rule, Side(i + shift, None, None), Side(j, None, None))

    blocks = create_block_mask(mask, None, None, q.shape[2], k.shape[2], q.device)
    y = flex_attention(q, k, v, None, blocks, scale, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(y, torch.Tensor)
    return y
