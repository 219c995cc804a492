"""The command line's names of recipes: this module accepts their short names, and BF16 for none;
`recipes.py` has the recipes."""

from mezzotint.recipe_names import RECIPE_CLASSES, recipe_short_name
from mezzotint.trainer.console import CommandError

BF16 = "bf16"
NAMES = (BF16, *RECIPE_CLASSES)


def recipe_name(asked: str) -> str:
    """Return the short name for a short name or a class name, in any case: "nvfp4" for "NVFP4BlockScaling"."""
    found = BF16 if asked.strip().lower() == BF16 else recipe_short_name(asked)
    if found is None:
        raise CommandError(f"there is no recipe {asked!r}: give one of {', '.join(NAMES)}")
    return found


def recipe_names(listed: str) -> list[str]:
    """Return the names in a comma-separated list, each once and in order; "all" stands for all of them."""
    if listed.strip().lower() == "all":
        return list(NAMES)
    names = [recipe_name(name) for name in listed.split(",") if name.strip()]
    if not names:
        raise CommandError(f"no recipe was given: give some of {', '.join(NAMES)}, or all")
    return list(dict.fromkeys(names))
