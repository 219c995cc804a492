"""FSDP2 and DDP in a world of two processes (`fsdp_world.py`), against one process, bit for bit.

Both get the same batch, so that the mean of two gradients is exact; sums inside of products are the same in one process
and in two, since weights are gathered before they are multiplied.
"""

import pytest
import torch

from mezzotint.distributed.fsdp import ShardedWeight, low_precision_gather
from tests.distributed.fsdp_world import CHECKS, LONG, compiled, long_run
from tests.distributed.sharded import model
from tests.recipes import RECIPES
from tests.worlds import World, results, shared_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world of its own: it takes long."""
    return shared_world(tmp_path_factory, (long_run,))


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Another one."""
    return shared_world(tmp_path_factory, (compiled,))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_fifty_steps_with_weights_gathered_in_low_precision(long: World, recipe: str) -> None:
    first, second = results(long, "long_run")
    alone, made = first[f"{recipe} alone"], first[recipe]
    assert len(made["losses"]) == LONG
    assert made["losses"] == alone["losses"]
    assert made["losses"][-1] < 0.9 * made["losses"][0]
    assert made.keys() == alone.keys() == second[recipe].keys()
    for name in made.keys() - {"losses"}:
        assert torch.equal(made[name], alone[name]), name
        assert torch.equal(made[name], second[recipe][name]), name


@pytest.mark.slow
def test_recipes_differ(long: World) -> None:
    """What the equalities above are worth: no two recipes have the same losses."""
    found = results(long, "long_run")[0]
    losses = [tuple(found[recipe]["losses"]) for recipe in RECIPES]
    assert len(set(losses)) == len(losses)


def test_each_way_of_sharding(world: World) -> None:
    """High precision, gathered in low precision, quantized weights; what is read of two copies, or both."""
    kinds = {
        "delayed": "Float8Tensor",
        "current": "Float8Tensor",
        "rowwise": "Float8RowwiseTensor",
        "block": "Float8BlockwiseQTensor",
        "custom": "HybridQuantizedTensor",
        "mxfp8": "MXFP8Tensor",
        "mxfp8 2d": "MXFP8Tensor",
        "nvfp4": "NVFP4Tensor",
        "nvfp4-plain": "NVFP4Tensor",
    }
    first, second = results(world, "short_runs")
    assert len(first) == 36
    for key, (losses, expected, kind) in first.items():
        assert losses == expected, key
        assert losses == second[key][0], key
        recipe, way = key.removesuffix(" None").removesuffix(" False"), key
        for known in ("high precision", "gathered", "quantized"):
            if recipe.endswith(known):
                recipe, way = recipe.removesuffix(f" {known}"), known
        assert kind == {"high precision": "Tensor", "gathered": "ShardedWeight"}.get(way, kinds.get(recipe)), key


@pytest.mark.parametrize("case", ["micro-batches", "reentrant", "recomputed", "no shard"])
def test_compositions(world: World, case: str) -> None:
    for found in results(world, "compositions"):
        cases = {key: value for key, value in found.items() if key.endswith(case)}
        assert len(cases) == 6
        for key, (losses, expected) in cases.items():
            assert losses == expected, key


def test_one_unit(world: World) -> None:
    for found in results(world, "one_unit"):
        assert len(found) == 4
        for recipe, (losses, expected) in found.items():
            assert losses == expected, recipe


@pytest.mark.parametrize(
    ("case", "expected"),
    [  # of each gather: the first block forward, the second, the second backward, the first; how many copies of weights
        ("again for backward", [1, 1, 1, 1]),
        ("quantized", [1, 1, 1, 1]),
        ("kept for backward", [2, 2]),
        ("kept after backward", [1, 1, 2, 2, 1, 1]),  # two micro-batches, the first of which keeps the weights
        ("by hand", [2, 2, 1, 1]),
        ("saved elsewhere", [2, 2, 2, 2]),  # as copies, which are made in forward
        ("recomputed", [1, 1, 2, 2]),
        ("reentrant", [1, 1, 2, 2]),
        ("recomputed inside", [1, 1, 2, 2]),  # the checkpoint inside of what is gathered at once
        ("recomputed in part", [1, 1, 2, 1]),  # by the MLP itself
        ("overridden", [1, 1, 2, 2]),  # backward computes on what forward multiplied
    ],
)
def test_copies_that_are_read(world: World, case: str, expected: list[int]) -> None:
    """MXFP8 in blocks of 1x32: bytes sent in each of two steps, and the losses of one process."""
    weights = [1, 2, 2, 1, 2, 1][: len(expected)]
    sizes = [count * copies * bytes_of(32, 64, "mxfp8") + 64 for count, copies in zip(weights, expected, strict=True)]
    for gathers, losses, alone in (found[case] for found in results(world, "one_direction")):
        assert gathers == 2 * sizes
        assert losses == alone


