"""The names that the command line gives to recipes. `recipes.py` has the recipes."""

from mezzotint.cli.console import CommandError

BF16 = "bf16"
# Name → class in mezzotint.recipe.
RECIPE_CLASSES = {
    BF16: None,
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "rowwise": "Float8RowwiseScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
_NAMES = {known.lower(): name for name, kind in RECIPE_CLASSES.items() for known in (name, kind or name)}


def recipe_name(asked: str) -> str:
    """A name, or that of the class, in any case → the name: "NVFP4BlockScaling" → "nvfp4"."""
    found = _NAMES.get(asked.strip().lower())
    if found is None:
        raise CommandError(f"there is no recipe {asked!r}: give one of {', '.join(RECIPE_CLASSES)}")
    return found


def recipe_names(listed: str) -> list[str]:
    """Names between commas → each once, in order; "all" → all."""
    if listed.strip().lower() == "all":
        return list(RECIPE_CLASSES)
    names = [recipe_name(name) for name in listed.split(",") if name.strip()]
    if not names:
        raise CommandError(f"no recipe was given: give some of {', '.join(RECIPE_CLASSES)}, or all")
    return list(dict.fromkeys(names))
