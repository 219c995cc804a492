"""Names of upstream's base module that mean something here; modules themselves do without them.

What only serves upstream's internals is not here: `grad_output_preprocess`, `set_nccl_overlap_warning_if_tp`, and the
keyword arguments of `register_parameter`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mezzotint.recipe import Recipe


class UpstreamNames:
    """Mixed into the base of the linear-like modules."""

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set a plain attribute, no parameter and no buffer, without asking what it is."""
        self.__dict__[name] = value

    def module_setattr(self, name: str, value: Any) -> None:
        """Set an attribute as `nn.Module` does."""
        setattr(self, name, value)

    @property
    def is_fsdp2(self) -> bool:
        """Whether `fully_shard` was applied to this module."""
        fsdp = sys.modules.get("torch.distributed.fsdp")  # never imported: nothing is sharded
        return fsdp is not None and isinstance(self, fsdp.FSDPModule)

    def set_meta_tensor(self: Any, fwd: bool, recipe: Recipe) -> None:
        """As `init_fp8_meta_tensors`: both directions have the state of one recipe."""
        self.init_fp8_meta_tensors(recipe)

    def prepare_forward(
        self: Any,
        inp: torch.Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> torch.Tensor:
        """For a subclass's own forward: the state of the recipe in force, and the input, contiguous unless allowed."""
        self.set_activation_dtype(inp)
        self.init_fp8_metadata(num_gemms)
        return inp if allow_non_contiguous else inp.contiguous()

    def end_forward(self) -> None:
        """The end of what `prepare_forward` began: there is nothing to undo."""

    @contextmanager
    def prepare_forward_ctx(
        self: Any,
        inp: torch.Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> Iterator[torch.Tensor]:
        """Both, around the code of a forward."""
        try:
            yield self.prepare_forward(inp, num_gemms, allow_non_contiguous, allow_different_data_and_param_types)
        finally:
            self.end_forward()

    def is_debug_iter(self) -> bool:
        """False: no debugging tool changes what modules compute."""
        return False

    def no_debug_features_active(self, quantizers: Any) -> bool:
        """True, for the same reason."""
        return True
