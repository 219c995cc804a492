"""The cases that are left of a cross product."""

from itertools import combinations, product

import pytest

from tests.pairs import cover

AXES = ("abcd", "12345678", "xy")
CASES = list(product(*AXES))


def combinations_of(cases: list[tuple[str, ...]], strength: int) -> set[tuple[str, ...]]:
    return {part for case in cases for part in combinations(case, strength)}


@pytest.mark.parametrize(("strength", "count"), [(0, 1), (1, 8), (2, 32), (3, 64)])
def test_every_combination_is_there(strength: int, count: int) -> None:
    chosen = [CASES[index] for index in sorted(cover(CASES, strength))]
    assert combinations_of(chosen, strength) == combinations_of(CASES, strength)
    assert len(chosen) == count


def test_what_does_not_occur_is_not_asked_for() -> None:
    assert cover([("a", 1), ("b", 2)], 2) == {0, 1}
    assert cover([], 2) == set()


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("c", range(2))
def test_what_no_pair_takes_is_left_out(a: int, b: int, c: int, request: pytest.FixtureRequest) -> None:
    """Two of the eight cases have every value, and the greedy choice finds every pair in six (the best is four)."""
    items = [item for item in request.session.items if item.originalname == request.node.originalname]  # type: ignore[attr-defined]
    if all(item.get_closest_marker("slow") is None for item in items):  # as `make test` selects them
        assert len(items) <= 2
    else:
        assert len(items) <= 6


@pytest.mark.cover(1)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(2))
def test_the_others_are_slow(a: int, b: int, request: pytest.FixtureRequest) -> None:
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow == ((a, b) not in [(0, 0), (1, 1), (2, 0)])
