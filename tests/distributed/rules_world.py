"""What each of two processes computes under rules: FSDP2, a checkpoint of shards, tensor parallelism."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mezzotint as mz
from mezzotint.distributed.checkpoint import load, save
from mezzotint.distributed.fsdp import low_precision_gather
from mezzotint.recipe import DelayedScaling, NVFP4BlockScaling, Rules
from tests.distributed.sharded import batch, loss_of, model, optimizer, sharded, train
from tests.worlds import Result, attempt

# A linear in each of four formats, one of them with state, one in high precision.
RULES = Rules(
    [
        ("0", DelayedScaling(amax_history_len=4)),
        ("*.fc2", NVFP4BlockScaling(disable_stochastic_rounding=True)),
        ("2", None),
        ("*", "mxfp8"),
    ]
)
STEPS = 3


def ruled_model() -> nn.Sequential:
    return mz.bind_rules(model(head=64), RULES)


def fully_sharded(rank: int) -> Result:
    """Each weight is gathered as its rule quantizes it; steps go on from a checkpoint of the shards."""
    made = sharded(low_precision_gather(ruled_model(), RULES))
    kinds = [type(each._local_tensor).__name__ for each in (made[0].weight, made[1].fc2_weight, made[2].weight)]
    optim = optimizer(made)
    losses = train(made, RULES, STEPS, optim=optim)
    folder = Path(os.environ["MEZZOTINT_TEST_FOLDER"]) / "checkpoint"
    save(folder, made, optim)
    losses += train(made, RULES, STEPS, first=STEPS, optim=optim)
    other = sharded(low_precision_gather(ruled_model(), RULES))
    again = optimizer(other)
    load(folder, other, again)
    return {"losses": losses, "resumed": train(other, RULES, STEPS, first=STEPS, optim=again), "kinds": kinds}


def parallel_step(group: Any, by_hand: bool = False) -> list[torch.Tensor]:
    """A step under rules, or with a region around each module that says what the rules say."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"tp_group": group, "params_dtype": torch.bfloat16, "device": "cpu"}
    split = group is not None
    made = nn.Sequential(
        mz.LayerNormMLP(64, 128, set_parallel_mode=split, sequence_parallel=False, **options),
        mz.Linear(64, 64, parallel_mode="column" if split else None, **options),
    )
    rules = Rules([("0", "current"), ("*", "mxfp8")])
    mz.bind_rules(made, rules)
    x = batch(0, 64).requires_grad_()
    if by_hand:
        with mz.autocast("current"):
            y = made[0](x)
        with mz.autocast("mxfp8"):
            y = made[1](y)
    else:
        with mz.autocast(rules):
            y = made(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def tensor_parallel(rank: int) -> Result:
    """Parts of weights under rules, and ranks whose rules are not the same."""
    group = dist.group.WORLD
    found: Result = {"by_rules": parallel_step(group), "by_hand": parallel_step(group, by_hand=True)}
    rules = Rules([("0", "mxfp8" if rank else "current"), ("*", None)])
    made = nn.Sequential(mz.Linear(64, 64, parallel_mode="column", tp_group=group, device="cpu"))
    mz.bind_rules(made, rules)

    def run() -> None:
        with mz.autocast(rules):
            loss_of(made(torch.randn(16, 64)))

    attempt(found, "error", run)
    return found


CHECKS = (fully_sharded, tensor_parallel)
