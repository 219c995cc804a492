"""`mezzotint train` over processes: replicas have one batch together, all stop together, what is lost comes back."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mezzotint.cli.main import main
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.data import Batches, Text
from mezzotint.trainer.local_checkpoint import find_checkpoints
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.world import ONE_RANK_WORLD, losing_none
from mezzotint.trainer.world import World as Processes
from tests.cli.tools import ROOT, environment, fails, losses, one_thread, read, write_text
from tests.cli.train_world import CHECKS, CHECKS_OF_FOUR, COMMON, EXPERTS, QUICK, SHARDS, SLOW_CHECKS, STEPS, WIDE
from tests.worlds import World, results, run_world

LIMIT = 120  # seconds, after which processes that still run are ended, and the test fails
TIMEOUT = 30  # seconds that a process waits for another


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    write_text(made)
    return made


def run_one(folder: Path, name: str, *options: str) -> Path:
    """In one process: a run of a whole batch where two replicas have a half each."""
    with one_thread():
        assert main(["train", *COMMON, f"--data={folder / 'text.txt'}", f"--out={folder / name}", *options]) == 0
    return folder / name


@pytest.fixture(scope="module")
def killed(folder: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """Of two processes the second is killed while both write a checkpoint: codes and errors, and what is there then."""
    run = folder / "killed"
    options = (*SHARDS, f"--data={folder / 'text.txt'}", f"--out={run}", f"--timeout={TIMEOUT}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # as torchrun has them
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.cli.train_killed", "train", *options],
            cwd=ROOT,
            env={**environment(), **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    ends = [(process.returncode, error) for process, error in zip(processes, said, strict=True)]
    return ends, sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def two(folder: Path, killed: Any, tmp_path_factory: pytest.TempPathFactory) -> World:
    run_one(folder, "one", "--recipe=delayed", "--steps=4")
    cut(folder / "one", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZZOTINT_TEST_FOLDER", str(folder))
        return run_world(tmp_path_factory.mktemp("two"), CHECKS, 2)


@pytest.fixture(scope="module")
def slow_two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZZOTINT_TEST_FOLDER", str(folder))
        return run_world(tmp_path_factory.mktemp("slow"), SLOW_CHECKS, 2)


@pytest.fixture(scope="module")
def four(two: World, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Some go on with what two processes began."""
    for name in ("larger", "copies"):
        copy_cut(folder, "whole", name, STEPS - 2)
    copy_cut(folder, "two experts", "more experts", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZZOTINT_TEST_FOLDER", str(folder))
        return run_world(tmp_path_factory.mktemp("four"), CHECKS_OF_FOUR, 4)


def copy_cut(folder: Path, run: str, name: str, step: int) -> None:
    shutil.copytree(folder / run, folder / name)
    cut(folder / name, step)


def cut(run: Path, step: int) -> None:
    """As if it had been killed after a step that has a checkpoint."""
    for path in find_checkpoints(run):
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)
    (run / "result.json").unlink()


def norms(run: Path) -> list[float]:
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return [event.value for event in events.Scalars("gradient_norm")]


# Numbers


def test_replicas_have_one_batch_together() -> None:
    text = Text(torch.arange(201) % 256, 256, "")
    whole = Batches(text, 4, 6, seed=3)
    parts = [Batches(text, 4, 2, seed=3, replica=replica, replicas=3) for replica in range(3)]
    for _ in range(20):  # over the end of an epoch, in the middle of a batch
        found = [part.next() for part in parts]
        for side, wanted in enumerate(whole.next()):
            assert torch.equal(torch.cat([pair[side] for pair in found]), wanted)
        assert {part.position for part in parts} == {whole.position}


def assert_close(folder: Path, name: str, one: Path, bound: float) -> None:
    """Losses, and the norms of gradients, counted once over all processes."""
    assert losses(folder / name) == pytest.approx(losses(one), abs=bound)
    assert norms(folder / name) == pytest.approx(norms(one), rel=0.03)


@pytest.mark.parametrize("recipe", QUICK)
def test_shards_are_one_process(two: World, folder: Path, recipe: str) -> None:
    check_shards(results(two, "recipes"), folder, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in COMMAND_RECIPES if name not in QUICK])
def test_more_shards_are_one_process(slow_two: World, folder: Path, recipe: str) -> None:
    check_shards(results(slow_two, "more_recipes"), folder, recipe)


