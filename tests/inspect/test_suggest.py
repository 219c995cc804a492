"""suggest_rules: against all choices that there are, one by one; and what it reads of a run."""

import itertools
import math
from typing import Any

import pytest

from mezzotint.inspect.suggest import LinearChoice, read_linears, speed_of, suggest_rules
from mezzotint.recipe import Rules

ROLES = ("input", "weight", "grad_output")


def linear(name: str, operations: float, **snr: float) -> LinearChoice:
    """One that has these ratios in all of its tensors; the first recipe is the run's, high precision is added."""
    noise = {recipe: dict.fromkeys(ROLES, 10 ** (-value / 10)) for recipe, value in snr.items()}
    return LinearChoice(name, operations, {**noise, "high_precision": dict.fromkeys(ROLES, 0.0)}, next(iter(snr)))


def some() -> list[LinearChoice]:
    return [
        linear("a", 1000, nvfp4=15, mxfp8=28),
        linear("b", 4000, nvfp4=19, mxfp8=31),
        linear("c", 2000, nvfp4=21, mxfp8=30),
        linear("d", 500, nvfp4=12, mxfp8=19),
    ]


def test_speeds() -> None:
    found = {name: speed_of(name) for name in ("high_precision", "delayed", "current", "mxfp8", "mxfp6", "nvfp4")}
    assert found == {"high_precision": 1, "delayed": 2, "current": 2, "mxfp8": 2, "mxfp6": 2, "nvfp4": 4}


def test_a_bound_is_held_by_the_cheapest() -> None:
    """No choice of recipes that holds the bound takes less time."""
    linears = some()
    found = suggest_rules(linears, min_snr=20)
    assert {each.name: each.recipe for each in found.linears} == {
        "a": "mxfp8",
        "b": "mxfp8",
        "c": "nvfp4",
        "d": "high_precision",
    }
    holding = [[name for name in each.noise if each.worst(name)[1] >= 20] for each in linears]
    times = [sum(map(LinearChoice.time, linears, choice)) for choice in itertools.product(*holding)]
    assert sum(each.time(each.recipe) for each in linears) == min(times)
    assert found.extra_time == pytest.approx((250 + 1000 + 375) / (7500 / 4))
    assert found.rules() == Rules([("a", "mxfp8"), ("b", "mxfp8"), ("d", None), ("*", "nvfp4")])
    assert [each.why for each in found.linears] == [
        "input has 15.0 dB, below 20",
        "input has 19.0 dB, below 20",
        "no tensor is below 20 dB",
        "input has 12.0 dB, below 20",
    ]


def test_a_budget_is_kept_and_spent_where_it_gains_most() -> None:
    """d is small and noisy; a loses its noise for 250, b for 1000, which is more than there is."""
    found = suggest_rules(some(), min_snr=20, budget=0.4)
    assert [each.recipe for each in found.linears] == ["mxfp8", "nvfp4", "nvfp4", "high_precision"]
    assert found.linears[1].why == "below 20 dB: the budget is spent"
    assert 0 < found.extra_time <= 0.4
    found = suggest_rules(some(), budget=0.07)
    assert [each.recipe for each in found.linears] == ["nvfp4", "nvfp4", "nvfp4", "mxfp8"]
    assert suggest_rules(some(), budget=0).extra_time == 0
    everything = suggest_rules(some(), budget=100)
    assert {each.recipe for each in everything.linears} == {"high_precision"}


def test_what_is_read_of_a_run() -> None:
    """The mean over steps, of a step that was written twice the last; operations of the sizes; null is no noise."""
    counts = {"input": 64 * 32, "weight": 16 * 32, "grad_output": 64 * 16}

    def record(step: int, role: str, snr: float | None) -> dict[str, Any]:
        return {"step": step, "module": "m", "role": role, "count": counts[role], "snr_db": snr}

    records = [record(0, role, 40) for role in ROLES] + [record(0, role, 20) for role in ROLES]
    records += [record(1, "input", 10), record(1, "weight", None), record(1, "grad_output", 20)]
    what_if = {"mxfp8": {"snr_db": 30}, "current": {"snr_db": 28}}
    details = {"tensors": {f"m.{role}": {"what_if": what_if} for role in ROLES}}
    (made,) = read_linears(records, details, "nvfp4", ["mxfp8", "high_precision"])
    assert made.noise["nvfp4"] == pytest.approx({"input": 0.055, "weight": 0.005, "grad_output": 0.01})
    assert made.noise["mxfp8"] == pytest.approx(dict.fromkeys(ROLES, 0.001))
    assert made.noise.keys() == {"nvfp4", "mxfp8", "high_precision"}
    assert made.operations == pytest.approx(3 * 2 * 64 * 32 * 16)
    assert made.worst("nvfp4") == ("input", pytest.approx(-10 * math.log10(0.055)))
    (alone,) = read_linears(records, {"tensors": {}}, "nvfp4", ["mxfp8", "high_precision"])
    assert alone.noise.keys() == {"nvfp4", "high_precision"}  # what was not tried is no choice


def test_wrong_bounds() -> None:
    with pytest.raises(ValueError, match="needs a bound"):
        suggest_rules(some())
    with pytest.raises(ValueError, match="budget is -1"):
        suggest_rules(some(), budget=-1)
    with pytest.raises(ValueError, match="no step of it was inspected"):
        read_linears([], {"tensors": {}}, "nvfp4", [])
    with pytest.raises(ValueError, match="the figures of the run lack 'snr_db'"):
        read_linears([{"step": 0, "module": "m", "role": "input", "count": 3}], {"tensors": {}}, "nvfp4", [])
