"""Checkpoints of sharded models: written by two processes, read by four, written again, read by one. And, in worlds
of four, models on a mesh of two dimensions (`mesh_world.py`), experts in one parameter (`grouped_world.py`)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mezzotint.distributed.checkpoint import full_state, load, load_full_state, save
from tests.distributed import grouped_world, mesh_world
from tests.distributed.dcp_world import (
    CASES,
    CHECKS,
    QUANTIZED,
    SIZE,
    TRAINED,
    build,
    learnt,
    quantized_model,
    split_model,
    steps,
)
from tests.distributed.sharded import optimizer
from tests.worlds import Result, World, results, run_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def world(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZZOTINT_TEST_FOLDER", str(folder))
        return run_world(tmp_path_factory.mktemp("dcp"), (*CHECKS, *grouped_world.CHECKS), SIZE)


@pytest.fixture(scope="module")
def mesh(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world of its own: it takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZZOTINT_TEST_FOLDER", str(folder))
        return run_world(tmp_path_factory.mktemp("mesh"), mesh_world.CHECKS, SIZE)


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("case", CASES)
def test_two_to_four_to_one(world: World, folder: Path, case: str) -> None:
    """The state bit for bit, and what follows from it: the same losses at each world size."""
    two = results(world, "written_by_two")[0][case]
    assert two["complete"]
    assert "holds a checkpoint already" in two["again"]
    for four in results(world, "read_by_four"):
        assert four[case]["step"] == 2
        assert_same(four[case]["state"], two["state"])
        assert four[case]["losses"] == two["losses"]
    made = build(case)
    optim = optimizer(made)
    assert load(folder / f"{case} 4", made, optim)["step"] == 2
    assert_same(full_state(made), two["state"])
    assert steps(made, case, optim, 2, 2) == two["losses"]


@pytest.mark.parametrize("case", CASES)
def test_delayed_scaling_and_quantized_weights_are_in_it(world: World, case: str) -> None:
    state = results(world, "written_by_two")[0][case]["state"]
    recipe, quantized = CASES[case]
    learnt = [name for name in state if name.endswith("_extra_state")]
    assert len(learnt) == 2
    assert any(bool((state[name][0] != 1).any()) for name in learnt) == (recipe == "delayed")
    assert ("0.weight" in state) != quantized
    assert any(value.dtype == torch.uint8 for value in state.values()) == quantized


@pytest.mark.parametrize("case", CASES)
def test_plain_states_in_shards(world: World, case: str) -> None:
    for found in results(world, "plain"):
        assert_same(found[case]["state"], found[case]["expected"])
        assert found[case]["kinds"] == ["Tensor"]
        assert "missing" in found["error"]
        assert "holds no checkpoint" in found["nothing"]


def test_parts_of_two_to_four_to_one(world: World, folder: Path) -> None:
    """With `tp_group`: parameters and optimizer are those of the whole, bit for bit, wherever they come from."""
    two, four = results(world, "parts_of_two"), results(world, "parts_of_four")
    for name in ("parts 2", "parts 4", "parts in shards"):
        whole = split_model()
        optim = optimizer(whole)
        load(folder / name, whole, optim)
        assert float(whole[0].scale_fwd[0]) != 1
        made = [found["learnt"] for found in two[:2]] if name == "parts 2" else [found[name] for found in four]
        assert_parts_of(made, learnt(whole, optim))
    for found in two[:2]:
        assert found["losses"][0] == found["losses"][1]
        assert torch.equal(*found["extra"])


def assert_parts_of(made: list[Result], whole: Result) -> None:
    """What the processes have of each tensor is the whole's, bit for bit, and all of it."""
    seen: dict[str, int] = {}
    for found in made:
        assert found.keys() == whole.keys()
        for key, pieces in found.items():
            ((_, full),) = whole[key]
            for at, part in pieces:
                where = tuple(slice(begin, begin + size) for begin, size in zip(at, part.shape, strict=True))
                assert torch.equal(part, full[where]), key
                seen[key] = seen.get(key, 0) + part.numel()
    assert all(count >= whole[key][0][1].numel() for key, count in seen.items())


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_parts_of_quantized_weights(world: World, folder: Path, recipe: str) -> None:
    """Codes and scales are those of the whole weight, quantized in one process, bit for bit."""
    results(world, "quantized_parts")
    expected = full_state(quantized_model(recipe))
    for name in ("", " in shards", " of four") if QUANTIZED[recipe] else ("",):
        made = quantized_model(recipe, seed=3)
        state = full_state(made)
        assert not any(torch.equal(value, expected[key]) for key, value in state.items() if value.dtype == torch.uint8)
        load(folder / f"{recipe} parts{name}", made)
        assert_same(full_state(made), expected)


