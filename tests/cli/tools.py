"""Runs of the program, in this process or in one of its own, on a model that takes milliseconds a step."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mezzotint.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--hidden=32", "--ffn=64", "--layers=2", "--heads=2", "--kv-heads=1", "--sequence=16", "--batch=2")
# One thread: beside another test two wait for each other.
TINY = (*SIZES, "--threads=1", "--no-compile", "--device=cpu", "--warmup=2")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Outcome:
    capsys.readouterr()
    with one_thread():
        code = main([str(argument) for argument in arguments])
    return Outcome(code, *capsys.readouterr())


def fails(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 2) -> str:
    """The one line that a command says when it cannot do as asked."""
    outcome = run(capsys, *arguments)
    assert outcome.code == code, outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("mezzotint: ")
    return outcome.err


def works(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    outcome = run(capsys, *arguments)
    assert outcome.code == 0, outcome
    return outcome.out


def row_of(said: str, name: str) -> str:
    """The row of a table, of the last one that has it."""
    return [line for line in said.splitlines() if line.startswith(f"{name} ")][-1]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_python(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def losses(run_folder: Path) -> list[float]:
    return read(run_folder / "result.json")["losses"]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_text(folder: Path, length: int = 4000) -> Path:
    """Some text to train on."""
    path = folder / "text.txt"
    words = b"the quick brown fox jumps over the lazy dog and runs away from it. "
    path.write_bytes((words * (length // len(words) + 1))[:length])
    return path
