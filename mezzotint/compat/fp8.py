"""This module has the names of `transformer_engine.pytorch.fp8`. Import them from `mezzotint`
or `mezzotint.quantization`."""

import warnings

from mezzotint.compat.global_state import FP8GlobalStateManager
from mezzotint.compat.recipe_state import RecipeState
from mezzotint.quantization import (
    autocast,
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    get_fp8_max,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)

get_default_fp8_recipe = get_default_recipe

__all__ = [
    "FP8GlobalStateManager",
    "RecipeState",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]

warnings.warn(
    "mezzotint.compat.fp8 is deprecated: import these names from mezzotint or mezzotint.quantization",
    DeprecationWarning,
    stacklevel=2,
)
