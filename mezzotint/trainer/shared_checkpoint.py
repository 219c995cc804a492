"""Checkpoints of runs on several ranks: all of them write one with DCP, and it is either complete or not there.

    <run>/checkpoints/step-00000100/
        __0_0.distcp …        what each rank wrote: its shards of weights and optimizer state, its random state
        .metadata             what is where; DCP writes it last
        checkpoint.json       step, configuration, size and hash of the files (`manifest.py`)

Names and positions are those of the whole model (`parts.py`), so that a world of another size, or one rank alone, reads
what it needs. All ranks see one folder. They write under another name, and rank 0 renames it when all are done.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mezzotint.comm.collectives import gather_objects
from mezzotint.distributed.parts import ShardPlacement
from mezzotint.distributed.reading import load_state, read_metadata
from mezzotint.files import FileEntry, describe_files, remove, sync
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.local_checkpoint import as_damaged, checkpoint_path, remove_old
from mezzotint.trainer.manifest import SEVERAL, About, write_about
from mezzotint.trainer.world import World, on_first, together


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, places: Mapping[str, ShardPlacement]
) -> dict[str, torch.Tensor]:
    """Return weights and AdamW's state by the names of the whole model, as views of this rank's shards."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        place = places[name]
        found[f"model.{place.name}"] = place.parts(parameter)
        for key, value in start_state(optimizer, parameter).items():
            found[f"optimizer.{place.name}.{key}"] = place.parts(value) if value.dim() else value
    return found


def start_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return AdamW's state of a parameter; before the first step it is created as AdamW would."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    return state


def save_shared(
    world: World, run: Path, step: int, config: Mapping[str, Any], state: Mapping[str, torch.Tensor], keep: int
) -> None:
    """Write a checkpoint, and remove all but the newest `keep`; all ranks call it."""
    path = checkpoint_path(run, step)
    aside = path.with_name(f".writing-{path.name}")

    def prepare() -> bool:
        remove(aside)
        if not path.exists():
            aside.mkdir(parents=True)
        return path.exists()

    def write() -> None:
        try:
            dcp.save(dict(state), checkpoint_id=str(aside))
        except (CheckpointException, OSError) as error:
            raise _unwritable(path, error) from None

    def look() -> dict[str, FileEntry]:
        """Describe this rank's share of the files that all ranks have written."""
        return describe_files(aside, sorted(file.name for file in aside.iterdir())[world.rank :: world.size])

    def finish() -> None:
        try:
            for name in files:
                sync(aside / name)
            write_about(aside, About(SEVERAL, step, config, files))
            sync(aside)
            aside.rename(path)
            sync(path.parent)
        except OSError as error:
            raise _unwritable(path, error) from None

    if not on_first(world, prepare):
        together(world, write)
        shares = gather_objects(together(world, look))
        files = {name: entry for share in shares for name, entry in share.items()}
        on_first(world, finish)
    on_first(world, lambda: remove_old(run, keep))


def _unwritable(path: Path, error: BaseException) -> CommandError:
    return CommandError(f"{path} cannot be written ({error}): make room, then go on with --resume", 1)


def read_stored(path: Path, about: About) -> Metadata:
    """Return DCP's metadata, which says what is where, after a check that it names only files of `checkpoint.json`."""
    try:
        metadata = read_metadata(path)
        others = {info.relative_path for info in metadata.storage_data.values()} - about.files.keys()
        if others:
            raise ValueError(f".metadata names {', '.join(sorted(others))}, which is no file of this checkpoint")
        if not all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()):
            raise ValueError(".metadata names more than tensors")
        return metadata
    except ValueError as error:
        raise as_damaged(path, error) from None


def load_into(path: Path, state: dict[str, torch.Tensor], metadata: Metadata) -> None:
    """Read what `state` names into its tensors; all ranks call it."""
    try:
        load_state(path, state, metadata)
    except ValueError as error:
        raise as_damaged(path, error) from None
