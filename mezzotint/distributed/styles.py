"""Styles for torch's `parallelize_module`: a model of whole modules, split over a device mesh from outside.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"blocks.*": TensorParallel(), "head": ColwiseParallel()})

Parameters become DTensors, of which each process has its part: optimizers, `clip_grad_norm_`, checkpoints
(`checkpoint.py`) and FSDP2 over another dimension of the mesh take them as they are. Modules compute what they compute
when they are made with `tp_group`. What goes in and comes out are plain tensors: whole, or with `sequence_parallel`
this process's part of the first dimension, where a weight split by column reads and one split by row writes; split
features in between. Gradients of parameters that are whole everywhere are summed over the processes where each has a
part of them.

All processes must have the same weights before: those of the first are given to the others.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from mezzotint.comm.collectives import broadcast_
from mezzotint.distributed.fsdp import ShardedWeight, wrap

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "TensorParallel"]


class _Style(ParallelStyle):
    modes: tuple[str, ...] = ()

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        split: Any = getattr(module, "split_over", None)
        if split is None:
            raise TypeError(
                f"{type(self).__name__} is given {type(module).__name__}: it splits modules of mezzotint. Convert the "
                "model first (mezzotint.convert), or use the style of that name in torch.distributed.tensor.parallel"
            )
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh has {device_mesh.ndim} dimensions: give one of them, device_mesh['tp']")

        def place(parameter: nn.Parameter, dim: int | None, stride: int) -> nn.Parameter:
            return _placed(parameter, device_mesh, dim, stride)

        split(device_mesh.get_group(), self.sequence_parallel, place, *self.modes)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_parallel={self.sequence_parallel})"


class ColwiseParallel(_Style):
    """Linear, LayerNormLinear: each process has some of the outputs."""

    modes = ("column",)


class RowwiseParallel(_Style):
    """Linear: each process has some of the inputs; outputs are summed."""

    modes = ("row",)


class TensorParallel(_Style):
    """LayerNormMLP, MultiheadAttention, TransformerLayer: the first weights by column, the last by row."""


class SequenceParallel(_Style):
    """LayerNorm, RMSNorm: each process has some of the tokens."""

    def __init__(self) -> None:
        super().__init__(sequence_parallel=True)


def _placed(parameter: nn.Parameter, mesh: Any, dim: int | None, stride: int) -> nn.Parameter:
    """A whole parameter as a DTensor, with what users have put on it."""
    if isinstance(parameter, DTensor):
        raise ValueError("a parameter is a DTensor already: split modules before FSDP2 shards them")
    given = parameter.detach()
    value = given._tensor if isinstance(given, ShardedWeight) else given
    if dim is None or stride == 1:
        made = distribute_tensor(value, mesh, [Replicate() if dim is None else Shard(dim)])
    else:
        # `stride` weights one below the other (a gated activation's), of each of which a process has its part.
        broadcast_(value, mesh.get_group())
        rank, size = mesh.get_local_rank(), mesh.size()
        part = torch.cat([each.chunk(size, dim)[rank] for each in value.chunk(stride, dim)], dim)
        placements = [_StridedShard(dim, split_factor=stride)]
        made = DTensor.from_local(part, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
    placed: torch.Tensor = made.detach()
    if isinstance(given, ShardedWeight):  # `low_precision_gather` was first
        placed = wrap(placed, given._recipe, given._gemm)
    fresh = nn.Parameter(placed, parameter.requires_grad)
    for name, attribute in vars(parameter).items():
        if not name.startswith("_"):
            setattr(fresh, name, attribute)
    return fresh
