"""Chains of operations in every recipe: one whole graph, eager = compiled bit for bit, graphs counted."""

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mezzotint as mz
from mezzotint import ops
from mezzotint import recipe as recipes
from tests.ops.chains import build, extras, step, twins
from tests.recipes import EVERY_RECIPE, RECIPES, VARIANTS, assert_equal, sample

pytestmark = pytest.mark.compile

ROWS = 24
# Every recipe with two chains. `make test` has some of them, beside `test_inductor`, of the same steps and counts.
QUICK = (("mlp", "nvfp4"), ("residual", "mxfp8"), ("experts", "current"), ("mix", "rowwise"))
EVERY = [
    pytest.param(name, recipe, marks=() if (name, recipe) in QUICK else pytest.mark.slow)
    for i, name in enumerate(("mlp", "residual", "experts", "mix"))
    for recipe in list(EVERY_RECIPE)[i % 2 :: 2]
]


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


def check_steps(name: str, recipe: Any, backend: str = "aot_eager") -> Pair:
    pair = Pair(name, backend)
    for seed in range(3):
        pair.check(recipe, seed)
    assert pair.graphs == 1
    return pair


@pytest.mark.parametrize(("name", "recipe"), EVERY)
def test_every_recipe(name: str, recipe: str) -> None:
    """One graph in all steps."""
    check_steps(name, EVERY_RECIPE[recipe])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), [("mlp", "delayed"), ("residual", "mxfp8"), ("mix", "none")])
def test_five_batch_sizes_have_two_graphs(name: str, recipe: str) -> None:
    pair = Pair(name)
    for seed, rows in enumerate((24, 40, 33, 16, 7)):
        pair.check(RECIPES[recipe], seed, rows)
    assert pair.graphs == 2


@pytest.mark.slow
def test_activations() -> None:
    check_steps("activations", RECIPES["delayed"])


@pytest.mark.cover(0)
@pytest.mark.parametrize(
    ("name", "variant"),
    [("mix", "rowwise-wgrad"), ("mlp", "current-high_precision"), ("experts", "mxfp8-dequantized")],
)
def test_variants(name: str, variant: str) -> None:
    check_steps(name, VARIANTS[variant])


@pytest.mark.cover(0)
@pytest.mark.parametrize(("name", "recipe"), [("mlp", "delayed"), ("residual", "nvfp4"), ("experts", "mxfp8")])
def test_inductor(name: str, recipe: str) -> None:
    check_steps(name, RECIPES[recipe], "inductor")


@pytest.mark.slow
def test_five_routings_have_two_graphs() -> None:
    pair = Pair("experts")
    for seed, splits in enumerate(([8, 16], [10, 14], [15, 9], [4, 20], [21, 3])):
        pair.check(RECIPES["delayed"], seed, splits=splits)
    assert pair.graphs == 2


def test_routings_by_a_tensor_have_one_graph() -> None:
    """Sizes that the graph reads itself: no group is known to have rows."""
    pair = Pair("experts")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for seed, splits in enumerate(([8, 16], [10, 14], [0, 24])):
            pair.check(RECIPES["mxfp8"], seed, splits=torch.tensor(splits))
        with pytest.raises(RuntimeError, match=r"assertion failed|must add up"):
            pair.check(RECIPES["mxfp8"], splits=torch.tensor([8, 15]))
    assert pair.graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), [("mlp", "delayed"), ("experts", "current")])
def test_micro_batches_have_two_graphs(name: str, recipe: str) -> None:
    pair = Pair(name)
    linears = [i for i, op in enumerate(pair.module) if isinstance(op, ops.Linear | ops.GroupedLinear)]
    for seed, first in enumerate((True, False, False, True)):
        pair.check(RECIPES[recipe], seed, op_kwargs={place: {"is_first_microbatch": first} for place in linears})
    assert pair.graphs == 2


@pytest.mark.slow
def test_train_eval_train() -> None:
    pair, chosen = Pair("mlp"), RECIPES["delayed"]
    for seed in range(2):
        pair.check(chosen, seed)
        results = []
        for chain, call in ((pair.module, pair.call), (pair.eager, pair.eager)):
            chain.eval()
            with torch.no_grad(), mz.autocast(recipe=chosen):
                results.append({"output": call(sample(ROWS, seed))})
            chain.train()
        assert_equal(*results)
    assert pair.graphs == 2


@pytest.mark.slow
def test_frozen_parameters_are_another_graph() -> None:
    pair = Pair("mlp")
    for frozen, graphs in (((), 1), ((0, 1), 2), ((), 2)):
        for chain in (pair.module, pair.eager):
            for place, op in enumerate(chain):
                op.requires_grad_(place not in frozen)
        pair.check(RECIPES["mxfp8"], input_grad=not frozen)
        assert pair.graphs == graphs


def compiled_alone(op: Any) -> tuple[Any, Any]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(op, fullgraph=True, backend=counter), counter


@pytest.mark.slow
def test_an_equal_recipe_is_no_new_graph_and_another_one_is() -> None:
    op = build("mlp")[1]
    eager = copy.deepcopy(op)
    call, counter = compiled_alone(op)
    for chosen, graphs in (
        (recipes.MXFP8BlockScaling(), 1),
        (recipes.MXFP8BlockScaling(), 1),
        (recipes.Float8CurrentScaling(), 2),
        (recipes.Float8CurrentScaling(use_power_2_scales=True), 3),
        (recipes.Float8CurrentScaling(use_power_2_scales=True), 3),
        (recipes.MXFP8BlockScaling(), 3),
        (None, 4),
    ):
        assert_equal(step(op, sample(ROWS), (), chosen, call), step(eager, sample(ROWS), (), chosen))
        assert counter.frame_count == graphs, chosen


def test_dropout_in_eval_is_another_graph() -> None:
    op = ops.Dropout(0.3)
    eager = copy.deepcopy(op)
    call, counter = compiled_alone(op)
    for seed, is_training in enumerate((True, False, True, False)):
        x = sample(ROWS, seed)
        op.train(is_training), eager.train(is_training)
        got = step(op, x, (), None, call)
        assert_equal(got, step(eager, x))
        assert torch.equal(got["output 0"], x) != is_training
    assert counter.frame_count == 2


@pytest.mark.cover(0)
@pytest.mark.parametrize("place", [1, 0, 2], ids=["Linear", "LayerNorm", "GELU"])
def test_an_operation_alone(place: int) -> None:
    """Compiled by itself, and not as a part of a Sequential."""
    op = build("mlp")[place]
    eager = copy.deepcopy(op)
    call, counter = compiled_alone(op)
    for seed in range(2):
        x = sample(ROWS, seed)
        assert_equal(step(op, x, (), RECIPES["mxfp8"], call), step(eager, x, (), RECIPES["mxfp8"]))
    assert counter.frame_count == 1
