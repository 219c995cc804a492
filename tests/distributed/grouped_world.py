"""What each of four processes computes with the experts of a GroupedLinear in one parameter, which FSDP2 shards."""

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import mezzotint as mz
from mezzotint.distributed.checkpoint import full_state, load, plain_state, save
from tests.distributed.dcp_world import folder
from tests.recipes import RECIPES
from tests.worlds import Result

WIDTH = 32
# Groups, and whether they are quantized.
CASES = {"delayed": (3, False), "mxfp8": (4, True)}


def layer(groups: int, init: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    with mz.quantized_model_init(enabled=init is not None, recipe=init):
        options = {"device": "cpu", "params_dtype": torch.bfloat16, **options}
        return mz.GroupedLinear(groups, WIDTH, WIDTH, single_grouped_weight=True, single_grouped_bias=True, **options)


def train(made: Any, recipe: Any, optim: Any, steps: int = 2) -> list[float]:
    """Losses; the same batch on every process, so that the mean of gradients over four is exact."""
    groups, losses = made.num_gemms, []
    for step in range(steps):
        x = torch.randn(8 * groups + 8, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        torch.manual_seed(step)  # stochastic rounding
        with mz.autocast(enabled=recipe is not None, recipe=recipe):
            loss = (made(x, [16] + [8] * (groups - 1)).float() - 1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def optimizer(made: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=5e-3)


def grouped_weights(rank: int) -> Result:
    """Losses and state in shards and whole; then from a checkpoint, in shards and whole, and without one."""
    found: Result = {}
    for name, (groups, quantized) in CASES.items():
        recipe = RECIPES[name]
        made, alone = (layer(groups, recipe if quantized else None) for _ in range(2))
        fully_shard(made)
        optim, other = optimizer(made), optimizer(alone)
        losses = [train(made, recipe, optim), train(alone, recipe, other)]
        shard = made.weight._local_tensor
        states = [full_state(made), {key: value.clone() for key, value in plain_state(alone).items()}]
        save(folder() / f"grouped {name}", made, optim)
        again, whole = (layer(groups, recipe if quantized else None) for _ in range(2))
        fully_shard(again)
        for each in (again, whole):
            optim = optimizer(each)
            load(folder() / f"grouped {name}", each, optim)
            losses.append(train(each, recipe, optim))
        losses.append(train(alone, recipe, other))
        found[name] = losses, states, type(shard).__name__, shard.shape[0]
    return found


def grouped_odds(rank: int) -> Result:
    """From the meta device, cut along another dimension, and what is refused."""
    found: Result = {"expected": layer(4).weight}
    for dim in (0, 1):
        made = layer(4, device="meta")
        fully_shard(made, shard_placement_fn=lambda p, dim=dim: Shard(dim))
        made.to_empty(device="cpu")
        torch.manual_seed(0)
        made.reset_parameters()
        found[f"meta {dim}"] = made.weight.full_tensor()
    quantized = fully_shard(layer(4, RECIPES["mxfp8"]))
    try:
        quantized.reset_parameters()
    except RuntimeError as error:
        found["reset"] = str(error)
    assert "draw initial values first" in found["reset"]
    for groups, dim in ((3, 0), (1, 0), (4, 1)):
        try:
            fully_shard(layer(groups, RECIPES["mxfp8"]), shard_placement_fn=lambda p, dim=dim: Shard(dim))
        except ValueError as error:
            found[f"refused {groups} {dim}"] = str(error)
    mixed = fully_shard(layer(4, RECIPES["mxfp8" if rank else "current"]))
    try:
        mixed(torch.ones(32, WIDTH).bfloat16(), [8] * 4)
    except ValueError as error:
        found["mixed"] = str(error)
    return found


CHECKS = (grouped_weights, grouped_odds)
