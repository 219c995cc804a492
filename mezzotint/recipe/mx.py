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
    """This recipe uses FP8 with one E8M0 scale per 32 elements.

    `enable_2d_quantization` scales weights by 32x32 tiles. `backward_override` is None, "high_precision" or
    "dequantized" (`Recipe.override`). `fp8_dpa` and `fp8_mha` ask for attention in low precision. `margin` must be 0.
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
    """This recipe uses FP4 with one E8M0 scale per 32 elements (OCP MX v1.0).

    As in NVFP4BlockScaling, input and gradient go through a Hadamard transform for the weight gradient, gradients are
    rounded stochastically, and weights are scaled by square tiles, of 32x32; each can be disabled. `scale_rule` "floor"
    is OCP's, with which the top of a block saturates. With "roundup" nothing saturates, so that stochastic rounding
    keeps the mean of the largest elements as well.
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
    """This recipe uses FP6 with one E8M0 scale per 32 elements (OCP MX v1.0).

    `fp6_format` "HYBRID" is E2M3, the finer type, forward and E3M2, the wider one, for gradients; "E2M3" or "E3M2" is
    for all tensors. `scale_rule` "floor" is OCP's, with which the top of a block saturates; with "roundup" nothing
    saturates.
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
