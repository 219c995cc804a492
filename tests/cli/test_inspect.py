"""`mezzotint train --inspect` and `mezzotint inspect`."""

from pathlib import Path

import pytest

from tests.cli.tools import fails, losses, works

Capture = pytest.CaptureFixture[str]


def test_a_run_is_looked_at_and_shown(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Every third of eight steps, the same losses; `--resume` goes on with the steps that it counts by."""
    plain = tmp_path / "plain"
    works(capsys, "train", *options, "--recipe=nvfp4", f"--out={plain}")
    run = tmp_path / "run"
    works(capsys, "train", *options, "--recipe=nvfp4", "--inspect=3", "--what-if")
    assert losses(run) == losses(plain)
    assert f"page of 3 inspected steps: {run / 'inspect.html'}" in works(capsys, "inspect", run)
    assert "self_attention.layernorm_qkv.grad_output" in (run / "inspect.html").read_text()
    works(capsys, "train", "--resume", f"--out={run}", "--steps=12")
    said = works(capsys, "inspect", run / "inspect", f"--out={tmp_path / 'page.html'}")
    assert "page of 4 inspected steps" in said
    assert (tmp_path / "page.html").exists()


def test_a_run_that_was_not_looked_at(capsys: Capture, tmp_path: Path) -> None:
    assert "has no inspect/figures.jsonl: give a run that was trained with --inspect" in fails(
        capsys, "inspect", tmp_path
    )
    (tmp_path / "figures.jsonl").write_text("no JSON\n")
    assert "line 1, is no JSON" in fails(capsys, "inspect", tmp_path, code=1)


def test_wrong_options(capsys: Capture, options: tuple[str, ...]) -> None:
    assert "bf16 quantizes nothing: give a --recipe" in fails(capsys, "train", *options, "--inspect=3")
    said = fails(capsys, "train", *options, "--recipe=mxfp8", "--what-if")
    assert "--what-if is for steps that are looked at: give --inspect 50 too" in said
