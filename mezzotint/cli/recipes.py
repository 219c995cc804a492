"""Recipes by the names that the command line gives them."""

from mezzotint.cli.recipe_names import BF16
from mezzotint.recipe import RECIPES as QUANTIZED
from mezzotint.recipe import Recipe

# None is BF16.
RECIPES: dict[str, Recipe | None] = {BF16: None, **{name: kind() for name, kind in QUANTIZED.items()}}
