"""This module trains one run of the convergence study with `Training`, step by step, and
writes the file of its results."""

import gc
import hashlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import mezzotint
from bench._convergence_runs import Entry
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.data import Text
from mezzotint.trainer.evaluate import evaluate
from mezzotint.trainer.local_checkpoint import find_checkpoints
from mezzotint.trainer.machine import peak_memory, reset_peak_memory, versions
from mezzotint.trainer.meter import Meter
from mezzotint.trainer.settings import RunConfig
from mezzotint.trainer.training import Training

DIGITS = 6  # of a loss in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A `Place` says where a run's text is, where its file and its checkpoints go, and when it has to stop."""

    text: Text
    data: Mapping[str, Any]  # a description of the data: hashes, sizes
    held_out: int  # tokens at the end of the text
    runs: Path
    scratch: Path
    deadline: float = math.inf  # of `time.monotonic`
    device: str = "auto"


def train_entry(entry: Entry, place: Place) -> bool:
    """Train a run from its start, or from its checkpoint if there is one; return False if the
    time was over before its end."""
    start = time.monotonic()
    path = place.runs / f"{entry.name}.jsonl"
    config = make_config(entry, place)
    eager = _eager_peak(config, place.text) if entry.study.measures_eager else None
    training = Training(config, place.text)
    folder = place.scratch / entry.name
    seconds = _resume(training, folder, path)
    if not training.step:
        shutil.rmtree(folder, ignore_errors=True)  # they are checkpoints of a run whose file is lost
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        _write(
            path, "settings", name=entry.name, study=entry.study.name, variant=entry.variant, **_settings(place, config)
        )
    run = _Run(training, path, folder, place.deadline, start - seconds, eager)
    is_whole = run.go()
    if is_whole:
        shutil.rmtree(folder, ignore_errors=True)
    del run, training
    gc.collect()
    return is_whole


def make_config(entry: Entry, place: Place) -> RunConfig:
    """Return all that a run's numbers follow from; the held-out tokens are the last of the text."""
    part = place.held_out / place.text.tokens.numel()
    train = replace(entry.study.train, seed=entry.seed, hold_out=part, device=place.device)
    if entry.schedule is None:
        train = replace(train, recipe=entry.recipe)
    else:
        train = replace(train, rules=entry.schedule.as_toml())
    return RunConfig(replace(entry.study.model, vocab=place.text.vocab), train, place.text.fingerprint)


