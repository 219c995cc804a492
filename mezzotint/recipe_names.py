"""Short names of recipes, for places where a name is enough: `autocast("mxfp8")`, the command line.

Nothing is imported here, so that the command line's help does not wait for PyTorch.
"""

# This maps a name to a class in `recipe/`.
RECIPE_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "rowwise": "Float8RowwiseScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "mxfp4": "MXFP4BlockScaling",
    "mxfp6": "MXFP6BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
_NAMES = {known.lower(): name for name, kind in RECIPE_CLASSES.items() for known in (name, kind)}


def recipe_short_name(asked: str) -> str | None:
    """Return the short name of a recipe, given it or the name of its class, in any case; None for no recipe."""
    return _NAMES.get(asked.strip().lower())
