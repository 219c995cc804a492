"""FP8GlobalStateManager is upstream's name for questions about the state behind `autocast`.

Upstream keeps scales and amax histories of all modules in global buffers. Here each module has its own: the functions
that register them, and those that copy state for recomputation (which `mezzotint.checkpoint` does), do nothing.
"""

from typing import Any

import torch

from mezzotint.comm.collectives import all_reduce_max
from mezzotint.comm.groups import is_initialized
from mezzotint.functional.delayed import SCALE_UPDATES
from mezzotint.quantization import (
    autocast,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    update_pending,
)
from mezzotint.recipe import Recipe
from mezzotint.region import AutocastState, State, current_state, get_autocast_state, set_autocast_state


class FP8GlobalStateManager:
    """This class has functions only, by which programs for Transformer Engine ask for the region in force. The state is
    in `region.py`.

    Example:
        >>> import mezzotint as mz
        >>> with mz.autocast("mxfp8"):
        ...     mz.FP8GlobalStateManager.is_fp8_enabled()
        True
    """

    is_fp8_available = staticmethod(is_fp8_available)
    is_mxfp8_available = staticmethod(is_mxfp8_available)
    is_fp8_block_scaling_available = staticmethod(is_fp8_block_scaling_available)
    is_nvfp4_available = staticmethod(is_nvfp4_available)
    get_autocast_state = staticmethod(get_autocast_state)

    @classmethod
    def set_autocast_state(cls, state: AutocastState) -> None:
        """Restore the state that `get_autocast_state` returned."""
        set_autocast_state(state)

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        return "forward" if forward else "backward"

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return current_state().enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return current_state().calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return current_state().init_enabled

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        return current_state().preserves_init

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        recipe = current_state().recipe
        return get_default_recipe() if recipe is None else recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        return current_state().group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Return False, because no module does work for all others."""
        return False

    @classmethod
    def get_buffer_info(cls) -> str:
        """Return the key under which upstream keeps a module's place in the global buffers."""
        return "buffer_index_and_autocast_key"

    @staticmethod
    def get_unique_autocast_key(recipe: Recipe | None = None, group: Any = None) -> str:
        """Return a string that is the same for regions of the same recipe and group."""
        return f"{recipe!r}:{id(group)}"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe, fp8_group: Any) -> str:
        """Return the string of `get_unique_autocast_key` with a direction in front of it."""
        return f"{cls.get_fwd_bwd_key(forward)}_{cls.get_unique_autocast_key(fp8_recipe, fp8_group)}"

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        """Return whether a key of `get_key_in_buffer` is for forward, and the rest of the key."""
        direction, _, rest = key.partition("_")
        return direction == "forward", rest

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Do nothing: a module's scales are updated where they are."""

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Do nothing: `mezzotint.checkpoint` keeps the scales of a first run."""

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Do nothing: `mezzotint.checkpoint` gives a second run the scales of the first."""

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict[str, Any]) -> None:
        """Do nothing: a second run writes no state."""

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: torch.Tensor, group: Any) -> None:
        """Write the elementwise maximum over the ranks of a group into a tensor."""
        if is_initialized():
            tensor.copy_(all_reduce_max(tensor, group))

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Open a region; `autocast_exit` closes the last one that is open."""
        region = autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
        region.__enter__()
        state = current_state()
        state.entered = (*state.entered, region)

    @classmethod
    def autocast_exit(cls, enabled: bool = False, _graph: bool = False) -> None:
        state = current_state()
        if not state.entered:
            raise RuntimeError("autocast_exit: no region is open; call autocast_enter first")
        *outer, region = state.entered
        state.entered = tuple(outer)
        region.__exit__(None, None, None)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Update delayed scaling's scales now, of the modules that wait for the end of
        the region or of the backward."""
        if forward:
            update_pending(True)
        else:
            SCALE_UPDATES.end()

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Set the flag that graphs read, FP32 [1]: 1 if kept weights (`is_first_microbatch`) are not
        to be quantized again, else 0."""
        state = current_state()
        if state.skip_weight_update is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            state.skip_weight_update = torch.empty(1, dtype=torch.float32, device=device)
        state.skip_weight_update.fill_(float(skip))

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> torch.Tensor | None:
        return current_state().skip_weight_update

    @classmethod
    def reset(cls) -> None:
        """Reset the state of this thread to what it is after the import."""
        state, fresh = current_state(), State()
        for name in State.__slots__:
            setattr(state, name, getattr(fresh, name))
        SCALE_UPDATES.waiting = {}
