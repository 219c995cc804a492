"""FSDP2 over a group of one process: nothing is gathered, and the numbers are those without it."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import mezzotint as mz
from mezzotint.distributed import low_precision_gather
from tests.recipes import RECIPES
from tests.worlds import Result, results, run_world

CHOSEN = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")


def step(module: Any, recipe: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    torch.manual_seed(2)
    with mz.autocast(recipe=recipe):
        y = module(x)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x)
    return y.detach(), dx


def sharded(rank: int) -> Result:
    found: Result = {}
    for name in CHOSEN:
        for kind in ("high", "gathered", "quantized"):
            modules = []
            for _ in range(2):
                torch.manual_seed(0)
                with mz.quantized_model_init(enabled=kind == "quantized", recipe=RECIPES[name]):
                    modules.append(mz.Linear(128, 128, device="cpu", params_dtype=torch.bfloat16))
            plain, module = modules
            if kind == "gathered":
                low_precision_gather(module, RECIPES[name])
            fully_shard(module)
            found[f"{name} {kind}"] = (step(module, RECIPES[name]), step(plain, RECIPES[name]))
    return found


def test_one_process(tmp_path: Path) -> None:
    (found,) = results(run_world(tmp_path, (sharded,), 1), "sharded")
    assert len(found) == 3 * len(CHOSEN)
    for name, (got, want) in found.items():
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), name
