"""Norms with linears, attention and transformer layers over processes; the loss; maxima; wrong use, on every rank."""

import pytest
import torch

from mezzotint.recipe import QuantizerRole
from tests.distributed.parallel import draw
from tests.distributed.tensor_parallel_modules_world import CHECKS, LAYERS
from tests.recipes import RECIPES
from tests.worlds import World, results, shared_world

SIZE = 2
BOUND = 2.0**-6  # as of the linears


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS, SIZE)


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


def test_maxima_over_a_group(world: World) -> None:
    """Delayed scaling: one collective for all modules, the largest of all processes; and two numbers, for the recipe
    and for which modules they are."""
    made = results(world, "reductions")
    for found in made:
        assert found["calls"] == {"all_reduce float32": 1, "all_gather_into_tensor int64": 2}
        assert found["calls without"] == {"all_gather_into_tensor int64": 1}  # the group has had the other recipe
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


def test_graphs_reduce_in_one_collective(world: World) -> None:
    """One forward and one for all modules backward; in `Parts` two: backward since one gives its gradient on quantized,
    forward since one runs twice, and takes what gradients may have left. Twice as many where there are two regions or,
    backward, two backwards."""
    backwards = {"modules": 1, "parts": 2}
    for found in results(world, "graphs"):
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
    """They are told, each of them, before they take each other's maxima; another order is no difference."""
    made = results(world, "different_modules")
    for found in made:
        for case in ("forward", "backward", "a graph", "more of them"):
            assert "takes its maxima over processes, of the same modules on all of them" in found[case], case
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
        assert found["context"] == ["class", "dtype", "fp8_dtype", "quantizer"]
        assert found["compiled"] == {"wrong": [], "graphs": 1}
    before, after = zip(*[found["scales"] for found in made], strict=True)
    assert before[0] < before[1]
    assert torch.equal(*after)


def test_stochastic_rounding(world: World) -> None:
    for found in results(world, "stochastic"):
        assert found["y"]
        assert 0.5 < found["dx"] < 1.5
        assert found["dw"] < 1.5  # of the first columns, which the first process has, the numbers are the same


def test_numbers_of_tokens_share_a_graph(world: World) -> None:
    for found in results(world, "dynamic"):
        assert found == {"wrong": [], "later graphs": 0}


CHANGED = {
    "to a new one": "Float8BlockScaling",
    "to one of before": "MXFP8BlockScaling",
    "to none": "Float8BlockScaling",
    "from none": "None; rank 1 has Float8CurrentScaling",
    "other tokens": "(16, 64) of torch.bfloat16; rank 1 has (32, 64)",
    "in a region inside": "Float8CurrentScaling",
    "maxima": "DelayedScaling",
}
CHANGED_IN_GRAPHS = {
    "to a new one": "MXFP8BlockScaling",
    "to one of before": "MXFP8BlockScaling",
    "to none": "Float8CurrentScaling",
    "from none": "None; rank 1 has Float8CurrentScaling",
    "to no region": "Float8CurrentScaling",
    "from no region": "None; rank 1 has Float8CurrentScaling",
    "in a region inside": "Float8CurrentScaling",
    "without gradients": "Float8CurrentScaling",
    "other tokens": "(16, 64) of torch.bfloat16; rank 1 has (32, 64)",
    "in the graph": "MXFP8BlockScaling",
    "in the second region": "MXFP8BlockScaling",
    "maxima": "MXFP8BlockScaling",
}


def test_a_recipe_that_changes_on_one_process_only(world: World) -> None:
    """All find it in a collective that they all take part in, ask what each has, and can go on."""
    for found in results(world, "changes"):
        assert found["wrong"] == []
        check_found(found["errors"], CHANGED)
        assert found["asked"] == (10, 2)  # for what differs 6 and 1, for what is new 4 and 1


def check_found(errors: dict[str, str], messages: dict[str, str]) -> None:
    assert errors.keys() == messages.keys()
    for case, message in messages.items():
        assert f"is not the same on the 2 processes of the group: rank 0 has {message}" in errors[case], case


def test_recipes_that_change_in_graphs(world: World) -> None:
    """A graph compares when it runs: what one process changes alone both find, in any region, and can go on. Nothing is
    asked while it is traced: one may compile again alone, or export, or cut a model into other graphs."""
    for rank, found in enumerate(results(world, "compiled_changes")):
        check_found(found.pop("errors"), CHANGED_IN_GRAPHS)
        if rank == 1:
            said = (
                "rank 1 of the 2 processes of the group has asked alone, rank 0 did not: recipe is Float8BlockScaling("
            )
            assert said in found.pop("alone")
        known = {"wrong": [], "asked": 0, "graphs": 0}
        assert found == {
            **{f"traced {i}": {**known, "graphs": 1, "asked": 0 if i else 2} for i in range(3)},  # of each module
            **{f"again {i}": known for i in range(3)},
            "goes on": known,
            "the second compiles again": {**known, "graphs": rank},
            "moved": known,
            "eager": known,
            "the second is eager": [],
            "not alone": "accepted",
            "apart": [],
        }


