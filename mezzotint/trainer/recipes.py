"""This module has the recipes by the names that the command line gives them, and reads those of a file (`--rules`)."""

from pathlib import Path

from mezzotint.recipe import RECIPES as QUANTIZED
from mezzotint.recipe import Recipe, Schedule, parse_schedule
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.recipe_names import BF16
from mezzotint.trainer.settings import TrainConfig

# None stands for BF16.
COMMAND_RECIPES: dict[str, Recipe | None] = {BF16: None, **{name: kind().frozen() for name, kind in QUANTIZED.items()}}


def read_rules(path: str) -> str:
    """Return the rules, or the schedule, of a file in the normalized text that a run keeps."""
    try:
        return Schedule.from_toml(Path(path)).as_toml()
    except ValueError as error:
        raise CommandError(f"--rules: {error}") from None


def schedule_of(train: TrainConfig) -> Schedule:
    """Return the schedule that says in which recipe each step of a run is trained."""
    if train.rules is None:
        return Schedule([(0, COMMAND_RECIPES[train.recipe])])
    try:
        return parse_schedule(train.rules, "--rules")
    except ValueError as error:
        raise CommandError(str(error)) from None
