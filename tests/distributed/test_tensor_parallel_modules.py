"""Norms with linears, attention and transformer layers over processes; the loss; amaxes."""

import pytest
import torch

from mezzotint.recipe import QuantizerRole
from tests.distributed.parallel import draw
from tests.distributed.tensor_parallel_modules_world import CHECKS, LAYERS, SLOW_CHECKS
from tests.recipes import RECIPES
from tests.worlds import World, results, shared_world

SIZE = 2
BOUND = 2.0**-6  # as of the linears


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS, SIZE)


@pytest.fixture(scope="module")
def slow_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, SLOW_CHECKS, SIZE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_norms_with_linears(world: World, recipe: str) -> None:
    """Gradients of weights, and a column-parallel output, are bit for bit those of one process."""
    for found in results(world, "norms"):
        cases = {case: made for case, made in found.items() if case.split()[0] == recipe}
        assert len(cases) >= 3
        for case, made in cases.items():
            assert made["wrong"] == [], case
            assert made["sums"] <= BOUND, case


def test_outputs_of_norms(world: World) -> None:
    for found in results(world, "norm_outputs"):
        assert found["wrong"] == []


@pytest.mark.parametrize("kind", LAYERS)
def test_transformer_layer(world: World, kind: str) -> None:
    """In FP32: nothing but the order of sums differs."""
    for found in results(world, "layers"):
        cases = {case: made for case, made in found.items() if case.split()[0] == kind}
        assert cases
        for case, made in cases.items():
            # One code that rounds the other way is 2^-4 of a value; there are 128 in a sum.
            bound = 1e-5 if case.endswith("none") else 0.02
            assert made["parts"] <= bound, case
            assert made["sums"] <= bound, case


def test_a_group_that_is_set_later(world: World) -> None:
    for found in results(world, "set_later"):
        assert found["error"] <= 1e-5


def test_a_compiled_layer(world: World) -> None:
    for found in results(world, "compiled_layer"):
        assert found == {"wrong": [], "graphs": 1}


def test_amaxes_over_a_group(world: World) -> None:
    """Delayed scaling: one collective for all modules, the largest of all processes; and a number, for which modules
    they are."""
    made = results(world, "reductions")
    for found in made:
        assert found["calls"] == {"all_reduce float32": 1, "all_gather_into_tensor int64": 1}
        assert found["calls without"] == {}
        assert found["same everywhere"]
        assert found["same with some"]  # where only one process has tokens
    own = [found["own"] for found in made]
    assert not torch.equal(own[0], own[1])
    assert own[0][:, 1:].all()
    assert torch.equal(made[0]["reduced"], torch.maximum(own[0], own[1]))


def test_gradients_of_all_modules_are_reduced_in_one_collective(world: World) -> None:
    """More where a module's next gradients, or a gradient that it gives on quantized, come before the end; one for each
    backward inside of a reentrant checkpoint's."""
    more = {"regions": 2, "regions of operations": 2, "quantized gradients": 3, "reentrant": 2}
    for found in results(world, "endings"):
        assert found.pop("waiting") == 0
        assert len(found) == 9
        for way, made in found.items():
            assert made == {"wrong": [], "buffers": 12, "calls": [more.get(way, 1), 0]}, way


@pytest.mark.slow
def test_graphs_reduce_in_one_collective(slow_world: World) -> None:
    """One forward and one for all modules backward; in `Parts` two: backward since one gives its gradient on quantized,
    forward since one runs twice, and takes what gradients may have left. Twice as many where there are two regions or,
    backward, two backwards."""
    backwards = {"modules": 1, "parts": 2}
    for found in results(slow_world, "graphs"):
        assert found.pop("waiting") == 0
        assert found.keys() == backwards.keys()
        for way, count in backwards.items():
            calls = {"retained": count + 2 * count, "regions": 2 * count + 2 * count, "gradients": count + count}
            calls["micro_batches"] = calls["regions"]
            assert found[way] == {
                "wrong": [],
                "calls": {schedule: [number, number] for schedule, number in calls.items()},
                "buffers": {"modules": 8, "parts": 16}[way],
                "graphs": 1,
                "breaks": 0,
            }


def test_processes_that_run_different_modules(world: World) -> None:
    """They are told, each of them, before they take each other's amaxes; another order is no difference."""
    made = results(world, "different_modules")
    for found in made:
        for case in ("forward", "backward", "a graph", "more of them"):
            assert "reduces amaxes over ranks, which must be those of the same modules" in found[case], case
            assert "rank 0 has" in found[case]
        assert "the same" not in found
        assert found["dropped"][0] > 1e6
        for scale, other in zip(found["scales"], made[0]["scales"], strict=True):
            assert torch.equal(scale, other)
            assert (scale != 1).any()
    assert [found["planned"] for found in made] == [0, 1]
    assert torch.equal(made[0]["dropped"], made[1]["dropped"])


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_a_split_vocabulary(world: World, smoothing: float, compiles: bool) -> None:
    for found in results(world, "losses"):
        assert found[f"{smoothing} {compiles}"]["error"] <= 1e-6
        assert found[f"{smoothing} {compiles}"]["ignored"] == 0.0


def test_grouped_linear(world: World) -> None:
    for found in results(world, "grouped"):
        assert found["wrong"] == []
        assert found["sums"] <= BOUND


def test_copies_checkpoints_and_quantized_weights(world: World) -> None:
    for found in results(world, "copies"):
        assert found["wrong"] == []
        assert found["sums"] <= BOUND


def test_weights_that_are_kept_quantized(world: World) -> None:
    """As one tensor, in every copy; no graph and no file knows of processes."""
    made = results(world, "kept_weights")
    quantizer = RECIPES["current"].quantizer(QuantizerRole("linear", "weight"))
    whole = quantizer.quantize(draw(64, 64, seed=8))
    for rank, found in enumerate(made):
        assert len(found["splits"]) == 6
        assert all(found["splits"].values())
        for codes, scale in found["codes"].values():
            assert torch.equal(codes, whole._data.chunk(2)[rank])
            assert torch.equal(scale, whole._scale_inv)
        assert found["alone"] == [(), (), ()]
        assert found["context"] == ["fake_dtype", "fp8_dtype", "quantizer"]
        assert found["compiled"] == {"wrong": [], "graphs": 1}
    before, after = zip(*[found["scales"] for found in made], strict=True)
    assert before[0] < before[1]
    assert torch.equal(*after)


def test_stochastic_rounding(world: World) -> None:
    for found in results(world, "stochastic"):
        assert found["y"]
        assert 0.5 < found["dx"] < 1.5
        assert found["dw"] < 1.5  # of the first columns, which the first process has, the numbers are the same


@pytest.mark.slow
def test_numbers_of_tokens_share_a_graph(slow_world: World) -> None:
    for found in results(slow_world, "dynamic"):
        assert found == {"wrong": [], "later graphs": 0}
