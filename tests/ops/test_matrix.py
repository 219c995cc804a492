"""Chains of operations in every recipe: one whole graph, eager = compiled bit for bit, graphs counted."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mezzotint as mz
from mezzotint import ops
from mezzotint import recipe as recipes
from tests.ops.chains import CHAINS, build, extras, step, twins
from tests.recipes import RECIPES, VARIANTS, assert_equal, sample

pytestmark = pytest.mark.compile

over_chains = pytest.mark.parametrize("name", CHAINS)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)
over_some = pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
ROWS = 24


class Pair:
    """A chain and its twin, compiled whole."""

    def __init__(self, name: str, backend: str = "aot_eager", **options: Any) -> None:
        self.name = name
        self.eager, self.module = twins(name)
        self.counter = CompileCounterWithBackend(backend)
        counters.clear()
        self.call = torch.compile(self.module, fullgraph=True, backend=self.counter, **options)

    def check(self, recipe: Any, seed: int = 0, rows: int = ROWS, splits: Any = None, **kwargs: Any) -> None:
        x, extra = sample(rows, seed) * (seed + 1), extras(self.name, rows, seed, splits)
        got = step(self.module, x, extra, recipe, self.call, **kwargs)
        assert_equal(got, step(self.eager, x, extra, recipe, **kwargs))

    @property
    def graphs(self) -> int:
        assert not counters["graph_break"]
        return self.counter.frame_count


def check_steps(name: str, recipe: Any, backend: str) -> None:
    pair = Pair(name, backend)
    for seed in range(3):
        pair.check(recipe, seed)
    assert pair.graphs == 1


@over_recipes
@over_chains
def test_aot_eager(name: str, recipe: str) -> None:
    check_steps(name, RECIPES[recipe], "aot_eager")


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("mlp", "none"), ("mlp", "delayed"), ("residual", "mxfp8"), ("residual", "nvfp4"), ("experts", "current")],
)
def test_inductor(name: str, recipe: str) -> None:
    check_steps(name, RECIPES[recipe], "inductor")


@pytest.mark.parametrize(
    ("name", "variant"),
    [("mlp", "current-high_precision"), ("residual", "rowwise-wgrad"), ("experts", "mxfp8-dequantized")],
)
def test_variants(name: str, variant: str) -> None:
    check_steps(name, VARIANTS[variant], "aot_eager")


@over_some
@over_chains
def test_five_batch_sizes_have_two_graphs(name: str, recipe: str) -> None:
    pair = Pair(name)
    for seed, rows in enumerate((16, 40, 33, 24, 7)):
        pair.check(RECIPES[recipe], seed, rows)
    assert pair.graphs <= 2


@over_some
def test_five_routings_have_two_graphs(recipe: str) -> None:
    pair = Pair("experts")
    for seed, splits in enumerate(([8, 4, 12], [10, 6, 8], [15, 5, 4], [4, 18, 2], [9, 5, 10])):
        pair.check(RECIPES[recipe], seed, splits=splits)
    assert pair.graphs <= 2


@over_some
def test_routings_by_a_tensor_have_one_graph(recipe: str) -> None:
    """Sizes that the graph reads itself."""
    pair = Pair("experts")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for seed, splits in enumerate(([8, 4, 12], [10, 0, 14], [0, 0, 24])):
            pair.check(RECIPES[recipe], seed, splits=torch.tensor(splits))
    assert pair.graphs == 1


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "nvfp4"])
@pytest.mark.parametrize("name", ["mlp", "experts"])
def test_micro_batches_have_two_graphs(name: str, recipe: str) -> None:
    pair = Pair(name)
    linears = [i for i, op in enumerate(pair.module) if isinstance(op, ops.Linear | ops.GroupedLinear)]
    for seed, first in enumerate((True, False, False, True)):
        op_kwargs = {place: {"is_first_microbatch": first} for place in linears}
        pair.check(RECIPES[recipe], seed, op_kwargs=op_kwargs)
    # Without a recipe nothing is kept, but the flag is an argument of the graph's function: two values are two graphs.
    assert pair.graphs == 2


@over_some
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_train_eval_train(name: str, recipe: str) -> None:
    pair, chosen = Pair(name), RECIPES[recipe]
    for seed in range(2):
        pair.check(chosen, seed)
        x, extra = sample(ROWS, seed), extras(name, ROWS, seed)
        results = []
        for chain, call in ((pair.module, pair.call), (pair.eager, pair.eager)):
            chain.eval()
            given = [e.clone() if isinstance(e, torch.Tensor) else e for e in extra]
            with torch.no_grad(), mz.autocast(enabled=chosen is not None, recipe=chosen):
                made = call(x, *given)
            results.append(dict(enumerate(made if isinstance(made, tuple) else (made,))))
            chain.train()
        assert_equal(*results)
    assert pair.graphs <= 3


def test_dropout_in_eval_is_another_graph() -> None:
    pair = Pair("mix")
    for seed in range(2):
        pair.check(RECIPES["mxfp8"], seed)
        pair.eager.eval(), pair.module.eval()
        pair.check(RECIPES["mxfp8"], seed)
        pair.eager.train(), pair.module.train()
    assert pair.graphs == 2


def test_an_equal_recipe_is_no_new_graph_and_another_one_is() -> None:
    pair = Pair("mlp")
    for chosen, graphs in (
        (recipes.MXFP8BlockScaling(), 1),
        (recipes.MXFP8BlockScaling(), 1),
        (recipes.Float8CurrentScaling(), 2),
        (recipes.Float8CurrentScaling(use_power_2_scales=True), 3),
        (recipes.Float8CurrentScaling(use_power_2_scales=True), 3),
        (recipes.MXFP8BlockScaling(), 3),
        (None, 4),
    ):
        pair.check(chosen)
        assert pair.graphs == graphs, chosen


def test_frozen_parameters_are_another_graph() -> None:
    pair = Pair("residual")
    for frozen, graphs in (((), 1), ((1, 2), 2), ((), 2)):
        for chain in (pair.module, pair.eager):
            for place, op in enumerate(chain):
                op.requires_grad_(place not in frozen)
        pair.check(RECIPES["mxfp8"])
        assert pair.graphs <= graphs


@over_some
def test_an_input_without_gradient(recipe: str) -> None:
    pair = Pair("mlp")
    for seed in range(2):
        pair.check(RECIPES[recipe], seed, input_grad=False)
    assert pair.graphs == 1


def test_an_operation_alone() -> None:
    """Compiled by itself."""
    for make in (ops.SwiGLU, lambda: build("mlp")[0], lambda: build("mlp")[1]):
        torch._dynamo.reset()
        op = make()
        counter = CompileCounterWithBackend("aot_eager")
        call = torch.compile(op, fullgraph=True, backend=counter)
        for seed in range(2):
            x = sample(ROWS, seed)
            got = step(op, x, (), RECIPES["mxfp8"], call)
            assert_equal(got, step(op, x, (), RECIPES["mxfp8"]))
        assert counter.frame_count == 1
