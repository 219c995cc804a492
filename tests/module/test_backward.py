"""Backward twice, backward elsewhere, recomputation: always with what forward had."""

from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from tests.recipes import MODULES, RECIPES, STATE, assert_equal, forward_arguments, gradient, make, run, sample, step

over_modules = pytest.mark.parametrize("name", MODULES)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)


def gradients(module: Any, leaf: torch.Tensor) -> dict[str, Any]:
    result: dict[str, Any] = {"input": leaf.grad}
    leaf.grad = None
    for name, parameter in module.named_parameters():
        result[name] = parameter.grad
        parameter.grad = None
    return result


@over_recipes
@over_modules
def test_second_backward(name: str, recipe: str) -> None:
    module = make(name)
    for seed in range(2):
        y, leaf = run(module, sample(seed=seed), RECIPES[recipe])
        loss = gradient(y)
        torch.manual_seed(3)
        loss.backward(retain_graph=True)
        first = gradients(module, leaf)
        torch.manual_seed(3)
        loss.backward()
        assert_equal(gradients(module, leaf), first)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@over_recipes
@over_modules
def test_backward_under_another_recipe(name: str, recipe: str) -> None:
    """What backward does was decided in forward."""
    module, twin = make(name), make(name)
    x = sample()
    expected = step(twin, x, RECIPES[recipe])
    y, leaf = run(module, x, RECIPES[recipe])
    with mz.autocast(recipe=mz.recipe.NVFP4BlockScaling()):
        gradient(y).backward()
    got = gradients(module, leaf)
    assert_equal(got, {key: expected[key] for key in got})


@pytest.mark.cover(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
@over_recipes
@over_modules
def test_checkpoint(name: str, recipe: str, use_reentrant: bool) -> None:
    """The recomputation, outside of autocast, uses the recipe and the scales of the first run, and counts nothing."""
    module, twin = make(name), make(name)
    for seed in range(3):
        x = sample(seed=seed)
        expected = step(twin, x, RECIPES[recipe])

        def call(x: torch.Tensor, *args: Any) -> Any:
            return mz.checkpoint(module, x, *args, use_reentrant=use_reentrant)

        assert_equal(step(module, x, RECIPES[recipe], call), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_of_two_modules_with_cached_weights(use_reentrant: bool) -> None:
    recipe = RECIPES["delayed"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make("layernorm_mlp"), make("linear")

        def forward(self, x: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
            hidden = self.first(x, is_first_microbatch=is_first_microbatch)
            return self.second(hidden, is_first_microbatch=is_first_microbatch)

    block, twin = Block(), Block()
    for seed, first in enumerate((True, False, True)):
        x = sample(seed=seed)
        expected = step(twin, x, recipe, is_first_microbatch=first)

        def call(x: torch.Tensor, is_first_microbatch: bool) -> Any:
            return mz.checkpoint(block, x, is_first_microbatch, use_reentrant=use_reentrant)

        assert_equal(step(block, x, recipe, call, is_first_microbatch=first), expected)
        for part in ("first", "second"):
            for key in STATE:
                assert torch.equal(getattr(getattr(block, part), key), getattr(getattr(twin, part), key))


@pytest.mark.parametrize("length", [1024, 3], ids=["all rows", "some rows"])
@over_modules
def test_interleaved_micro_batches(name: str, length: int) -> None:
    """Two forwards, then two backwards, as a pipeline runs them; in a graph with the scales of forward, too."""
    module, twin, recipe = make(name), make(name), mz.recipe.DelayedScaling(amax_history_len=length)
    graph = torch.compile(module, fullgraph=True, backend="aot_eager")
    for step_number in range(3):
        found = []
        for each, call in ((twin, twin), (module, graph)):
            outputs = [run(each, sample(seed=2 * step_number + i), recipe, call) for i in range(2)]
            for i, (y, _) in enumerate(outputs):
                (gradient(y) * (1 + 3 * i + step_number)).backward()
            found.append({key: getattr(each, key).clone() for key in STATE})
            for i, (_, leaf) in enumerate(outputs):
                found[-1][f"input {i}"] = leaf.grad
            found[-1].update({key: parameter.grad for key, parameter in each.named_parameters()})
        assert_equal(found[1], found[0])


@pytest.mark.parametrize("name", ["linear", "layernorm_linear", "layernorm_mlp"])
@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_frozen_parameters(name: str, recipe: str) -> None:
    """What needs no gradient gets none, and changes none of the others."""
    expected = step(make(name), sample(), RECIPES[recipe])
    for frozen in [key for key, _ in make(name).named_parameters()]:
        module = make(name)
        getattr(module, frozen).requires_grad_(False)
        got = step(module, sample(), RECIPES[recipe])
        assert got[frozen] is None
        assert_equal(got, expected, but=(frozen, *STATE))
    module = make(name)
    module.requires_grad_(False)
    x = sample()
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = module(x)
        assert not y.requires_grad
        assert torch.equal(y, expected["output"])


@over_recipes
@over_modules
def test_without_gradients(name: str, recipe: str) -> None:
    expected = step(make(name), sample(), RECIPES[recipe])["output"]
    module, x = make(name), sample()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            y = module(x, *forward_arguments(module, x))
        assert not y.requires_grad
        assert torch.equal(y, expected)
