"""The names of recipes: this module has the recipes by their short names, and takes a recipe or a name for an
argument."""

from mezzotint.recipe.base import ANSWERS, Recipe, check_recipe
from mezzotint.recipe.delayed import DelayedScaling
from mezzotint.recipe.float8 import Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling
from mezzotint.recipe.mx import MXFP4BlockScaling, MXFP6BlockScaling, MXFP8BlockScaling
from mezzotint.recipe.nvfp4 import NVFP4BlockScaling
from mezzotint.recipe_names import RECIPE_CLASSES, recipe_short_name

_CLASSES: tuple[type[Recipe], ...] = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    NVFP4BlockScaling,
)
_BY_CLASS = {kind.__name__: kind for kind in _CLASSES}
RECIPES: dict[str, type[Recipe]] = {name: _BY_CLASS[kind] for name, kind in RECIPE_CLASSES.items()}
ANSWERS.update(kind.quantizer for kind in RECIPES.values())


def as_recipe(recipe: Recipe | str) -> Recipe:
    """Return the recipe, or the one with default options that a name stands for.

    Args:
        recipe: A recipe, or a short name of `mezzotint.recipe.RECIPES`.

    Returns:
        A recipe.

    Raises:
        ValueError: If there is no recipe of that name.
        TypeError: If it is neither a recipe nor a name.

    Example:
        >>> from mezzotint.recipe import as_recipe
        >>> type(as_recipe("mxfp8")).__name__
        'MXFP8BlockScaling'
    """
    if isinstance(recipe, str):
        name = recipe_short_name(recipe)
        if name is None:
            raise ValueError(f"there is no recipe {recipe!r}: give one of {', '.join(RECIPES)}, or a Recipe")
        return RECIPES[name]()
    check_recipe(recipe)
    return recipe
