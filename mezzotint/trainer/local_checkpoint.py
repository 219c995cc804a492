"""Checkpoints of runs on one rank: this module writes and reads folders that are either complete or not there.

    <run>/checkpoints/step-00000100/
        model.safetensors     the weights, by their names in the model
        state.pt              optimizer, delayed scaling, random numbers, losses, place in the data: tensors and numbers
        checkpoint.json       step, configuration, size and hash of the files (`manifest.py`)

A checkpoint is written under another name, flushed to the disk, and renamed; one that is to be removed is renamed
first. So a folder that is called `step-…` is complete, whatever ends the program and whenever it does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mezzotint.distributed.reading import METADATA
from mezzotint.files import check_files, describe_files, remove, sync
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.manifest import ONE, About, read_about, write_about

WEIGHTS, STATE = "model.safetensors", "state.pt"
DELAYED = "_extra_state"  # the suffix of the names of delayed scaling's state in a state dict


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A `Checkpoint` holds all that a run on one rank continues from."""

    step: int
    config: Mapping[str, Any]
    model: Mapping[str, torch.Tensor]  # delayed scaling's state included
    optimizer: Mapping[str, Mapping[str, torch.Tensor]]  # AdamW's state of each parameter, by its name
    rng: Mapping[str, torch.Tensor]
    losses: torch.Tensor  # FP32 [step]
    position: int  # in the data


def _folder(run: Path) -> Path:
    return run / "checkpoints"


def find_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, the oldest first; folders that are not called `step-…` are ignored."""
    found = [path for path in _folder(run).glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoint_path(run: Path, step: int) -> Path:
    return _folder(run) / f"step-{step:08d}"


def save_checkpoint(run: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint, remove all but the newest `keep`, and return its path."""
    path = checkpoint_path(run, checkpoint.step)
    aside = path.with_name(f".writing-{path.name}")
    try:
        if not path.exists():
            _write(aside, checkpoint)
            aside.rename(path)
            sync(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # what torch and safetensors raise for a full disk
        remove(aside)
        raise CommandError(f"{path} cannot be written ({error}): make room, then go on with --resume", 1) from None
    remove_old(run, keep)
    return path


def remove_old(run: Path, keep: int) -> None:
    """Remove all checkpoints of a run but the newest `keep`."""
    for old in find_checkpoints(run)[:-keep]:
        gone = old.with_name(f".removing-{old.name}")
        remove(gone)
        remove(old.rename(gone))


def remove_remains(run: Path) -> None:
    """Remove the unfinished folders that a killed run left behind."""
    for pattern in (".writing-*", ".removing-*"):
        for remains in _folder(run).glob(pattern):
            remove(remains)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    remove(folder)
    folder.mkdir(parents=True)
    weights = {name: value for name, value in checkpoint.model.items() if not name.endswith(DELAYED)}
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, folder / WEIGHTS)
    state = {
        "delayed": {name: value for name, value in checkpoint.model.items() if name.endswith(DELAYED)},
        "optimizer": {name: dict(value) for name, value in checkpoint.optimizer.items()},
        "rng": dict(checkpoint.rng),
        "losses": checkpoint.losses.cpu(),
        "position": checkpoint.position,
    }
    torch.save(state, folder / STATE)
    files = describe_files(folder, (WEIGHTS, STATE))
    for name in files:
        sync(folder / name)
    write_about(folder, About(ONE, checkpoint.step, checkpoint.config, files))
    sync(folder)


def open_checkpoint(path: Path, first: int = 0, every: int = 1) -> About:
    """Return what `checkpoint.json` says of a checkpoint, of one rank or of several, after a check of its files.

    Each file must be as it was written. This rank checks every `every`th one from `first` on,
    so that ranks share the work.
    """
    try:
        about = read_about(path)
        if not (about.files.keys() == {WEIGHTS, STATE} if about.kind == ONE else METADATA in about.files):
            raise ValueError(f"files of {about.kind} are not {', '.join(sorted(about.files)) or 'none'}")
        check_files(path, about.files, sorted(about.files)[first::every])
    except (OSError, ValueError) as error:
        raise as_damaged(path, error) from None
    return about


