"""`bench guards`, small: every model in every recipe, each beside its BF16; no time is looked at."""

import json
from pathlib import Path

import pytest

from bench import guards

pytestmark = pytest.mark.compile


def test_guards(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "ROUNDS", 1)
    path = tmp_path / "out.json"
    assert guards.main(["--layers", "1", "--recipes", "current,delayed", "--json", str(path)]) == 0
    rows = {(row["model"], row["recipe"]): row for row in json.loads(path.read_text())["rows"]}
    models, recipes = ("nn.Linear", "TransformerLayer"), ("bf16", "current", "delayed")
    assert list(rows) == [(model, recipe) for model in models for recipe in recipes]
    for model in models:
        plain, current, delayed = (rows[model, recipe] for recipe in recipes)
        assert plain["ratio"] == 1
        assert plain["guards"] < current["guards"] < delayed["guards"]  # delayed scaling's state is guarded, too
    assert "of bf16" in capsys.readouterr().out


def test_names() -> None:
    with pytest.raises(SystemExit):
        guards.main(["--recipes", "fp3"])
