"""Recipes in the OCP MX formats: they use FP8, FP6 or FP4 with one E8M0 scale, a power of two, per 32 elements."""

from mezzotint.constants import DType
from mezzotint.recipe.base import Recipe, recipe_class
from mezzotint.recipe.options import Format, check_format_and_override, check_override, element_of
from mezzotint.recipe.roles import BACKWARD_TENSORS, QuantizerRole
from mezzotint.tensor.checks import check_choice
from mezzotint.tensor.mxfp4 import MXFP4Quantizer
from mezzotint.tensor.mxfp6 import MXFP6Quantizer
from mezzotint.tensor.mxfp8 import MXFP8Quantizer
from mezzotint.tensor.packed_mx import SCALE_RULES
from mezzotint.tensor.quantizer import Quantizer


@recipe_class
class MXFP8BlockScaling(Recipe):
    """This recipe uses FP8 with one scale, a power of two, per 32 elements (the MXFP8 format of the OCP standard).

    Args:
        margin: It must be 0: the scale of a block follows from the block.
        fp8_format: The element types, a `Format`: `Format.E4M3` for all tensors, or `Format.HYBRID` for E4M3 in forward
            and E5M2 for gradients. The default is E4M3.
        fp8_dpa: Whether attention runs in FP8, which is not supported: attention raises an error if it is True. The
            default is False.
        fp8_mha: Whether tensors around attention are FP8, which is not supported either. The default is False.
        backward_override: How backward computes without quantizing: "high_precision" with the original tensors,
            "dequantized" with the values that forward multiplied, or None (the default) to quantize.
        enable_2d_quantization: Whether weights have one scale per tile of 32x32 elements, so that a weight and its
            transpose have the same values. The default is False.

    Raises:
        ValueError: If an option has a value that the recipe does not take.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(128, 128, device="cpu")
        >>> with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
        ...     y = layer(torch.randn(128, 128))
        >>> y.shape
        torch.Size([128, 128])
    """

    colour = "#0072B2"
    _family = "mxfp8"

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False  # weights by 32x32 tiles

    def __post_init__(self) -> None:
        check_format_and_override(self)
        if self.margin != 0:
            raise ValueError(f"margin is {self.margin}: the scale of a block follows from the block; leave it 0")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        is_weight = role.tensor_type == "weight" and role.module_type in ("linear", "grouped_linear")
        two_d = self.enable_2d_quantization and is_weight
        return MXFP8Quantizer(element_of(self, role), with_2d_quantization=two_d)

    def alignment(self) -> int:
        return 32


@recipe_class
class MXFP4BlockScaling(Recipe):
    """This recipe uses FP4 with one scale, a power of two, per 32 elements (the MXFP4 format of the OCP standard).

    Input and gradient go through a random Hadamard transform for the weight gradient, gradients are rounded
    stochastically, and weights are scaled by tiles of 32x32; each can be disabled.

    Args:
        disable_rht: Whether the random Hadamard transform is left out, which spreads outliers of input and gradient
            before the product of the weight gradient. The default is False.
        disable_stochastic_rounding: Whether gradients are rounded to nearest instead of stochastically. The default is
            False.
        disable_2d_quantization: Whether weights have one scale per 32 elements of a row instead of one per tile of
            32x32. The default is False.
        scale_rule: How the scale follows from the amax of a block: "floor" (the default) is that of the OCP standard,
            with which the largest elements of a block may saturate; with "roundup" none saturates. Then stochastic
            rounding keeps the mean of the largest elements as well.
        backward_override: How backward computes without quantizing: "high_precision" with the original tensors,
            "dequantized" with the values that forward multiplied, or None (the default) to quantize.

    Raises:
        ValueError: If an option has a value that the recipe does not take.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(128, 128, device="cpu")
        >>> with mz.autocast(recipe=mz.recipe.MXFP4BlockScaling(scale_rule="roundup")):
        ...     y = layer(torch.randn(128, 128))
        >>> y.shape
        torch.Size([128, 128])
    """

    colour = "#F0E442"

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    scale_rule: str = "floor"
    backward_override: str | None = None

    def __post_init__(self) -> None:
        check_override(self)
        check_choice("scale_rule", self.scale_rule, SCALE_RULES)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        is_weight = role.tensor_type == "weight"
        return MXFP4Quantizer(
            with_rht=not is_weight and not self.disable_rht,
            with_2d_quantization=is_weight and not self.disable_2d_quantization,
            stochastic_rounding=role.tensor_type in BACKWARD_TENSORS and not self.disable_stochastic_rounding,
            scale_rule=self.scale_rule,
        )

    def alignment(self) -> int:
        return 32


@recipe_class
class MXFP6BlockScaling(Recipe):
    """This recipe uses FP6 with one scale, a power of two, per 32 elements (the MXFP6 formats of the OCP standard).

    Args:
        fp6_format: The element types: "HYBRID" (the default) is E2M3, the finer one, in forward and E3M2, the wider
            one, for gradients; "E2M3" or "E3M2" is for all tensors.
        scale_rule: How the scale follows from the amax of a block: "floor" (the default) is that of the OCP standard,
            with which the largest elements of a block may saturate; with "roundup" none saturates.
        backward_override: How backward computes without quantizing: "high_precision" with the original tensors,
            "dequantized" with the values that forward multiplied, or None (the default) to quantize.
        enable_2d_quantization: Whether weights have one scale per tile of 32x32 elements, so that a weight and its
            transpose have the same values. The default is False.

    Raises:
        ValueError: If an option has a value that the recipe does not take.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(128, 128, device="cpu")
        >>> with mz.autocast(recipe=mz.recipe.MXFP6BlockScaling()):
        ...     y = layer(torch.randn(128, 128))
        >>> y.shape
        torch.Size([128, 128])
    """

    colour = "#882255"

    fp6_format: str = "HYBRID"
    scale_rule: str = "floor"
    backward_override: str | None = None
    enable_2d_quantization: bool = False  # weights by 32x32 tiles

    def __post_init__(self) -> None:
        check_override(self)
        check_choice("fp6_format", self.fp6_format, ("HYBRID", "E2M3", "E3M2"))
        check_choice("scale_rule", self.scale_rule, SCALE_RULES)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        is_wide = self.fp6_format == "E3M2" or (self.fp6_format == "HYBRID" and role.tensor_type in BACKWARD_TENSORS)
        return MXFP6Quantizer(
            DType.kFloat6E3M2 if is_wide else DType.kFloat6E2M3,
            with_2d_quantization=self.enable_2d_quantization and role.tensor_type == "weight",
            scale_rule=self.scale_rule,
        )

    def alignment(self) -> int:
        return 32
