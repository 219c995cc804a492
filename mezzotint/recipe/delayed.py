"""DelayedScaling: this FP8 recipe makes scales from the amaxes of past iterations."""

from collections.abc import Callable

from mezzotint.recipe.base import Recipe, recipe_class
from mezzotint.recipe.options import Format, check_format
from mezzotint.recipe.requests import DelayedScalingRequest, QuantizerRequest, check_delayed
from mezzotint.recipe.roles import QuantizerRole


@recipe_class
class DelayedScaling(Recipe):
    """This recipe uses FP8 with one scale per tensor, made from the amaxes of past iterations.

    An amax is the largest absolute value of a tensor. Because the scale is known before the tensor is, quantizing takes
    one pass over it; but values that are much larger than those of past iterations saturate. Modules keep scales and
    histories as buffers, which are saved with the model.

    Args:
        margin: How many powers of two the scale leaves unused below the format's largest value. The default is 0.
        fp8_format: The element types, a `Format`: `Format.E4M3` for all tensors, or `Format.HYBRID` for E4M3 in forward
            and E5M2 for gradients. The default is HYBRID.
        amax_history_len: How many amaxes of past iterations are kept. The default is 1024.
        amax_compute_algo: How they are reduced to one: "max" (the default), "most_recent", or a function of the
            history.
        scaling_factor_compute_algo: A function of (amax, scale, largest value of the format, recipe) that returns the
            new scale, or None for the usual one.
        reduce_amax: Whether amaxes are reduced over the ranks of the region's `amax_reduction_group`. The default is
            True.
        fp8_dpa: Whether attention runs in FP8, which is not supported: attention raises an error if it is True. The
            default is False.
        fp8_mha: Whether tensors around attention are FP8, which is not supported either. The default is False.
        backward_override: It must be None, because scales of gradients are made in backward.

    Raises:
        ValueError: If an option has a value that the recipe does not take.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(128, 128, device="cpu")
        >>> with mz.autocast(recipe=mz.recipe.DelayedScaling(amax_history_len=16)):
        ...     y = layer(torch.randn(128, 128))
        >>> y.shape
        torch.Size([128, 128])
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
