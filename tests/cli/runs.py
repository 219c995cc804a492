"""Runs of `mezzotint train` that several files look at."""

import shutil
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mezzotint.trainer.data import read_text
from mezzotint.trainer.local_checkpoint import find_checkpoints
from mezzotint.trainer.loop import Training
from mezzotint.trainer.settings import RunConfig, TrainConfig
from mezzotint.trainer.sizes import ModelConfig


def rewind(folder: Path) -> None:
    """To the last checkpoint but one, as if the run had been killed before the last."""
    shutil.rmtree(find_checkpoints(folder)[-1])
    (folder / "result.json").unlink()


def make_training(text: Path, layers: int = 1, **changed: Any) -> Training:
    found = read_text(str(text))
    sizes = ModelConfig(hidden=32, ffn=64, layers=layers, heads=2, kv_heads=1, sequence=16, batch=2, vocab=found.vocab)
    settings: dict[str, Any] = {"steps": 4, "warmup": 0, "compile": False, "device": "cpu", **changed}
    return Training(RunConfig(sizes, TrainConfig(**settings), found.fingerprint), found)


def scalars(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()
