"""`mezzotint train`: learns in every recipe, goes on bit for bit, loses nothing."""

import math
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
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mezzotint.trainer.console import as_count
from mezzotint.trainer.data import as_words, read_text
from mezzotint.trainer.evaluate import evaluate
from mezzotint.trainer.local_checkpoint import WEIGHTS, find_checkpoints
from mezzotint.trainer.loop import Training, catch_signals
from mezzotint.trainer.meter import Meter
from mezzotint.trainer.progress import Reporter
from mezzotint.trainer.recipes import RECIPES
from mezzotint.trainer.sample import write_on
from mezzotint.trainer.settings import RunConfig, TrainConfig
from mezzotint.trainer.sizes import ModelConfig
from tests.cli.test_main import closed_pipe
from tests.cli.tools import TINY, contents, fails, losses, read, run, run_python, works, write_text

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture
def options(tmp_path: Path, text: Path) -> tuple[str, ...]:
    return (*TINY, f"--data={text}", f"--out={tmp_path / 'run'}", "--steps=8", "--log-every=4", "--checkpoint-every=4")


@pytest.fixture
def made(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> Path:
    """A run that came to its end, with checkpoints after 4 and 8 steps."""
    works(capsys, "train", *options)
    return tmp_path / "run"


def rewind(folder: Path) -> None:
    """To the last checkpoint but one, as if the run had been killed before the last."""
    shutil.rmtree(find_checkpoints(folder)[-1])
    (folder / "result.json").unlink()


# Learning


@pytest.mark.parametrize("recipe", RECIPES)
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


def make_training(text: Path, layers: int = 1, **changed: Any) -> Training:
    found = read_text(str(text))
    sizes = ModelConfig(hidden=32, ffn=64, layers=layers, heads=2, kv_heads=1, sequence=16, batch=2, vocab=found.vocab)
    settings: dict[str, Any] = {"steps": 4, "warmup": 0, "compile": False, "device": "cpu", **changed}
    return Training(RunConfig(sizes, TrainConfig(**settings), found.fingerprint), found)


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


@pytest.mark.parametrize("recipe", RECIPES)
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


# Losing nothing


def test_a_run_is_not_written_over(capsys: Capture, made: Path, options: tuple[str, ...]) -> None:
    before = contents(made)
    assert "give --resume to go on with it, --overwrite to begin anew" in fails(capsys, "train", *options)
    assert "there is no recipe" in fails(capsys, "train", *options, "--overwrite", "--recipe=fp16")
    assert "is empty" in fails(capsys, "train", *options, "--overwrite", "--data=/dev/null")
    assert contents(made) == before
    works(capsys, "train", *options, "--overwrite", "--seed=1", "--steps=4")
    assert len(losses(made)) == 4
    assert losses(made)[0] != read_losses(before)[0]


def read_losses(files: dict[str, bytes]) -> list[float]:
    text = files["result.json"].decode()
    return [float(part) for part in text.split("[")[1].split("]")[0].split(",")]


def test_a_folder_of_something_else_is_left_alone(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "diary.txt").write_text("dear diary")
    for more in ((), ("--overwrite",)):
        assert "is not empty: give another --out" in fails(capsys, "train", *options, *more)
    assert "holds no run" in fails(capsys, "train", "--resume", f"--out={folder}")
    assert contents(folder) == {"diary.txt": b"dear diary"}
    assert "is a file" in fails(capsys, "train", *options, f"--out={folder / 'diary.txt'}")
    said = fails(capsys, "train", *options, f"--out={folder / 'diary.txt' / 'run'}")
    assert "cannot be made (Not a directory): give another --out" in said


def test_a_missing_folder(capsys: Capture, tmp_path: Path) -> None:
    said = fails(capsys, "train", "--resume", f"--out={tmp_path / 'run'}")
    assert "does not exist: leave --resume out" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--lr=0.1", "--lr 0.001, not 0.1"),
        ("--hidden=64", "--hidden 32, not 64"),
        ("--model=tiny", "--hidden 32, not 128"),
        ("--compile", "--compile False, not True"),
    ],
)
def test_another_configuration(capsys: Capture, made: Path, option: str, said: str) -> None:
    before = contents(made)
    found = fails(capsys, "train", "--resume", f"--out={made}", option)
    assert said in found
    assert "leave the option out" in found
    assert contents(made) == before


