"""The training loop: it trains with AdamW, a cosine schedule, clipped gradients and microbatches,
and keeps a run in a folder.

    <run>/config.json     what was asked for, and a hash of the text
          checkpoints/    see `local_checkpoint.py`
          tensorboard/    loss, gradient norm and learning rate of every step; tokens a second and held-out loss of some
          inspect/        with `--inspect`, what quantization did to tensors: see `inspect/store.py`
          result.json     every loss, written at the end

All ranks run this loop; rank 0 writes the files and prints.
"""

import math
import signal
import statistics
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from mezzotint.files import write_json
from mezzotint.inspect.region import inspect
from mezzotint.trainer.console import CommandError, enough_memory, is_closed
from mezzotint.trainer.evaluate import evaluate
from mezzotint.trainer.machine import peak_memory, reset_peak_memory
from mezzotint.trainer.meter import Meter
from mezzotint.trainer.progress import Reporter
from mezzotint.trainer.runs import INSPECT
from mezzotint.trainer.training import Training
from mezzotint.trainer.world import World, largest_number, on_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A `Result` describes a run that came to its end."""

    recipe: str
    losses: list[float]
    final: float  # mean of the last losses
    tokens_per_second: float | None
    peak_memory: int  # bytes
    graphs: int
    compile_seconds: float
    device: str
    held_out: float | None = None  # loss at the end on text that was not trained on


class Stopped(Exception):
    """This exception ends a run that a signal asked to stop; it is raised after a whole step."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.code = 128 + number


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Note the first Ctrl-C or SIGTERM in the list that is yielded; a second one does what it does without this."""
    noted: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        for signum, handler in before.items():
            signal.signal(signum, handler)

    for signum in (signal.SIGINT, signal.SIGTERM):
        before[signum] = signal.signal(signum, note)
    try:
        yield noted
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_training(training: Training, folder: Path, console: Console) -> Result:
    """Train from the current step to the last one, or raise `Stopped` after a signal, which one
    rank gets and all of them heed."""
    train, world = training.config.train, training.world
    reset_peak_memory(training.device)
    start, meter, inspector = training.step, Meter(training.device), _inspector(training, folder)
    with (
        _writer(folder, start, world) as writer,
        Reporter(console, train.recipe_label, train.steps, start) as reporter,
        catch_signals() as signals,
        enough_memory(),
        _without_warnings(),
    ):
        if train.compile and training.step < train.steps:
            reporter.say("compiling: the first step takes up to some minutes")
        while training.step < train.steps:
            with inspector:
                training.run_step()
            if is_closed(console):
                signals.append(signal.SIGPIPE)
            # The ranks agree once a step: a signal that comes later stops them after the next step.
            stopping = largest_number(world, max(signals, default=0))
            is_end = stopping > 0 or training.step == train.steps
            logs = is_end or training.step % train.log_every == 0
            saves = train.checkpoint_every > 0 and (is_end or training.step % train.checkpoint_every == 0)
            meter.step(waits=logs)
            reporter.advance()
            if logs or saves:
                start = _record(training, start, writer)
            if logs:
                _show(training, meter, writer, reporter)
            if train.eval_every and not stopping and not is_end and training.step % train.eval_every == 0:
                _evaluate(training, writer, reporter)
                meter.pause()
            if saves:
                writer.flush()
                training.save(folder)
                meter.pause()
            if stopping and training.step < train.steps:
                raise Stopped(stopping, training.step)
        held_out = _evaluate(training, writer, reporter) if train.hold_out else None
        result = _result(training, meter, held_out)
        on_first(world, lambda: write_json(folder / "result.json", asdict(result)))
    return result


def _inspector(training: Training, folder: Path) -> AbstractContextManager[Any]:
    """Return a region around each step that inspects what is quantized, or an empty one if that was not asked for."""
    train = training.config.train
    if not train.inspect:
        return nullcontext()
    return inspect(training.model, every=train.inspect, out=folder / INSPECT, what_if=train.what_if, step=training.step)


class _Silent:
    """A `_Silent` stands in for a SummaryWriter and writes nothing."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        pass

    def flush(self) -> None:
        pass


@contextmanager
def _writer(folder: Path, start: int, world: World) -> Iterator[SummaryWriter | _Silent]:
    """Yield a SummaryWriter on rank 0, and one that writes nothing on the others."""
    if not world.is_first:
        yield _Silent()
        return
    purge = start + 1 if start else None  # drop what an interrupted run wrote after its last checkpoint
    with SummaryWriter(str(folder / "tensorboard"), purge_step=purge) as writer:
        yield writer


def _record(training: Training, start: int, writer: SummaryWriter | _Silent) -> int:
    """Write the losses since `start` to the log, and return the step to go on from.

    A loss or norm that is not finite raises an error, so that it gets no checkpoint.
    """
    losses, norms = (values[start : training.step].tolist() for values in (training.losses, training.norms))
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start + 1):
        writer.add_scalar("loss", loss, step)
        writer.add_scalar("gradient_norm", norm, step)
        writer.add_scalar("learning_rate", training.config.train.learning_rate(step - 1), step)
        _check_number("loss", loss, step)
        _check_number("gradient's norm", norm, step)
    return training.step


def _check_number(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise CommandError(f"the {name} is {value} at step {step}: lower --lr, or give another --recipe", 1)


def _show(training: Training, meter: Meter, writer: SummaryWriter | _Silent, reporter: Reporter) -> None:
    step, speed = training.step, meter.steps_per_second
    tokens = None if speed is None else speed * training.tokens_per_step
    if tokens is not None:
        writer.add_scalar("tokens_per_second", tokens, step)
    reporter.show(step, training.losses[step - 1].item(), tokens)


def _evaluate(training: Training, writer: SummaryWriter | _Silent, reporter: Reporter) -> float:
    loss = evaluate(training)
    writer.add_scalar("held_out_loss", loss, training.step)
    reporter.note(f"step {training.step}/{training.config.train.steps}  held-out loss {loss:.4f}")
    return loss


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence a warning: the compiler reads `grad` of the input of a layer that is compiled by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*attribute of a Tensor that is not a leaf", UserWarning)
        yield


def _result(training: Training, meter: Meter, held_out: float | None) -> Result:
    train, losses = training.config.train, training.losses.tolist()
    speed = meter.steps_per_second
    where = torch.cuda.get_device_name(training.device) if training.device.type == "cuda" else "cpu"
    return Result(
        recipe=train.recipe_label,
        losses=losses,
        final=statistics.fmean(losses[-train.last :]),
        tokens_per_second=None if speed is None else speed * training.tokens_per_step,
        peak_memory=peak_memory(training.device),
        graphs=meter.graphs,
        compile_seconds=meter.compile_seconds,
        device=where,
        held_out=held_out,
    )
