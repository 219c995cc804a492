"""A text to train on, and a run that came to its end."""

from pathlib import Path

import pytest

from tests.cli.tools import TINY, works, write_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture
def options(tmp_path: Path, text: Path) -> tuple[str, ...]:
    return (*TINY, f"--data={text}", f"--out={tmp_path / 'run'}", "--steps=8", "--log-every=4", "--checkpoint-every=4")


@pytest.fixture
def made(capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...]) -> Path:
    """A run that came to its end, with checkpoints after 4 and 8 steps."""
    works(capsys, "train", *options)
    return tmp_path / "run"
