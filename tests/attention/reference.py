"""Attention by its formula, in FP64 and by loops: what every kernel, layout and mask is compared with."""

import math
from typing import Any

import torch

MASKS = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)


def sees(
    i: int, j: int, q_length: int, k_length: int, mask: str, window: tuple[int, int] | None, bottom_right: bool | None
) -> bool:
    """Whether query i of a sequence sees key j of it."""
    if i >= q_length or j >= k_length:
        return False
    if "causal" in mask:
        bottom_right = mask.endswith("bottom_right")
    elif bottom_right is None:
        bottom_right = True
    stands_on = i + k_length - q_length if bottom_right else i
    if "causal" in mask and j > stands_on:
        return False
    left, right = window or (-1, -1)
    return not (left >= 0 and j < stands_on - left) and not (right >= 0 and j > stands_on + right)


def slopes_of_alibi(heads: int) -> list[float]:
    """As the paper's code has it."""

    def powers(n: int) -> list[float]:
        start = 2.0 ** (-(2.0 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return powers(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return powers(closest) + slopes_of_alibi(2 * closest)[0::2][: heads - closest]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: str = "no_mask",
    *,
    lengths: tuple[list[int], list[int]] | None = None,
    window: tuple[int, int] | None = None,
    bottom_right: bool | None = None,
    hidden: torch.Tensor | None = None,
    bias_type: str = "no_bias",
    bias: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, s, h, d], k and v [b, s, g, d] → [b, s, h · d] and the largest logit of each head; differentiable.

    `hidden` [b, h, s, s]: True is masked out, for "arbitrary".
    """
    batch, q_size, heads, channels = q.shape
    k_size, groups = k.shape[1:3]
    scale = channels**-0.5 if scale is None else scale
    rows, largest = [], torch.full((heads,), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        q_length = lengths[0][b] if lengths and "padding" in mask else q_size
        k_length = lengths[1][b] if lengths and "padding" in mask else k_size
        bottom = "bottom_right" in mask or ("causal" not in mask and bottom_right is not False)
        for i in range(q_size):
            for h in range(heads):
                group = h // (heads // groups)
                logits, values = [], []
                for j in range(k_size):
                    if not sees(i, j, q_length, k_length, mask, window, bottom_right):
                        continue
                    if mask == "arbitrary" and hidden is not None and hidden[b, h, i, j]:
                        continue
                    logit = (q[b, i, h].double() * k[b, j, group].double()).sum()
                    if bias_type == "pre_scale_bias":
                        logit = logit + _at(bias, b, h, i, j)
                    logit = logit * scale
                    if bias_type == "post_scale_bias":
                        logit = logit + _at(bias, b, h, i, j)
                    if bias_type == "alibi":
                        own = (
                            slopes_of_alibi(heads)[h] if slopes is None else slopes.view(-1, heads)[b % len(slopes), h]
                        )
                        gap = (i + k_length - q_length if bottom else i) - j
                        logit = logit - own * abs(gap)
                    logits.append(logit)
                    values.append(v[b, j, group].double())
                if not logits:
                    rows.append(q[b, i, h].double().sum() * 0 + torch.zeros(v.shape[-1], dtype=torch.float64))
                    continue
                stacked = torch.stack(logits)
                largest[h] = max(largest[h], stacked.max().detach())
                if sink is not None:
                    stacked = torch.cat((stacked, sink[h : h + 1].double()))
                weights = stacked.softmax(0)[: len(values)]
                rows.append((weights[:, None] * torch.stack(values)).sum(0))
    return torch.stack(rows).view(batch, q_size, heads * v.shape[-1]), largest


def _at(bias: Any, b: int, h: int, i: int, j: int) -> torch.Tensor:
    return bias[b % bias.shape[0], h % bias.shape[1], i, j].double()
