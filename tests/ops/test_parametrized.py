"""Operations whose parameters are computed of others: gradients go through what computes them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import mezzotint as mz
from mezzotint import ops
from tests.recipes import RECIPES, gradient

WIDTH = 32


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def old_weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(module)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "twice": lambda module: parametrize.register_parametrization(module, "weight", Twice()),
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": old_weight_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["none", "current"])
def test_linear(way: str, recipe: str) -> None:
    """As the module, which has its weight computed by the same."""
    torch.manual_seed(0)
    module = mz.Linear(WIDTH, WIDTH, bias=False, device="cpu")
    operation = ops.BasicLinear(WIDTH, WIDTH, device="cpu")
    operation.load_state_dict(module.state_dict())
    x = torch.randn(16, WIDTH)
    outputs = []
    for linear in (module, operation):
        WAYS[way](linear)
        with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            outputs.append(linear(x))
        gradient(outputs[-1]).backward()
    assert torch.equal(*outputs)
    expected = dict(module.named_parameters())
    assert [name for name, _ in operation.named_parameters()] == [*expected]
    for name, parameter in operation.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name].grad), name


def test_norm_and_bias_in_a_pipeline() -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    made = ops.Sequential(ops.LayerNorm(WIDTH, device="cpu"), ops.Linear(WIDTH, WIDTH, device="cpu"))
    linear, bias = made[1].basic_ops
    made[0].load_state_dict(theirs[0].state_dict())
    linear.load_state_dict({"weight": theirs[1].weight})
    bias.load_state_dict({"bias": theirs[1].bias})
    pairs = [(made[0], theirs[0], "bias"), (linear, theirs[1], "weight"), (bias, theirs[1], "bias")]
    for operation, module, name in pairs:
        for each in (operation, module):
            parametrize.register_parametrization(each, name, Twice())
    x = torch.randn(8, WIDTH)
    for model in (made, theirs):
        gradient(model(x)).backward()
    for operation, module, name in pairs:
        ours, its = (each.parametrizations[name].original.grad for each in (operation, module))  # type: ignore[union-attr, index]
        torch.testing.assert_close(ours, its)
    torch.testing.assert_close(made[0].weight.grad, theirs[0].weight.grad)


def test_an_operation_that_cannot_tell() -> None:
    operation = ops.GroupedLinear(2, WIDTH, WIDTH, device="cpu")
    parametrize.register_parametrization(operation, "weight0", Twice())
    with pytest.raises(ValueError, match="is parametrized"):
        operation(torch.randn(4, WIDTH), torch.tensor([2, 2]))
