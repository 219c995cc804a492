"""The examples of training and of moving over run as they stand."""

import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.cli.tools import ROOT, one_thread

EXAMPLES = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.compile
def test_training_loop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / "training_loop.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # needs no C++ compiler
    torch.manual_seed(0)
    with one_thread():
        runpy.run_path(str(path))
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.5


def test_from_transformer_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with one_thread():
        runpy.run_path(str(EXAMPLES / "from_transformer_engine.py"))
    assert capsys.readouterr().out.startswith("torch.Size([64, 2, 512])")


def test_pages_name_them() -> None:
    page = Path(ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for name in ("training_loop.py", "from_transformer_engine.py"):
        assert f"examples/{name}" in page
