"""`mezzotint train`: learns in every recipe, goes on bit for bit."""

import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzotint.trainer.local_checkpoint import WEIGHTS, find_checkpoints
from mezzotint.trainer.loop import Training, catch_signals
from mezzotint.trainer.meter import Meter
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.settings import TrainConfig
from tests.cli.runs import make_training, rewind, scalars
from tests.cli.test_main import closed_pipe
from tests.cli.tools import TINY, contents, fails, losses, read, run, run_python, works

Capture = pytest.CaptureFixture[str]


# Learning


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", COMMAND_RECIPES)
def test_the_loss_falls(capsys: Capture, tmp_path: Path, options: tuple[str, ...], recipe: str) -> None:
    said = works(capsys, "train", *options, f"--recipe={recipe}", "--lr=0.01")
    found = losses(tmp_path / "run")
    assert len(found) == 8
    assert found[-1] < found[0] - 0.3
    assert f"{recipe}  step 4/8  loss {found[3]:.4f}" in said
    assert f"final loss {sum(found) / 8:.4f} (mean of the last 8)" in said
    assert f"run in {tmp_path / 'run'}" in said


def test_python_sources_are_the_default_text(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        assert f"run in runs/train-00{number}" in works(capsys, "train", *TINY, "--steps=1")
    assert losses(tmp_path / "runs/train-001") == losses(tmp_path / "runs/train-002")


def test_micro_batches_are_a_batch(capsys: Capture, tmp_path: Path, text: Path) -> None:
    """Half the batch twice is the same step, but for rounding."""
    common = (*TINY, f"--data={text}", "--steps=4")
    works(capsys, "train", *common, "--batch=4", f"--out={tmp_path / 'whole'}")
    works(capsys, "train", *common, "--batch=2", "--accumulate=2", f"--out={tmp_path / 'halves'}")
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), abs=2e-3)


def test_micro_batches_share_quantized_weights(
    capsys: Capture, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    real = Training.__init__

    def spy(self: Training, *args: Any) -> None:
        real(self, *args)
        call = self.call

        def note(*given: Any, is_first_microbatch: bool | None) -> Any:
            seen.append(is_first_microbatch)
            return call(*given, is_first_microbatch=is_first_microbatch)

        self.call = note

    monkeypatch.setattr(Training, "__init__", spy)
    works(capsys, "train", *options, "--accumulate=3", "--recipe=mxfp8")
    assert seen == [True, False, False] * 8
    seen.clear()
    works(capsys, "train", *options, "--overwrite", "--recipe=mxfp8")
    assert seen == [None] * 8


def test_learning_rate_rises_and_falls() -> None:
    config = TrainConfig(steps=100, warmup=10, lr=1.0, final_lr=0.1)
    rates = [config.learning_rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert all(after < before for before, after in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert TrainConfig(warmup=0, lr=1.0).learning_rate(0) == 1.0


@pytest.mark.parametrize(("clip", "wanted"), [(0.5, 0.5), (0.0, None), (1e4, None)])
def test_the_optimizer_gets_gradients_of_at_most_the_norm(text: Path, clip: float, wanted: float | None) -> None:
    """What was logged is the norm before."""
    training = make_training(text, clip=clip)
    seen: list[float] = []
    training.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in training.model.parameters()])))
    )
    training.run_step()
    logged = training.norms[0].item()
    assert logged > 1.0
    assert seen == [pytest.approx(logged if wanted is None else wanted, rel=1e-3)]


def test_matrices_decay_and_nothing_else(text: Path) -> None:
    """Where gradients are zero, AdamW multiplies by 1 - lr · decay."""
    training = make_training(text, lr=0.5, weight_decay=0.5)
    before = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training.optimizer.step()
    kinds = set()
    for name, value in training.model.named_parameters():
        is_matrix = value.dim() >= 2
        kinds.add(is_matrix)
        torch.testing.assert_close(value.detach(), before[name] * (0.75 if is_matrix else 1.0), rtol=1e-6, atol=0)
    assert kinds == {True, False}


