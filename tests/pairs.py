"""Fewer of the cases of a cross product, so that every combination of some of its values is still among them.

A test of four modules, eight recipes and two options has 64 cases, of which 32 have every pair: a module with a recipe,
a recipe with an option. What a third value does to a pair has not been seen to matter where this is used
(`dev/mutants.py`). A test says so with `@pytest.mark.cover(2)`, every pair, `@pytest.mark.cover(1)`, every value, or
`@pytest.mark.cover(0)`, the first case alone; `conftest.py` marks the other cases `slow`. With a second number,
`@pytest.mark.cover(1, 2)`, the slow ones are those that every pair takes, and the rest of a long product does not run.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations


def cover(cases: Sequence[Sequence[Hashable]], strength: int) -> set[int]:
    """Indices of cases, each a value for every parameter, that have all combinations of `strength` values.

    Only combinations that occur count. Greedy, and the same every time: the case with the most that is missing, of
    several the one whose values were taken least often.
    """
    has = [frozenset(combinations(enumerate(case), min(strength, len(case)))) for case in cases]
    missing = set().union(*has)
    chosen: set[int] = set()
    taken: Counter[tuple[int, Hashable]] = Counter()
    while missing:
        best = max(
            range(len(cases)), key=lambda i: (len(has[i] & missing), -sum(taken[v] for v in enumerate(cases[i])))
        )
        chosen.add(best)
        taken.update(enumerate(cases[best]))
        missing -= has[best]
    return chosen
