"""Runs without a backward of their own, and runs inside of another backward: torch's checkpoint around our modules."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mezzotint as mz
from mezzotint import ops
from tests.recipes import IN, OPTIONS, RECIPES, assert_equal, gradient, make, sample

DELAYED = RECIPES["delayed"]


def chain() -> nn.Module:
    torch.manual_seed(0)
    made = (ops.RMSNorm(IN), ops.Linear(IN, 2 * IN), ops.SwiGLU(), ops.Linear(IN, IN))
    return ops.Sequential(*made).to("cpu", torch.bfloat16)


MAKERS: dict[str, Callable[[], nn.Module]] = {"layernorm_mlp": lambda: make("layernorm_mlp"), "ops": chain}
over_makers = pytest.mark.parametrize("maker", MAKERS)
over_ways = pytest.mark.parametrize("use_reentrant", [True, False])


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers() if "scale" in name or "amax" in name}


def train(module: nn.Module, before: Callable[[torch.Tensor], Any] | None, call: Any = None) -> dict[str, Any]:
    """Two steps of delayed scaling; in each, `before` runs first in the region, on the input."""
    found: dict[str, Any] = {}
    for step in range(2):
        x = sample(seed=step).requires_grad_()
        with mz.autocast(recipe=DELAYED):
            if before is not None:
                before(x)
            y = (module if call is None else call)(x)
        gradient(y).backward()
        found.update({f"output {step}": y.detach(), f"input {step}": x.grad})
    found.update({name: parameter.grad for name, parameter in module.named_parameters()})
    return found | state_of(module)


@over_makers
@pytest.mark.parametrize("how", ["no_grad", "frozen", "checkpoint without gradients"])
def test_a_run_without_backward_comes_first(maker: str, how: str) -> None:
    """The scales of gradients follow from the backward of the other run."""
    module = MAKERS[maker]()
    expected = train(copy.deepcopy(module), None)

    def before(x: torch.Tensor) -> None:
        if how == "frozen":
            module.requires_grad_(False)
            module(x.detach())
            module.requires_grad_()
            return
        with torch.no_grad():
            module(x) if how == "no_grad" else mz.checkpoint(module, x)

    assert_equal(train(module, before), expected)


@over_makers
@over_ways
def test_our_checkpoint_after_a_run_without_gradients(maker: str, use_reentrant: bool) -> None:
    module = MAKERS[maker]()
    expected = train(copy.deepcopy(module), None)
    with_checkpoint = lambda x: mz.checkpoint(module, x, use_reentrant=use_reentrant)  # noqa: E731
    assert_equal(train(module, torch.no_grad()(module.forward), with_checkpoint), expected)


@over_makers
@over_ways
@pytest.mark.parametrize("recipe", ["none", "delayed", "nvfp4"])
def test_torchs_checkpoint_with_backward_in_the_region(maker: str, recipe: str, use_reentrant: bool) -> None:
    module, chosen = MAKERS[maker](), RECIPES[recipe]

    def run(module: nn.Module, checkpoints: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for step in range(2):
            torch.manual_seed(step)
            x = sample(seed=step).requires_grad_()
            with mz.autocast(enabled=chosen is not None, recipe=chosen):
                y = checkpoint(module, x, use_reentrant=use_reentrant) if checkpoints else module(x)
                gradient(y).backward()
            found.update({f"output {step}": y.detach(), f"input {step}": x.grad})
        found.update({name: parameter.grad for name, parameter in module.named_parameters()})
        return found | state_of(module)

    assert_equal(run(copy.deepcopy(module), True), run(module, False))


@over_makers
@over_ways
def test_torchs_checkpoint_of_delayed_scaling_with_backward_outside(maker: str, use_reentrant: bool) -> None:
    """The scales of the first run are gone. A run that was in high precision is none of this."""
    module, x = MAKERS[maker](), sample().requires_grad_()
    with mz.autocast(recipe=RECIPES["delayed"]):
        y = checkpoint(module, x, use_reentrant=use_reentrant)
    with pytest.raises(RuntimeError, match=r"mezzotint\.checkpoint"):
        gradient(y).backward()
    gradient(checkpoint(module, x, use_reentrant=use_reentrant)).backward()
    with mz.autocast(recipe=RECIPES["delayed"]):
        y = mz.checkpoint(module, x, use_reentrant=use_reentrant)
    gradient(y).backward()


@over_makers
@over_ways
def test_torchs_checkpoint_with_backward_outside(maker: str, use_reentrant: bool) -> None:
    """It computes again with the recipe of the module's run before."""
    module = MAKERS[maker]()

    def run(checkpoints: bool) -> dict[str, torch.Tensor]:
        x = sample().requires_grad_()
        module.zero_grad()
        with mz.autocast(recipe=RECIPES["current"]):
            y = checkpoint(module, x, use_reentrant=use_reentrant) if checkpoints else module(x)
        gradient(y).backward()
        grads = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        return {"output": y.detach(), "input": x.grad, **grads}

    expected = run(False)
    gradient(module(sample().requires_grad_())).backward()  # in high precision
    assert_equal(run(True), expected)


