"""The bias of grouped linears whose rows are weighted: this module adds the row's scale times the bias of its group.

    forward     round(y + s · b)            FP32 inside, s one per row, b [N] of the row's group
    backward    ds = Σ over columns dy · b          db of a group = Σ over its rows s · dy          FP32 sums

`scales` may be a router's probabilities: the bias of an expert then counts as much as its product does.
"""

from collections.abc import Sequence

import torch

from mezzotint.kernels._lib import leaf


def scaled_bias_reference(
    y: torch.Tensor, scales: torch.Tensor, biases: Sequence[torch.Tensor], splits: Sequence[int]
) -> torch.Tensor:
    """Return y (M, N) plus scales [M] times the bias [N] of each row's group, in y's dtype; G biases, M = Σ splits."""
    made = torch.empty_like(y, memory_format=torch.contiguous_format)
    groups = zip(y.split(list(splits)), scales.split(list(splits)), biases, made.split(list(splits)), strict=True)
    for part, s, bias, out in groups:
        out.copy_((s.float()[:, None] * bias.float()).add_(part))
    return made


def scaled_bias_backward_reference(
    dy: torch.Tensor, scales: torch.Tensor, biases: Sequence[torch.Tensor], splits: Sequence[int]
) -> list[torch.Tensor]:
    """Return ds [M] in the scales' dtype, then db [N] of each group in its bias's dtype."""
    parts, rows = dy.split(list(splits)), scales.split(list(splits))
    ds = torch.cat([(part.float() * bias.float()).sum(1) for part, bias in zip(parts, biases, strict=True)])
    dbs = [
        (part.float() * s.float()[:, None]).sum(0).to(bias.dtype)
        for part, s, bias in zip(parts, rows, biases, strict=True)
    ]
    return [ds.to(scales.dtype), *dbs]


scaled_bias = leaf(
    "scaled_bias(Tensor y, Tensor scales, Tensor[] biases, SymInt[] splits) -> Tensor",
    fake=lambda y, scales, biases, splits: y.new_empty(y.shape),
    cpu=scaled_bias_reference,
)

scaled_bias_backward = leaf(
    "scaled_bias_backward(Tensor dy, Tensor scales, Tensor[] biases, SymInt[] splits) -> Tensor[]",
    fake=lambda dy, scales, biases, splits: [
        scales.new_empty(scales.shape),
        *[bias.new_empty(bias.shape) for bias in biases],
    ],
    cpu=scaled_bias_backward_reference,
)
