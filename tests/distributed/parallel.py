"""What the worlds of tensor parallelism share: parts of tensors and modules, a training step, what was sent."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import mezzotint as mz
from mezzotint import recipe as recipes
from mezzotint.comm.collectives import collective
from mezzotint.functional.delayed import delayed_compare
from mezzotint.kernels._lib import _IMPLEMENTATIONS
from tests.recipes import RECIPES, VARIANTS
from tests.worlds import Result

# Stochastic rounding draws for each part on its own: nothing to compare bit for bit.
BITWISE = {
    **RECIPES,
    **VARIANTS,
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4-row-scaled": recipes.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True
    ),
    "nvfp4-4over6": recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all"),
}


def world() -> tuple[Any, int, int]:
    """The group of all, how many they are, which one this is."""
    return dist.group.WORLD, dist.get_world_size(), dist.get_rank()


def unit(name: str) -> int:
    """Sizes are multiples of this on each process, so that no tile of a weight and no block of tokens is cut."""
    return 128 if name.startswith("block") else 32


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(x: torch.Tensor, dim: int, stride: int = 1) -> torch.Tensor:
    """This process's, of each of `stride` pieces."""
    _, size, rank = world()
    return torch.cat([piece.chunk(size, dim)[rank] for piece in x.chunk(stride, dim)], dim)


def part_like(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """What of the whole belongs to a parameter, as its attributes say."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    return part(whole, parameter.partition_dim, parameter.partition_stride)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, of the largest value; of what is zero but for rounding (of a bias of keys), itself."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.numel() == 0:
        return 0.0
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-2))


def make(cls: Any, *sizes: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Weights as drawn, biases and norms with many values: the same for a part as for the whole."""
    torch.manual_seed(0)
    module = cls(*sizes, device="cpu", params_dtype=dtype, **options)
    size = world()[1]
    with torch.no_grad():
        for index, (name, parameter) in enumerate(module.named_parameters()):
            if "bias" in name or "layer_norm" in name:
                is_split = getattr(parameter, "tensor_model_parallel", False)
                whole = draw(parameter.numel() * (size if is_split else 1), seed=100 + index, dtype=dtype) * 0.1
                parameter.add_(part_like(parameter, whole))
    return module


def step(module: Any, x: torch.Tensor, dy: torch.Tensor, recipe: Any, call: Any = None, **kwargs: Any) -> Result:
    """Output and gradients, by name."""
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


def differing(got: Result, want: Result) -> list[str]:
    """Names of what is not equal, bit for bit."""
    return [key for key in want if (got[key] is None) != (want[key] is None) or not torch.equal(got[key], want[key])]


def split_of(mode: str, sp: bool, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a linear of this mode gets of its input and of the gradient of its output."""
    if mode == "column":
        return part(x, 0) if sp else x, part(dy, -1)
    return part(x, -1), part(dy, 0) if sp else dy


COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class Sent(TorchDispatchMode):
    """The bytes that this process gives to collectives, and how often, by name and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (collective, delayed_compare):  # operators of ours that send, on the CPU: what they do inside
            with self:
                return _IMPLEMENTATIONS[func][0](*args)
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name in COLLECTIVES:
            key = f"{name} {str(args[0].dtype).removeprefix('torch.')}"
            self.bytes[key] = self.bytes.get(key, 0) + args[0].numel() * args[0].element_size()
            self.calls[key] = self.calls.get(key, 0) + 1
        return func(*args, **(kwargs or {}))
