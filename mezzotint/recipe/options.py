"""Options that recipes share: element types, how a GEMM accumulates and how one tensor is quantized. This module also
checks them."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from mezzotint.constants import DType
from mezzotint.recipe.roles import BACKWARD_TENSORS, QuantizerRole
from mezzotint.tensor.checks import check_epsilon
from mezzotint.tensor.graph_constant import GraphConstant

OVERRIDES = (None, "high_precision", "dequantized")


class OptionsConflictError(ValueError):
    """This error says that two options of a recipe exclude each other, each of which is right by itself."""


class _Maxima(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """A `Format` has the element types of forward and backward tensors, given by their largest values.

    E2M1 is FP4, E4M3 and E5M2 are FP8, named after their bits of exponent and mantissa. HYBRID is E4M3 in forward and
    E5M2, which has the wider range, for gradients.

    Example:
        >>> from mezzotint.recipe import Format
        >>> Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd
        (448, 57344)
    """

    E2M1 = _Maxima(6, 6)
    E4M3 = _Maxima(448, 448)
    E5M2 = _Maxima(57344, 57344)
    HYBRID = _Maxima(448, 57344)


@dataclass(frozen=True)
class MMParams(GraphConstant):
    """These parameters say how a matrix product accumulates.

    Args:
        use_split_accumulator: Whether partial sums are promoted to full FP32. The default is True.

    Example:
        >>> from mezzotint.recipe import Float8CurrentScaling, MMParams
        >>> recipe = Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))
        >>> recipe.fp8_gemm_fprop.use_split_accumulator
        True
    """

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams(GraphConstant):
    """These parameters say how a tensor is quantized, in recipes that allow it to be said for each tensor.

    Args:
        power_2_scale: Whether the scale is rounded to a power of two; for FP8. The default is False.
        amax_epsilon: The least amax that is assumed; for FP8. The default is 0.
        random_hadamard_transform: Whether the tensor goes through a random Hadamard transform for the weight gradient;
            for NVFP4. The default is False.
        stochastic_rounding: Whether the tensor is rounded stochastically; for NVFP4. The default is False.
        fp4_2d_quantization: Whether scales are those of square tiles; for NVFP4. The default is False.

    Raises:
        ValueError: If `amax_epsilon` is no number that an amax can have.

    Example:
        >>> from mezzotint.recipe import Float8CurrentScaling, QParams
        >>> recipe = Float8CurrentScaling(fp8_quant_bwd_grad=QParams(power_2_scale=True))
        >>> recipe.fp8_quant_bwd_grad.power_2_scale, recipe.fp8_quant_fwd_inp.power_2_scale
        (True, False)
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    _is_filled: ClassVar[bool] = False  # set if a recipe made it from its switches; a changed copy makes it again
    _epsilon: ClassVar[str] = "0.0"  # amax_epsilon as text, for `epsilon_of`

    def __post_init__(self) -> None:
        check_epsilon(self.amax_epsilon)
        object.__setattr__(self, "_epsilon", repr(self.amax_epsilon))


def element(fp8_format: Format, forward: bool) -> DType:
    """Return the element type of a format's forward, or backward, tensors.

    Args:
        fp8_format: A `Format`.
        forward: True for forward tensors, False for gradients.

    Returns:
        A `DType`.

    Example:
        >>> from mezzotint.recipe import Format, element
        >>> element(Format.HYBRID, forward=False).name
        'kFloat8E5M2'
    """
    is_e5m2 = fp8_format is Format.E5M2 or (fp8_format is Format.HYBRID and not forward)
    return DType.kFloat8E5M2 if is_e5m2 else DType.kFloat8E4M3


def element_of(recipe: Any, role: QuantizerRole) -> DType:
    """Return the element type in which a recipe quantizes the tensor of a role."""
    return element(recipe.fp8_format, role.tensor_type not in BACKWARD_TENSORS)


def params_of(recipe: Any, prefix: str, role: QuantizerRole) -> QParams:
    """Return the options that a recipe has for the tensor of a role; `prefix` is "fp8" or "fp4", as in its fields."""
    name = "bwd_grad" if role.tensor_type in BACKWARD_TENSORS else "fwd_inp"
    return getattr(recipe, f"{prefix}_quant_{'fwd_weight' if role.tensor_type == 'weight' else name}")


def epsilon_of(params: QParams) -> float:
    """Return `amax_epsilon`, from its text. Under `torch.compile(dynamic=True)` a float that is read becomes a symbol,
    and no quantizer, which is a constant of the graph, can be made of that; text stays a constant."""
    return float(params._epsilon)


def set_default(recipe: Any, name: str, default: Any) -> bool:
    """Fill in a field that was left None, and return whether it was. (The field has no default instance, because torch
    2.11 does not trace that.)"""
    given = getattr(recipe, name)
    if given is None:
        object.__setattr__(recipe, name, default)
    elif not isinstance(given, type(default)):
        wanted = type(default).__name__
        raise TypeError(f"{name} is {type(given).__name__}: give a mezzotint.recipe.{wanted}")
    return given is None


def set_params(recipe: Any, name: str, default: QParams) -> None:
    """Fill in options that were left None, or that were filled in before this recipe was copied
    (`dataclasses.replace`)."""
    if set_default(recipe, name, default) or getattr(recipe, name)._is_filled:
        object.__setattr__(default, "_is_filled", True)
        object.__setattr__(recipe, name, default)


def check_format_and_override(recipe: Any, formats: tuple[Format, ...] = (Format.E4M3, Format.HYBRID)) -> None:
    """Raise ValueError unless `fp8_format` is one of `formats` and `backward_override` is one that exists."""
    check_format(recipe, formats)
    check_override(recipe)


def check_format(recipe: Any, allowed: tuple[Format, ...]) -> None:
    """Raise ValueError unless `fp8_format` is one of `allowed`."""
    if recipe.fp8_format not in allowed:
        names = " or ".join(f"Format.{fmt.name}" for fmt in allowed)
        raise ValueError(f"fp8_format is {recipe.fp8_format}: {type(recipe).__name__} takes {names}")


def check_override(recipe: Any) -> None:
    """Raise ValueError unless `backward_override` is one that exists."""
    if recipe.backward_override not in OVERRIDES:
        raise ValueError(
            f"backward_override is {recipe.backward_override!r}: give None, 'high_precision' or 'dequantized'"
        )
