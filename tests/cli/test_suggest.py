"""`mezzotint suggest`: an inspected run → rules that the next run takes."""

import shutil
from pathlib import Path

import pytest

from mezzotint.recipe import Rules
from tests.cli.tools import fails, read, works

Capture = pytest.CaptureFixture[str]


def test_a_run_is_trained_by_what_is_suggested(
    capsys: Capture, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = tmp_path / "run"
    works(capsys, "train", *options, "--recipe=nvfp4", "--inspect=3", "--what-if")
    said = works(capsys, "suggest", run, "--min-snr=20", "--recipes=mxfp8,bf16")
    assert "asked: no tensor below 20 dB" in said
    assert "8 of 8 linears move, for 100.00% more time in products" in said
    assert "peak memory of a step in one process" in said
    rules = Rules.from_toml(run / "rules.toml")
    assert {pattern for pattern, _ in rules.rules} >= {"layers.0.layernorm_mlp.fc1", "*"}
    assert all(recipe is None or recipe.mxfp8() or recipe.nvfp4() for _, recipe in rules.rules)
    next_run = tmp_path / "next"
    works(capsys, "train", *options, f"--rules={run / 'rules.toml'}", f"--out={next_run}")
    assert read(next_run / "result.json")["recipe"] == "rules"
    said = works(capsys, "suggest", run, "--min-snr=40", "--budget=30%", f"--out={tmp_path / 'other.toml'}")
    assert "stay below 40 dB: a larger --budget would move them" in said
    assert "at most 30.0% more time in products" in said
    # By hand: without the configuration of a run, the recipe must be said.
    shutil.copytree(run / "inspect", tmp_path / "hand")
    assert "which says in which recipe it was trained: give --recipe" in fails(capsys, "suggest", tmp_path / "hand")
    works(capsys, "suggest", tmp_path / "hand", "--recipe=nvfp4")
    assert (tmp_path / "hand" / "rules.toml").exists()
    assert "was trained in nvfp4: leave it out" in fails(capsys, "suggest", run, "--recipe=mxfp8")
    assert "was trained with --rules" in fails(capsys, "suggest", _inspected(next_run, run))


def _inspected(run: Path, other: Path) -> Path:
    shutil.copytree(other / "inspect", run / "inspect")
    return run


def test_what_cannot_be_suggested(capsys: Capture, tmp_path: Path) -> None:
    assert "give a run that was trained with --inspect" in fails(capsys, "suggest", tmp_path)
    (tmp_path / "figures.jsonl").write_text("")
    assert "--budget is 'much'" in fails(capsys, "suggest", tmp_path, "--recipe=mxfp8", "--budget=much")
    assert "no step of it was inspected" in fails(capsys, "suggest", tmp_path, "--recipe=mxfp8", code=1)
