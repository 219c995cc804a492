"""The measurement of pipelines runs; no time is looked at."""

import json
from pathlib import Path

import pytest

from bench import ops


def test_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    sizes = ["--tokens", "32", "--hidden", "32", "--ffn", "64", "--reps", "1"]
    assert ops.main([*sizes, "--recipes", "bf16,delayed", "--no-compile", "--bias", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["block"], row["recipe"]) for row in rows] == [
        (block, recipe) for block in ("mlp", "residual") for recipe in ("bf16", "delayed")
    ]
    assert all(set(row["eager"]) == {"fused", "unfused", "module"} for row in rows)
    assert "module / fused" in capsys.readouterr().out


def test_names() -> None:
    with pytest.raises(SystemExit, match=r"there is no 'fp3': give some of bf16"):
        ops.main(["--recipes", "fp3"])
