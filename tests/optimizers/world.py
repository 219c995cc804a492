"""What each of two processes computes with FusedAdam and FusedSGD on parameters that FSDP2 has sharded."""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mezzotint.optimizers import FusedAdam, FusedSGD
from tests.distributed.sharded import model, sharded, train
from tests.recipes import RECIPES
from tests.worlds import Result

STEPS = 4
# Name → optimizer, its options, recipe of quantized weights. All give the bits of one process.
CASES: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "plain": (FusedAdam, {}, None),
    "remainders": (FusedAdam, {"master_weights": True, "store_param_remainders": True}, None),
    "moments": (FusedAdam, {"exp_avg_dtype": torch.bfloat16, "master_weights": True}, None),
    "sgd": (FusedSGD, {"momentum": 0.9}, None),
    "current": (FusedAdam, {"master_weights": True}, "current"),
    "mxfp8": (FusedAdam, {}, "mxfp8"),
    "nvfp4": (FusedAdam, {"master_weights": True}, "nvfp4"),
}


def make(name: str, is_sharded: bool) -> tuple[nn.Sequential, Any]:
    cls, options, recipe = CASES[name]
    made = model(init=None if recipe is None else RECIPES[recipe])
    made = sharded(made) if is_sharded else made
    return made, cls(made.parameters(), lr=5e-3, **options)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().float().clone()


def sharded_as_one(rank: int) -> Result:
    """Losses and parameters, sharded, and of one process alone."""
    found: Result = {}
    for name, (*_, recipe) in CASES.items():
        chosen = RECIPES[recipe or "none"]
        for is_sharded in (True, False):
            made, optimizer = make(name, is_sharded)
            losses = train(made, chosen, STEPS, optim=optimizer)
            # In BF16, which quantized shards are dequantized to before they are put together.
            values = {key: whole(parameter).bfloat16() for key, parameter in made.named_parameters()}
            found[f"{name} {'sharded' if is_sharded else 'alone'}"] = {"losses": losses, **values}
    return found


def resumed_from_whole_state(rank: int) -> Result:
    """The optimizer's whole state goes to another one, of moments in FP8, and back."""
    made, optimizer = make("moments", True)
    train(made, None, STEPS, optim=optimizer)
    options = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(made, optimizer, options=options)
    again = FusedAdam(made.parameters(), lr=1.0, **CASES["moments"][1])
    set_optimizer_state_dict(made, again, saved, options=options)
    low = FusedAdam(made.parameters(), lr=1.0, master_weights=True, exp_avg_dtype=torch.uint8)
    set_optimizer_state_dict(made, low, saved, options=options)
    found: Result = {
        "lr": again.param_groups[0]["lr"],
        "names": sorted({k for s in saved["state"].values() for k in s}),
    }
    for i, parameter in enumerate(made.parameters()):
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            one, two = (whole(o.get_unscaled_state(parameter, name)) for o in (optimizer, again))
            found[f"{i} {name}"] = torch.equal(one, two)
        one, two = (whole(o.get_unscaled_state(parameter, "exp_avg")) for o in (optimizer, low))
        found[f"{i} low"] = bool((one - two).norm() <= 0.04 * one.norm())
    return found


CHECKS = (sharded_as_one, resumed_from_whole_state)
