"""Recipes by the names that the command line gives them."""

from mezzotint.cli.console import CommandError
from mezzotint.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

BF16 = "bf16"
RECIPES: dict[str, Recipe | None] = {
    BF16: None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


def find_recipe(name: str) -> Recipe | None:
    """None is BF16."""
    if name not in RECIPES:
        raise CommandError(f"there is no recipe {name!r}: give one of {', '.join(RECIPES)}")
    return RECIPES[name]


def recipe_names(listed: str) -> list[str]:
    """Names between commas → each once, in order; "all" → all."""
    names = list(RECIPES) if listed == "all" else [name.strip() for name in listed.split(",") if name.strip()]
    for name in names:
        find_recipe(name)
    if not names:
        raise CommandError(f"no recipe was given: give some of {', '.join(RECIPES)}, or all")
    return list(dict.fromkeys(names))