def load_checkpoint(path: Path, about: About) -> Checkpoint:
    """Load a checkpoint of one rank, on the CPU.

    Anything but what `save_checkpoint` writes raises an error that says how to go on. `check_fits` and `check_place`
    check whether the checkpoint fits a run.
    """
    try:
        weights = load_file(path / WEIGHTS)
    except Exception as error:  # damaged bytes raise errors of any kind
        raise as_damaged(path, ValueError(f"{WEIGHTS}: {error}")) from None
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception:  # torch's message is left out: it advises to unpickle, which runs code in the file
        reason = f"{STATE} holds more than tensors and plain values, or is damaged"
        raise as_damaged(path, ValueError(reason)) from None
    parts = {"delayed": dict, "optimizer": dict, "rng": dict, "losses": torch.Tensor, "position": int}
    if not isinstance(state, dict) or {name: type(value) for name, value in state.items()} != parts:
        raise as_damaged(path, ValueError(f"{STATE} has not {', '.join(parts)}, or has more"))
    if not all(isinstance(name, str) and name.endswith(DELAYED) for name in state["delayed"]):
        raise as_damaged(path, ValueError(f"{STATE}: delayed has more than delayed scaling's state"))
    return Checkpoint(
        step=about.step,
        config=about.config,
        model={**weights, **state["delayed"]},
        optimizer=state["optimizer"],
        rng=state["rng"],
        losses=state["losses"],
        position=state["position"],
    )


def check_fits(checkpoint: Checkpoint, model: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError unless weights and AdamW's state are those of a whole model with the parameters `model`."""
    weights = {name: value for name, value in checkpoint.model.items() if not name.endswith(DELAYED)}
    for what, found in ((WEIGHTS, weights), (f"{STATE}: optimizer", checkpoint.optimizer)):
        if found.keys() != model.keys():
            less, more = sorted(model.keys() - found.keys()), sorted(map(str, found.keys() - model.keys()))
            raise ValueError(
                f"{what} lacks {', '.join(less) or 'nothing'}, and has {', '.join(more) or 'nothing'} more"
            )
    for name, wanted in model.items():
        _check_tensor(f"{name} in {WEIGHTS}", weights[name], wanted.dtype, wanted.shape)
        state, where = checkpoint.optimizer[name], f"{name} in {STATE}, optimizer"
        if not isinstance(state, dict) or state.keys() != {"step", "exp_avg", "exp_avg_sq"}:
            raise ValueError(f"{where}, has not step, exp_avg and exp_avg_sq alone")
        _check_tensor(f"{where}, step", state["step"], torch.float32, ())
        for key in ("exp_avg", "exp_avg_sq"):
            _check_tensor(f"{where}, {key}", state[key], wanted.dtype, wanted.shape)
    if "cpu" not in checkpoint.rng:
        raise ValueError(f"{STATE}: rng has no random numbers of the CPU")
    for name, value in checkpoint.model.items():
        if name.endswith(DELAYED) and type(value) is not torch.Tensor:
            raise ValueError(f"{name} in {STATE} is {type(value).__name__}, not a tensor")


def check_place(step: int, losses: Any, position: int, rng: Mapping[str, Any], device: torch.device) -> None:
    """Raise a ValueError unless a run can go on from there; `rng` is empty for a rank
    that the saved run did not have."""
    _check_tensor("losses", losses, torch.float32, (step,))
    if not losses.isfinite().all():
        raise ValueError("losses has some that are no numbers")
    if not 0 <= position < 2**63:
        raise ValueError(f"position is {position}: there is no such place in the data")
    for name, where in (("cpu", torch.device("cpu")), ("cuda", device)):
        if name in rng and where.type == name:
            try:
                torch.Generator(where).set_state(rng[name])
            except (RuntimeError, TypeError):
                raise ValueError(f"rng has no state of torch's generator of random numbers ({name})") from None


def _check_tensor(name: str, value: Any, dtype: torch.dtype, shape: Any) -> None:
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
        raise ValueError(f"{name} is {type(value).__name__}, not a plain tensor")
    if (value.dtype, tuple(value.shape)) != (dtype, tuple(shape)):
        raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}, not {dtype} {tuple(shape)}")


def as_damaged(path: Path, error: BaseException) -> CommandError:
    """Return the error that says how to go on without a checkpoint that cannot be read."""
    others = [other for other in find_checkpoints(path.parent.parent) if other != path]
    rest = f"step {_step_of(others[-1])}" if others else "the start"
    return CommandError(f"{path} is damaged ({error}): move it away to resume from {rest}")
