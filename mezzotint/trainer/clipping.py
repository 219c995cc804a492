"""This module computes the norm of a gradient that is spread over ranks, and clips by it."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from mezzotint.comm.collectives import all_reduce
from mezzotint.comm.groups import rank_in
from mezzotint.distributed.parts import local_of
from mezzotint.trainer.mesh import Meshes, expert_parameters


@torch.no_grad()
def clip_gradients(model: nn.Module, meshes: Meshes, limit: float) -> torch.Tensor:
    """Scale gradients down to a norm of `limit` if theirs is larger, and return their norm before that.

    This is `clip_grad_norm_` over all ranks: what several ranks have alike is counted on the first of them.
    """
    experts = set(expert_parameters(model))
    gradients, counted = [], []
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        gradient = local_of(parameter.grad)
        gradients.append(gradient)
        is_first = isinstance(parameter, DTensor)  # a shard, which no other rank has
        if not is_first:
            is_first = rank_in(meshes.copy_group if parameter in experts else meshes.replica_group) == 0
        is_whole = parameter not in experts and not getattr(parameter, "tensor_model_parallel", False)
        if is_first and (not is_whole or rank_in(meshes.tensor_group) == 0):
            counted.append(gradient)
    own = get_total_norm(counted) if counted else gradients[0].new_zeros(())
    norm = all_reduce(own.square(), None).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