def _settings(place: Place, config: RunConfig) -> dict[str, Any]:
    return {
        "config": config.as_json(),
        "data": dict(place.data),
        "code": hash_code(),
        "versions": versions(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and place.device != "cpu" else "cpu",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hash_code() -> str:
    """Return a hash of the package's sources, which computed the numbers."""
    root, found = Path(mezzotint.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _eager_peak(config: RunConfig, text: Text) -> int:
    """Return the memory of an eager step in bytes, measured on the second one, because AdamW's state exists by then."""
    training = Training(replace(config, train=replace(config.train, compile=False)), text)
    training.run_step()
    reset_peak_memory(training.device)
    training.run_step()
    peak = peak_memory(training.device)
    del training
    gc.collect()  # so that it does not count for what comes next
    return peak


def _resume(training: Training, folder: Path, path: Path) -> float:
    """Go on from the newest checkpoint if this run's file exists too, and return the
    seconds that the run took so far."""
    found = find_checkpoints(folder)
    if not found or not path.exists():
        return 0.0

    def check(config: Mapping[str, Any]) -> None:
        other = RunConfig.from_json(config)
        wrong = training.config.differences(other)
        if wrong or other.fingerprint != training.config.fingerprint:
            raise CommandError(f"{found[-1]} is of another run ({', '.join(wrong) or 'other text'}): remove {folder}")

    training.load(found[-1], check)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    seconds = max(
        (row["seconds"] for row in rows if row["kind"] == "steps" and row["step"] <= training.step), default=0.0
    )
    _write(path, "resumed", step=training.step, code=hash_code())
    return seconds


def _write(path: Path, kind: str, **values: Any) -> None:
    """Append a line; what is in the file stays there, whatever ends the program."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **values}) + "\n")


class _Run:
    """A `_Run` runs the steps of a run; it waits for the GPU at the steps that are logged, and at no other."""

    def __init__(
        self, training: Training, path: Path, folder: Path, deadline: float, start: float, eager: int | None
    ) -> None:
        """Prepare the run; `start` is when it would have begun if it had run without a break."""
        self.training, self.path, self.folder, self.deadline, self.start = training, path, folder, deadline, start
        self.eager, self.logged, self.peak = eager, training.step, 0
        self.meter = Meter(training.device)

    def go(self) -> bool:
        """Train to the end; return False, after writing a checkpoint, if the deadline came first."""
        training, train = self.training, self.training.config.train
        reset_peak_memory(training.device)
        while training.step < train.steps:
            training.run_step()
            is_end = training.step == train.steps
            logs = is_end or training.step % train.log_every == 0
            self.meter.step(waits=logs)
            if logs and not self._log():
                return True
            if train.eval_every and not is_end and training.step % train.eval_every == 0:
                self._evaluate()
            is_late = logs and not is_end and time.monotonic() > self.deadline
            if is_late or (train.checkpoint_every and not is_end and training.step % train.checkpoint_every == 0):
                training.save(self.folder)
                self.meter.pause()
            if is_late:
                return False
        self._end(self._evaluate())
        return True

    def _log(self) -> bool:
        """Write the steps since the last time; return False if a loss is not finite, which ends the run."""
        training = self.training
        losses, norms = (values[self.logged : training.step].tolist() for values in (training.losses, training.norms))
        seconds = round(time.monotonic() - self.start, 1)
        is_number = all(map(math.isfinite, losses + norms))
        if is_number:
            losses, norms = ([round(value, DIGITS) for value in values] for values in (losses, norms))
            _write(self.path, "steps", step=training.step, seconds=seconds, losses=losses, norms=norms)
            speed = self._tokens_per_second()
            said = "" if speed is None else f"  {speed:,.0f} tokens/s"
            steps = f"step {training.step}/{training.config.train.steps}"
            print(f"{self.path.stem}  {steps}  loss {losses[-1]:.4f}{said}  {seconds:.0f} s", flush=True)
        else:
            bad = next(i for i, pair in enumerate(zip(losses, norms, strict=True)) if not all(map(math.isfinite, pair)))
            _write(self.path, "end", diverged=self.logged + bad + 1, seconds=seconds)
            print(f"{self.path.stem}  diverged at step {self.logged + bad + 1}", flush=True)
        self.logged = training.step
        return is_number

    def _tokens_per_second(self) -> float | None:
        speed = self.meter.steps_per_second
        return None if speed is None else round(speed * self.training.tokens_per_step, 1)

    def _evaluate(self) -> float:
        """Write the held-out loss, and keep the memory of the evaluation out of that of a step."""
        self.peak = max(self.peak, peak_memory(self.training.device))
        loss = round(evaluate(self.training), DIGITS)
        _write(self.path, "held_out", step=self.training.step, loss=loss)
        print(f"{self.path.stem}  step {self.training.step}  held-out loss {loss:.4f}", flush=True)
        reset_peak_memory(self.training.device)
        self.meter.pause()
        return loss

    def _end(self, held_out: float) -> None:
        train, losses = self.training.config.train, self.training.losses.tolist()
        _write(
            self.path,
            "end",
            final=round(statistics.fmean(losses[-train.last :]), DIGITS),
            held_out=held_out,
            tokens_per_second=self._tokens_per_second(),
            peak_memory=self.peak,
            eager_peak_memory=self.eager,
            graphs=self.meter.graphs,
            compile_seconds=round(self.meter.compile_seconds, 1),
            seconds=round(time.monotonic() - self.start, 1),
        )
