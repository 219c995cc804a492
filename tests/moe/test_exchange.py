"""Experts spread over processes give what one process with all of them gives, whoever has tokens or none."""

from typing import Any

import pytest
import torch

from tests.moe.exchange_world import (
    CHECKS,
    CHOSEN,
    EMPTY,
    EXPERTS,
    STEPS,
    TOKENS,
    run_steps,
)
from tests.recipes import assert_equal
from tests.worlds import World, results, shared_world

FOUR = tuple(check for check in CHECKS if check.__name__ != "compiled")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    """By size: for each rank what every check gave."""
    return {size: shared_world(tmp_path_factory, checks, size) for size, checks in ((2, CHECKS), (4, FOUR))}


def as_one(made: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks gave, as one process would have: tokens in a row, experts by their number in the world."""
    found = {name: torch.cat([each[name] for each in made]) for name in ("output", "x", "probs")}
    local = EXPERTS // len(made)
    for rank, each in enumerate(made):
        for number in range(local):
            for kind in ("weight", "bias"):
                found[f"{kind}{rank * local + number}"] = each[f"{kind}{number}"]
    return found


@pytest.mark.parametrize("size", TOKENS)
@pytest.mark.parametrize("recipe", CHOSEN)
def test_equals_one_process(worlds: dict[int, World], size: int, recipe: str) -> None:
    """Bit for bit: an expert has the same rows in the same order. Stochastic rounding draws other numbers for the
    experts of another process: gradients are near, as two draws in one process are."""
    made = results(worlds[size], "recipes")
    wanted = run_steps(size, None, recipe)
    for step in map(str, range(STEPS)):
        got, expected = as_one([each[recipe][step] for each in made]), wanted[step]
        assert got["x"].shape[0] == sum(TOKENS[size])
        random = tuple(name for name in got if name != "output") if recipe == "nvfp4" else ()
        assert_equal(got, {name: expected[name] for name in got}, but=random)
        for name in random:
            error = (got[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-9)
            assert error < 0.25, name
        assert not got[f"weight{EMPTY}"].any()
        assert not got[f"bias{EMPTY}"].any()
        assert got["weight0"].any()


@pytest.mark.parametrize("size", TOKENS)
def test_rows_of_any_shape(worlds: dict[int, World], size: int) -> None:
    for rank, made in enumerate(results(worlds[size], "more_dimensions")):
        assert made["flat"]
        assert made["cube"]
        assert made["gradient"]
        local = EXPERTS // size
        assert made["m_splits"] == (sum(range(1, size + 1)),) * local
        wanted = [
            float(row)
            for expert in range(rank * local, (rank + 1) * local)
            for other in range(size)
            for row in range(expert * (other + 1), (expert + 1) * (other + 1))
        ]
        assert made["got"].tolist() == wanted


@pytest.mark.parametrize("size", TOKENS)
def test_groups(worlds: dict[int, World], size: int) -> None:
    for rank, made in enumerate(results(worlds[size], "a_part_of_the_world")):
        first = rank // 2 * 2
        assert made == {"pair": [first, first + 1] * (EXPERTS // 2), "alone": [rank] * EXPERTS}


@pytest.mark.parametrize("size", TOKENS)
def test_wrong_use_is_refused_on_every_rank(worlds: dict[int, World], size: int) -> None:
    said = {
        "does not divide": f"the number of experts is 5: it must be divisible by the {size} ranks",
        "does not add up": "does not add up to the rows on rank 1 of the group",
        "negative": "does not add up to the rows on rank 0 of the group",
        "floats": "tokens_per_expert is torch.float32 (4,): give an integer",
        "other rows": "x has shape (3, 1): the exchange was planned for 4 rows",
    }
    for made in results(worlds[size], "wrong_use"):
        assert made.keys() == said.keys()
        for name, message in made.items():
            assert said[name] in message


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "known"])
def test_compiled(worlds: dict[int, World], recipe: str) -> None:
    for made in results(worlds[2], "compiled"):
        for step in range(1 if recipe == "known" else STEPS):
            assert_equal(made[f"{recipe} {step} compiled"], made[f"{recipe} {step} eager"])
        assert made.get(f"{recipe} graphs", 1) == 1


def test_every_check_is_looked_at(worlds: dict[int, World]) -> None:
    for size, checks in ((2, CHECKS), (4, FOUR)):
        for made in worlds[size]:
            assert list(made) == [check.__name__ for check in checks]