def check_shards(found: list[Any], folder: Path, recipe: str) -> None:
    """But for sums in another order, and what FSDP2 gathers in BF16: norms, embedding and head. Of losses of 5.4 that
    makes up to 0.0021, by the CPU."""
    for made in found:
        assert made[recipe]["code"] == 0, made[recipe]["err"]
    one = run_one(folder, f"one {recipe}", "--batch=4", f"--recipe={recipe}", "--steps=3", *WIDE)
    assert_close(folder, f"two {recipe}", one, 0.01 if recipe == "nvfp4" else 3e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("copies", ("--accumulate=2", "--batch=4")),
        ("tensors", ("--recipe=mxfp8", *WIDE)),
        ("experts", ("--batch=4", *EXPERTS)),
    ],
)
def test_layouts_of_two(two: World, folder: Path, name: str, options: tuple[str, ...]) -> None:
    for made in results(two, "layouts_of_two"):
        assert made[name]["code"] == 0, made[name]["err"]
    one = run_one(folder, f"one {name}", "--steps=3", *options)
    assert_close(folder, f"two {name}", one, 2e-3)
    if name == "copies":  # the mean of two halves, both BF16 sums of as many terms
        assert losses(folder / "two copies")[0] == losses(one)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shards", "tensors"])
def test_evaluation_changes_no_number(slow_two: World, folder: Path, name: str) -> None:
    made = results(slow_two, "held_out")
    for outcome in (part[key] for part in made for key in (name, f"blind {name}")):
        assert outcome["code"] == 0, outcome["err"]
    assert losses(folder / f"held out {name}") == losses(folder / f"blind {name}")
    assert made[0][name]["out"].count("held-out loss") == 3
    assert ("it writes:" in made[0][name]["out"]) == (name == "shards")
    assert made[1][name]["out"] == ""
    assert [part["no sample"]["code"] for part in made] == [2, 2]
    assert "--sample: with --tp" in made[0]["no sample"]["err"]


@pytest.mark.slow
def test_layouts_of_four(four: World, folder: Path) -> None:
    for made in results(four, "layouts_of_four"):
        for name, outcome in made.items():
            assert outcome["code"] == 0, (name, outcome["err"])
    one = run_one(folder, "one of four", "--batch=4", "--recipe=nvfp4", "--steps=4", *WIDE)
    assert_close(folder, "four", one, 0.02)
    one = run_one(folder, "one of four experts", "--batch=4", "--steps=3", *EXPERTS)
    assert_close(folder, "four experts", one, 2e-3)


@pytest.mark.slow
def test_compiled_is_eager(slow_two: World, folder: Path) -> None:
    """Bit for bit: one graph, of the model or of its layer."""
    for made in results(slow_two, "compiled"):
        for outcome in made.values():
            assert outcome["code"] == 0, outcome["err"]
    for name in ("tensors", "shards"):
        assert losses(folder / f"compiled {name}") == losses(folder / f"eager {name}")
        assert read(folder / f"compiled {name}/result.json")["graphs"] == 1


# Going on


def test_a_killed_process_ends_the_others(killed: Any) -> None:
    """With an error, as soon as its connections close; what was being written is not seen."""
    ((code, said), (other, _)), names = killed
    assert other == -signal.SIGKILL
    assert code == 1, said
    assert "mezzotint: rank 0 lost another one (" in said
    assert "--resume goes on from the last checkpoint" in said
    assert names == [".writing-step-00000004", "step-00000002"]


