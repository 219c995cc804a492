"""Masks of attention: this module determines which query sees which key.

Every token has a position in its sequence, and every rule is about the distance from query to key:

    distance = position of the query - position of the key       -right ≤ distance ≤ left

A causal mask has right = 0, and a sliding window sets left too. If the diagonal is that of the bottom right corner, the
queries stand at the end of the keys: their positions are moved by the difference of the lengths. Apart from the
distance, some tokens may be padding, and in a packed batch ("thd") tokens belong to different sequences. The lengths
stay tensors all the way, so a graph does not depend on them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.tensor.checks import check_choice
from mezzotint.tracing import has_values_at_hand

# Functions have their choices in them, because a graph guards on each value of a module that it reads.


def check_qkv_format(name: str, value: Any) -> None:
    """Check an order of dimensions: s is the sequence, b the batch, h the heads, d the channels, t all tokens."""
    check_choice(name, value, ("sbhd", "bshd", "thd"))


def check_bias_type(value: Any) -> None:
    """Check what is added to scores, before or after they are scaled."""
    check_choice("core_attention_bias_type", value, ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi"))


def check_probability(name: str, value: Any) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}: give a probability")


@dataclass(frozen=True, slots=True)
class Rule:
    """A `Rule` is a mask type, a window and a diagonal, resolved."""

    has_padding: bool
    is_arbitrary: bool
    left: int  # how many keys a query sees behind it; -1: all
    right: int  # and how many ahead of it
    is_bottom_right: bool

    def is_plain(self, q_size: int, k_size: int) -> bool:
        """Return whether there is no mask, or a causal one whose diagonal starts at the first query and key."""
        if self.has_padding or self.is_arbitrary or self.left != -1:
            return False
        return self.right == -1 or (self.right == 0 and (not self.is_bottom_right or q_size == k_size))


def resolve_rule(mask_type: str, window_size: Any, bottom_right_diagonal: bool | None) -> Rule:
    """Check the three arguments and return the rule that they make. A causal mask says itself where its diagonal is;
    otherwise it is that of the bottom right corner, unless `bottom_right_diagonal` is False."""
    name = mask_type.replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    causal = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
    check_choice("attn_mask_type", name, ("no_mask", "padding", *causal, "arbitrary"))
    left, right = window = (-1, -1) if window_size is None else _pair(window_size)
    if left < -1 or right < -1:
        raise ValueError(f"window_size is {window}: give how far a query sees back and ahead, -1 for all")
    if "causal" in name:
        return Rule(
            has_padding="padding" in name,
            is_arbitrary=False,
            left=left,
            right=0,
            is_bottom_right=name.endswith("bottom_right"),
        )
    return Rule(
        has_padding=name == "padding",
        is_arbitrary=name == "arbitrary",
        left=left,
        right=right,
        is_bottom_right=bottom_right_diagonal is not False,
    )


def _pair(window_size: Any) -> tuple[int, int]:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}: give a pair, how far a query sees back and ahead, or None")
    return window_size[0], window_size[1]


@dataclass(slots=True)
class Side:
    """A `Side` describes the tokens of the queries, or of the keys; B is 1 if all sequences of a batch are alike."""

    position: torch.Tensor  # int [B, S]
    is_token: torch.Tensor | None  # bool [B, S]; False: padding
    sequence: torch.Tensor | None  # int [1, S], in a packed batch

    def at(self, index: Any) -> "Side":
        """Return the side of the tokens that an index of [B, S] selects."""
        is_token = None if self.is_token is None else self.is_token[index]
        return Side(self.position[index], is_token, None if self.sequence is None else self.sequence[index])


def check_counts(**cu_seqlens: Any) -> None:
    """Check that each of these counts tokens up from 0. They are looked at only where nobody has to wait for that: on
    the CPU, outside of graphs."""
    for name, cu in cu_seqlens.items():
        if has_values_at_hand(cu) and cu.numel() > 0 and (bool(cu[0] != 0) or bool((cu.diff() < 0).any())):
            raise ValueError(f"{name} is {cu.tolist()}: it must begin with 0, and no entry be less than the last")


def packed_positions(cu_seqlens: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for `size` packed tokens, the sequence that each belongs to and its place in it, both [size]. Tokens past
    the last sequence count as its own."""
    index = torch.arange(size, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # This is not `searchsorted`, because Inductor's kernel for GPUs (torch 2.11) searches a slice from the start of its
    # storage.
    sequence = (index[:, None] >= cu_seqlens[1:-1]).sum(-1)
    return sequence, index - cu_seqlens[sequence]


def batch_sides(
    rule: Rule, q_size: int, k_size: int, q_is_token: Any, k_is_token: Any, device: torch.device
) -> tuple[Side, Side]:
    """Return both sides of a batch with sequences side by side; `q_is_token` and `k_is_token` are bool [b, s], or None
    if there is no padding."""
    q = Side(torch.arange(q_size, device=device)[None], q_is_token, None)
    k = Side(torch.arange(k_size, device=device)[None], k_is_token, None)
    if rule.is_bottom_right:
        q_length = q_size if q_is_token is None else q_is_token.sum(-1, keepdim=True)
        k_length = k_size if k_is_token is None else k_is_token.sum(-1, keepdim=True)
        q.position = q.position + (k_length - q_length)
    return q, k


def packed_side(cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor | None, size: int) -> Side:
    """Return the side of sequences one behind the other; with `cu_seqlens_padded` there is padding behind each of
    them."""
    starts = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    sequence, position = packed_positions(starts, size)
    return Side(position[None], (position < cu_seqlens.diff()[sequence])[None], sequence[None])


def cached_side(lengths: torch.Tensor, size: int) -> Side:
    """Return the side of sequences of at most `size` tokens, each in its own part of a cache that is seen as one packed
    batch. `lengths` is [b]."""
    index = torch.arange(lengths.shape[0] * size, device=lengths.device)
    sequence, position = index // size, index % size
    return Side(position[None], (position < lengths[sequence])[None], sequence[None])


def align(rule: Rule, q: Side, q_lengths: torch.Tensor, k_lengths: torch.Tensor) -> None:
    """Move the queries of a packed batch to the end of their keys, if the rule says so. The lengths are [b]."""
    if rule.is_bottom_right:
        assert q.sequence is not None
        q.position = q.position + (k_lengths - q_lengths)[q.sequence]


def broadcast_pairs(q: Side, k: Side) -> tuple[Side, Side]:
    """Return both sides so that every query meets every key: [B, 1, queries, 1] and [B, 1, 1, keys]."""
    return q.at((slice(None), None, slice(None), None)), k.at((slice(None), None, None, slice(None)))


def distance(q: Side, k: Side) -> torch.Tensor:
    return q.position - k.position


def allowed(rule: Rule, q: Side, k: Side) -> torch.Tensor | None:
    """Return whether a query sees a key, bool, for sides whose tensors broadcast, or None if it always does."""
    terms = []
    if rule.right >= 0:
        terms.append(distance(q, k) >= -rule.right)
    if rule.left >= 0:
        terms.append(distance(q, k) <= rule.left)
    if q.sequence is not None and k.sequence is not None:
        terms.append(q.sequence == k.sequence)
    terms += [side.is_token for side in (q, k) if side.is_token is not None]
    found = None
    for term in terms:
        found = term if found is None else found & term
    return found


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """Return the slopes of ALiBi, FP32 [heads]: 2^(-8/n), 2^(-16/n), … for the largest power of two n ≤ heads, then
    every second one of those for 2n."""
    n = 2 ** math.floor(math.log2(num_heads))
    powers = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    powers += [2.0 ** (-4.0 * (2 * i + 1) / n) for i in range(num_heads - n)]
    return torch.tensor(powers, dtype=torch.float32, device=device)


def alibi_bias(slope: torch.Tensor, q: Side, k: Side) -> torch.Tensor:
    """Return -slope · |distance|, FP32."""
    return distance(q, k).abs().float() * -slope.float()


def checked_mask(mask: Any) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise ValueError(f"attention_mask is {mask if mask is None else type(mask).__name__}: give a tensor of bool")
    return mask


def tokens_of(
    rule: Rule, q: torch.Tensor, k: torch.Tensor, attention_mask: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return which of the queries [b, s_q, ..] and of the keys [b, s_k, ..] are no padding, each bool [b, s], or None
    if all are."""
    if not rule.has_padding:
        return None, None
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        for name, x, cu in (("cu_seqlens_q", q, cu_seqlens_q), ("cu_seqlens_kv", k, cu_seqlens_kv)):
            if tuple(cu.shape) != (x.shape[0] + 1,):
                raise ValueError(
                    f"{name} has shape {tuple(cu.shape)}: give [{x.shape[0] + 1}], one more than the batch"
                )
        check_counts(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
        sides = ((q, cu_seqlens_q.diff()), (k, cu_seqlens_kv.diff()))
        q_tokens, k_tokens = (torch.arange(x.shape[1], device=x.device) < n[:, None] for x, n in sides)
        return q_tokens, k_tokens
    if attention_mask is None:
        raise ValueError("a padding mask needs attention_mask [b, 1, 1, s], or cu_seqlens_q and cu_seqlens_kv [b + 1]")
    masks = attention_mask if isinstance(attention_mask, tuple | list) else (attention_mask, attention_mask)
    found = []
    for x, mask in zip((q, k), masks, strict=True):
        if checked_mask(mask).numel() != x.shape[0] * x.shape[1]:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}: give [{x.shape[0]}, 1, 1, {x.shape[1]}] for padding, "
                "and (of queries, of keys) where they differ"
            )
        found.append(~mask.reshape(x.shape[0], x.shape[1]))
    return found[0], found[1]


def packed_sides(
    rule: Rule, q_size: int, k_size: int, cu_q: Any, cu_k: Any, cu_q_padded: Any, cu_k_padded: Any
) -> tuple[Side, Side]:
    """Return both sides of a packed batch."""
    if not rule.has_padding:
        raise ValueError("qkv_format 'thd' needs a padding mask: give attn_mask_type='padding_causal' or 'padding'")
    if cu_q is None or cu_k is None or cu_q.dim() != 1 or cu_q.shape != cu_k.shape:
        raise ValueError("qkv_format 'thd' needs cu_seqlens_q and cu_seqlens_kv, both [number of sequences + 1]")
    check_counts(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k)
    check_counts(cu_seqlens_q_padded=cu_q_padded, cu_seqlens_kv_padded=cu_k_padded)
    q, k = packed_side(cu_q, cu_q_padded, q_size), packed_side(cu_k, cu_k_padded, k_size)
    align(rule, q, cu_q.diff(), cu_k.diff())
    return q, k
