"""`mezzotint bench` is `python -m bench`, from anywhere."""

from pathlib import Path

import pytest

from mezzotint.cli import bench as module
from tests.cli.tools import fails, run

Capture = pytest.CaptureFixture[str]


def test_measurements_run(capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(capfd, "bench", "--help")
    assert outcome.code == 0
    assert "training" in outcome.out
    assert run(capfd, "bench", "nothing-of-this-name").code == 2


def test_a_wheel_has_none(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert "bench/ is not here" in fails(capsys, "bench", "quantize")
