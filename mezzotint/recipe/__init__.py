"""Recipes: a recipe says, for every tensor of a module, how it is quantized.

    recipe.quantizer(role)    the quantizer of a tensor, or a request for state (delayed scaling)
    recipe.products()         how the three GEMMs of a linear accumulate

Equal recipes are interchangeable: a compiled module does not recompile for an equal one. To change an option assign it,
or make another recipe (`dataclasses.replace`); the next region of `autocast` sees it, in compiled code as well.
"""

from mezzotint.recipe.base import Recipe, check_recipe
from mezzotint.recipe.custom import CustomRecipe
from mezzotint.recipe.delayed import DelayedScaling
from mezzotint.recipe.float8 import GEMMS, Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling
from mezzotint.recipe.mx import MXFP4BlockScaling, MXFP6BlockScaling, MXFP8BlockScaling
from mezzotint.recipe.names import RECIPES, as_recipe
from mezzotint.recipe.nvfp4 import NVFP4BlockScaling
from mezzotint.recipe.options import OVERRIDES, Format, MMParams, QParams, element
from mezzotint.recipe.options import _Maxima as _Maxima
from mezzotint.recipe.requests import MAX_MARGIN, DelayedScalingRequest, QuantizerRequest
from mezzotint.recipe.roles import BACKWARD_TENSORS, FORWARD_TENSORS, QuantizerRole, slot
from mezzotint.recipe.rules import RULED_TENSORS, MixedRecipe, Rules, choose_recipe
from mezzotint.recipe.schedule import Schedule, parse_schedule

__all__ = [
    "BACKWARD_TENSORS",
    "FORWARD_TENSORS",
    "GEMMS",
    "MAX_MARGIN",
    "OVERRIDES",
    "RECIPES",
    "RULED_TENSORS",
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "MMParams",
    "MXFP4BlockScaling",
    "MXFP6BlockScaling",
    "MXFP8BlockScaling",
    "MixedRecipe",
    "NVFP4BlockScaling",
    "QParams",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "Rules",
    "Schedule",
    "as_recipe",
    "check_recipe",
    "choose_recipe",
    "element",
    "parse_schedule",
    "slot",
]

# Pickles, and PyTorch's list of classes that a file may name (`torch.serialization.add_safe_globals`), know a class by
# the name of its module. The name is set to this package, so that files can be read wherever in it a class is defined.
for _class in [value for value in globals().values() if isinstance(value, type)]:
    _class.__module__ = __name__
