"""Recipes by the names that the command line gives them."""

from mezzotint import recipe
from mezzotint.cli.recipe_names import RECIPE_CLASSES

# None is BF16.
RECIPES: dict[str, recipe.Recipe | None] = {
    name: None if kind is None else getattr(recipe, kind)() for name, kind in RECIPE_CLASSES.items()
}
