"""Factories for `CustomRecipe`: a factory is a function that returns the quantizer of a role. Use one, or write your
own.

    recipe = CustomRecipe(qfactory=mxfp8_factory)

Each `<format>_factory` does what that format's own recipe does; the mixed ones choose the format by role.
"""

from mezzotint.custom_recipes.factories import (
    current_scaling_factory,
    delayed_scaling_factory,
    float8_block_scaling_factory,
    float8_rowwise_factory,
    high_precision_factory,
    mxfp4_factory,
    mxfp6_factory,
    mxfp8_factory,
    nvfp4_factory,
    nvfp4_forward_mxfp8_backward_factory,
    nvfp4_weight_mxfp8_factory,
)
from mezzotint.custom_recipes.gemm import GEMMType, MMParams

__all__ = [
    "GEMMType",
    "MMParams",
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "float8_rowwise_factory",
    "high_precision_factory",
    "mxfp4_factory",
    "mxfp6_factory",
    "mxfp8_factory",
    "nvfp4_factory",
    "nvfp4_forward_mxfp8_backward_factory",
    "nvfp4_weight_mxfp8_factory",
]