def test_a_step_compares_once(world: World) -> None:
    """In graphs as in eager code: in each region once for each run of the module that comes first. What a checkpoint
    computes again compares again in eager code alone."""
    same = {
        "model": [0, 1, 1],  # the first run asks
        "twice": [2, 2, 2],
        "checkpoint": [0, 1, 1],
        "regions": [2, 2, 2],
        "bare model": [1, 1, 1],
        "bare twice": [2, 2, 2],
        "bare checkpoint": [1, 1, 1],
        "bare regions": [2, 2, 2],
        "without gradients": [1, 1, 1],
    }
    for found in results(world, "comparisons"):
        assert found == {
            "None": {**same, "recomputed": [2, 2, 2]},
            "inductor": {**same, "recomputed": [1, 1, 1]},
        }


REFUSED = {
    "size": "tp_size is 3, tp_group has 2 processes",
    "no group": "tp_size is 2 and there is no group: give tp_group, or call set_tensor_parallel_group",
    "group set": "tp_group has 1 processes, the module was made for tp_size=2",
    "layer group": "tp_group has 1 processes, the module was made for tp_size=2",
    "features": "out_features is 65: it must be divisible by the 2 processes",
    "heads": "num_attention_heads is 1: it must be divisible by the 2 processes",
    "tokens": "inp has shape (3, 16): sequence_parallel gives each of 2 processes a part of the first dimension",
    "no tokens": "inp has shape (16,): sequence_parallel needs",
    "uneven": "inp is not the same on the 2 processes of the group: rank 0 has (4, 32)",
    "dtypes": "rank 0 has (4, 32) of torch.float32; rank 1 has (4, 32) of torch.bfloat16",
    "recipes": "recipe is not the same on the 2 processes of the group: rank 0 has Float8CurrentScaling",
    "recipe changes": "recipe is not the same on the 2 processes of the group: rank 0 has Float8CurrentScaling",
    "one without": "recipe is not the same on the 2 processes of the group: rank 0 has",
    "maxima": "recipe is not the same on the 2 processes of the group: rank 0 has DelayedScaling(",
    "maxima, one without": "recipe is not the same on the 2 processes of the group: rank 0 has DelayedScaling(",
    "operations": "recipe is not the same on the 2 processes of the group: rank 0 has Float8CurrentScaling",
    "ops": "in_features is 31: it must be divisible by the 2 processes",
    "chained": "columnwise_source is 'rowwise_dequantized'",
    "kept otherwise": "the quantizer of weight is not the same on the 2 processes of the group: rank 0 has Float8Curr",
    "kept by one": "is not the same on the 2 processes of the group: rank 0 has",
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_refused_on_every_rank(world: World, case: str) -> None:
    for found in results(world, "wrong_use"):
        assert found.keys() == REFUSED.keys()
        assert REFUSED[case] in found[case]


MIXED = "recipe is not the same on the 2 processes of the group: rank 0 has"
REFUSED_IN_GRAPHS = {
    "no group": REFUSED["no group"],
    "tokens": REFUSED["tokens"],
    "uneven": REFUSED["uneven"],
    "uneven, dynamic": "rank 0 has (4, 32) of torch.float32; rank 1 has (5, 32) of torch.float32",
    "recipes": f"{MIXED} Float8CurrentScaling",
    "recipes, inductor": f"{MIXED} Float8CurrentScaling",
    "recipes, graphs may break": f"{MIXED} Float8CurrentScaling",
    "recipe changes": f"{MIXED} Float8CurrentScaling",
    "recipe in the graph": f"{MIXED} MXFP8BlockScaling",
    "maxima": f"{MIXED} MXFP8BlockScaling",
    "one without": f"{MIXED} DelayedScaling",
    "no region": f"{MIXED} None",
    "one eager": f"{MIXED} Float8CurrentScaling",
    "operations": f"{MIXED} Float8CurrentScaling",
}


def test_wrong_use_is_refused_in_graphs(world: World) -> None:
    for found in results(world, "compiled_wrong_use"):
        assert found.keys() == REFUSED_IN_GRAPHS.keys()
        for case, message in REFUSED_IN_GRAPHS.items():
            assert message in found[case], case
        assert "enable_2d_quantization=True); rank 1" in found["recipe in the graph"]
