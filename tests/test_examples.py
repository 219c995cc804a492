"""What stands in examples/ runs, as a reader would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_readme_names_every_example() -> None:
    assert EXAMPLES
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES:
        assert f"examples/{path.name}" in readme


@pytest.mark.slow
def test_own_op() -> None:
    command = [sys.executable, "examples/own_op.py", "aot_eager"]  # a backend that needs no C++ compiler
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    forward, backward, result = run.stdout.splitlines()
    assert forward == "forward:  ForwardLinearBiasActivation, TanhScale, ForwardLinearBiasActivation"
    assert backward == "backward: Bias, BasicLinear, ConstantScale, ScaledTanh, Bias, BasicLinear"
    assert result.startswith("gradients agree with PyTorch's")


def run_processes(name: str) -> list[str]:
    """The lines that two processes print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"examples/{name}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return sorted(run.stdout.splitlines())


@pytest.mark.slow
def test_expert_parallel() -> None:
    lines = run_processes("expert_parallel.py")
    losses = [float(line.split()[-1]) for line in lines]
    assert [line.split()[:2] for line in lines] == [["step", str(number)] for number in range(1, 11)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_pipeline() -> None:
    """Which compares each stage's gradients with those of one process."""
    said = "gradients of stages {} are those of one process, bit for bit"
    assert run_processes("pipeline.py") == [f"rank {rank}: {said.format([rank, rank + 2])}" for rank in range(2)]


def test_torchtitan_converter() -> None:
    command = [sys.executable, "examples/torchtitan_converter.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "MXFP8BlockScaling" in run.stdout
