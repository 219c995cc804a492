"""Schedule: it says which recipe is used at which steps of a run."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzotint.recipe.base import Recipe
from mezzotint.recipe.names import as_recipe
from mezzotint.recipe.rules import Rules, rules_of_tables, tables_of_rules
from mezzotint.recipe.tables import (
    Table,
    check_keys,
    list_of_tables,
    parse_tables,
    read_source,
    recipe_of_table,
    table_of_recipe,
    write_tables,
)


@dataclass(frozen=True)
class Schedule:
    """A schedule says which recipe is used at which steps of a run.

    The recipes are taken as they are when the schedule is made.

    Args:
        phases: Pairs of a step and what is used from that step on: a recipe, its short name, `Rules`, or None for high
            precision. Steps rise, and the first one is 0.

    Raises:
        TypeError: If `phases` is not made of such pairs.
        ValueError: If the steps do not rise from 0.

    Example:
        >>> import mezzotint as mz
        >>> schedule = mz.recipe.Schedule([(0, "mxfp8"), (9_000, None)])
        >>> type(schedule.at(100)).__name__
        'MXFP8BlockScaling'
        >>> schedule.region(9_000)
        {'enabled': False, 'recipe': None}
        >>> with mz.autocast(**schedule.region(100)):
        ...     pass  # a training step
    """

    phases: Any

    def __post_init__(self) -> None:
        given = self.phases
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"phases is {type(given).__name__}: give pairs of a step and a recipe, or None")
        made = tuple([_as_phase(number, each) for number, each in enumerate(given, 1)])
        steps = [step for step, _ in made]
        if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ValueError(f"the phases begin at steps {steps}: give steps that rise, the first one 0")
        object.__setattr__(self, "phases", made)

    def at(self, step: int) -> Recipe | None:
        """Return the recipe of a step, or None for high precision."""
        if step < 0:
            raise ValueError(f"step is {step}: give 0 or more")
        return [recipe for first, recipe in self.phases if first <= step][-1]

    def region(self, step: int) -> dict[str, Any]:
        """Return the arguments of `autocast` for a step: its recipe, and whether there is one."""
        recipe = self.at(step)
        return {"enabled": recipe is not None, "recipe": recipe}

    def rules(self) -> list[Rules]:
        """Return those of the recipes that are rules, each once, so that a model can be bound to them."""
        found: list[Rules] = []
        for _, recipe in self.phases:
            if isinstance(recipe, Rules) and recipe not in found:
                found.append(recipe)
        return found

    @classmethod
    def from_toml(cls, path: str | Path) -> "Schedule":
        """Return the schedule that is in a file; a file with rules alone is one phase."""
        return parse_schedule(read_source(path), str(path))

    def as_toml(self) -> str:
        """Return the text that `to_toml` writes."""
        if len(self.phases) == 1 and isinstance(self.phases[0][1], Rules):
            return self.phases[0][1].as_toml()
        return write_tables("schedule", [_table_of(step, recipe) for step, recipe in self.phases])

    def to_toml(self, path: str | Path) -> None:
        """Write the schedule into a file."""
        Path(path).write_text(self.as_toml(), encoding="utf-8")


def parse_schedule(text: str, source: str) -> Schedule:
    """Return the schedule that a TOML text describes; rules alone are one phase.

    Args:
        text: The text, with one table [[schedule]] for each phase or one table [[rule]] for each rule.
        source: The name of the text in error messages, such as the path of its file.

    Returns:
        A `Schedule`.

    Raises:
        ValueError: If the text has neither of these tables, or a table is wrong.

    Example:
        >>> from mezzotint.recipe import parse_schedule
        >>> text = '''
        ... [[schedule]]
        ... step = 0
        ... recipe = "mxfp8"
        ... '''
        >>> type(parse_schedule(text, "an example").at(0)).__name__
        'MXFP8BlockScaling'
    """
    held = parse_tables(text, source)
    if "rule" in held:
        return Schedule([(0, rules_of_tables(list_of_tables(held, "rule", source), source))])
    if "schedule" not in held:
        raise ValueError(f"{source} has neither [[rule]] nor [[schedule]]: write one table for each rule, or phase")
    phases: list[tuple[Any, Recipe | None]] = []
    for number, table in enumerate(list_of_tables(held, "schedule", source), 1):
        where = f"phase {number} of {source}"
        check_keys(table, {"step", "rule"} if "rule" in table else {"step", "recipe", "options"}, where)
        if "rule" in table:
            nested = {"rule": table["rule"]}
            phases.append((table.get("step"), rules_of_tables(list_of_tables(nested, "rule", where), where)))
        else:
            phases.append((table.get("step"), recipe_of_table(table, where)))
    try:
        return Schedule(phases)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None


def _table_of(step: int, recipe: Recipe | None) -> Table:
    if isinstance(recipe, Rules):
        return {"step": step, "rule": tables_of_rules(recipe)}
    return {"step": step, **table_of_recipe(recipe)}


def _as_phase(number: int, given: Any) -> tuple[int, Recipe | None]:
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != 2:
        raise TypeError(f"phase {number} is {given!r}: give a pair of a step and a recipe, or None")
    step, recipe = given
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"the step of phase {number} is {step!r}: give a whole number")
    return step, None if recipe is None else as_recipe(recipe).frozen()
