"""Backward uses what forward used: attributes and parameters that are set anew in between change nothing.

Every plain attribute of every module is changed at once; what backward reads of a module would be wrong or raise.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import ops
from mezzotint.ops.basic import collectives
from tests.ops import chains
from tests.recipes import GROUPS, RECIPES, assert_equal, gradient, make, sample, splits

_OF_TORCH = {*vars(nn.Module()), *vars(nn.Module)} - {"training"}
_PARAMETERS = {"_weight_names", "_bias_names", "_order"}  # which there are


def other(value: Any) -> Any:
    """Another value of the same kind; the value itself where it is no plain one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 0.3 * value + 0.1
    if isinstance(value, str):
        return f"{value}?"
    if isinstance(value, torch.dtype):
        return torch.float16
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, tuple) and all(isinstance(item, bool | int | float | str) for item in value):
        return (*[other(item) for item in value], 1)
    return object() if value is None else value


def change(model: nn.Module) -> set[str]:
    """Set every plain attribute, of the object or of its class, and every parameter anew. Names of what was set."""
    names = set()
    for module in model.modules():
        classes = [vars(base) for base in type(module).__mro__ if base.__module__.startswith("mezzotint.")]
        values = {name: value for held in (*classes[::-1], vars(module)) for name, value in held.items()}
        for name, value in values.items():
            if name not in _OF_TORCH | _PARAMETERS and not name.startswith("__") and other(value) is not value:
                module.__dict__[name] = other(value)
                names.add(name)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=torch.float64))
                names.add(name)
    return names


def step(model: Any, changes: bool, inputs: tuple[Any, ...], recipe: str) -> tuple[dict[str, Any], set[str]]:
    """Output, gradients by name, what delayed scaling has learnt; and what was changed before backward."""
    model = copy.deepcopy(model)
    leaves = [value.detach().clone().requires_grad_() if isinstance(value, torch.Tensor) else value for value in inputs]
    parameters = dict(model.named_parameters())
    chains.seed(1)
    with mz.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        made = model(*leaves)
    made = made if isinstance(made, tuple) else (made,)
    names = change(model) if changes else set()
    torch.stack([gradient(y) for y in made]).sum().backward()
    result = {f"output {i}": chains.plain(y).detach() for i, y in enumerate(made)}
    result |= {f"input {i}": leaf.grad for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    result |= {name: parameter.grad for name, parameter in parameters.items()}
    result |= {name: getattr(parameter, "main_grad", None) for name, parameter in parameters.items()}
    result |= dict(model.named_buffers())
    return result, names


def check(model: Any, inputs: tuple[Any, ...], recipe: str) -> set[str]:
    expected, _ = step(model, False, inputs, recipe)
    got, names = step(model, True, inputs, recipe)
    assert_equal(got, expected)
    return names


OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
NORM = (4, 16)
OPERATIONS: dict[str, Callable[[], ops.Sequential]] = {
    "shapes": lambda: ops.Sequential(
        ops.Reshape((-1, *NORM)),
        ops.LayerNorm(NORM, zero_centered_gamma=True, **OPTIONS),
        ops.Reshape((-1, 64)),
        ops.RMSNorm(64, zero_centered_gamma=True, **OPTIONS),
        ops.L2Normalization(eps=0.1),
        ops.Quantize(True, True),
    ),
    "scaled bias": lambda: ops.Sequential(ops.GroupedLinear(2, 64, 32, scale_bias=True, **OPTIONS)),
    "scale and sum": lambda: ops.Sequential(
        ops.BasicLinear(64, 32, **OPTIONS), ops.ConstantScale(0.5), ops.AddExtraInput()
    ),
}


@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
@pytest.mark.parametrize("name", [*chains.CHAINS, *OPERATIONS])
def test_operations(name: str, recipe: str) -> None:
    if name in chains.CHAINS:
        model, x = chains.build(name), sample(8)
        inputs: tuple[Any, ...] = (x, *chains.extras(name, 8))
    else:
        model = chains.spread(OPERATIONS[name]())
        more = {"scaled bias": ([3, 5], torch.rand(8)), "scale and sum": (sample(8, width=32),)}
        inputs = (sample(8), *more.get(name, ()))
    names = check(model, inputs, recipe)
    wanted = {
        "mlp": {"eps", "activation", "params", "zero_centered_gamma", "normalized_shape", "weight", "bias"},
        "experts": {"num_groups", "scale_bias", "fuse_wgrad_accumulation", "glu_interleave_size", "weight0"},
        "activations": {"dropout_probability", "scale", "params", "cache_quantized_input", "training"},
    }
    assert wanted.get(name, set()) <= names


@pytest.mark.parametrize("cls", [ops.AllGather, ops.ReduceScatter, ops.AllReduce])
def test_collectives(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []

    def collective(x: torch.Tensor, group: Any) -> torch.Tensor:
        groups.append(group)
        return x * 2

    for name in ("all_gather", "all_reduce", "reduce_scatter"):
        monkeypatch.setattr(collectives, name, collective)
    op, x = cls(), sample(8).requires_grad_()
    y = op(x)
    change(op)
    y.sum().backward()
    assert groups == [None, None]
    assert x.grad is not None


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: make("linear"),
    "fused accumulation": lambda: with_main_grads(make("linear", fuse_wgrad_accumulation=True)),
    "layernorm_linear": lambda: make("layernorm_linear", zero_centered_gamma=True),
    "layernorm_mlp": lambda: make("layernorm_mlp"),
    "recomputed MLP": lambda: make("layernorm_mlp", checkpoint=True),
    "grouped_linear": lambda: make("grouped_linear"),
    "LayerNorm": lambda: mz.LayerNorm(64, zero_centered_gamma=True, device="cpu"),
    "RMSNorm": lambda: mz.RMSNorm(64, eps=0.1, device="cpu"),
}


def with_main_grads(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, recipe: str) -> None:
    model = MODULES[name]()
    inputs = (sample(8), splits(8, GROUPS)) if name == "grouped_linear" else (sample(8),)
    assert {"training"} <= check(model, inputs, recipe)


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_transformer_layer(recipe: str) -> None:
    torch.manual_seed(0)
    model = mz.TransformerLayer(
        64, 128, 4, hidden_dropout=0.1, attention_dropout=0.0, params_dtype=torch.bfloat16, device="cpu"
    )
    assert {"hidden_dropout", "attention_dropout", "eps"} <= check(model, (sample(8).view(4, 2, 64),), recipe)
