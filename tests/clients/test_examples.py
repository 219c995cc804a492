"""The examples of Hugging Face's loops run, as a reader would run them."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> list[str]:
    """What the example prints."""
    command = [sys.executable, str(EXAMPLES / f"huggingface_{name}.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_trainer(tmp_path: Path) -> None:
    """A backend that needs no C++ compiler. The example itself compares the losses of the two runs."""
    lines = run("trainer", "aot_eager", str(tmp_path))
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 12
    assert steps[-1].split("loss ")[1] < steps[0].split("loss ")[1]
    assert lines[-1] == "read again, by from_pretrained: the same logits: True"


def test_accelerate(tmp_path: Path) -> None:
    lines = run("accelerate", str(tmp_path))
    assert len([line for line in lines if line.startswith("step")]) == 12
    assert lines[-1] == "read again after half of the steps: the same losses"


def test_lora(tmp_path: Path) -> None:
    lines = run("lora", str(tmp_path))
    assert len([line for line in lines if line.startswith("step")]) == 10
    assert lines[-2:] == [
        "adapter read again: the same logits: True",
        "weights exported again: the same bytes: True",
    ]
