"""Checkpoints: folders that are whole or not there.

    <run>/checkpoints/step-00000100/
        model.safetensors     the weights, by their names in the model
        state.pt              optimizer, delayed scaling, random numbers, losses, place in the data: tensors and numbers
        checkpoint.json       step, configuration, size of the files

One is written under another name, brought to the disk, and renamed; one that is removed is renamed first. So whatever
ends the program, and whenever, what is called `step-…` is whole.
"""

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mezzotint.cli.console import CommandError

WEIGHTS, STATE, ABOUT = "model.safetensors", "state.pt", "checkpoint.json"
DELAYED = "_extra_state"  # the last part of the names of delayed scaling's state in a state dict


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run continues from."""

    step: int
    config: Mapping[str, Any]
    model: Mapping[str, torch.Tensor]  # delayed scaling's state included
    optimizer: Mapping[str, Any]
    rng: Mapping[str, torch.Tensor]
    losses: torch.Tensor  # FP32 [step]
    position: int  # in the data


def write_durably(path: Path, data: bytes) -> None:
    """All of it or nothing, also when the machine stops."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_bytes(data)
    sync(aside)
    aside.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_durably(path, (json.dumps(value, indent=1) + "\n").encode())


def sync(path: Path) -> None:
    """To the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _folder(run: Path) -> Path:
    return run / "checkpoints"


def find_checkpoints(run: Path) -> list[Path]:
    """Of a run, the oldest first."""
    return sorted(_folder(run).glob("step-*"))


def checkpoint_path(run: Path, step: int) -> Path:
    return _folder(run) / f"step-{step:08d}"


def save_checkpoint(run: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write it, and remove all but the newest `keep`."""
    path = checkpoint_path(run, checkpoint.step)
    aside = path.with_name(f".writing-{path.name}")
    try:
        if not path.exists():
            _write(aside, checkpoint)
            aside.rename(path)
            sync(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's and safetensors' for a full disk
        shutil.rmtree(aside, ignore_errors=True)
        raise CommandError(f"{path} cannot be written ({error}): make room, then go on with --resume", 1) from None
    remove_old(run, keep)
    return path


def remove_old(run: Path, keep: int) -> None:
    """All checkpoints but the newest `keep`."""
    for old in find_checkpoints(run)[:-keep]:
        gone = old.rename(old.with_name(f".removing-{old.name}"))
        shutil.rmtree(gone)


def remove_remains(run: Path) -> None:
    """What a run that was killed left behind."""
    for pattern in (".writing-*", ".removing-*"):
        for remains in _folder(run).glob(pattern):
            shutil.rmtree(remains)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights = {name: value for name, value in checkpoint.model.items() if not name.endswith(DELAYED)}
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, folder / WEIGHTS)
    state = {
        "delayed": {name: value for name, value in checkpoint.model.items() if name.endswith(DELAYED)},
        "optimizer": dict(checkpoint.optimizer),
        "rng": dict(checkpoint.rng),
        "losses": checkpoint.losses.cpu(),
        "position": checkpoint.position,
    }
    torch.save(state, folder / STATE)
    sizes = {name: (folder / name).stat().st_size for name in (WEIGHTS, STATE)}
    about = {"step": checkpoint.step, "config": checkpoint.config, "bytes": sizes}
    for name in sizes:
        sync(folder / name)
    write_json(folder / ABOUT, about)
    sync(folder)


def load_checkpoint(path: Path) -> Checkpoint:
    """On the CPU. Anything but a whole checkpoint is an error that says how to go on."""
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        for name, size in about["bytes"].items():
            found = (path / name).stat().st_size
            if found != size:
                raise ValueError(f"{name} has {found} bytes of {size}")
        weights = load_file(path / WEIGHTS)
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        return Checkpoint(
            about["step"],
            about["config"],
            {**weights, **state["delayed"]},
            state["optimizer"],
            state["rng"],
            state["losses"],
            state["position"],
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise as_damaged(path, error) from None


def as_damaged(path: Path, error: BaseException) -> CommandError:
    """How to go on without a checkpoint that cannot be read."""
    others = [other for other in find_checkpoints(path.parent.parent) if other != path]
    rest = f"step {others[-1].name.removeprefix('step-').lstrip('0') or '0'}" if others else "the start"
    return CommandError(f"{path} is damaged ({error}): move it away to resume from {rest}")