def test_a_checkpoint_of_another_configuration(
    capsys: Capture, tmp_path: Path, made: Path, options: tuple[str, ...]
) -> None:
    other = tmp_path / "other"
    works(capsys, "train", *options, "--hidden=64", f"--out={other}")
    shutil.rmtree(made / "checkpoints")
    shutil.copytree(other / "checkpoints", made / "checkpoints")
    before = contents(made)
    assert "step-00000008 has --hidden 64, not 32" in fails(capsys, "train", "--resume", f"--out={made}")
    assert contents(made) == before


def test_another_text(capsys: Capture, made: Path, text: Path) -> None:
    text.write_text("something else, and long enough for a sequence")
    assert "the text is not the one" in fails(capsys, "train", "--resume", f"--out={made}")


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "checkpoint.json"])
def test_a_truncated_file(capsys: Capture, made: Path, name: str) -> None:
    wanted = losses(made)
    last = find_checkpoints(made)[-1]
    (last / name).write_bytes((last / name).read_bytes()[:-10])
    before = contents(made)
    assert "is damaged" in (said := fails(capsys, "train", "--resume", f"--out={made}"))
    assert "move it away to resume from step 4" in said
    assert contents(made) == before
    shutil.rmtree(last)
    works(capsys, "train", "--resume", f"--out={made}")
    assert losses(made) == wanted


def test_a_configuration_that_is_no_more(capsys: Capture, made: Path) -> None:
    (made / "config.json").write_text('{"model": {')
    assert "config.json cannot be read" in fails(capsys, "train", "--resume", f"--out={made}")


