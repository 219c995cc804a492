"""Files of a run that are well formed and wrong: one line that names the file, no traceback, and nothing is changed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mezzotint.cli.main import main
from mezzotint.files import describe_files, hash_of, write_json
from mezzotint.trainer.local_checkpoint import STATE, WEIGHTS, find_checkpoints
from mezzotint.trainer.manifest import ABOUT
from mezzotint.trainer.runs import locked
from tests.cli.tools import TINY, contents, fails, losses, one_thread, read, run_python, works, write_text

Capture = pytest.CaptureFixture[str]
NAN = float("nan")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in delayed scaling, with checkpoints after 2 and 4 steps."""
    folder = tmp_path_factory.mktemp("finished")
    options = (*TINY, "--layers=1", "--recipe=delayed", "--steps=4", "--checkpoint-every=2")
    with one_thread():
        assert main(["train", *options, f"--data={write_text(folder)}", f"--out={folder / 'run'}"]) == 0
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def last(run: Path) -> Path:
    return find_checkpoints(run)[-1]


def refused(capsys: Capture, run: Path) -> str:
    before = contents(run)
    said = fails(capsys, "train", "--resume", f"--out={run}")
    assert "Traceback" not in said
    assert contents(run) == {**before, "lock": b""}
    return said


# checkpoint.json

Change = Callable[[dict[str, Any]], Any]


def set_to(**values: Any) -> Change:
    return lambda about: about | values


ABOUTS: dict[str, tuple[str | Change, str]] = {
    "nothing": ("", "Expecting value"),
    "a list": ("[]", "it is [], not an object"),
    "null": ("null", "it is null, not an object"),
    "a number": ("3", "it is 3, not an object"),
    "half": ('{"step": 4', "delimiter"),
    "deep": ("[" * 100_000, "recursion"),
    "empty": ("{}", "it has [], not kind, step, config and files"),
    "a step of nan": (set_to(step=NAN), "step is NaN, not a whole number"),
    "a step of text": (set_to(step="4"), 'step is "4", not a whole number'),
    "half a step": (set_to(step=4.5), "step is 4.5, not a whole number"),
    "a step of true": (set_to(step=True), "step is true, not a whole number"),
    "a negative step": (set_to(step=-4), "step is -4, in a folder called step-00000004"),
    "a large step": (set_to(step=10**30), "in a folder called step-00000004"),
    "another step": (set_to(step=2), "step is 2, in a folder called step-00000004"),
    "no config": (set_to(config=None), "config is null, not an object"),
    "a kind of its own": (set_to(kind="two"), "kind is 'two', neither"),
    "another kind": (set_to(kind="several processes"), "files of several processes are not"),
    "files of a list": (set_to(files=[]), "files is [], not an object"),
    "no files": (set_to(files={}), "files of one process are not none"),
    "a path": (set_to(files={"../config.json": {}}), "'../config.json' in files is no name of a file here"),
    "a file of a number": (set_to(files={STATE: 3}), "state.pt is 3, not an object"),
    "a file without a hash": (set_to(files={STATE: {"bytes": 3}}), "state.pt has ['bytes'], not bytes and sha256"),
    "more": (set_to(more=1), "not kind, step, config and files"),
    "an earlier version's": (
        lambda about: {"step": 4, "config": about["config"], "bytes": {}},
        "it was written by an earlier version, and has no hashes of its files",
    ),
}


@pytest.mark.parametrize("name", ABOUTS)
def test_about(capsys: Capture, run: Path, name: str) -> None:
    change, said = ABOUTS[name]
    path = last(run) / ABOUT
    path.write_text(change if isinstance(change, str) else json.dumps(change(read(path))))
    found = refused(capsys, run)
    assert said in found
    assert "step-00000004 is damaged (checkpoint.json: " in found or said.startswith("files of")
    assert found.endswith("): move it away to resume from step 2\n")


