"""Names of quantized attention on the attention module. Attention is not quantized here: they say so."""

from typing import Any

from mezzotint.compat.extra_state import IgnoresExtraState
from mezzotint.recipe import QuantizerRole, Recipe
from mezzotint.region import current_state

# The tensors of three groups of slots. What leaves attention, the output and the gradient of the inputs, has no type:
# its role is the next module's, and its name says where it comes from.
_FORWARD = (3, ("qkv", "", "s"), "dpa_output")
_BACKWARD = (2, ("", "do", "dp"), "dpa_grad_input")


class AttentionNames(IgnoresExtraState):
    """Mixed into DotProductAttention."""

    @property
    def fp8(self) -> bool:
        """False, whatever the recipe."""
        return False

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """The recipe in force; there are no scales and histories."""
        return {"recipe": current_state().recipe, "fp8_checkpoint": False}

    @property
    def quantizers(self) -> dict[str, list[Any]]:
        """None, forward and backward."""
        return {"scaling_fwd": [], "scaling_bwd": []}

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole]:
        """Return the roles that tensors of attention would have, for a factory that wants to know them."""
        size, types, leaving = _FORWARD if fwd else _BACKWARD
        name = getattr(self, "name", None) or ""
        found = [types[min(i // size, 2)] for i in range(num_quantizers)]
        outside = QuantizerRole("", "", f"{name}.{leaving}" if name else leaving)
        return [QuantizerRole("dpa", tensor, name) if tensor else outside for tensor in found]

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: there is no state."""

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """Do nothing: there is no state."""
