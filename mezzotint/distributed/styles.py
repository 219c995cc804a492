"""Styles for torch's `parallelize_module`: they split a model of whole modules over a device mesh from outside.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"blocks.*": TensorParallel(), "head": ColwiseParallel()})

Parameters become DTensors, of which each rank has its shard: optimizers, `clip_grad_norm_`, checkpoints
(`checkpoint.py`) and FSDP2 over another dimension of the mesh take them as they are. Modules compute what they compute
when they are made with `tp_group`. Inputs and outputs are plain tensors. They are whole; or, with `sequence_parallel`,
the inputs of a weight that is split by column and the outputs of one that is split by row are this rank's shard of the
first dimension. In between, features are split. Gradients of parameters that are whole everywhere are summed over the
ranks if each rank has only a share of them.

The model is split as the first rank has it: its weights are given to the other ranks, which should have the same.
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
    """This style splits the outputs of a `Linear` or `LayerNormLinear` over ranks, for `parallelize_module` of PyTorch.

    Args:
        sequence_parallel: Whether the first dimension of the tensors outside of the split weights is divided over the
            ranks as well. The default is False.

    Example:
        >>> from mezzotint.distributed import ColwiseParallel
        >>> plan = {"head": ColwiseParallel()}  # for parallelize_module(model, mesh, plan)
        >>> plan["head"].sequence_parallel
        False
    """

    modes = ("column",)


class RowwiseParallel(_Style):
    """This style splits the inputs of a `Linear` over ranks, for `parallelize_module` of PyTorch; the outputs are
    summed.

    Args:
        sequence_parallel: Whether the first dimension of the tensors outside of the split weights is divided over the
            ranks as well. The default is False.

    Example:
        >>> from mezzotint.distributed import RowwiseParallel
        >>> plan = {"proj": RowwiseParallel()}  # for parallelize_module(model, mesh, plan)
        >>> plan["proj"].sequence_parallel
        False
    """

    modes = ("row",)


class TensorParallel(_Style):
    """This style splits a `LayerNormMLP`, `MultiheadAttention` or `TransformerLayer` over ranks, for
    `parallelize_module` of PyTorch: the first weights by column, the last by row.

    Args:
        sequence_parallel: Whether the first dimension of the tensors outside of the split weights is divided over the
            ranks as well. The default is False.

    Example:
        >>> from mezzotint.distributed import TensorParallel
        >>> plan = {"blocks.*": TensorParallel(sequence_parallel=True)}  # for parallelize_module(model, mesh, plan)
        >>> plan["blocks.*"].sequence_parallel
        True
    """


class SequenceParallel(_Style):
    """This style splits the tokens of a `LayerNorm` or `RMSNorm` over ranks, for `parallelize_module` of PyTorch.

    Example:
        >>> from mezzotint.distributed import SequenceParallel
        >>> plan = {"norm": SequenceParallel()}  # for parallelize_module(model, mesh, plan)
        >>> plan["norm"].sequence_parallel
        True
    """

    def __init__(self) -> None:
        super().__init__(sequence_parallel=True)


def _placed(parameter: nn.Parameter, mesh: Any, dim: int | None, stride: int) -> nn.Parameter:
    """Return a whole parameter as a DTensor, with the attributes that users have set on it."""
    if isinstance(parameter, DTensor):
        raise ValueError("a parameter is a DTensor already: split modules before FSDP2 shards them")
    given = parameter.detach()
    value = given._tensor if isinstance(given, ShardedWeight) else given
    if dim is None or stride == 1:
        made = distribute_tensor(value, mesh, [Replicate() if dim is None else Shard(dim)])
    else:
        # There are `stride` weights one below the other (those of a gated activation), and a rank has its shard of
        # each.
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