CONFIGS: dict[str, tuple[Change, str]] = {
    "empty": (lambda config: {}, "fingerprint"),
    "no model": (lambda config: config | {"model": None}, "must be a mapping, not NoneType"),
    "a model of a list": (lambda config: config | {"model": []}, "must be a mapping, not list"),
    "a size of text": (
        lambda config: config | {"model": config["model"] | {"hidden": "32"}},
        "--hidden is '32': give an integer",
    ),
    "half a size": (
        lambda config: config | {"model": config["model"] | {"batch": 2.5}},
        "--batch is 2.5: give an integer",
    ),
    "no size": (lambda config: config | {"model": config["model"] | {"layers": 0}}, "--layers is 0"),
    "a setting of its own": (lambda config: config | {"train": config["train"] | {"speed": 1}}, "speed"),
    "a list of recipes": (
        lambda config: config | {"train": config["train"] | {"recipe": []}},
        "--recipe is []: give text",
    ),
    "another recipe": (lambda config: config | {"train": config["train"] | {"recipe": "fp2"}}, "fp2"),
    "steps of true": (
        lambda config: config | {"train": config["train"] | {"steps": True}},
        "--steps is True: give an integer",
    ),
    "a rate of nan": (lambda config: config | {"train": config["train"] | {"lr": NAN}}, "--lr is nan"),
    "data of a number": (lambda config: config | {"train": config["train"] | {"data": 3}}, "--data is 3: give text"),
    "a layout of a number": (lambda config: config | {"layout": 3}, "must be a mapping, not int"),
    "no text": (lambda config: config | {"fingerprint": 3}, "it is no configuration of a run"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(capsys: Capture, run: Path, name: str) -> None:
    """In the checkpoint, and of the run."""
    change, said = CONFIGS[name]
    path = last(run) / ABOUT
    about = read(path)
    path.write_text(json.dumps(about | {"config": change(about["config"])}))
    found = refused(capsys, run)
    assert "step-00000004 has no configuration of a run (" in found
    assert said in found
    (run / "config.json").write_text(json.dumps(change(read(run / "config.json"))))
    found = refused(capsys, run)
    assert "config.json cannot be read (" in found
    assert said in found


@pytest.mark.parametrize("text", ["[]", "null", "3", "", "[" * 100_000])
def test_configurations_that_are_no_objects(capsys: Capture, run: Path, text: str) -> None:
    (run / "config.json").write_text(text)
    assert "config.json cannot be read (" in refused(capsys, run)


# What the files hold, with hashes that fit


def rehash(path: Path) -> None:
    about = read(path / ABOUT)
    files = {
        name: {"bytes": entry.bytes, "sha256": entry.sha256}
        for name, entry in describe_files(path, about["files"]).items()
    }
    write_json(path / ABOUT, about | {"files": files})


WEIGHT = "embedding.weight"


def changed_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda weights: weights | {WEIGHT: change(weights[WEIGHT])}


WEIGHT_FILES: dict[str, tuple[Change, str]] = {
    "one less": (lambda w: {name: value for name, value in w.items() if name != WEIGHT}, f"lacks {WEIGHT}, and has no"),
    "one more": (lambda w: w | {"more": torch.ones(2)}, "lacks nothing, and has more more"),
    "none": (lambda w: {}, "model.safetensors lacks"),
    "integers": (changed_weight(lambda value: value.to(torch.int8)), f"{WEIGHT} in model.safetensors is torch.int8 ("),
    "another precision": (
        changed_weight(lambda value: value.bfloat16()),
        "is torch.bfloat16 (256, 32), not torch.float32",
    ),
    "another shape": (changed_weight(lambda value: value.t().contiguous()), "(32, 256), not torch.float32 (256, 32)"),
    "flat": (changed_weight(lambda value: value.flatten()), "(8192,), not torch.float32 (256, 32)"),
}


@pytest.mark.parametrize("name", WEIGHT_FILES)
def test_weights(capsys: Capture, run: Path, name: str) -> None:
    change, said = WEIGHT_FILES[name]
    path = last(run)
    save_file(change(load_file(path / WEIGHTS)), path / WEIGHTS)
    rehash(path)
    found = refused(capsys, run)
    assert "step-00000004 is damaged (" in found
    assert said in found


class Call:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def moment(value: Any) -> Change:
    def change(state: dict[str, Any]) -> Any:
        state["optimizer"][WEIGHT]["exp_avg"] = value
        return state

    return change


def first_delayed(value: Any) -> Change:
    def change(state: dict[str, Any]) -> Any:
        state["delayed"][next(iter(state["delayed"]))] = value
        return state

    return change


STATES: dict[str, tuple[Change, str]] = {
    "a list": (lambda s: [], "state.pt has not delayed, optimizer, rng, losses, position, or has more"),
    "nothing": (lambda s: None, "state.pt has not"),
    "one less": (lambda s: {"losses": s["losses"]}, "state.pt has not"),
    "one more": (lambda s: s | {"more": 1}, "state.pt has not"),
    "losses of a list": (lambda s: s | {"losses": [1.0] * 4}, "state.pt has not"),
    "a loss less": (lambda s: s | {"losses": s["losses"][1:]}, "losses is torch.float32 (3,), not torch.float32 (4,)"),
    "losses of nan": (lambda s: s | {"losses": s["losses"] * NAN}, "losses has some that are no numbers"),
    "losses of integers": (lambda s: s | {"losses": s["losses"].int()}, "losses is torch.int32 (4,)"),
    "a negative place": (lambda s: s | {"position": -1}, "position is -1"),
    "a place too far": (lambda s: s | {"position": 2**70}, "position is 1180591620717411303424"),
    "half a place": (lambda s: s | {"position": 1.5}, "state.pt has not"),
    "short random numbers": (
        lambda s: s | {"rng": {"cpu": s["rng"]["cpu"][:-1]}},
        "rng has no state of torch's generator",
    ),
    "random numbers of text": (lambda s: s | {"rng": {"cpu": "cpu"}}, "rng has no state of torch's generator"),
    "floating random numbers": (lambda s: s | {"rng": {"cpu": s["rng"]["cpu"].float()}}, "rng has no state of torch's"),
    "no random numbers": (lambda s: s | {"rng": {}}, "rng has no random numbers of the CPU"),
    "no optimizer": (lambda s: s | {"optimizer": {}}, f"state.pt: optimizer lacks {WEIGHT}"),
    "numbers for names": (lambda s: s | {"optimizer": {0: {}, 1: {}}}, "and has 0, 1 more"),
    "another moment": (moment(torch.ones(3)), f"{WEIGHT} in state.pt, optimizer, exp_avg is torch.float32 (3,), not"),
    "a moment of integers": (moment(torch.ones(256, 32, dtype=torch.int8)), "exp_avg is torch.int8 (256, 32)"),
    "a moment of text": (moment("text"), "exp_avg is str, not a plain tensor"),
    "a sparse moment": (moment(torch.ones(256, 32).to_sparse()), "plain"),  # torch 2.11 refuses to read it
    "scales of another module": (lambda s: s | {"delayed": {"no._extra_state": torch.ones(3, 5)}}, "is of no module"),
    "scales of no module": (lambda s: s | {"delayed": {"weight": torch.ones(3, 5)}}, "delayed has more than"),
    "scales of another shape": (first_delayed(torch.ones(3, 7)), "_extra_state has shape (3, 7)"),
    "scales of text": (first_delayed("text"), "is str, not a tensor"),
}


@pytest.mark.parametrize("name", STATES)
def test_states(capsys: Capture, run: Path, name: str) -> None:
    change, said = STATES[name]
    path = last(run)
    torch.save(change(torch.load(path / STATE, weights_only=True)), path / STATE)
    rehash(path)
    found = refused(capsys, run)
    assert "step-00000004 is damaged (" in found
    assert said in found


# What somebody else put there


def test_a_flipped_bit(capsys: Capture, run: Path) -> None:
    for name in (WEIGHTS, STATE):
        path = last(run) / name
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        assert f"({name} is not as it was written: its SHA-256 is another)" in refused(capsys, run)
        data[-100] ^= 1
        path.write_bytes(data)
    assert "final loss" in works(capsys, "train", "--resume", f"--out={run}")


def test_a_state_that_runs_code(capsys: Capture, run: Path, tmp_path: Path) -> None:
    path = last(run)
    torch.save({"losses": Call(tmp_path / "trace")}, path / STATE)
    rehash(path)
    found = refused(capsys, run)
    assert "(state.pt holds more than tensors and plain values, or is damaged)" in found
    assert "weights_only" not in found
    assert not (tmp_path / "trace").exists()


def test_metadata_beside_a_checkpoint_of_one_process(capsys: Capture, run: Path, tmp_path: Path) -> None:
    """checkpoint.json says what the checkpoint is: what it does not name is not looked at."""
    wanted = losses(run)
    shutil.rmtree(last(run))
    (last(run) / ".metadata").write_bytes(f"(S{str(tmp_path / 'trace')!r}\nios\nmkdir\n.".encode())
    works(capsys, "train", "--resume", f"--out={run}")
    assert losses(run) == wanted
    assert not (tmp_path / "trace").exists()


def test_metadata_that_is_named_runs_nothing(capsys: Capture, run: Path, tmp_path: Path) -> None:
    path = last(run)
    (path / ".metadata").write_bytes(f"(S{str(tmp_path / 'trace')!r}\nios\nmkdir\n.".encode())
    about = read(path / ABOUT)
    write_json(path / ABOUT, about | {"kind": "several processes", "files": {".metadata": None}})
    rehash(path)
    found = refused(capsys, run)
    assert ".metadata cannot be read (it names os.mkdir, which is no part of a checkpoint's metadata)" in found
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", [".result.json.writing", "result.json", "checkpoints/.writing-step-00000004", "lock"])
def test_links_are_not_followed(capsys: Capture, run: Path, tmp_path: Path, name: str) -> None:
    """Names that the program will write are known beforehand."""
    wanted = losses(run)
    shutil.rmtree(last(run))
    target = tmp_path / "target"
    target.write_text("precious") if name != "checkpoints/.writing-step-00000004" else target.mkdir()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
    if name == "lock":
        assert "lock cannot be written" in fails(capsys, "train", "--resume", f"--out={run}")
    else:
        works(capsys, "train", "--resume", f"--out={run}")
        assert losses(run) == wanted
        assert not (run / name).is_symlink()
    assert target.read_text() == "precious" if target.is_file() else not list(target.iterdir())


def test_a_link_in_the_place_of_an_old_checkpoint(capsys: Capture, run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    find_checkpoints(run)[0].rename(elsewhere)
    (run / "checkpoints/step-00000002").symlink_to(elsewhere)
    shutil.rmtree(last(run))
    works(capsys, "train", "--resume", f"--out={run}", "--checkpoint-every=1")
    assert [path.name for path in find_checkpoints(run)] == ["step-00000003", "step-00000004"]
    assert (elsewhere / ABOUT).exists()


def test_a_checkpoint_under_another_name_is_none(capsys: Capture, run: Path) -> None:
    """What is damaged is moved away by giving it another name, in its place."""
    wanted = losses(run)
    (last(run) / STATE).write_bytes(b"")
    last(run).rename(last(run).with_name("step-00000004.damaged"))
    works(capsys, "train", "--resume", f"--out={run}")
    assert losses(run) == wanted
    assert (run / "checkpoints/step-00000004.damaged").is_dir()


# Two at once


def test_two_in_one_folder(capsys: Capture, run: Path) -> None:
    before = contents(run)
    with locked(run):
        for option in ("--resume", "--overwrite"):
            options = (*TINY, "--steps=1") if option == "--overwrite" else ()
            said = fails(capsys, "train", option, *options, f"--out={run}")
            assert f"process {os.getpid()} on {os.uname().nodename} trains in {run}: wait for it, stop it" in said
    assert contents(run) == {**before, "lock": b""}
    assert "final loss" in works(capsys, "train", "--resume", f"--out={run}")


def test_the_lock_of_a_killed_process_is_gone(capsys: Capture, run: Path) -> None:
    code = "import os, signal, sys; from pathlib import Path; from mezzotint.trainer.runs import locked\n"
    code += "with locked(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    assert run_python(code, run).returncode == -9
    assert (run / "lock").read_text().startswith("process ")
    assert "final loss" in works(capsys, "train", "--resume", f"--out={run}")


def test_hashes_are_those_of_the_files(run: Path) -> None:
    for path in find_checkpoints(run):
        for name, entry in read(path / ABOUT)["files"].items():
            assert entry == {"bytes": (path / name).stat().st_size, "sha256": hash_of(path / name)}
