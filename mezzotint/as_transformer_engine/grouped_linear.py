"""GroupedLinear for Megatron-Core, which splits `_extra_state` into that of each expert, and joins it again."""

from typing import Any

import torch

from mezzotint.compat.extra_state_bytes import write_extra_state
from mezzotint.module import grouped_linear
from mezzotint.recipe import DelayedScaling


class GroupedLinear(grouped_linear.GroupedLinear):
    """This is `mezzotint.GroupedLinear` with `_extra_state` in Transformer Engine's form: bytes, none if it has learnt
    nothing. State dicts of either form load into both."""

    def get_extra_state(self) -> torch.Tensor:
        """Return scales and histories of delayed scaling, with their recipe, pickled."""
        state, recipe = super().get_extra_state(), self._learnt_recipe()
        if state is None or recipe is None:
            return torch.empty(0, dtype=torch.uint8)
        return write_extra_state(state, recipe)

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Return other modules' entries, with the recipe that is saved; `fp8_checkpoint` says if there are bytes."""
        meta, recipe = super().fp8_meta, self._learnt_recipe()
        if recipe is not None:
            dict.__setitem__(meta, "recipe", recipe)
        dict.__setitem__(meta, "fp8_checkpoint", recipe is not None)
        return meta

    def _learnt_recipe(self) -> DelayedScaling | None:
        """Return the recipe of the scales and histories, or None if nothing was learnt. After a compiled run only the
        length of the history is known."""
        if self._is_fresh():
            return None
        if isinstance(self._recipe, DelayedScaling):
            return self._recipe
        length = self.amax_history_fwd.shape[0] if self._request is None else self._request.amax_history_len
        return DelayedScaling(amax_history_len=length)
