"""DelayedScaling: this FP8 recipe makes scales from the amaxes of past iterations."""

from collections.abc import Callable

from mezzotint.recipe.base import Recipe, recipe_class
from mezzotint.recipe.options import Format, check_format
from mezzotint.recipe.requests import DelayedScalingRequest, QuantizerRequest, check_delayed
from mezzotint.recipe.roles import QuantizerRole


@recipe_class
class DelayedScaling(Recipe):
    """This recipe uses FP8 with one scale per tensor, made from the amaxes of past iterations.

    `amax_history_len` is how many amaxes are kept, and `amax_compute_algo` reduces them to one: "max", "most_recent" or
    a function. The scale leaves room of `margin` powers of two, unless `scaling_factor_compute_algo` computes it.
    `reduce_amax` says whether amaxes are reduced over ranks. `fp8_dpa` and `fp8_mha` ask for attention in low
    precision. `backward_override` must be None, because scales are made in backward.
    """

    colour = "#E69F00"
    _family = "delayed"

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        check_format(self, (Format.E4M3, Format.HYBRID))
        check_delayed(self)
        if self.backward_override is not None:
            raise ValueError(
                f"backward_override is {self.backward_override!r}: delayed scaling has none, its scales are made in "
                "backward; use Float8CurrentScaling"
            )

    def quantizer(self, role: QuantizerRole) -> QuantizerRequest:
        return DelayedScalingRequest(
            fp8_format=self.fp8_format,
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            scaling_factor_compute_algo=self.scaling_factor_compute_algo,
            reduce_amax=self.reduce_amax,
        )
