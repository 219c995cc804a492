"""The core of attention: this module computes softmax(mask(Q · Kᵀ · scale + bias)) · V by PyTorch's kernels.

No mask, and a causal mask over as many keys as queries, are left to `scaled_dot_product_attention`; any other mask is
given to it as a tensor. Sliding windows in compiled code on a GPU are computed by FlexAttention (`flex.py`). A query
that sees no key gives 0, and no gradient.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from mezzotint import hw
from mezzotint.attention.flex import flex_attend, flex_serves
from mezzotint.attention.masks import Rule, Side, alibi_bias, allowed, broadcast_pairs


@dataclass(slots=True)
class Scores:
    """A `Scores` describes what happens between the two products."""

    rule: Rule
    is_plain: bool  # the kernel's own mask suffices, and there is no bias or sink
    sides: tuple[Side, Side] | None  # queries and keys; may be None if it is plain
    arbitrary: torch.Tensor | None  # bool, True: masked out
    bias: torch.Tensor | None  # added after the scale
    slopes: torch.Tensor | None  # of ALiBi, [1, h] or [b, h]
    sink: torch.Tensor | None  # FP32 [h]: a logit that only the softmax's denominator has
    scale: float
    dropout: float
    recomputes: bool  # backward recomputes instead of keeping what forward made


def score_terms(scores: Scores) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return which keys a query sees, bool, and what is added to the scaled products, each None if there is nothing;
    both broadcast to [b, h, s_q, s_k]."""
    assert scores.sides is not None
    q, k = broadcast_pairs(*scores.sides)
    seen = allowed(scores.rule, q, k)
    if scores.arbitrary is not None:
        seen = ~scores.arbitrary if seen is None else seen & ~scores.arbitrary
    if scores.slopes is None:
        return seen, scores.bias
    return seen, alibi_bias(scores.slopes[:, :, None, None], q, k)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Return the attention [b, h, s_q, e] of q [b, h, s_q, d], k [b, g, s_k, d] and v [b, g, s_k, e]."""
    if hw.multiplies_slowly(q):
        return attend(q.float(), k.float(), v.float(), scores).to(q.dtype)
    heads, groups = q.shape[1], k.shape[1]
    if scores.is_plain:
        is_causal = scores.rule.right == 0
        return functional.scaled_dot_product_attention(
            q, k, v, None, scores.dropout, is_causal, scale=scores.scale, enable_gqa=heads != groups
        )
    is_rule = scores.bias is None and scores.slopes is None and scores.sink is None and scores.dropout == 0.0
    if is_rule and not scores.recomputes and flex_serves(q, v, scores.rule):
        return flex_attend(q, k, v, scores.rule, scores.scale)
    seen, bias = score_terms(scores)
    if heads != groups:  # not all kernels with a mask take fewer heads of keys than of queries
        k, v = k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)
    sees_any = None
    if scores.sink is not None:
        # There is one more key, of zeros, with the sink as its bias: it is in the denominator, and its value adds
        # nothing.
        shape = (q.shape[0], heads, q.shape[2], k.shape[2])
        column = scores.sink.float().view(1, -1, 1, 1).expand(*shape[:3], 1)
        bias = q.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
        bias = torch.cat((bias.expand(shape), column), -1)
        seen = None if seen is None else functional.pad(seen, (0, 1), value=True)
        k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
    elif seen is not None:
        # A query that sees nothing is allowed to see all keys, and its result is dropped: cuDNN's kernel makes NaN of 0
        # / 0.
        sees_any = seen.any(-1, keepdim=True)
        seen = seen | ~sees_any
    mask = seen
    if bias is not None:
        # On a GPU, cuDNN's kernel takes a bias of another dtype for one of the queries' dtype and computes nonsense.
        # The CPU's kernel also takes FP32.
        bias = bias.to(q.dtype) if q.is_cuda or bias.dtype != torch.float32 else bias
        mask = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
    if mask is not None and mask.dim() < 2:  # the kernels do not broadcast fewer than two dimensions
        mask = mask.expand(q.shape[2], k.shape[2])
    y = functional.scaled_dot_product_attention(q, k, v, mask, scores.dropout, False, scale=scores.scale)
    return y if sees_any is None else torch.where(sees_any, y, 0.0)


def largest_logit(q: torch.Tensor, k: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Return the largest logit that the softmax of each head sees, FP32 [h]."""
    with torch.no_grad():
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        logits = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scores.scale
        seen, bias = score_terms(scores)
        if bias is not None:
            logits = logits + bias.float()
        if seen is not None:
            logits = logits.masked_fill(~seen, -torch.inf)
        return logits.amax((0, 2, 3))
