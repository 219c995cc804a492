"""Checkpoints of runs over several processes: written by all of them, with DCP, and whole or not there.

    <run>/checkpoints/step-00000100/
        __0_0.distcp …        what each process wrote: its parts of weights and optimizer state, its random numbers
        .metadata             what is where; DCP writes it last
        checkpoint.json       step, configuration, size of the files

Names and places are those of the whole model (`parts.py`): a world of another size, or one process, reads what it
needs. All processes see one folder. They write under another name, which the first one changes when all are done.
"""

import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from mezzotint.cli.checkpoint import ABOUT, as_damaged, checkpoint_path, remove_old, sync, write_json
from mezzotint.cli.console import CommandError
from mezzotint.cli.world import World, on_first, together
from mezzotint.distributed.checkpoint import in_one_process, is_complete
from mezzotint.distributed.groups import is_initialized
from mezzotint.distributed.parts import Place

# Where a file is not what it was, or is not there. Collectives that fail raise others.
_ERRORS = (CheckpointException, OSError, ValueError, KeyError, EOFError, pickle.UnpicklingError)


def is_shared(path: Path) -> bool:
    """Whether several processes wrote it."""
    return is_complete(path)


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, places: Mapping[str, Place]
) -> dict[str, torch.Tensor]:
    """Weights and AdamW's state, by the names of the whole model, over the memory of this process's parts."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        place = places[name]
        found[f"model.{place.name}"] = place.parts(parameter)
        for key, value in start_state(optimizer, parameter).items():
            found[f"optimizer.{place.name}.{key}"] = place.parts(value) if value.dim() else value
    return found


def start_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's, of a parameter; as it makes it itself, before the first step."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    return state


def save_shared(
    world: World, run: Path, step: int, config: Mapping[str, Any], state: Mapping[str, torch.Tensor], keep: int
) -> None:
    """Write it, and remove all but the newest `keep`. All processes call it."""
    path = checkpoint_path(run, step)
    aside = path.with_name(f".writing-{path.name}")

    def prepare() -> bool:
        shutil.rmtree(aside, ignore_errors=True)
        if not path.exists():
            aside.mkdir(parents=True)
        return path.exists()

    def write() -> None:
        try:
            dcp.save(dict(state), checkpoint_id=str(aside))
        except (CheckpointException, OSError) as error:
            raise _unwritable(path, error) from None

    def finish() -> None:
        try:
            sizes = {file.name: file.stat().st_size for file in sorted(aside.iterdir())}
            write_json(aside / ABOUT, {"step": step, "config": config, "bytes": sizes})
            sync(aside)
            aside.rename(path)
            sync(path.parent)
        except OSError as error:
            raise _unwritable(path, error) from None

    if not on_first(world, prepare):
        together(world, write)
        on_first(world, finish)
    on_first(world, lambda: remove_old(run, keep))


def _unwritable(path: Path, error: BaseException) -> CommandError:
    return CommandError(f"{path} cannot be written ({error}): make room, then go on with --resume", 1)


def read_about(path: Path) -> tuple[int, Mapping[str, Any], dict[str, Any]]:
    """Step, configuration, and what is in it: name → size, dtype. Files that are not whole are an error."""
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        for name, size in about["bytes"].items():
            found = (path / name).stat().st_size
            if found != size:
                raise ValueError(f"{name} has {found} bytes of {size}")
        return about["step"], about["config"], FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except _ERRORS as error:
        raise as_damaged(path, error) from None


def load_into(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Read what `state` names into its tensors. All processes call it."""
    try:
        with in_one_process():
            dcp.load(state, checkpoint_id=str(path), no_dist=not is_initialized())
    except _ERRORS as error:
        raise as_damaged(path, error) from None