def test_a_forward_of_the_users_in_backward() -> None:
    """In a region that says so it computes in high precision."""
    linear = mz.Linear(IN, IN, **OPTIONS)
    seen = []

    def hook(grad: torch.Tensor) -> None:
        with mz.autocast(enabled=False), torch.no_grad():
            seen.append(linear(grad))

    x = sample().requires_grad_()
    with mz.autocast(recipe=RECIPES["current"]):
        y = linear(x)
    y.register_hook(hook)
    y.sum().backward()
    assert torch.equal(seen[0], linear(torch.ones_like(y)))


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("maker", ["linear", "transformer_layer"])
def test_a_checkpoint_of_micro_batches_in_a_graph(maker: str) -> None:
    """Nothing is kept there: a graph writes no attribute inside of a checkpoint. What an earlier step has kept outside
    of the graph is not read either: a second micro-batch has the weights of now."""
    torch.manual_seed(0)
    module = mz.Linear(32, 32) if maker == "linear" else mz.TransformerLayer(32, 64, 2, hidden_dropout=0.0)
    x = sample(16, width=32, dtype=torch.float32).reshape(8, 2, 32)
    with mz.autocast(recipe=RECIPES["current"]):
        module(x, is_first_microbatch=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0)

    def run(is_first_microbatch: bool, x: torch.Tensor) -> torch.Tensor:
        return mz.checkpoint(module, x, is_first_microbatch=is_first_microbatch, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for is_first_microbatch in (True, False):
        found = []
        for function in (compiled, lambda _, x: module(x)):
            module.zero_grad()
            torch.manual_seed(1)
            with mz.autocast(recipe=RECIPES["current"]):
                y = function(is_first_microbatch, x)
            gradient(y).backward()
            found.append({"y": y.detach(), **{name: each.grad for name, each in module.named_parameters()}})
        assert_equal(*found)


@over_ways
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_recomputation_keeps_no_weights(recipe: str, use_reentrant: bool) -> None:
    """Those of the first run stay, and so what later micro-batches are computed with."""
    module = make("linear")
    with mz.autocast(recipe=RECIPES[recipe]):
        y = mz.checkpoint(module, sample().requires_grad_(), is_first_microbatch=True, use_reentrant=use_reentrant)
    kept, scales = module._workspaces, module._weight_scales
    assert kept is not None
    gradient(y).backward()
    assert module._workspaces is kept
    assert module._weight_scales is scales


DROPPED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "dropped": lambda module, x: module(x),
    "detached": lambda module, x: module(x).detach(),
    "checkpoint": lambda module, x: mz.checkpoint(module, x, use_reentrant=False),
}


def small_gradients(module: Any, before: Any, backend: str | None = None) -> dict[str, Any]:
    """Steps whose gradients are 0 in FP8 with a scale of 1. In each region `before` gives what has no backward."""

    def run(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        with mz.autocast(recipe=DELAYED):
            return before(module, x), module(x)

    call = run if backend is None else torch.compile(run, fullgraph=True, backend=backend)
    for step in range(4):
        x = sample(seed=step).requires_grad_()
        other, y = call(x)
        module.zero_grad()
        (gradient(y) * 1e-6).backward()
        del other
    assert x.grad is not None
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"input": x.grad, **grads, **state_of(module)}


@over_makers
@pytest.mark.parametrize("how", DROPPED)
def test_a_run_whose_backward_never_comes(maker: str, how: str) -> None:
    """Whether its output is kept or not: the scales of gradients follow from the run that has a backward."""
    got = small_gradients(MAKERS[maker](), DROPPED[how])
    assert got["input"].any()
    scales = [value for name, value in got.items() if name.endswith("scale_bwd")]
    assert scales
    assert all((scale > 1).any() for scale in scales)


@pytest.mark.compile
@pytest.mark.parametrize("how", ["dropped", "detached"])
def test_a_run_whose_backward_never_comes_in_a_graph(how: str) -> None:
    eager, traced = make("linear"), make("linear")
    got = small_gradients(traced, DROPPED[how], "aot_eager")
    assert (got["scale_bwd"] != 1).any()
    assert got["input"].any()
    if how == "detached":  # else a graph has a backward of the other output, too, of zeros
        assert_equal(got, small_gradients(eager, DROPPED[how]))


def test_a_run_whose_backward_never_comes_and_a_rule_of_the_users() -> None:
    """Which is asked only where gradients were seen: it would roll an empty history."""
    asked: list[int] = []

    def rule(history: torch.Tensor) -> torch.Tensor:
        asked.append(history.shape[1])
        return history.amax(0)

    module = make("linear")
    recipe = mz.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=rule)
    for _ in range(3):
        with mz.autocast(recipe=recipe):
            module(sample())
            y = module(sample())
        (gradient(y) * 1e-6).backward()
    assert asked.count(2) == 2
    assert module.scale_bwd[0] > 1e6


def test_runs_with_a_backward_each_in_one_region_take_their_scales() -> None:
    """As gradient accumulation inside of one region: each micro-batch finds what those before it have seen."""
    module = make("linear")
    with mz.autocast(recipe=DELAYED):
        for i in range(3):
            (gradient(module(sample())) * 2.0**-i).backward()
    now, oldest, *past = module.amax_history_bwd[:4, 0].tolist()
    assert now > 0
    assert [oldest, *past] == [0.0, 4 * now, 2 * now]


def test_a_recomputation_leaves_a_history_of_another_length() -> None:
    """A run with a longer history came between a checkpoint's two runs."""
    module, x = make("linear"), sample().requires_grad_()
    with mz.autocast(recipe=mz.recipe.DelayedScaling(amax_history_len=4)):
        first = mz.checkpoint(module, x, use_reentrant=False)
    with mz.autocast(recipe=mz.recipe.DelayedScaling(amax_history_len=16)):
        second = module(x)
    before = module.amax_history_fwd.clone()
    assert before[15, 0] != 0
    (gradient(first) + gradient(second)).backward()
    assert torch.equal(module.amax_history_fwd, before)
