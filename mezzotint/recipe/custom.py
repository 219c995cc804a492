"""CustomRecipe: with this recipe a user's function says how each tensor is quantized."""

from collections.abc import Callable
from typing import Any

from mezzotint.recipe.base import Recipe, recipe_class
from mezzotint.recipe.options import Format, check_override
from mezzotint.recipe.requests import QuantizerRequest
from mezzotint.recipe.roles import QuantizerRole
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tracing import eager_only


@recipe_class
class CustomRecipe(Recipe):
    """This recipe asks a function of yours how each tensor is quantized.

    Eager code calls the function each time a module runs. Compiled code calls it while the graph is traced, and traces
    again when something that the function read has changed. So the function may change its answer at any time.
    `mezzotint.custom_recipes` has such functions.

    Args:
        qfactory: A function of a `QuantizerRole` that returns a quantizer (`IdentityQuantizer()` to leave the tensor as
            it is) or a `DelayedScalingRequest`.
        fp8_format: A `Format`, which the factory may read. The default is HYBRID.
        fp8_dpa: Whether attention runs in FP8, which is not supported: attention raises an error if it is True. The
            default is False.
        fp8_mha: Whether tensors around attention are FP8, which is not supported either. The default is False.
        backward_override: How backward computes without quantizing: "high_precision" with the original tensors,
            "dequantized" with the values that forward multiplied, or None (the default) to quantize.
        quantization_alignment: The multiple to which `Fp8Padding` pads the rows of a group of tokens. The default is
            128.

    Raises:
        TypeError: If `qfactory` is no function.
        ValueError: If `backward_override` or `quantization_alignment` has a value that it cannot have.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> def factory(role):
        ...     return mz.IdentityQuantizer() if role.tensor_type == "grad_output" else mz.MXFP8Quantizer()
        >>> layer = mz.Linear(64, 64, device="cpu")
        >>> with mz.autocast(recipe=mz.recipe.CustomRecipe(qfactory=factory)):
        ...     y = layer(torch.randn(32, 64))
        >>> y.shape
        torch.Size([32, 64])
    """

    _family = "custom"

    qfactory: Callable[[QuantizerRole], Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        check_override(self)
        if not callable(self.qfactory):
            raise TypeError(f"qfactory is {type(self.qfactory).__name__}: give a function of a QuantizerRole")
        if self.quantization_alignment < 1:
            raise ValueError(f"quantization_alignment is {self.quantization_alignment}: give 1 or more")

    def quantizer(self, role: QuantizerRole) -> Quantizer | QuantizerRequest:
        made = self.qfactory(role)
        is_wrong = made is None or isinstance(made, str | int | float | type | tuple | list | dict)
        if is_wrong or _is_something_else(made):
            raise TypeError(
                f"qfactory gave {type(made).__name__} for {role}: give a Quantizer (IdentityQuantizer to leave the "
                "tensor as it is) or a DelayedScalingRequest"
            )
        return made

    def alignment(self) -> int:
        return self.quantization_alignment


@eager_only(in_graph=False)
def _is_something_else(made: Any) -> bool:
    """Return whether a factory returned something that is no quantizer. Inside a graph the answer is False, because
    torch 2.11 does not know the class of a quantizer that was made there."""
    return not isinstance(made, Quantizer | QuantizerRequest)
