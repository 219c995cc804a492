"""This module has the names of quantized attention on the attention module. Attention is not quantized
here, which is what they answer."""

from typing import Any

from mezzotint.compat.extra_state import IgnoresExtraState
from mezzotint.recipe import QuantizerRole, Recipe
from mezzotint.region import current_state

# Upstream numbers the quantizers of attention in three groups of equal size. An entry has that size, the type of tensor
# in each group, and the name of the tensor that leaves attention (the output, or the gradient of the inputs). The type
# of the latter is empty, because the module that receives it decides what it is.
_FORWARD = (3, ("qkv", "", "s"), "dpa_output")
_BACKWARD = (2, ("", "do", "dp"), "dpa_grad_input")


class AttentionNames(IgnoresExtraState):
    """This mixin gives DotProductAttention the names of quantized attention."""

    @property
    def fp8(self) -> bool:
        """Return False, whatever the recipe."""
        return False

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Return the recipe in force; there are no scales and amax histories."""
        return {"recipe": current_state().recipe, "fp8_checkpoint": False}

    @property
    def quantizers(self) -> dict[str, list[Any]]:
        """Return no quantizers, for forward and for backward."""
        return {"scaling_fwd": [], "scaling_bwd": []}

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole]:
        """Return the roles that the tensors of attention would have, for a factory that wants to know them."""
        size, types, leaving = _FORWARD if fwd else _BACKWARD
        name = getattr(self, "name", None) or ""
        found = [types[min(i // size, 2)] for i in range(num_quantizers)]
        outside = QuantizerRole("", "", f"{name}.{leaving}" if name else leaving)
        return [QuantizerRole("dpa", tensor, name) if tensor else outside for tensor in found]

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: there is no state."""

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """Do nothing: there is no state."""
