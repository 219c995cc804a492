"""Recipes and modules that tests run over, and one training step of a module."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mezzotint as mz
from mezzotint import recipe
from mezzotint.recipe import Recipe

RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "custom": recipe.CustomRecipe(mz.custom_recipes.nvfp4_forward_mxfp8_backward_factory),
}
# Every recipe that has a name. Most tests run over `RECIPES`, one of each way to scale; a new one runs through the
# matrices of modules and operations.
EVERY_RECIPE: dict[str, Recipe | None] = RECIPES | {
    name: RECIPES.get(name) or kind() for name, kind in recipe.RECIPES.items()
}
# Norm of the error over norm of the result: a product of two tensors of 3 bits of mantissa (E4M3), of 3 and 2 (E5M2
# gradients), of FP4. About twice what was seen.
BOUNDS = {
    "none": 0.01,
    "delayed": 0.12,
    "current": 0.12,
    "rowwise": 0.08,
    "block": 0.08,
    "mxfp8": 0.08,
    "mxfp4": 0.5,
    "mxfp6": 0.15,
    "nvfp4": 0.45,
    "custom": 0.35,
}
# Options that change what backward computes on, or the scales.
VARIANTS: dict[str, Recipe] = {
    "current-pow2": recipe.Float8CurrentScaling(use_power_2_scales=True),
    "current-high_precision": recipe.Float8CurrentScaling(backward_override="high_precision"),
    "delayed-most_recent": recipe.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent", margin=1),
    "rowwise-wgrad": recipe.Float8RowwiseScaling(high_precision_wgrad=True),
    "rowwise-exact-dequantized": recipe.Float8RowwiseScaling(use_power_2_scales=False, backward_override="dequantized"),
    "block-f32": recipe.Float8BlockScaling(use_f32_scales=True),
    "mxfp8-2d-hybrid": recipe.MXFP8BlockScaling(enable_2d_quantization=True, fp8_format=recipe.Format.HYBRID),
    "mxfp8-dequantized": recipe.MXFP8BlockScaling(backward_override="dequantized"),
    "mxfp4-plain": recipe.MXFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True, scale_rule="roundup"
    ),
    "mxfp6-2d-e3m2": recipe.MXFP6BlockScaling(fp6_format="E3M2", enable_2d_quantization=True, scale_rule="roundup"),
    "nvfp4-plain": recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "nvfp4-row-scaled": recipe.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
    "nvfp4-4over6": recipe.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
    "custom-delayed": recipe.CustomRecipe(mz.custom_recipes.delayed_scaling_factory),
}

IN, OUT, GROUPS = 64, 48, 3
OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}

MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **kw: mz.Linear(IN, OUT, **{**OPTIONS, **kw}),
    "layernorm_linear": lambda **kw: mz.LayerNormLinear(IN, OUT, **{**OPTIONS, **kw}),
    "layernorm_mlp": lambda **kw: mz.LayerNormMLP(
        IN, OUT, **{**OPTIONS, "activation": "swiglu", "normalization": "RMSNorm", **kw}
    ),
    "grouped_linear": lambda **kw: mz.GroupedLinear(GROUPS, IN, OUT, **{**OPTIONS, **kw}),
}
STATE = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


def make(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = MODULES[name](**options)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if "bias" in key or "layer_norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def twins(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    module = make(name, **options)
    return module, copy.deepcopy(module)


def sample(rows: int = 40, seed: int = 0, dtype: torch.dtype = torch.bfloat16, width: int = IN) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def splits(rows: int, groups: int = GROUPS) -> list[int]:
    """Ragged, with an empty group in the middle."""
    first = rows // 3
    return [first, *[0] * (groups - 2), rows - first]


def forward_arguments(module: Any, x: torch.Tensor) -> tuple[Any, ...]:
    module = getattr(module, "_orig_mod", module)
    return (splits(x.shape[0], module.num_gemms),) if isinstance(module, mz.GroupedLinear) else ()


def run(
    module: Any, x: torch.Tensor, chosen: Recipe | None, call: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward under the recipe: the output and the leaf that it was made from."""
    leaf = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    with mz.autocast(enabled=chosen is not None, recipe=chosen):
        y = (module if call is None else call)(leaf, *forward_arguments(module, x), **kwargs)
    return y, leaf


def step(module: Any, x: torch.Tensor, chosen: Recipe | None, call: Any = None, **kwargs: Any) -> dict[str, Any]:
    """Forward and backward: output, gradients by name, and delayed scaling's state."""
    y, leaf = run(module, x, chosen, call, **kwargs)
    gradient(y).backward()
    result = {"output": y.detach(), "input": leaf.grad}
    for name, parameter in module.named_parameters():
        result[name] = None if parameter.grad is None else parameter.grad.clone()
        parameter.grad = None
    result.update({name: getattr(module, name).clone() for name in STATE if hasattr(module, name)})
    return result


def gradient(y: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient has many values."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return (y.float() * weights.to(y.device)).sum()


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        other = expected[name]
        if name in but or (value is None and other is None):
            continue
        assert value is not None, name
        assert (value.dtype, value.shape) == (other.dtype, other.shape), name
        assert torch.equal(value, other), f"{name}: {(value != other).sum()} of {value.numel()} differ"
