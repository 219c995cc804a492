"""Factories for `CustomRecipe`: a function of a role that gives its quantizer. Take one, or write one like it.

    recipe = CustomRecipe(qfactory=mxfp8_factory)

Each `<format>_factory` does what that format's own recipe does; the mixed ones use another format by role.
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
