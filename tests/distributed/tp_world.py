"""What each process of a world computes with its part of a module, beside the whole module."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import mezzotint as mz
from mezzotint import recipe as recipes
from mezzotint.distributed.gradients import reduce_gradients
from tests.recipes import RECIPES
from tests.worlds import Result

os.environ["OMP_NUM_THREADS"] = "1"

# Stochastic rounding draws for each part on its own: nothing to compare bit for bit.
BITWISE = {**RECIPES, "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)}


def world() -> tuple[Any, int, int]:
    return dist.group.WORLD, dist.get_world_size(), dist.get_rank()


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unit(name: str) -> int:
    """Sizes are multiples of this on each process, so that no tile of the weight is cut."""
    return 128 if name == "block" else 32


def part(x: torch.Tensor, dim: int) -> torch.Tensor:
    _, size, rank = world()
    return x.chunk(size, dim)[rank].contiguous()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, of the largest value."""
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))


def step(module: Any, x: torch.Tensor, dy: torch.Tensor, recipe: Any, call: Any = None, **kwargs: Any) -> Result:
    """Output and gradients; delayed scaling's scales after it."""
    leaf = x.detach().clone().requires_grad_()
    torch.manual_seed(5)
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        y = (module if call is None else call)(leaf, **kwargs)
    y.backward(dy)
    made: Result = {"y": y.detach(), "dx": leaf.grad}
    for name, parameter in module.named_parameters():
        made[name] = None if parameter.grad is None else parameter.grad.clone()
        parameter.grad = None
    return made


def spread_biases(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for index, (name, parameter) in enumerate(module.named_parameters()):
            if "bias" in name or "layer_norm" in name:
                _, size, rank = world()
                is_split = getattr(parameter, "tensor_model_parallel", False)
                whole = draw(parameter.numel() * (size if is_split else 1), seed=100 + index) * 0.1
                value = whole.chunk(size)[rank] if is_split else whole
                parameter.add_(value.view_as(parameter).to(parameter.dtype))
    return module


def make(cls: Any, *sizes: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return spread_biases(cls(*sizes, device="cpu", params_dtype=torch.bfloat16, **options))


class Sent(TorchDispatchMode):
    """Counts the bytes that this process gives to collectives, by their name and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            key = func.__name__.split(".")[0], args[0].dtype
            self.bytes[key] = self.bytes.get(key, 0) + args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def split_inputs(mode: str, sp: bool, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if mode == "column":
        return part(x, 0) if sp else x, part(dy, -1)
    return part(x, -1), part(dy, 0) if sp else dy


def linear_case(name: str, mode: str, sp: bool, tokens: int, steps: int = 1) -> Result:
    """A linear of this mode against the whole one: what is equal, and how far off the sums are."""
    group, size, _ = world()
    recipe = BITWISE[name]
    width = unit(name) * size
    whole = make(mz.Linear, width, width)
    split = make(mz.Linear, width, width, parallel_mode=mode, tp_group=group, sequence_parallel=sp)
    found: Result = {}
    for i in range(steps):
        x, dy = draw(tokens * size, 1, width, seed=1 + i) * (1 + i), draw(tokens * size, 1, width, seed=50 + i)
        want = step(whole, x, dy, recipe)
        got = step(split, *split_inputs(mode, sp, x, dy), recipe)
        dim = 0 if mode == "column" else 1
        found["weight"] = torch.equal(split.weight, part(whole.weight, dim))
        found[f"dw {i}"] = torch.equal(got["weight"], part(want["weight"], dim))
        if mode == "column":
            found[f"y {i}"] = torch.equal(got["y"], part(want["y"], -1))
            found[f"db {i}"] = torch.equal(got["bias"], part(want["bias"], 0))
            found[f"sum {i}"] = error(got["dx"], part(want["dx"], 0) if sp else want["dx"])
        else:
            found[f"dx {i}"] = torch.equal(got["dx"], part(want["dx"], -1))
            split.bias.grad = got["bias"]
            if sp:
                reduce_gradients(split, group)
            found[f"db sum {i}"] = error(split.bias.grad, want["bias"])
            split.bias.grad = None
            found[f"sum {i}"] = error(got["y"], part(want["y"], 0) if sp else want["y"])
    return found


def linears(rank: int) -> Result:
    found: Result = {}
    for name in BITWISE:
        for mode in ("column", "row"):
            for sp in (False, True):
                steps = 3 if name == "delayed" else 1
                found[f"{name} {mode} {sp}"] = linear_case(name, mode, sp, unit(name), steps)
    return found
