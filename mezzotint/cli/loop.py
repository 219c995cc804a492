"""The training loop: AdamW under a cosine, clipped gradients, micro-batches; a run is a folder.

    <run>/config.json     what was asked for, and a hash of the text
          checkpoints/    see `checkpoint.py`
          tensorboard/    loss, gradient norm, learning rate, tokens a second
          result.json     every loss, written at the end

What a run computes follows from its configuration alone: a run that is resumed makes the numbers of one that was never
interrupted, bit for bit on a CPU with the same versions and threads.
"""

import math
import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from mezzotint.cli.checkpoint import Checkpoint, save_checkpoint, write_json
from mezzotint.cli.console import CommandError
from mezzotint.cli.data import Batches, Text
from mezzotint.cli.machine import check_compiler, find_device, peak_memory, reset_peak_memory
from mezzotint.cli.meter import Meter
from mezzotint.cli.model import LanguageModel
from mezzotint.cli.progress import Reporter
from mezzotint.cli.recipes import find_recipe
from mezzotint.cli.settings import RunConfig
from mezzotint.quantization import autocast

BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run that came to its end."""

    recipe: str
    losses: list[float]
    final: float  # mean of the last losses
    tokens_per_second: float | None
    peak_memory: int  # bytes
    graphs: int
    compile_seconds: float
    device: str


class Training:
    """A model, its optimizer and its data, after `step` steps."""

    def __init__(self, config: RunConfig, text: Text) -> None:
        self.config, self.step = config, 0
        train = config.train
        if train.compile and config.model.experts:
            raise CommandError("--experts: how many rows an expert gets is known when it runs; give --no-compile")
        self.device = find_device(train.device)
        self.recipe = find_recipe(train.recipe)
        self.batches = Batches(text, config.model.sequence, config.model.batch, train.seed)
        self.losses = torch.zeros(train.steps, device=self.device)
        self.norm = torch.zeros((), device=self.device)  # of the last gradient
        torch.manual_seed(train.seed)
        self.model = LanguageModel(config.model).to(self.device)  # made on the CPU: the same weights anywhere
        self.call: Any = self.model
        if train.compile:
            check_compiler(self.device)
            torch.compiler.reset()  # runs share the code of the model, and the graphs of one function are limited
            self.call = torch.compile(self.model, fullgraph=True)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=BETAS, fused=True)

    @property
    def tokens_per_step(self) -> int:
        return self.config.model.batch * self.config.model.sequence * self.config.train.accumulate

    def run_step(self) -> None:
        """Forward and backward of each micro-batch, and the optimizer's step."""
        train = self.config.train
        for group in self.optimizer.param_groups:
            group["lr"] = train.learning_rate(self.step)
        total = torch.zeros((), device=self.device)
        for micro in range(train.accumulate):
            tokens, targets = (part.to(self.device, non_blocking=True) for part in self.batches.next())
            # Weights change once a step: micro-batches after the first use the quantized weights of the first.
            is_first = None if train.accumulate == 1 else micro == 0
            with autocast(enabled=self.recipe is not None, recipe=self.recipe):
                loss = self.call(tokens, targets, is_first_microbatch=is_first)
            (loss / train.accumulate).backward()
            total += loss.detach() / train.accumulate
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), train.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[self.step] = total
        self.step += 1

    def take(self) -> Checkpoint:
        """Everything that the next step depends on."""
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return Checkpoint(
            self.step,
            self.config.as_json(),
            self.model.state_dict(),
            self.optimizer.state_dict(),
            rng,
            self.losses[: self.step].clone(),
            self.batches.position,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """What `take` gave, in this process or in another."""
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(dict(checkpoint.optimizer))
        torch.set_rng_state(checkpoint.rng["cpu"])
        if self.device.type == "cuda" and "cuda" in checkpoint.rng:
            torch.cuda.set_rng_state(checkpoint.rng["cuda"], self.device)
        self.losses[: checkpoint.step] = checkpoint.losses.to(self.device)
        self.step, self.batches.position = checkpoint.step, checkpoint.position


class Stopped(Exception):
    """A signal asked to stop, and the run did, after a whole step."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.code = 128 + number


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are noted, once; a second one does what it does without this."""
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
    """From where it is to its end, or to a signal (`Stopped`)."""
    train = training.config.train
    reset_peak_memory(training.device)
    start, meter = training.step, Meter(training.device)
    purge = start + 1 if start else None  # what an interrupted run wrote after its last checkpoint
    with (
        SummaryWriter(str(folder / "tensorboard"), purge_step=purge) as writer,
        Reporter(console, train.recipe, train.steps, start) as reporter,
        catch_signals() as signals,
        _without_memory(),
    ):
        while training.step < train.steps:
            training.run_step()
            stops = bool(signals)  # asked once: a signal from here on stops after the next step
            is_end = stops or training.step == train.steps
            logs = is_end or training.step % train.log_every == 0
            saves = train.checkpoint_every > 0 and (is_end or training.step % train.checkpoint_every == 0)
            meter.step(waits=logs)
            reporter.advance()
            if logs or saves:
                start = _record(training, start, writer)
            if logs:
                _show(training, meter, writer, reporter)
            if saves:
                writer.flush()
                save_checkpoint(folder, training.take(), train.keep)
                meter.pause()
            if stops and training.step < train.steps:
                raise Stopped(signals[0], training.step)
    result = _result(training, meter)
    write_json(folder / "result.json", asdict(result))
    return result


def _record(training: Training, start: int, writer: SummaryWriter) -> int:
    """Note the losses since `start`; the step to go on from. What is no number any more gets no checkpoint."""
    for step, loss in enumerate(training.losses[start : training.step].tolist(), start + 1):
        writer.add_scalar("loss", loss, step)
        _check_number("loss", loss, step)
    _check_number("gradient's norm", training.norm.item(), training.step)
    return training.step


def _check_number(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise CommandError(f"the {name} is {value} at step {step}: lower --lr, or give another --recipe", 1)


def _show(training: Training, meter: Meter, writer: SummaryWriter, reporter: Reporter) -> None:
    step, speed = training.step, meter.steps_per_second
    tokens = None if speed is None else speed * training.tokens_per_step
    writer.add_scalar("gradient_norm", training.norm.item(), step)
    writer.add_scalar("learning_rate", training.config.train.learning_rate(step - 1), step)
    if tokens is not None:
        writer.add_scalar("tokens_per_second", tokens, step)
    reporter.show(step, training.losses[step - 1].item(), tokens)


@contextmanager
def _without_memory() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise CommandError(
            "the GPU has too little memory: lower --batch or --sequence; `mezzotint plan` says what fits", 1
        ) from None


def _result(training: Training, meter: Meter) -> Result:
    train, losses = training.config.train, training.losses.tolist()
    speed = meter.steps_per_second
    where = torch.cuda.get_device_name(training.device) if training.device.type == "cuda" else "cpu"
    return Result(
        recipe=train.recipe,
        losses=losses,
        final=statistics.fmean(losses[-train.last :]),
        tokens_per_second=None if speed is None else speed * training.tokens_per_step,
        peak_memory=peak_memory(training.device),
        graphs=meter.graphs,
        compile_seconds=meter.compile_seconds,
        device=where,
    )
