"""Gradients that must be summed over ranks: those of parameters that all ranks hold whole, and use on some tokens each.

Gradients of plain parameters are summed by hand, after backward (`reduce_gradients`). Those of DTensors are summed in
backward (`local_shard`): the gradient of a replicated DTensor must be the same on all ranks.
"""

from typing import Any

import torch
from torch import nn

from mezzotint.comm.collectives import all_reduce
from mezzotint.comm.groups import world_size


def local_shard(parameter: Any, sums_over: Any = None) -> torch.Tensor:
    """Return this rank's shard of a DTensor. If a group is given as `sums_over`, its gradient is summed over that."""
    part = parameter.to_local()
    return part if sums_over is None else _SummedGradient.apply(part, sums_over)


class _SummedGradient(torch.autograd.Function):
    """This function is the identity; its gradient is summed over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return all_reduce(dy, ctx.group), None


@torch.no_grad()
def reduce_gradients(model: nn.Module, group: Any) -> None:
    """Sum over a group, in place, the gradients of parameters whose attribute `sequence_parallel` is true.

    These are norms and row-parallel biases in sequence parallelism. A parameter's `main_grad` is summed if it has one.
    Call this after backward and before the optimizer's step; it takes one collective for each dtype.

    Args:
        model: The model whose gradients are summed.
        group: The process group of tensor parallelism. None means all ranks. With one rank nothing is done.

    Example:
        >>> import mezzotint as mz
        >>> from mezzotint.distributed import reduce_gradients
        >>> reduce_gradients(mz.Linear(16, 16, device="cpu"), None)  # one rank alone: nothing to sum
    """
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
