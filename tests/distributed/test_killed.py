"""A process of a sharded run is killed: the others end with an error, and training goes on from what was saved."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mezzotint.distributed.checkpoint import is_complete, load
from tests.distributed.killed import RECIPE, TIMEOUT
from tests.distributed.sharded import model, optimizer, train

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2
LIMIT = 60 + 3 * TIMEOUT  # seconds: starting, training, and a wait for the killed one in each of a few collectives


def run(folder: Path, first: int, last: int, when: str, at: int) -> list[tuple[int, str]]:
    """What each process ended with, and its errors. One that does not end in time is an error here."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distributed.killed"]
    processes = [
        subprocess.Popen(
            [*command, *map(str, (folder, rank, SIZE, first, last, when, at))],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.mark.slow
def test_a_killed_process(tmp_path: Path) -> None:
    # In the middle of the checkpoint of step 6.
    (code, error), (killed, _) = run(tmp_path, 0, 8, "saving", 6)
    assert killed == -signal.SIGKILL
    assert code > 0, error
    assert "Error" in error
    before = json.loads((tmp_path / "losses-0.json").read_text())
    assert len(before) == 6
    assert [is_complete(tmp_path / f"step-{step}") for step in (2, 4, 6)] == [True, True, False]
    with pytest.raises(ValueError, match="one that was not written to its end"):
        load(tmp_path / "step-6", model())
    # Resumed by as many, from the last that is whole, and in the middle of step 6.
    (code, error), (killed, _) = run(tmp_path, 4, 8, "training", 6)
    assert killed == -signal.SIGKILL
    assert code > 0, error
    after = json.loads((tmp_path / "losses-4.json").read_text())
    assert after == before[4:]
    assert is_complete(tmp_path / "step-6")
    # And by one process: here, since every process has the same batch, to the same losses.
    made = model()
    optim = optimizer(made)
    load(tmp_path / "step-4", made, optim)
    assert train(made, RECIPE, 2, first=4, optim=optim) == before[4:]
