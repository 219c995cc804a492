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
    """A factory may return a request in place of a quantizer: the module then keeps state for the tensor."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """This request asks for a scale from the amaxes of past iterations. Its fields are those of `DelayedScaling`."""

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
