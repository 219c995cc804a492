"""`bench overhead`, small: every candidate is there, and where its time goes adds up."""

import json
from pathlib import Path

import pytest
import torch

from bench import overhead


def test_every_candidate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bool] = set()
    timed = overhead._step

    def watched(*args: object, **kwargs: object) -> object:
        seen.add(torch._C._is_multithreading_enabled())
        return timed(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(overhead, "_step", watched)
    monkeypatch.setattr(overhead, "BLOCK", 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--features", "32", "--tokens", "32", "--repeat", "1", "--one-thread"]
    assert overhead.main([*arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert {"nn.Linear bf16", *overhead.RECIPES, "torchao tensorwise"} <= rows.keys()
    for name, row in rows.items():
        assert "error" not in row, name
        assert row["ops"] + row["python"] == pytest.approx(row["us"])
    assert "one thread" in capsys.readouterr().out
    assert seen == {False}
    assert torch._C._is_multithreading_enabled()
