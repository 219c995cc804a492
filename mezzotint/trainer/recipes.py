"""Recipes by the names that the command line gives them."""

from mezzotint.recipe import RECIPES as QUANTIZED
from mezzotint.recipe import Recipe
from mezzotint.trainer.recipe_names import BF16

# None is BF16.
COMMAND_RECIPES: dict[str, Recipe | None] = {BF16: None, **{name: kind().frozen() for name, kind in QUANTIZED.items()}}
