"""How processes share a model: replicas, shards of weights, experts.

    world = shard · expert · tensor        a mesh of processes, the last dimension the nearest

A group of `tensor` processes works on one batch, each on a part of its tokens where it is not split by heads or
columns. The replicas are shard · expert groups: each has a batch of its own, all of them share the weights (`fsdp`) or
have copies of them. Experts are spread over expert · tensor processes, and each expert is shared, or copied, by the
`shard` processes that have it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # which lets collectives run on fake tensors
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
    """A world of any size, of which this process is the first, and in which nothing is sent."""
    if dist.is_initialized():
        raise CommandError("--world: this process is one of a world already; plan in a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Meshes:
    """The processes that this one shares something with."""

    replicas: DeviceMesh  # what is no expert
    copies: DeviceMesh  # its experts
    replica_group: Any
    copy_group: Any
    expert_group: Any  # those that together have all experts
    tensor_group: Any  # those that have the same batch


def make_meshes(layout: Layout, device_type: str = "cpu") -> Meshes:
    """A collective. Not inside of a FakeTensorMode, which a mesh's own tensors are not made for."""
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
    """This process's part of the model; all of it without meshes. `recomputes`: backward runs forward again."""
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
        for name, parameter in model.named_parameters():  # which are other ones now
            for attribute, value in attributes[name].items():
                setattr(parameter, attribute, value)
    return model


def shard(model: LanguageModel, meshes: Meshes, recipe: Recipe | None, *, one_direction: bool = True) -> None:
    """FSDP2, layer by layer: weights of layers are gathered as the recipe quantizes them, the others in BF16;
    `one_direction`: in forward what forward reads, in backward what backward reads.

    What nobody else has, as an expert that is nowhere else, stays as it is.
    """
    if meshes.replicas.size() == 1:
        return
    has_copies = meshes.copies.size() > 1
    options: dict[str, Any] = {
        # Inputs are BF16 already, but for the angles of positions, which stay as they are.
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
    """AdamW; what is sharded and what is not are groups of their own, since no operation takes both."""
    parameters = list(model.parameters())
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return torch.optim.AdamW([{"params": group} for group in (sharded, whole) if group], fused=True)


def reduce_over_meshes(module: nn.Module, layout: Layout, meshes: Meshes, but: nn.Module | None = None) -> None:
    """The sum of what processes have parts of, of one batch; over replicas the mean, which FSDP2 takes by itself.

    An expert has the sum over the replicas whose tokens it got already. Parameters of `but` are left out.
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
    """Those that replicas do not share."""
    return [parameter for experts in _experts(module) for parameter in experts.parameters()]


def _is_partial(parameter: nn.Parameter) -> bool:
    """Whether the processes of a tensor group have parts of its gradient."""
    return getattr(parameter, "sequence_parallel", False)


def _experts(module: nn.Module) -> list[nn.Module]:
    return [part.experts for part in module.modules() if isinstance(part, Mixture)]


def balanced_exchange(tokens_per_expert: torch.Tensor, rows: int, group: Any = None) -> Exchange:
    """What `plan_exchange` gives where every process has as many rows, evenly over experts. Reads nothing."""
    count, experts = world_size(group), tokens_per_expert.shape[0]
    each = [rows // experts + (expert < rows % experts) for expert in range(experts)]
    local = experts // count
    sent = tuple(sum(each[place : place + local]) for place in range(0, experts, local))
    start = rank_in(group) * local
    mine = each[start : start + local]
    counts = torch.tensor([mine] * count, device=tokens_per_expert.device)
    return Exchange(sent, (sum(mine),) * count, tuple(count * size for size in mine), counts)
