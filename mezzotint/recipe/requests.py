"""Requests for state: a recipe may return one in place of a quantizer, and the module keeps the state (delayed
scaling)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mezzotint.recipe.options import Format, element
from mezzotint.tensor.float8 import Float8ScaledQuantizer
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.quantizer import Quantizer

MAX_MARGIN = 100  # with it, the largest value of a format · 2^-margin is still a normal number of FP32


@dataclass(frozen=True)
class QuantizerRequest(GraphConstant):
    """A factory may return a request in place of a quantizer: the module then keeps state for the tensor.

    This is the base class; `DelayedScalingRequest` is the request that exists.

    Example:
        >>> import mezzotint as mz
        >>> issubclass(mz.DelayedScalingRequest, mz.QuantizerRequest)
        True
    """


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """This request asks for a scale from the amaxes of past iterations. Its fields are those of `DelayedScaling`.

    Args:
        fp8_format: The element types, a `Format`: `Format.E4M3` for all tensors, or `Format.HYBRID` for E4M3 in forward
            and E5M2 for gradients. The default is HYBRID.
        margin: How many powers of two the scale leaves unused below the format's largest value. The default is 0.
        amax_history_len: How many amaxes of past iterations are kept. The default is 1024.
        amax_compute_algo: How they are reduced to one: "max" (the default), "most_recent", or a function of the
            history.
        scaling_factor_compute_algo: A function of (amax, scale, largest value of the format, request) that returns the
            new scale, or None for the usual one.
        reduce_amax: Whether amaxes are reduced over the ranks of the region's `amax_reduction_group`. The default is
            True.

    Raises:
        ValueError: If an option has a value that it cannot have.

    Example:
        >>> import mezzotint as mz
        >>> recipe = mz.recipe.CustomRecipe(qfactory=lambda role: mz.DelayedScalingRequest(amax_history_len=16))
        >>> recipe.quantizer(mz.QuantizerRole("linear", "input")).amax_history_len
        16
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        check_delayed(self)

    def scaled_quantizer(self, forward: bool) -> Quantizer:
        """Return the quantizer of a forward, or backward, tensor, which is given the kept scale with each call."""
        return Float8ScaledQuantizer(element(self.fp8_format, forward))

    def has_own_rule(self) -> bool:
        """Return whether a user's function says how scales follow from histories, or which amax of them counts."""
        return callable(self.amax_compute_algo) or self.scaling_factor_compute_algo is not None


def check_delayed(recipe: Any) -> None:
    """Raise ValueError if an option of delayed scaling, in the recipe or in a request, makes no sense."""
    length = recipe.amax_history_len
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"amax_history_len is {length!r}: give 1 or more")
    margin = recipe.margin
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not abs(margin) <= MAX_MARGIN:
        raise ValueError(f"margin is {margin!r}: give a number from -{MAX_MARGIN} to {MAX_MARGIN}, 0 for none")
    if not callable(recipe.amax_compute_algo) and recipe.amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"amax_compute_algo is {recipe.amax_compute_algo!r}: give 'max', 'most_recent' or a function")
    if recipe.scaling_factor_compute_algo is not None and not callable(recipe.scaling_factor_compute_algo):
        raise ValueError(
            f"scaling_factor_compute_algo is {recipe.scaling_factor_compute_algo!r}: give None or a function"
        )