def test_processes_agree_on_what_they_send(world: World) -> None:
    """The second of two modules runs on the first process only, and only that could say what backward reads."""
    for found in results(world, "agreed"):
        assert found["read again"] == [False, True]
        copies = [2, 3, 2, 3]  # of two weights
        assert found["gathers"] == [count * bytes_of(32, 64, "mxfp8") for count in copies]


@pytest.mark.slow
def test_compiled_blocks(compiling: World) -> None:
    """One graph for each of two blocks, and none more in later steps. Nobody knows what a graph computes again: both
    copies of a weight are sent for backward, unless it is said that one is read."""
    sent = {"mxfp8 quantized": True, "custom gathered": True, "recomputed": True}
    for found in results(compiling, "compiled"):
        assert len(found) == 6
        for key, (losses, expected, graphs, both) in found.items():
            assert losses == expected, key
            assert graphs == 2, key
            assert both is sent.get(key), key


def bytes_of(rows: int, width: int, recipe: str) -> float:
    """Of a shard of a weight, by hand: codes, then scales."""
    elements = rows * width
    return {
        "none": 2 * elements,
        "rowwise": elements + rows * 4,  # column-wise as long; a column's scale is not sent
        "custom": elements + rows * 4,  # the codes of MXFP8, for backward; the scales of NVFP4, padded to four
        "delayed": elements,
        "current": elements,
        "block": elements + 4 * (rows // 128) * 4,  # tiles of a row of scales: two, padded to four
        "mxfp8": elements + rows * max(width // 32, 4) * 1.0,  # as long as the padded column-wise scales
        "mxfp8 2d": elements + rows * 4,
        "nvfp4": elements / 2 + rows * width / 16,
        "nvfp4-plain": elements / 2 + width * 4,  # those of the column-wise copy, padded to four
    }[recipe]


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8 2d"])
def test_bytes_sent(world: World, recipe: str) -> None:
    """Half of BF16's in 8 bits and about a quarter in NVFP4, plus scales; of a hybrid the longer direction."""
    width = 256 if recipe == "block" else 64
    rows = width // 2
    norm = 2 * rows  # one weight of a norm, in BF16
    linear = bytes_of(rows, width, recipe)
    expected = [linear + norm, 2 * linear + norm, 2 * linear + norm, linear + norm]
    for found in results(world, "bytes_sent"):
        assert found[recipe] == expected
    high = bytes_of(rows, width, "none")
    bounds = {"none": (1, 1), "nvfp4": (0.25, 0.29)}
    low, top = bounds.get(recipe, (0.5, 0.54))
    assert low <= linear / high <= top


def test_one_direction_of_blocks_of_sixteen(world: World) -> None:
    for found in results(world, "bytes_sent"):
        assert found["nvfp4-plain"][0] == bytes_of(32, 64, "nvfp4-plain") + 64


def test_mixed_precision_policy(world: World) -> None:
    for found in results(world, "policy"):
        for recipe, (plain, gathered) in found.items():
            assert plain == gathered, recipe


@pytest.mark.parametrize("way", ["high precision", "gathered", "quantized"])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_parameters_between_steps(world: World, recipe: str, way: str) -> None:
    """Norms of gradients, state dicts, copies: parameters are DTensors."""
    quantized = {"delayed": "Float8Tensor", "mxfp8": "MXFP8Tensor"}[recipe]
    for found in results(world, "between_steps"):
        sharded, alone = (found[f"{recipe} {way} norm {which}"] for which in (True, False))
        assert torch.allclose(sharded.float(), alone.float(), rtol=2**-7)  # BF16, summed in another order
        made = found[f"{recipe} {way}"]
        assert made["keys"]
        assert made["copied"]
        assert made["kinds"] == ({"Tensor", quantized} if way == "quantized" else {"Tensor"})
        trained, loaded, reference = made["losses"]
        assert trained == loaded
        assert trained == pytest.approx(reference, rel=1e-3)


def test_experts_and_operations(world: World) -> None:
    for found in results(world, "other_modules"):
        assert len(found) == 4
        for key, (alone, sharded, gathered) in found.items():
            assert alone == sharded == gathered, key


@pytest.mark.parametrize(("recipe", "bound"), [("none", 1e-4), ("current", 0.25), ("mxfp8", 0.25)])
def test_another_batch_on_each_process(world: World, recipe: str, bound: float) -> None:
    """Gradients are the mean: what was learnt, with FSDP2 and with DDP, is what one process learns of both batches."""
    first, second = results(world, "halves")
    start = dict(model(params_dtype=torch.float32).named_parameters())
    for made in (first[recipe][0], first[recipe][1]):
        for name, whole in first[recipe][2].items():
            learnt = whole - start[name].detach()
            assert float(learnt.norm()) > 0, name
            assert float((made[name] - whole).norm() / learnt.norm()) < bound, name
    for kind in range(2):
        for name, value in first[recipe][kind].items():
            assert torch.equal(value, second[recipe][kind][name]), name


def test_odds(world: World) -> None:
    for found in results(world, "odds"):
        assert len(found) == 5
        for case, (expected, losses) in found.items():
            assert losses == expected, case


def test_data_parallel(world: World) -> None:
    first, second = results(world, "data_parallel")
    for recipe in ("delayed", "mxfp8", "nvfp4"):
        losses, expected = first[recipe]
        assert losses == expected, recipe
        assert second[recipe][0] == losses, recipe
    assert torch.equal(first["scales"], second["scales"])
    assert bool((first["scales"] != 1).all())


def test_a_weight_of_two_modules_stays_one() -> None:
    made = model(head=64)
    made[2].weight = made[0].weight
    low_precision_gather(made, RECIPES["current"])
    assert made[2].weight is made[0].weight
    assert type(made[0].weight) is torch.nn.Parameter
    assert isinstance(made[1].fc1_weight, ShardedWeight)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no model", "TypeError: model is str: give an nn.Module"),
        ("no recipe", "ValueError: recipe is None and weight is not quantized"),
        ("override", "ValueError: recipe has backward_override='high_precision'"),
        ("twice", "ValueError: weight is gathered in low precision already"),
        ("sharded", "ValueError: weight is in shards already"),
        ("directions", "TypeError: one_direction is 1: give True, False or None"),
        ("kept for backward", "ValueError: one_direction is True, but FSDP2 keeps what it gathers for forward"),
        ("kept after backward", "ValueError: FSDP2 has gathered a weight in the one direction that backward reads"),
        ("recomputed", "ValueError: FSDP2 has gathered a weight in the one direction that backward reads"),
        ("recomputed later", "ValueError: FSDP2 has gathered a weight in the one direction that backward reads"),
        ("saved elsewhere", "ValueError: saved_tensors_hooks inside of what FSDP2 gathers at once may copy"),
        ("uneven", r"ValueError: a weight of shape (5, 64) in Float8Tensor cannot be gathered from 2 ranks"),
        ("main_grad", "ValueError: fuse_wgrad_accumulation needs weight.main_grad"),
    ],
)
def test_wrong_use_is_an_error_on_every_rank(world: World, case: str, message: str) -> None:
    for found in results(world, "wrong_use"):
        assert found[case].startswith(message)
        assert found["kept"] == "Tensor"


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("way", ["gathered", "quantized"])
def test_mixed_recipes_are_an_error_on_every_rank(world: World, way: str, compiles: bool) -> None:
    for found in results(world, "wrong_use"):
        message = found[f"mixed, {way}, {compiles}"]
        assert message.startswith("ValueError: the format of a weight's shards is not the same on the 2 ranks of the")
        assert "group: rank 0 has Float8CurrentScalingQuantizer(" in message
        assert "; rank 1 has MXFP8Quantizer(" in message
