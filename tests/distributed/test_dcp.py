"""Checkpoints of sharded models: written by two processes, read by four, written again, read by one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mezzotint.distributed.checkpoint import full_state, load, load_full_state, save
from tests.distributed.dcp_world import CASES, CHECKS, SIZE, build, learnt, split_model, steps
from tests.distributed.sharded import optimizer
from tests.worlds import World, results, run_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def world(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZZOTINT_TEST_FOLDER", str(folder))
        return run_world(tmp_path_factory.mktemp("dcp"), CHECKS, SIZE)


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
    assert len(learnt) == (2 if recipe == "delayed" else 0)
    assert ("0.weight" in state) != quantized
    assert any(value.dtype == torch.uint8 for value in state.values()) == quantized


@pytest.mark.parametrize("case", CASES)
def test_plain_states_in_shards(world: World, case: str) -> None:
    for found in results(world, "plain"):
        assert_same(found[case]["state"], found[case]["expected"])
        assert found[case]["kinds"] == ["Tensor"]
        assert "missing" in found["error"]
        assert "holds no checkpoint" in found["nothing"]


def test_parts_of_weights_in_shards(world: World) -> None:
    """Tensor parallelism inside of FSDP2: what is gathered in low precision is quantized as the whole weight is."""
    for found in results(world, "with_tensor_parallelism"):
        assert len(found) == 3
        for recipe, (plain, gathered) in found.items():
            assert plain == gathered, recipe


def test_parts_of_two_to_four_to_one(world: World, folder: Path) -> None:
    """With `tp_group`: parameters and optimizer are those of the whole, bit for bit, wherever they come from."""
    two, four = results(world, "parts_of_two"), results(world, "parts_of_four")
    for name in ("parts 2", "parts 4", "parts in shards"):
        whole = split_model()
        optim = optimizer(whole)
        load(folder / name, whole, optim)
        everything = learnt(whole, optim)
        assert float(whole[0].scale_fwd[0]) != 1
        seen: dict[str, int] = {}
        for found in [made["learnt"] for made in two[:2]] if name == "parts 2" else [made[name] for made in four]:
            assert found.keys() == everything.keys()
            for key, pieces in found.items():
                ((_, full),) = everything[key]
                for at, part in pieces:
                    where = tuple(slice(begin, begin + size) for begin, size in zip(at, part.shape, strict=True))
                    assert torch.equal(part, full[where]), (name, key)
                    seen[key] = seen.get(key, 0) + part.numel()
        assert all(count >= everything[key][0][1].numel() for key, count in seen.items())
    for found in two[:2]:
        assert found["losses"][0] == found["losses"][1]
        assert torch.equal(*found["extra"])


def test_parts_that_are_refused(world: World) -> None:
    for found in results(world, "parts_of_four"):
        assert found["refused"]["quantized"].startswith("weight is quantized, and a part of a weight (tp_group)")
        assert found["refused"]["async"].startswith("is_async with parts of weights (tp_group: 0.bias)")


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