def test_text_that_cannot_be_trained_on(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    assert "is empty" in fails(capsys, "train", *options, f"--data={tmp_path / 'empty'}")
    assert "does not exist" in fails(capsys, "train", *options, f"--data={tmp_path / 'nowhere'}")
    assert "give more text" in fails(capsys, "train", *options, f"--data={tmp_path / 'short'}")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number(
    capsys: Capture, made: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Training.run_step

    def run_step(self: Training) -> None:
        real(self)
        if self.step == 6:
            self.losses[5] = math.nan

    monkeypatch.setattr(Training, "run_step", run_step)
    said = fails(capsys, "train", *options, "--overwrite", "--log-every=100", "--checkpoint-every=2", code=1)
    assert "the loss is nan at step 6: lower --lr" in said
    assert [path.name for path in find_checkpoints(made)] == ["step-00000002", "step-00000004"]


def test_a_gpu_that_is_not_there(capsys: Capture, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "give --device cpu" in fails(capsys, "train", *options, "--device=cuda")


def test_memory_that_is_not_there(capsys: Capture, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_step(self: Training) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr(Training, "run_step", run_step)
    assert "the GPU has too little memory: lower --batch" in fails(capsys, "train", *options, code=1)


# What is told on the way


def scalars(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard_has_every_loss_once(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    works(capsys, "train", *options, "--log-every=4", "--checkpoint-every=3")
    rewind(folder)  # to step 6, which had no line
    works(capsys, "train", "--resume", f"--out={folder}")
    events = scalars(folder)
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    assert [event.value for event in events.Scalars("loss")] == losses(folder)
    for name in ("gradient_norm", "learning_rate"):
        assert [event.step for event in events.Scalars(name)] == list(range(1, 9))
    assert all(event.value > 0 for event in events.Scalars("gradient_norm"))
    rates = [event.value for event in events.Scalars("learning_rate")]
    assert rates == pytest.approx([TrainConfig(steps=8, warmup=2).learning_rate(step) for step in range(8)])
    assert [event.step for event in events.Scalars("tokens_per_second")] == [4, 8]


def test_a_run_says_what_it_is(capsys: Capture, tmp_path: Path, text: Path, options: tuple[str, ...]) -> None:
    said = works(capsys, "train", *options, "--recipe=MXFP8", "--accumulate=2", "--hold-out=0.25").splitlines()
    count = sum(parameter.numel() for parameter in make_training(text, layers=2).model.parameters())
    assert said[0] == f"mxfp8 on cpu, eager: {as_count(count)} parameters in 2 layers, 8 steps of 64 tokens"
    assert said[1] == f"text: {text}, 3,000 bytes, and 1,000 held out"
    assert said[2] == f"run in {tmp_path / 'run'}"


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_evaluation_changes_no_number(capsys: Capture, tmp_path: Path, options: tuple[str, ...], recipe: str) -> None:
    """State of the recipe, random numbers, place in the text."""
    common = (*options, f"--recipe={recipe}", "--hold-out=0.25")
    works(capsys, "train", *common)
    wanted = losses(tmp_path / "run")
    said = works(capsys, "train", *common, "--overwrite", "--eval-every=3", "--eval-batches=2")
    assert losses(tmp_path / "run") == wanted
    events = scalars(tmp_path / "run").Scalars("held_out_loss")
    assert [event.step for event in events] == [3, 6, 8]
    for event in events:
        assert f"{recipe}  step {event.step}/8  held-out loss {event.value:.4f}" in said
    assert read(tmp_path / "run/result.json")["held_out"] == pytest.approx(events[-1].value)


def test_what_is_held_out_is_not_trained_on(text: Path) -> None:
    training = make_training(text, hold_out=0.25, eval_every=1)
    whole = read_text(str(text)).tokens
    assert torch.equal(training.text.tokens, whole[:3000])
    assert torch.equal(training.held_out.tokens, whole[3000:])
    assert training.batches.num_windows == 2999 // 16
    assert evaluate(training) == evaluate(training) == pytest.approx(math.log(256), abs=0.1)
    assert training.model.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--eval-every=2",), "--eval-every needs text that is not trained on: give --hold-out 0.05 too"),
        (("--hold-out=0.6",), "--hold-out is 0.6: give a part of the text, at most 0.5"),
        (("--hold-out=0.001",), "the text has 4 tokens"),
    ],
)
def test_evaluation_that_cannot_be(capsys: Capture, options: tuple[str, ...], more: tuple[str, ...], said: str) -> None:
    assert said in fails(capsys, "train", *options, *more)


def test_a_run_goes_on_with_what_it_held_out(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> None:
    works(capsys, "train", *options, "--hold-out=0.25")
    said = fails(capsys, "train", "--resume", f"--out={tmp_path / 'run'}", "--hold-out=0.1")
    assert "--hold-out 0.25, not 0.1" in said
    assert "held-out loss" in works(capsys, "train", "--resume", f"--out={tmp_path / 'run'}", "--eval-every=4")


def test_a_sample(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> None:
    """The same from the same weights, and no number of the run changes."""
    works(capsys, "train", *options)
    wanted = losses(tmp_path / "run")
    said = works(capsys, "train", *options, "--overwrite", "--sample=30")
    after = said.split("after 'the quic' it writes:\n")[1]
    assert len(after.split("\nrun in")[0]) > 5
    assert losses(tmp_path / "run") == wanted
    again = works(capsys, "train", "--resume", f"--out={tmp_path / 'run'}", "--sample=30")
    assert after in again


def test_a_sample_follows_the_model(text: Path) -> None:
    """Of a model that knows but one token, past the window that it sees."""
    training = make_training(text)
    for parameter in training.model.parameters():
        parameter.data.zero_()
    training.model.norm.weight.data.fill_(1.0)
    training.model.embedding.weight.data.fill_(1.0)
    training.model.head.weight.data[65] = 10.0
    prompt, made = write_on(training, 20)
    assert prompt == list(b"the quic")
    assert bytes(made) == b"A" * 20


def test_a_sample_cannot_move_the_cursor() -> None:
    assert as_words(list(b"a\x1b[2J\n\xff\x00b")) == "a\ufffd[2J\n\ufffd\ufffdb"


def test_a_line_every_so_many_steps(capsys: Capture, options: tuple[str, ...]) -> None:
    lines = [line for line in works(capsys, "train", *options, "--log-every=3").splitlines() if "bf16  step" in line]
    assert [line.split()[2] for line in lines] == ["3/8", "6/8", "8/8"]
    assert all("tokens/s" in line for line in lines)


def test_a_bar_in_a_terminal() -> None:
    console = Console(force_terminal=True, force_interactive=True, width=100, record=True)
    with Reporter(console, "mxfp8", 10, 4) as reporter:
        reporter.advance()
        reporter.show(5, 2.5, 1234.5)
        reporter._bar.refresh()
    said = console.export_text()
    assert "mxfp8" in said
    assert "5/10" in said
    assert "loss 2.5000  1,234 tokens/s" in said
    assert "step 5/10" not in said


def test_speed_is_of_steps_that_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    graphs = [3]
    monkeypatch.setattr("mezzotint.trainer.meter.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("mezzotint.trainer.meter._count_graphs", lambda: graphs[0])
    meter = Meter(torch.device("cpu"))
    for seconds, more in ((10.0, 1), (1.0, 0), (6.0, 1), (1.0, 0)):
        clock[0] += seconds
        graphs[0] += more
        meter.step(waits=False)
    clock[0] += 50.0
    meter.pause()
    clock[0] += 1.0
    meter.step(waits=True)
    assert meter.steps_per_second == 1.0
    assert meter.graphs == 2
    assert meter.compile_seconds == 14.0


def test_run_is_reported(capsys: Capture, options: tuple[str, ...]) -> None:
    assert run(capsys, "train", *options).err == ""