def test_tokens_of_a_step_are_those_of_all_its_micro_batches(text: Path) -> None:
    training = make_training(text, accumulate=3)
    assert training.tokens_per_step == 2 * 16 * 3
    training.run_step()
    assert training.batches.position == 2 * 3  # windows of 16


def test_speed_counts_all_micro_batches(
    capsys: Capture, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "steps_per_second", 10.0)
    said = works(capsys, "train", *options, "--accumulate=3")
    assert read(tmp_path / "run/result.json")["tokens_per_second"] == 10.0 * 2 * 16 * 3
    assert "960 tokens/s" in said
    assert [event.value for event in scalars(tmp_path / "run").Scalars("tokens_per_second")] == [960.0, 960.0]


def test_gradients_are_clipped(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> None:
    norms = []
    for clip in ("0", "0.001"):
        works(capsys, "train", *options, f"--clip={clip}", "--overwrite")
        norms.append(losses(tmp_path / "run"))
    assert norms[0][0] == norms[1][0]
    assert norms[0] != norms[1]


@pytest.mark.slow
@pytest.mark.compile
def test_compiled_is_eager(capsys: Capture, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; a graph for the first micro-batch and one for the others."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    common = (*TINY, "--layers=1", f"--data={text}", "--steps=4", "--accumulate=2", "--recipe=delayed")
    works(capsys, "train", *common, f"--out={tmp_path / 'eager'}")
    said = works(capsys, "train", *common, "--compile", f"--out={tmp_path / 'compiled'}")
    assert "delayed  compiling: the first step takes" in said.split("step 4/4")[0]
    assert losses(tmp_path / "compiled") == losses(tmp_path / "eager")
    eager, compiled = (read(tmp_path / name / "result.json") for name in ("eager", "compiled"))
    assert (eager["graphs"], eager["compile_seconds"]) == (0, 0.0)
    assert compiled["graphs"] == 2
    assert compiled["compile_seconds"] > 0.1


def test_a_missing_compiler_is_said_before_it_is_needed(
    capsys: Capture, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install g++, or give --no-compile" in fails(capsys, "train", *options, "--compile")


# Going on


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", COMMAND_RECIPES)
def test_resumed_is_uninterrupted(capsys: Capture, tmp_path: Path, options: tuple[str, ...], recipe: str) -> None:
    """Delayed scaling has state in the modules, NVFP4 takes random numbers: weights and losses, bit for bit."""
    folder = tmp_path / "run"
    works(capsys, "train", *options, f"--recipe={recipe}", "--accumulate=2")
    wanted, weights = losses(folder), (find_checkpoints(folder)[-1] / WEIGHTS).read_bytes()
    rewind(folder)
    works(capsys, "train", "--resume", f"--out={folder}")
    assert losses(folder) == wanted
    assert (find_checkpoints(folder)[-1] / WEIGHTS).read_bytes() == weights


KILLED = """
import os, runpy, signal
from mezzotint.trainer import local_checkpoint, loop

run_step, save = loop.Training.run_step, local_checkpoint.torch.save
calls = []

def count(place, real, *arguments):
    calls.append(place)
    if calls.count("{place}") == {time}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)

loop.Training.run_step = lambda self: count("step", run_step, self)
local_checkpoint.torch.save = lambda *arguments: count("checkpoint", save, *arguments)
runpy.run_module("mezzotint", run_name="__main__", alter_sys=True)
"""


@pytest.mark.cover(0)
@pytest.mark.parametrize(("place", "time", "kept"), [("step", 9, 2), ("checkpoint", 2, 1)])
def test_killed_and_resumed(capsys: Capture, tmp_path: Path, text: Path, place: str, time: int, kept: int) -> None:
    """SIGKILL between checkpoints and inside one, in a process of its own."""
    common = (*TINY, f"--data={text}", "--steps=12", "--recipe=delayed", "--checkpoint-every=4")
    folder = tmp_path / "killed"
    process = run_python(KILLED.format(place=place, time=time), "train", *common, f"--out={folder}")
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not (folder / "result.json").exists()
    assert [path.name for path in find_checkpoints(folder)] == ["step-00000004", "step-00000008"][:kept]
    works(capsys, "train", "--resume", f"--out={folder}")
    works(capsys, "train", *common, f"--out={tmp_path / 'whole'}")
    assert losses(folder) == losses(tmp_path / "whole")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]


def test_resumed_before_the_first_checkpoint(capsys: Capture, made: Path) -> None:
    wanted = losses(made)
    shutil.rmtree(made / "checkpoints")
    (made / "result.json").unlink()
    works(capsys, "train", "--resume", f"--out={made}")
    assert losses(made) == wanted


def test_resumed_after_the_end(capsys: Capture, made: Path) -> None:
    wanted = losses(made)
    assert "final loss" in works(capsys, "train", "--resume", f"--out={made}")
    assert losses(made) == wanted


def test_what_decides_no_number_may_change(capsys: Capture, tmp_path: Path, made: Path, text: Path) -> None:
    wanted = losses(made)
    rewind(made)
    moved = text.rename(tmp_path / "moved.txt")
    works(capsys, "train", "--resume", f"--out={made}", f"--data={moved}", "--log-every=1", "--checkpoint-every=2")
    assert losses(made) == wanted


def test_a_run_is_made_longer(capsys: Capture, made: Path) -> None:
    before = losses(made)
    said = works(capsys, "train", "--resume", f"--out={made}", "--steps=12")
    assert "which goes on after step 8" in said
    assert "step 12/12" in said
    assert losses(made)[:8] == before
    assert len(losses(made)) == 12
    assert read(made / "config.json")["train"]["steps"] == 12
    longer = losses(made)
    shutil.rmtree(find_checkpoints(made)[-1])
    works(capsys, "train", "--resume", f"--out={made}")  # which remembers it
    assert losses(made) == longer


def test_a_run_is_not_made_shorter_than_it_is(capsys: Capture, made: Path) -> None:
    before = contents(made)
    said = fails(capsys, "train", "--resume", f"--out={made}", "--steps=7")
    assert "--steps is 7: the run has 8 already; give as many or more" in said
    assert contents(made) == before


def raise_at(step: int, number: int) -> Callable[[Training], None]:
    """A step that is interrupted by a signal in its middle."""
    real = Training.run_step

    def run_step(self: Training) -> None:
        if self.step + 1 == step:
            signal.raise_signal(number)
        real(self)

    return run_step


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_a_checkpoint(
    capsys: Capture, made: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    wanted, handler = losses(made), signal.getsignal(number)
    with monkeypatch.context() as patched:
        patched.setattr(Training, "run_step", raise_at(6, number))
        said = fails(capsys, "train", *options, "--overwrite", code=128 + number)
    assert f"stopped by {number.name} after step 6: go on with mezzotint train --resume --out {made}" in said
    assert [path.name for path in find_checkpoints(made)] == ["step-00000004", "step-00000006"]
    assert signal.getsignal(number) is handler
    works(capsys, "train", "--resume", f"--out={made}")
    assert losses(made) == wanted


def test_output_that_nobody_reads_stops_with_a_checkpoint(
    capsys: Capture, made: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mezzotint train | head -1`: as Ctrl-C."""
    wanted = losses(made)
    with closed_pipe() as pipe, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", pipe)
        code, err = run(capsys, "train", *options, "--overwrite", "--log-every=2")[::2]
    assert code == 128 + signal.SIGPIPE
    assert re.fullmatch(
        r"mezzotint: stopped by SIGPIPE after step [1-3]: go on with mezzotint train --resume .*\n", err
    )
    assert len(find_checkpoints(made)) == 1
    works(capsys, "train", "--resume", f"--out={made}")
    assert losses(made) == wanted


def test_a_second_signal_does_not_wait() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell turns it off for what it runs aside
    try:
        with catch_signals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals == [signal.SIGINT]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
