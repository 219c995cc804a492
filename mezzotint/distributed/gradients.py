"""Gradients that each process has a part of: of parameters that all processes hold whole, and use on some tokens."""

from typing import Any

import torch
from torch import nn

from mezzotint.distributed.collectives import all_reduce
from mezzotint.distributed.groups import world_size


@torch.no_grad()
def reduce_gradients(model: nn.Module, group: Any) -> None:
    """Sum over the group, in place, the gradients (`main_grad` where there is one) of parameters whose attribute
    `sequence_parallel` is true: norms and row-parallel biases in sequence parallelism. After backward, before the step;
    one collective for each dtype."""
    if world_size(group) == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if getattr(parameter, "sequence_parallel", False) and gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        summed = all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), group)
        for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
