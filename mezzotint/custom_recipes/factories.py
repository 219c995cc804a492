"""Factories of single formats, and simple mixtures: each function returns the quantizer of a role for
`CustomRecipe`."""

from typing import Any

from mezzotint.constants import DType
from mezzotint.recipe import (
    BACKWARD_TENSORS,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
)
from mezzotint.tensor.hybrid import HybridQuantizer
from mezzotint.tensor.identity import IdentityQuantizer
from mezzotint.tensor.mxfp8 import MXFP8Quantizer
from mezzotint.tensor.nvfp4 import NVFP4Quantizer


def high_precision_factory(role: QuantizerRole) -> Any:
    """Return a quantizer that leaves the tensor in high precision.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.high_precision_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "input"))).__name__
        'IdentityQuantizer'
    """
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole) -> DelayedScalingRequest:
    """Return a request for FP8 with a scale from past iterations, which the module keeps.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.delayed_scaling_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "input"))).__name__
        'DelayedScalingRequest'
    """
    return DelayedScalingRequest(amax_history_len=DelayedScaling().amax_history_len)


def current_scaling_factory(role: QuantizerRole) -> Any:
    """Return an FP8 quantizer with one scale per tensor.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.current_scaling_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "input"))).__name__
        'Float8CurrentScalingQuantizer'
    """
    return Float8CurrentScaling().quantizer(role)


def float8_rowwise_factory(role: QuantizerRole) -> Any:
    """Return an FP8 quantizer with one scale per row.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.float8_rowwise_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "input"))).__name__
        'Float8RowwiseQuantizer'
    """
    return Float8RowwiseScaling().quantizer(role)


def float8_block_scaling_factory(role: QuantizerRole) -> Any:
    """Return an FP8 quantizer with one scale per block.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.float8_block_scaling_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "input"))).__name__
        'Float8BlockQuantizer'
    """
    return Float8BlockScaling().quantizer(role)


def mxfp4_factory(role: QuantizerRole) -> Any:
    """Return an MXFP4 quantizer, with its recipe's Hadamard transform, stochastic rounding and 32x32 weight tiles.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.mxfp4_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "input"))).__name__
        'MXFP4Quantizer'
    """
    return MXFP4BlockScaling().quantizer(role)


def mxfp6_factory(role: QuantizerRole) -> Any:
    """Return an MXFP6 quantizer: E2M3 forward, E3M2 for gradients.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.mxfp6_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "input"))).__name__
        'MXFP6Quantizer'
    """
    return MXFP6BlockScaling().quantizer(role)


def mxfp8_factory(role: QuantizerRole) -> Any:
    """Return an MXFP8 quantizer.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.mxfp8_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "input"))).__name__
        'MXFP8Quantizer'
    """
    return MXFP8BlockScaling().quantizer(role)


def nvfp4_factory(role: QuantizerRole) -> Any:
    """Return an NVFP4 quantizer, with its recipe's Hadamard transform, stochastic rounding and 16x16 weight tiles.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.nvfp4_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "input"))).__name__
        'NVFP4Quantizer'
    """
    return NVFP4BlockScaling().quantizer(role)


def nvfp4_forward_mxfp8_backward_factory(role: QuantizerRole) -> Any:
    """Return quantizers with which forward multiplies NVFP4 and both backward GEMMs multiply MXFP8.

    Forward tensors hold NVFP4 row-wise and MXFP8 column-wise.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.nvfp4_forward_mxfp8_backward_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "weight"))).__name__
        'HybridQuantizer'
    """
    if role.tensor_type in BACKWARD_TENSORS:
        return MXFP8Quantizer(DType.kFloat8E4M3)
    forward = NVFP4Quantizer(with_2d_quantization=role.tensor_type == "weight")
    return HybridQuantizer(rowwise_quantizer=forward, columnwise_quantizer=MXFP8Quantizer(DType.kFloat8E4M3))


def nvfp4_weight_mxfp8_factory(role: QuantizerRole) -> Any:
    """Return an NVFP4 quantizer for weights, and an MXFP8 one for everything else.

    Args:
        role: What the tensor is.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=mz.custom_recipes.nvfp4_weight_mxfp8_factory)
        >>> type(recipe.quantizer(mz.QuantizerRole("linear", "weight"))).__name__
        'NVFP4Quantizer'
    """
    if role.tensor_type == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return MXFP8Quantizer(DType.kFloat8E4M3)
