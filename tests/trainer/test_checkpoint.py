"""A checkpoint is whole or not there."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzotint.trainer import local_checkpoint as module
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.local_checkpoint import (
    STATE,
    WEIGHTS,
    Checkpoint,
    find_checkpoints,
    load_checkpoint,
    open_checkpoint,
    remove_remains,
    save_checkpoint,
)


def make(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    weight = torch.nn.Parameter(torch.randn(3, 4, generator=generator))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    model = {"layer.weight": weight, "layer._extra_state": torch.randn(5, 2, generator=generator)}
    rng = {"cpu": generator.get_state()}
    state = {"layer.weight": optimizer.state[weight]}
    return Checkpoint(
        step=step, config={"seed": 0}, model=model, optimizer=state, rng=rng, losses=torch.rand(step), position=7 * step
    )


def load(path: Path) -> Checkpoint:
    return load_checkpoint(path, open_checkpoint(path))


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(found[key], value)
    else:
        assert found == wanted


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    wanted = make(3)
    found = load(save_checkpoint(tmp_path, wanted, keep=2))
    for name in Checkpoint.__slots__:
        assert_same(getattr(found, name), getattr(wanted, name))


def test_delayed_scaling_is_beside_the_weights(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make(3), keep=2)
    assert set(module.load_file(path / WEIGHTS)) == {"layer.weight"}
    assert set(torch.load(path / STATE, weights_only=True)["delayed"]) == {"layer._extra_state"}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, make(step), keep=2)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


class Killed(BaseException):
    """Ends a program as a signal does: nothing catches it."""


@pytest.mark.parametrize("place", ["save_file", "torch.save", "write_about", "rename"])
def test_killed_while_writing(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1), keep=2)
    before = find_checkpoints(tmp_path)
    targets = {"save_file": module, "torch.save": torch, "write_about": module, "rename": Path}

    def kill(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(targets[place], place.rpartition(".")[2], kill)
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, make(2), keep=2)
    assert find_checkpoints(tmp_path) == before
    assert any(path.name.startswith(".writing") for path in (tmp_path / "checkpoints").iterdir())
    remove_remains(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == before
    assert load(save_checkpoint(tmp_path, make(2), keep=2)).step == 2


def test_killed_while_removing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1), keep=1)
    real = module.remove

    def kill(path: Path) -> None:
        was_there = path.exists()
        real(path)
        if was_there and path.name.startswith(".removing"):
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(module, "remove", kill)
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, make(2), keep=1)
    (left,) = find_checkpoints(tmp_path)
    assert load(left).step == 2


def test_files_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real_sync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append("renamed")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    save_checkpoint(tmp_path, make(1), keep=1)
    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    assert {WEIGHTS, STATE, ".writing-step-00000001"} <= set(before)
    assert "checkpoints" in after


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("name", [WEIGHTS, STATE, "checkpoint.json"])
@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_a_damaged_one_says_so(tmp_path: Path, name: str, harm: Any) -> None:
    save_checkpoint(tmp_path, make(1), keep=2)
    path = save_checkpoint(tmp_path, make(2), keep=2)
    harm(path / name)
    with pytest.raises(CommandError, match=r"is damaged .*: move it away to resume from step 1"):
        load(path)
    first = find_checkpoints(tmp_path)[0]
    assert load(first).step == 1


def test_damage_that_keeps_the_size(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make(1), keep=2)
    size = (path / STATE).stat().st_size
    (path / STATE).write_bytes(bytes(size))
    with pytest.raises(CommandError, match=r"is damaged .*: move it away to resume from the start"):
        load(path)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1), keep=1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(CommandError, match=r"No space left on device.*: make room") as raised:
        save_checkpoint(tmp_path, make(2), keep=1)
    assert raised.value.code == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
