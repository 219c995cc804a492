"""This module lists the runs of the convergence study, and reads the files that say how far each of them is.

A run is a file of its own, `<study>-<recipe>-s<seed>.jsonl`, small enough for the tree: its settings first, then losses
and held-out losses as they came, and at its end speed and memory. A run whose file has an end is finished.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mezzotint.recipe import Rules, Schedule
from mezzotint.trainer.recipe_names import BF16
from mezzotint.trainer.settings import TrainConfig
from mezzotint.trainer.sizes import MODELS, ModelConfig

RUNS = Path(__file__).resolve().parents[1] / "dev" / "convergence" / "runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A `Study` is a model and how it is trained; recipe, seed and data are a run's own."""

    name: str
    model: ModelConfig
    train: TrainConfig
    minutes: float  # the estimate for a run, as long as none is finished
    measures_eager: bool = False  # also the memory of an eager step, which is what `plan` predicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An `Entry` is a run of a study. A variant of a recipe has a schedule, which may hold rules per layer."""

    study: Study
    recipe: str
    seed: int = 1
    variant: str = ""
    schedule: Schedule | None = None

    @property
    def name(self) -> str:
        """Return the name of the run, for example "125m-nvfp4-s1"."""
        return "-".join(filter(None, (self.study.name, self.recipe, self.variant, f"s{self.seed}")))


STUDY_125M = Study(
    name="125m",
    model=ModelConfig(
        hidden=768, ffn=2048, layers=12, heads=12, kv_heads=4, vocab=32768, sequence=1024, batch=64, rope_base=10000.0
    ),
    train=TrainConfig(
        steps=1536, lr=6e-4, warmup=96, last=96, log_every=16, eval_every=384, eval_batches=20, hold_out=0.01,
        checkpoint_every=384, keep=1,
    ),
    minutes=8,
)  # fmt: skip
STUDY_1B = Study(
    name="1b",
    model=replace(MODELS["llama3.2-1b"], vocab=32768, sequence=2048, batch=8),
    train=TrainConfig(
        steps=300, lr=3e-4, warmup=50, last=20, log_every=10, eval_every=100, eval_batches=20, hold_out=0.01,
        checkpoint_every=0, keep=1,
    ),
    minutes=6,
    measures_eager=True,
)  # fmt: skip
FIRST = ("delayed", "current", "mxfp8", "nvfp4", "block", "rowwise")
LATER = ("mxfp6", "mxfp4")
ENTRIES = (
    Entry(study=STUDY_125M, recipe=BF16),
    *(Entry(study=STUDY_125M, recipe=name) for name in FIRST),
    *(Entry(study=STUDY_125M, recipe=BF16, seed=seed) for seed in (2, 3)),
    # Its last tenth of the steps, and its first and last layer, are in BF16.
    Entry(
        study=STUDY_125M,
        recipe="nvfp4",
        variant="last10-bf16",
        schedule=Schedule([(0, "nvfp4"), (STUDY_125M.train.steps * 9 // 10, None)]),
    ),
    Entry(
        study=STUDY_125M,
        recipe="nvfp4",
        variant="ends-bf16",
        schedule=Schedule([(0, Rules([("layers.0.*", None), ("layers.11.*", None), ("*", "nvfp4")]))]),
    ),
    *(Entry(study=STUDY_1B, recipe=name) for name in (BF16, "delayed", "current", "mxfp8")),
    *(Entry(study=STUDY_125M, recipe=name) for name in LATER),
)


@dataclass(slots=True)
class RunFile:
    """A `RunFile` is what the file of a run says; `end` is None while it is not finished."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)  # step → loss
    seconds: float = 0.0  # how long it took so far
    end: dict[str, Any] | None = None


def read_run(path: Path) -> RunFile:
    """Return what a file holds; for a run that was interrupted and resumed, the steps that it kept."""
    run = RunFile(path.stem)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kind = row.pop("kind")
        if kind == "settings":
            run.settings = row
        elif kind == "resumed":
            del run.losses[row["step"] :], run.norms[row["step"] :]
            run.held_out = {step: loss for step, loss in run.held_out.items() if step <= row["step"]}
        elif kind == "steps":
            run.seconds = row["seconds"]
            run.losses += row["losses"]
            run.norms += row["norms"]
        elif kind == "held_out":
            run.held_out[row["step"]] = row["loss"]
        else:
            run.end, run.seconds = row, row["seconds"]
    return run


def read_runs(folder: Path, entries: Sequence[Entry] = ENTRIES) -> dict[str, RunFile]:
    """Return the runs that have a file, by name, in the order of the entries."""
    paths = [folder / f"{entry.name}.jsonl" for entry in entries]
    return {path.stem: read_run(path) for path in paths if path.exists()}


def is_finished(runs: Mapping[str, RunFile], entry: Entry) -> bool:
    """Return whether a run came to its end, or ended by a loss that is not finite."""
    return entry.name in runs and runs[entry.name].end is not None


def predict_seconds(runs: Mapping[str, RunFile], entry: Entry) -> float:
    """Return how long a run will take, with a tenth added.

    The prediction is by its own steps if it was interrupted, else the time of the slowest of its recipe, or of its
    study, or the study's estimate.
    """
    own = runs.get(entry.name)
    if own is not None and own.losses:
        return 1.1 * own.seconds * entry.study.train.steps / len(own.losses)
    for prefix in (f"{entry.study.name}-{entry.recipe}-", f"{entry.study.name}-"):
        known = [run.seconds for run in runs.values() if run.end is not None and run.name.startswith(prefix)]
        if known:
            return 1.1 * max(known)
    return 60 * entry.study.minutes