@pytest.mark.parametrize("recipe", TRAINED)
def test_shards_of_quantized_parts_learn_what_parts_learn(world: World, folder: Path, recipe: str) -> None:
    """Bit for bit: scales are of the whole over both dimensions of the mesh."""
    results(world, "quantized_parts")
    states = []
    for name in ("parts", "shards"):
        made = quantized_model(recipe, seed=3)
        load(folder / f"{recipe} trained in {name}", made)
        states.append(full_state(made))
    assert_same(*states)
    start = full_state(quantized_model(recipe))
    scales = [k for k, value in start.items() if value.dtype == torch.float32 and not k.endswith("_extra_state")]
    assert len(scales) >= 4
    assert not any(torch.equal(states[0][key], start[key]) for key in scales)


def test_parts_that_are_refused(world: World) -> None:
    for found in results(world, "quantized_parts"):
        assert found["cut"].startswith(
            "ValueError: weight is quantized in blocks of 32 rows, and a shard of a weight of shape (64, 128) "
            "(tp_group)"
        )
        own = "ValueError: weight is quantized (Float8Tensor), and a shard of a weight (tp_group) whose"
        assert own in found["own"]
        assert found["one"].startswith("ValueError: weight is quantized (GroupedTensor), and a shard of a weight")


@pytest.mark.parametrize("case", CASES)
def test_files_without_pickle(tmp_path: Path, case: str) -> None:
    """safetensors, and torch.load with weights_only."""
    made = build(case)
    steps(made, case, optimizer(made), 0, 1)
    state = full_state(made)
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    for read in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt", weights_only=True)):
        other = build(case)
        load_full_state(other, read)
        assert_same(full_state(other), state)
        assert steps(other, case, optimizer(other), 5, 1) == steps(made, case, optimizer(made), 5, 1)
        load_full_state(made, read)


def test_what_was_learnt_goes_when_another_checkpoint_has_none(tmp_path: Path) -> None:
    case = "delayed high precision"
    fresh, made = build(case), build(case)
    save(tmp_path / "fresh", fresh)
    steps(made, case, optimizer(made), 0, 1)
    assert "0._extra_state" in full_state(made)
    assert load(tmp_path / "fresh", made) == {}
    assert_same(full_state(made), full_state(fresh))


