"""RecipeState holds the quantizers of a list of tensors, and the state that they need, outside of a module.

Modules keep their state in buffers of their own (`layer/scaling_state.py`); this is for code that quantizes by itself.
`RecipeState.create` picks the class for a recipe; each class can also be made directly, for its own recipe.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from mezzotint.constants import DType
from mezzotint.quantization import get_fp8_te_dtype
from mezzotint.recipe import (
    BACKWARD_TENSORS,
    FORWARD_TENSORS,
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    check_recipe,
    element,
)
from mezzotint.tensor.float8 import Float8Quantizer
from mezzotint.tensor.quantizer import Quantizer


class RecipeState:
    """A `RecipeState` has the quantizers of the tensors of one direction, as Transformer Engine's class of this name.

    Tensors without a role are taken as those of a linear layer, repeated.

    Args:
        recipe: The recipe that says which quantizers they are.
        mode: The direction, "forward" or "backward".
        num_quantizers: The number of tensors. The default is 1.
        device: The device of the state of delayed scaling, or None.
        roles: What each tensor is, or None.

    Raises:
        ValueError: If `mode` is unknown, or there is not one role for each tensor.

    Example:
        >>> import mezzotint as mz
        >>> state = mz.RecipeState.create(mz.recipe.MXFP8BlockScaling(), mode="forward", num_quantizers=2)
        >>> [type(each).__name__ for each in state.make_quantizers()]
        ['MXFP8Quantizer', 'MXFP8Quantizer']
    """

    _counted_type: ClassVar[str] = "linear"  # the module type of slots without a role
    scale: torch.Tensor | None = None  # FP32 [n], of delayed scaling
    amax_history: torch.Tensor | None = None  # FP32 (L, n)

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        if mode not in ("forward", "backward"):
            raise ValueError(f"mode is {mode!r}: give 'forward' or 'backward'")
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(f"roles has {len(roles)} entries for {num_quantizers} quantizers: give one for each")
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        self.device = None if device is None else torch.device(device)
        types = FORWARD_TENSORS if mode == "forward" else BACKWARD_TENSORS
        counted = [QuantizerRole(self._counted_type, types[i % len(types)], "") for i in range(num_quantizers)]
        given = [None] * num_quantizers if roles is None else roles
        self.roles = [each if role is None else role for role, each in zip(given, counted, strict=True)]
        self._made = [recipe.quantizer(role) for role in self.roles]
        requests = [made for made in self._made if isinstance(made, DelayedScalingRequest)]
        if any(request != requests[0] for request in requests):
            raise ValueError("the roles ask for different delayed scaling: the requests of one state must be equal")
        if requests:
            self.scale = torch.ones(num_quantizers, dtype=torch.float32, device=device)
            shape = requests[0].amax_history_len, num_quantizers
            self.amax_history = torch.zeros(shape, dtype=torch.float32, device=device)

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> "RecipeState":
        """Return the state of a recipe, of the class that belongs to that recipe."""
        check_recipe(recipe)
        found = [state for kind, state in STATES.items() if isinstance(recipe, kind)]
        made = found[0] if found else RecipeState
        return made(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)

    def make_quantizers(self) -> list[Quantizer]:
        """Return a quantizer for each slot; those of delayed scaling read and write this state."""
        return [self._quantizer(slot, made) for slot, made in enumerate(self._made)]

    def _quantizer(self, slot: int, made: Any) -> Quantizer:
        if not isinstance(made, DelayedScalingRequest):
            return made.copy()
        assert self.scale is not None
        assert self.amax_history is not None
        dtype = element(made.fp8_format, self.mode == "forward")
        return Float8Quantizer(self.scale[slot : slot + 1], self.amax_history[0, slot : slot + 1], dtype)

    def inherit_state_from(self, other: "RecipeState") -> None:
        """Copy scales and amax histories from `other` if both states have them: the first
        rows of a history, then zeros."""
        if self.scale is None or self.amax_history is None or other.scale is None or other.amax_history is None:
            return
        if self.scale.shape != other.scale.shape:
            raise ValueError(
                f"other has {other.num_quantizers} slots, this state {self.num_quantizers}: make it as many"
            )
        self.scale.copy_(other.scale)
        rows = min(self.amax_history.shape[0], other.amax_history.shape[0])
        self.amax_history.zero_()
        self.amax_history[:rows].copy_(other.amax_history[:rows])


class _OneFormatState(RecipeState):
    """This state has one element type for all tensors of a direction."""

    @property
    def dtype(self) -> DType:
        """Return the element type of this direction."""
        return get_fp8_te_dtype(self.recipe, self.mode == "forward")


class DelayedScalingRecipeState(_OneFormatState):
    """This state of delayed scaling has `scale` FP32 [n] and `amax_history` FP32 (length, n)."""


class Float8CurrentScalingRecipeState(_OneFormatState):
    """This recipe scales FP8 by the amax of the tensor at hand, so it keeps no state."""


class MXFP8BlockScalingRecipeState(_OneFormatState):
    """MXFP8 keeps no state. A slot without a role is not taken as a weight, which could be quantized by tiles."""

    _counted_type = ""


class Float8BlockScalingRecipeState(RecipeState):
    """FP8 in blocks keeps no state."""

    @property
    def qx_dtype(self) -> DType:
        """Return the element type of inputs."""
        return get_fp8_te_dtype(self.recipe, True)

    @property
    def qw_dtype(self) -> DType:
        """Return the element type of weights."""
        return get_fp8_te_dtype(self.recipe, True)

    @property
    def qgrad_dtype(self) -> DType:
        """Return the element type of gradients."""
        return get_fp8_te_dtype(self.recipe, False)


class NVFP4BlockScalingRecipeState(RecipeState):
    """NVFP4 keeps no state."""

    dtype = DType.kFloat4E2M1


class CustomRecipeState(RecipeState):
    """A custom recipe has the state of delayed scaling if its factory asks for that, else none."""


STATES: dict[type[Recipe], type[RecipeState]] = {
    DelayedScaling: DelayedScalingRecipeState,
    Float8CurrentScaling: Float8CurrentScalingRecipeState,
    MXFP8BlockScaling: MXFP8BlockScalingRecipeState,
    Float8BlockScaling: Float8BlockScalingRecipeState,
    NVFP4BlockScaling: NVFP4BlockScalingRecipeState,
    CustomRecipe: CustomRecipeState,
}


def get_fp4_te_dtype(fp4_recipe: Recipe) -> DType:
    """Return the 4-bit type of a recipe, which must be an NVFP4BlockScaling."""
    if not isinstance(fp4_recipe, NVFP4BlockScaling):
        raise ValueError(f"fp4_recipe is {type(fp4_recipe).__name__}: give an NVFP4BlockScaling")
    return DType.kFloat4E2M1


def check_recipe_support(recipe: Recipe) -> None:
    """Raise an error if `recipe` is no recipe; every recipe runs everywhere, by emulation where it must."""
    check_recipe(recipe)


def split_and_copy(buffer: torch.Tensor, outputs: Sequence[torch.Tensor], chunk_sizes: Sequence[int]) -> None:
    """Copy consecutive pieces of a flat buffer, of `chunk_sizes` elements each, into `outputs`."""
    for output, part in zip(outputs, buffer.split(list(chunk_sizes)), strict=True):
        output.copy_(part.view(output.shape))
