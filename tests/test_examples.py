"""What stands in examples/ runs, as a reader would run it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_readme_names_every_example() -> None:
    assert EXAMPLES
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES:
        assert f"examples/{path.name}" in readme


def test_own_op() -> None:
    command = [sys.executable, "examples/own_op.py", "aot_eager"]  # a backend that needs no C++ compiler
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    forward, backward, result = run.stdout.splitlines()
    assert forward == "forward:  ForwardLinearBiasActivation, TanhScale, ForwardLinearBiasActivation"
    assert backward == "backward: Bias, BasicLinear, ConstantScale, ScaledTanh, Bias, BasicLinear"
    assert result.startswith("gradients agree with PyTorch's")
