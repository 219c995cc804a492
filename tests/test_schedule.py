"""Schedules, and recipes, rules and schedules as TOML."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.recipe import CustomRecipe, DelayedScaling, MXFP8BlockScaling, Recipe, Rules, Schedule
from tests.recipes import EVERY_RECIPE, VARIANTS

MX = MXFP8BlockScaling()
WRITTEN: dict[str, Recipe | None] = {
    name: each for name, each in (EVERY_RECIPE | VARIANTS).items() if not isinstance(each, CustomRecipe)
}


def test_the_recipe_of_a_step() -> None:
    schedule = Schedule([(0, "mxfp8"), (3, Rules([("*", "current")])), (9, None)])
    found = {step: schedule.at(step) for step in (0, 2, 3, 8, 9, 10**9)}
    rules = Rules([("*", "current")])
    assert found == {0: MX, 2: MX, 3: rules, 8: rules, 9: None, 10**9: None}
    assert schedule.rules() == [rules]
    assert schedule.region(2) == {"enabled": True, "recipe": MX}
    assert schedule.region(9) == {"enabled": False, "recipe": None}
    model, x = mz.Linear(32, 32), torch.randn(16, 32)
    with mz.autocast(**schedule.region(9)):
        assert torch.equal(model(x), model(x))
    with mz.autocast(**schedule.region(0)):
        quantized = model(x)
    with mz.autocast(MX):
        assert torch.equal(quantized, model(x))


def test_a_schedule_is_a_value() -> None:
    schedule = Schedule([(0, MX), (9, None)])
    assert schedule == Schedule(((0, "mxfp8"), (9, None)))
    assert hash(schedule) == hash(Schedule([(0, MX), (9, None)]))
    changed = DelayedScaling()
    taken = Schedule([(0, changed)])
    changed.margin = 2
    assert taken == Schedule([(0, "delayed")])


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], r"the phases begin at steps \[\]"),
        ([(1, MX)], r"begin at steps \[1\]: give steps that rise, the first one 0"),
        ([(0, MX), (5, None), (5, MX)], r"begin at steps \[0, 5, 5\]"),
        ("mxfp8", "phases is str"),
        ([(0, MX, 3)], "phase 1 is .*: give a pair"),
        ([(0.5, MX)], "the step of phase 1 is 0.5: give a whole number"),
        ([(0, "mxfp9")], "there is no recipe 'mxfp9'"),
    ],
)
def test_what_is_no_schedule(phases: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Schedule(phases)


def test_a_step_before_the_first() -> None:
    with pytest.raises(ValueError, match="step is -1"):
        Schedule([(0, MX)]).at(-1)


@pytest.mark.parametrize("name", WRITTEN)
def test_every_recipe_is_written_and_read(name: str, tmp_path: Path) -> None:
    rules = Rules([('a."b\\ü', WRITTEN[name]), ("*:weight", WRITTEN[name]), ("*", None)])
    rules.to_toml(tmp_path / "rules.toml")
    assert Rules.from_toml(tmp_path / "rules.toml") == rules
    schedule = Schedule([(0, WRITTEN[name]), (5, rules), (7, None)])
    schedule.to_toml(tmp_path / "schedule.toml")
    assert Schedule.from_toml(tmp_path / "schedule.toml") == schedule
    assert Schedule.from_toml(tmp_path / "rules.toml") == Schedule([(0, rules)])


def test_what_has_no_text() -> None:
    with pytest.raises(ValueError, match="CustomRecipe cannot be written as TOML"):
        Rules([("*", CustomRecipe(lambda role: None))]).as_toml()
    with pytest.raises(ValueError, match="DelayedScaling cannot be written as TOML: amax_compute_algo is <function"):
        Rules([("*", DelayedScaling(amax_compute_algo=lambda history: history[0]))]).as_toml()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path, message in ((tmp_path / "bytes", "no text in UTF-8"), (tmp_path, "Is a directory"), ("/no", "No such")):
        with pytest.raises(ValueError, match=message):
            Rules.from_toml(path)
    (tmp_path / "phases.toml").write_text(Schedule([(0, MX)]).as_toml())
    with pytest.raises(ValueError, match=r"has no \[\[rule\]\]"):
        Rules.from_toml(tmp_path / "phases.toml")