def test_killed_and_resumed(two: World, folder: Path) -> None:
    """By as many processes: the losses of a run that was never killed, bit for bit."""
    for made in results(two, "whole"):
        assert (made["whole"]["code"], made["killed"]["code"]) == (0, 0), made
    assert losses(folder / "killed") == losses(folder / "whole")
    names = sorted(path.name for path in (folder / "killed/checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006"]


def test_a_signal_to_one_stops_all(two: World, folder: Path) -> None:
    first, second = (made for made in results(two, "whole"))
    for made in (first, second):
        assert made["stopped"]["code"] == 128 + signal.SIGTERM
        assert made["checkpoints"] == ["step-00000002", "step-00000003"]
        assert made["resumed"]["code"] == 0
    assert "stopped by SIGTERM after step 3: go on with mezzotint train --resume" in first["stopped"]["err"]
    assert second["stopped"]["err"] == ""
    assert losses(folder / "stopped") == losses(folder / "whole")


@pytest.mark.slow
def test_four_resumed_by_four(four: World, folder: Path) -> None:
    """Parts of tensors in shards, and random numbers of each process: weights and losses, bit for bit."""
    assert results(four, "layouts_of_four")[0]["resumed"]["code"] == 0
    again = folder / "four/checkpoints/step-00000004"
    for path in sorted((folder / "last").glob("*.distcp")):
        assert path.read_bytes() == (again / path.name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["larger", "copies"])
def test_two_resumed_by_four(four: World, folder: Path, name: str) -> None:
    """As many replicas, of two processes each."""
    found, wanted = losses(folder / name), losses(folder / "whole")
    assert found[: STEPS - 2] == wanted[: STEPS - 2]
    assert found[STEPS - 2 :] == pytest.approx(wanted[STEPS - 2 :], abs=2e-3)


def test_two_resumed_by_one(two: World, folder: Path) -> None:
    """Which has half the batch then."""
    copy_cut(folder, "whole", "alone", STEPS - 2)
    with one_thread():
        assert main(["train", "--resume", f"--out={folder / 'alone'}"]) == 0
    found, wanted = losses(folder / "alone"), losses(folder / "whole")
    assert found[: STEPS - 2] == wanted[: STEPS - 2]
    assert found[STEPS - 2 :] == pytest.approx(wanted[STEPS - 2 :], abs=0.3)
    assert (find_checkpoints(folder / "alone")[-1] / "model.safetensors").exists()


@pytest.mark.slow
def test_experts_on_more_processes(four: World, folder: Path) -> None:
    """Four replicas instead of two, in the third step."""
    found, wanted = losses(folder / "more experts"), losses(folder / "two experts")
    assert found[:2] == wanted[:2]
    assert found[2] == pytest.approx(wanted[2], abs=0.3)


def truncated(data: bytes) -> bytes:
    return data[:-10]


def flipped(data: bytes) -> bytes:
    return data[:-10] + bytes([data[-10] ^ 1]) + data[-9:]


@pytest.mark.parametrize("harm", [truncated, flipped])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "checkpoint.json"])
def test_a_damaged_file(
    two: World, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, name: str, harm: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "whole", run)
    path = find_checkpoints(run)[-1] / name
    path.write_bytes(harm(path.read_bytes()))
    said = fails(capsys, "train", "--resume", f"--out={run}")
    assert f"step-{STEPS:08d} is damaged (" in said
    assert f"move it away to resume from step {STEPS - 2}" in said


def test_one_resumed_by_two(two: World, folder: Path) -> None:
    for made in results(two, "from_one_process"):
        assert made["resumed"]["code"] == 0, made["resumed"]["err"]
    assert len(losses(folder / "one")) == 4
    assert losses(folder / "one")[-1] < losses(folder / "one")[0]


# What is said


def test_the_first_process_speaks(two: World, folder: Path) -> None:
    first, second = (made["whole"] for made in results(two, "whole"))
    assert f"delayed  step 2/{STEPS}  loss {losses(folder / 'whole')[1]:.4f}" in first["out"]
    assert "final loss" in first["out"]
    assert (second["out"], second["err"], first["err"]) == ("", "", "")
    assert len(list((folder / "whole/tensorboard").iterdir())) == 1
    assert read(folder / "whole/config.json")["layout"] == {"world": 2, "tp": 1, "fsdp": True, "ep": 1}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("usage", "--stepps"),
        ("both", "--resume and --overwrite: give one of them"),
        ("size", "--tp is 4: give a divisor of the 2 ranks"),
        ("heads", "--tp is 2: give a divisor of heads=1"),
        ("there", "holds a run already"),
        ("differs", "--lr is not the same on the 2 ranks of the group: rank 0 has 1.0; rank 1 has 2.0"),
        ("one", "rank 1: there is no text here"),
    ],
)
def test_what_cannot_be_is_said_once(two: World, name: str, said: str) -> None:
    first, second = results(two, "wrong")
    assert (first[name]["code"], second[name]["code"]) == (2, 2)
    assert said in first[name]["err"]
    assert first[name]["err"].count("\n") == 1
    assert second[name]["err"] == ""
    assert not first["is there"]


def test_a_loss_that_is_no_number(two: World) -> None:
    first, second = results(two, "wrong")
    assert (first["nan"]["code"], second["nan"]["code"]) == (1, 1)
    assert "the loss is nan at step 1" in first["nan"]["err"]
    assert second["nan"]["err"] == ""


def test_errors_that_are_no_loss_stay_as_they_are() -> None:
    second = Processes(rank=1, size=2)
    for world, error in ((second, RuntimeError("shapes")), (ONE_RANK_WORLD, RuntimeError("gloo"))):
        with pytest.raises(RuntimeError, match=str(error)), losing_none(world):
            raise error
    with (
        pytest.raises(CommandError, match=r"rank 1 lost another one \(gloo: gone\): ") as raised,
        losing_none(second),
    ):
        raise RuntimeError("gloo: gone\nand more")
    assert (raised.value.code, raised.value.is_own) == (1, True)


@pytest.mark.parametrize("option", ["--tp=2", "--fsdp", "--ep=2"])
def test_without_a_world(capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str) -> None:
    said = fails(capsys, "train", *COMMON, f"--out={tmp_path / 'run'}", option)
    assert f"{option.split('=')[0]} is for several ranks: start them with torchrun" in said
    assert not os.listdir(tmp_path)
