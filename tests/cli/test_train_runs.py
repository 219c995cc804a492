"""`mezzotint train`: loses nothing, and says what it does."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mezzotint.trainer.console import as_count
from mezzotint.trainer.data import as_words, read_text
from mezzotint.trainer.evaluate import evaluate
from mezzotint.trainer.local_checkpoint import find_checkpoints
from mezzotint.trainer.loop import Training
from mezzotint.trainer.meter import Meter
from mezzotint.trainer.progress import Reporter
from mezzotint.trainer.sample import write_on
from mezzotint.trainer.settings import TrainConfig
from tests.cli.runs import make_training, rewind, scalars
from tests.cli.tools import contents, fails, losses, read, run, works

Capture = pytest.CaptureFixture[str]


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
        reporter._bar._progress.refresh()
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
