"""Whether ranks mean the same: what is refused on every one of them, when they ask each other, `check_same`."""

from collections import Counter

import pytest

from tests.distributed.agreement_world import CHECKS
from tests.worlds import World, results, shared_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS, 2)


def test_ranks_ask_at_the_first_run_and_for_a_new_graph(world: World) -> None:
    """And only for what they have not agreed on: one may trace again alone. A graph has no operator for it, and runs
    no collective that eager code does not."""
    known = {"wrong": [], "asked": 0, "graphs": 0}
    for rank, found in enumerate(results(world, "rounds")):
        operators = found.pop("operators")
        assert operators
        assert not [name for name in operators if "meet" in name or "agree" in name or "compare" in name]
        calls = {name: sorted(made.pop("calls")) for name, made in found.items()}
        assert "gather torch.int64" not in [call for each in calls.values() for call in each]
        assert len(calls["eager 0"]) > len(calls["eager 2"]) > 0  # amaxes; tokens
        for i in range(3):  # a compiler may gather once what eager code gathers twice
            assert calls[f"graph {i}"] == calls[f"again {i}"]
            assert Counter(calls[f"graph {i}"]) <= Counter(calls[f"eager {i}"])
        assert calls["graph 1"] == calls["the second traces again"] == calls["the second has moved"]
        assert found == {
            "eager 0": {**known, "asked": 2},  # of each module
            "eager 1": known,
            "eager 2": known,
            "graph 0": {**known, "graphs": 1},
            "graph 1": {**known, "graphs": 1, "asked": 2},
            "graph 2": {**known, "graphs": 1, "asked": 2},
            **{f"again {i}": known for i in range(3)},
            "the second traces again": {**known, "graphs": rank},
            "the second has moved": known,
        }


def test_regions_that_take_amaxes_ask_once_for_a_recipe(world: World) -> None:
    for found in results(world, "regions"):
        assert found["asked"] == [1, 0, 1, 0, 0, 1, 0]


def test_a_rank_that_traces_alone_raises(world: World) -> None:
    """After the timeout, and can go on; an export asks nobody."""
    for rank, found in enumerate(results(world, "alone")):
        if rank == 1:
            message = found.pop("alone")
            assert "of the 2 ranks of the group, rank 1 has asked alone, rank 0 did not: recipe is MXFP8" in message
        assert found == {"not alone": "accepted"}


REQUESTED = {
    "the same": "accepted",
    "none": "accepted",
    "whole": "accepted",
    "recipes": "recipe is not the same on the 2 ranks of the group: rank 0 has Float8CurrentScaling(",
    "in a region": "recipe is not the same on the 2 ranks of the group: rank 0 has Float8CurrentScaling(",
    "changed": "recipe is not the same on the 2 ranks of the group: rank 0 has Float8CurrentScaling(",
    "sizes": "module 1 is not the same on the 2 ranks of the group: rank 0 has Linear(in_features=32, ",
    "splits": "split by row, sequence_parallel=True",
    "tokens": "module 0 is not the same on the 2 ranks of the group: rank 0 has Linear(",
    "dtypes": " of torch.bfloat16, split by column",
    "one has more": "module 1 is not the same on the 2 ranks of the group: rank 0 has Linear(",
    "no model": "model is str: give an nn.Module",
    "no recipe": "there is no recipe 'mxfp9'",
}


def test_check_same(world: World) -> None:
    """What differs, on every rank, with what each of them has."""
    for found in results(world, "on_request"):
        assert found.keys() == REQUESTED.keys()
        for case, message in REQUESTED.items():
            assert message in found[case], case
        assert "; rank 1 has none." in found["one has more"]


REFUSED = {
    "size": "tp_size is 3, the size of tp_group is 2",
    "no group": "tp_size is 2 and there is no group: give tp_group, or call set_tensor_parallel_group",
    "group set": "the size of tp_group is 1, the module was made for tp_size=2",
    "layer group": "the size of tp_group is 1, the module was made for tp_size=2",
    "features": "out_features is 65: it must be divisible by the 2 ranks",
    "heads": "num_attention_heads is 1: it must be divisible by the 2 ranks",
    "tokens": "inp has shape (3, 16): sequence_parallel gives each of 2 ranks a share of the first dimension",
    "no tokens": "inp has shape (16,): sequence_parallel needs",
    "uneven": "inp is not the same on the 2 ranks of the group: rank 0 has (4, 32)",
    "dtypes": "rank 0 has (4, 32) of torch.float32; rank 1 has (4, 32) of torch.bfloat16",
    "recipes": "recipe is not the same on the 2 ranks of the group: rank 0 has Float8CurrentScaling",
    "one without": "recipe is not the same on the 2 ranks of the group: rank 0 has",
    "amaxes": "recipe is not the same on the 2 ranks of the group: rank 0 has DelayedScaling(",
    "amaxes, one without": "recipe is not the same on the 2 ranks of the group: rank 0 has DelayedScaling(",
    "operations": "recipe is not the same on the 2 ranks of the group: rank 0 has Float8CurrentScaling",
    "ops": "in_features is 31: it must be divisible by the 2 ranks",
    "chained": "columnwise_source is 'rowwise_dequantized'",
    "kept otherwise": "the quantizer of weight is not the same on the 2 ranks of the group: rank 0 has Float8Curr",
    "kept by one": "is not the same on the 2 ranks of the group: rank 0 has",
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_refused_on_every_rank(world: World, case: str) -> None:
    for found in results(world, "wrong_use"):
        assert found.keys() == REFUSED.keys()
        assert REFUSED[case] in found[case]


MIXED = "recipe is not the same on the 2 ranks of the group: rank 0 has"
REFUSED_IN_GRAPHS = {
    "no group": REFUSED["no group"],
    "tokens": REFUSED["tokens"],
    "uneven": REFUSED["uneven"],
    "uneven, dynamic": "rank 0 has (4, 32) of torch.float32; rank 1 has (5, 32) of torch.float32",
    "recipes": f"{MIXED} Float8CurrentScaling",
    "recipes, inductor": f"{MIXED} Float8CurrentScaling",
    "recipes, graphs may break": f"{MIXED} Float8CurrentScaling",
    "a new graph": f"{MIXED} Float8CurrentScaling",
    "a new group": f"{MIXED} Float8CurrentScaling",
    "recipe in the graph": f"{MIXED} MXFP8BlockScaling",
    "amaxes": f"{MIXED} MXFP8BlockScaling",
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