def test_bad_arguments(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"extra\['step'\] is int: give a tensor"):
        save(tmp_path, module, extra={"step": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="is_async without process_group"):
        save(tmp_path, module, is_async=True)
    with pytest.raises(ValueError, match=r"weight has shape \(3, 2\), the model's \(2, 2\)"):
        load_full_state(module, {"weight": torch.ones(3, 2), "bias": torch.ones(2)})


# On a mesh


# Of what one process learns. In FP32 sums in another order change little; stochastic rounding draws for each part on
# its own.
DISTANCES = {"block": 1e-4, "nvfp4": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", mesh_world.WAYS)
def test_styles_and_shards(mesh: World, recipe: str) -> None:
    """As modules made in parts, bit for bit, gathered in low precision or not; and as one process."""
    found = results(mesh, "mesh_training")
    for each in found:
        assert all(each[recipe][way] for way in mesh_world.WAYS[recipe])
    losses, alone = found[0][recipe]["losses"]
    assert losses == pytest.approx(alone, rel=1e-6 if recipe != "nvfp4" else 1e-3)
    assert found[0][recipe]["distance"] < DISTANCES.get(recipe, 1e-6)


@pytest.mark.slow
def test_recipes_differ_on_a_mesh(mesh: World) -> None:
    found = results(mesh, "mesh_training")[0]
    assert len({tuple(made["losses"][0]) for made in found.values()}) == len(mesh_world.WAYS)


@pytest.mark.slow
def test_tokens_in_parts(mesh: World) -> None:
    for found in results(mesh, "mesh_sequence"):
        assert found["distance"] < 1e-6


@pytest.mark.slow
def test_clipping_on_a_mesh(mesh: World) -> None:
    for found in results(mesh, "mesh_clipping"):
        assert found["made"]["norms"] == pytest.approx(found["alone"]["norms"], rel=1e-6)
        assert found["made"]["norms"][0] > 0.01


@pytest.mark.slow
def test_a_compiled_block_on_a_mesh(mesh: World) -> None:
    for found in results(mesh, "mesh_compiled"):
        assert found["losses"][0] == found["losses"][1]
        assert found["graphs"] == 1


@pytest.mark.slow
def test_bytes_sent_on_a_mesh(mesh: World) -> None:
    """Of shards of parts, by hand: a quarter of FP32's in 8 bits, and an eighth in 4, plus scales."""
    norm = 2 * 64 * 4  # weight and bias, in FP32
    shards = {"column": (32, 128), "row": (64, 64), "fc1": (64, 128), "fc2": (64, 128)}
    for found in results(mesh, "mesh_bytes"):
        for recipe, of in {
            "none": lambda rows, columns: rows * columns * 4,
            "current": lambda rows, columns: rows * columns,
            "mxfp8": lambda rows, columns: rows * columns + rows * 4,  # four blocks in a row, or two and padding
            "nvfp4": lambda rows, columns: rows * columns // 2 + rows * columns // 16,
        }.items():
            column, row, fc1, fc2 = (of(*shape) for shape in shards.values())
            forward = [column + norm, row, fc1 + fc2 + norm]
            assert found[recipe] == [*forward, *reversed(forward)], recipe


@pytest.mark.slow
@pytest.mark.parametrize(("name", "activation"), [("mesh", "gelu"), ("gated", "swiglu")])
def test_from_a_mesh_to_one_process(mesh: World, folder: Path, name: str, activation: str) -> None:
    """Parameters, optimizer and delayed scaling's state, of halves of a gated activation too."""
    found = results(mesh, {"mesh": "mesh_checkpoint", "gated": "mesh_gated"}[name])
    whole = mesh_world.make(activation=activation)
    optim = mesh_world.adam(whole)
    load(folder / name, whole, optim)
    assert_parts_of([each["learnt"] for each in found], learnt(whole, optim))
    assert float(whole[0].scale_fwd[0]) != 1
    for each in found:
        assert_same(each["full"], full_state(whole))
        assert_same(each["full again"], each["full"])


@pytest.mark.slow
def test_halves_in_other_layouts(mesh: World, folder: Path) -> None:
    found = results(mesh, "mesh_gated")
    whole = mesh_world.make(activation="swiglu")
    optim = mesh_world.adam(whole)
    load(folder / "gated", whole, optim)
    assert_parts_of([each["in four parts"] for each in found], learnt(whole, optim))
    for each in found:
        assert each["losses"][0] == each["losses"][1]
        assert each["distance"] < 1e-6
    load(folder / "gated in parts", whole)
    assert_same(full_state(whole), full_state(mesh_world.make(activation="swiglu")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("sharded", "ValueError: weight is in shards already: call low_precision_gather first"),
        ("twice", "ValueError: weight is gathered in low precision already"),
        ("twice before", "ValueError: weight is gathered in low precision already"),
        ("columns", "ValueError: a weight of shape (32, 64) is in shards of shape (32, 32)"),
    ],
)
def test_wrong_use_on_a_mesh(mesh: World, case: str, message: str) -> None:
    for found in results(mesh, "mesh_wrong"):
        assert found[case].startswith(message)


# Experts in one parameter


@pytest.mark.parametrize("case", grouped_world.CASES)
def test_experts_in_one_parameter(world: World, case: str) -> None:
    """In shards of whole experts, uneven where they are not quantized: the losses and bytes of one process."""
    groups, quantized = grouped_world.CASES[case]
    every = [found[case] for found in results(world, "grouped_weights")]
    assert sum(count for *_, count in every) == groups
    for (first, alone, again, whole, expected), (sharded, plain), kind, _ in every:
        assert first == alone
        assert again == whole == expected != first
        assert_same(sharded, plain)
        assert kind == ("GroupedTensor" if quantized else "Tensor")


def test_experts_in_one_parameter_cut_otherwise(world: World) -> None:
    """Initial values from the meta device are those of one process; what cannot be gathered is refused by all."""
    for found in results(world, "grouped_odds"):
        for dim in (0, 1):
            assert torch.equal(found[f"meta {dim}"], found["expected"])
        for case in ("refused 3 0", "refused 1 0", "refused 4 1"):
            assert "its groups must divide evenly, along the first dimension" in found[case]
        assert "the format of a weight's shards is not the same on the 4 ranks of the group" in found["mixed"]
