"""This module lets ranks share a model: as replicas, with shards of weights, and with experts spread over them.

    world = shard · expert · tensor        a mesh of ranks, the last dimension the nearest

The `tensor` ranks of a group work on one batch; where a layer is not split by heads or columns, each takes a shard of
the tokens. There are shard · expert such groups, the replicas: each has a batch of its own, and they either share the
weights (`fsdp`) or have copies of them. Experts are spread over expert · tensor ranks, and each expert is shared, or
copied, by the `shard` ranks that have it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # lets collectives run on fake tensors
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mezzotint.comm.collectives import all_reduce
from mezzotint.comm.groups import rank_in, world_size
from mezzotint.distributed.fsdp import low_precision_gather
from mezzotint.layer.bind import bind_rules
from mezzotint.moe.exchange import Exchange, plan_exchange
from mezzotint.recipe import Recipe, Rules
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.layout import Layout
from mezzotint.trainer.mixture import Mixture
from mezzotint.trainer.model import LanguageModel
from mezzotint.trainer.sizes import ModelConfig

DIMENSIONS = ("shard", "expert", "tensor")


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Make a world of any size in which this process is rank 0 and nothing is sent."""
    if dist.is_initialized():
        raise CommandError("--world: this process is one of a world already; plan in a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Meshes:
    """A `Meshes` holds the meshes and groups of ranks that this rank shares something with."""

    replicas: DeviceMesh  # of all parameters but experts
    copies: DeviceMesh  # of this rank's experts
    replica_group: Any
    copy_group: Any
    expert_group: Any  # the ranks that together have all experts
    tensor_group: Any  # the ranks that have the same batch


def make_meshes(layout: Layout, device_type: str = "cpu") -> Meshes:
    """Make the meshes of a layout; all ranks call it, and not in a FakeTensorMode, since a mesh makes real tensors."""
    expert = max(layout.ep // layout.tp, 1)
    shape = (layout.world // (expert * layout.tp), expert, layout.tp)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)
    replicas, copies = mesh["shard", "expert"]._flatten("replicas"), mesh["shard"]
    experts = mesh["expert", "tensor"]._flatten("experts")
    groups = [part.get_group() for part in (replicas, copies, experts, mesh["tensor"])]
    return Meshes(replicas, copies, *groups)


def make_model(
    config: ModelConfig,
    layout: Layout,
    meshes: Meshes | None,
    recipe: Recipe | None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    exchange: Callable[[torch.Tensor, int, Any], Exchange] = plan_exchange,
    recomputes: bool = False,
) -> LanguageModel:
    """Return this rank's shard of the model, or all of it if `meshes` is None.

    `exchange` decides which tokens go to which expert's rank, and `recomputes` says that backward runs forward again.
    """
    layout.check_model(config)
    made: dict[str, Any] = {"device": device, "dtype": dtype, "exchange": exchange}
    if meshes is not None:
        made |= {"tensor_group": meshes.tensor_group, "expert_group": meshes.expert_group}
    model = LanguageModel(config, **made)
    if isinstance(recipe, Rules):
        bind_rules(model, recipe)
    if meshes is not None and layout.fsdp:
        attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
        shard(model, meshes, recipe, one_direction=not recomputes)
        for name, parameter in model.named_parameters():  # FSDP2 has replaced them
            for attribute, value in attributes[name].items():
                setattr(parameter, attribute, value)
    return model


def shard(model: LanguageModel, meshes: Meshes, recipe: Recipe | None, *, one_direction: bool = True) -> None:
    """Apply FSDP2 layer by layer: weights of layers are gathered as the recipe quantizes them, the others in BF16.

    With `one_direction` forward gathers what forward reads, and backward what backward reads. A parameter that no other
    rank has, such as an expert without copies, stays as it is.
    """
    if meshes.replicas.size() == 1:
        return
    has_copies = meshes.copies.size() > 1
    options: dict[str, Any] = {
        # Inputs are BF16 already, except for the angles of positions, which must stay FP32.
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
        "reshard_after_forward": True,
    }
    alone = set() if has_copies else set(expert_parameters(model))
    for layer in model.layers:
        for part in layer.children():
            if recipe is not None and (has_copies or not isinstance(part, Mixture)):
                low_precision_gather(part, recipe, one_direction=one_direction)
        for experts in _experts(layer) if has_copies else ():
            fully_shard(experts, mesh=meshes.copies, **options)
        fully_shard(layer, mesh=meshes.replicas, ignored_params=alone, **options)
    fully_shard(model, mesh=meshes.replicas, ignored_params=alone, **options)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with sharded and whole parameters in groups of their own, since no operation takes both."""
    parameters = list(model.parameters())
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return torch.optim.AdamW([{"params": group} for group in (sharded, whole) if group], fused=True)


def reduce_over_meshes(module: nn.Module, layout: Layout, meshes: Meshes, but: nn.Module | None = None) -> None:
    """Reduce the gradients of a module over ranks: the sum over those that share a batch, the mean over replicas.

    FSDP2 takes the mean over replicas by itself. The gradient of an expert is already the sum over the replicas whose
    tokens it got. Parameters of `but` are left out.
    """
    done = set() if but is None else set(but.parameters())
    alone = set(expert_parameters(module))
    replicas, copies = meshes.replicas.size(), meshes.copies.size()
    for parameter in module.parameters():
        if parameter in done or parameter.grad is None:
            continue
        gradient = parameter.grad._local_tensor if isinstance(parameter.grad, DTensor) else parameter.grad
        if _is_partial(parameter):
            gradient.copy_(all_reduce(gradient, meshes.tensor_group))
        if not layout.fsdp:
            gradient.copy_(all_reduce(gradient, meshes.copy_group if parameter in alone else meshes.replica_group))
            gradient.div_(replicas)
        elif parameter in alone:
            gradient.div_(replicas // copies)


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of experts, which replicas do not share."""
    return [parameter for experts in _experts(module) for parameter in experts.parameters()]


def _is_partial(parameter: nn.Parameter) -> bool:
    """Return whether the ranks of a tensor group each have a partial sum of this parameter's gradient."""
    return getattr(parameter, "sequence_parallel", False)


def _experts(module: nn.Module) -> list[nn.Module]:
    return [part.experts for part in module.modules() if isinstance(part, Mixture)]


def balanced_exchange(tokens_per_expert: torch.Tensor, rows: int, group: Any = None) -> Exchange:
    """Return what `plan_exchange` gives if every rank has `rows` rows, spread evenly over experts; no data is read."""
    count, experts = world_size(group), tokens_per_expert.shape[0]
    each = [rows // experts + (expert < rows % experts) for expert in range(experts)]
    local = experts // count
    sent = tuple(sum(each[place : place + local]) for place in range(0, experts, local))
    start = rank_in(group) * local
    mine = each[start : start + local]
    counts = torch.tensor([mine] * count, device=tokens_per_expert.device)
    return Exchange(sent, (sum(mine),) * count, tuple(count * size for size in mine), counts)
