"""This module has names of upstream's base module that mean something here; modules themselves do without them.

What only serves upstream's internals is not here: `grad_output_preprocess`, `set_nccl_overlap_warning_if_tp`,
`get_weight_workspace` (`quantize_weight` took its place), and the keyword arguments of `register_parameter`.

Nor are the parts of upstream's autograd functions: `ctx.backward_objects`, its `setup_saved_tensors(ctx)`, and
`ctx_attrs["saved_tensor_aliases"]`. One autograd function serves all modules here (`functional/autograd.py`): the
backward arguments of a core name its saved tensors in `SAVED`, `unflatten` puts them back, and a saved tensor that is
an input is saved as that input, so that no alias need be declared.
"""

import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mezzotint.functional import weight as weights
from mezzotint.recipe import Recipe
from mezzotint.region import current_state
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


def quantize_weight(
    *,
    tensor: Any = None,
    quantizer: Quantizer | None = None,
    workspace: Any = None,
    update_workspace: bool = True,
    skip_update_flag: torch.Tensor | None = None,
    fsdp_group: Any = None,
    workspace_dtype: torch.dtype | None = None,
    cache: bool = False,
) -> tuple[Any, Any]:
    """Return a quantized weight, and the workspace to keep or None, as upstream's function of this name does.

    A weight that is quantized already is returned as it is. A `workspace` that fits is used, and updated in place if
    `update_workspace`; else the weight is quantized into a new one, of the nominal dtype `workspace_dtype` if that is
    given. `functional.weight.quantize_weight` does the work.
    """
    if tensor is None or quantizer is None:
        missing = "tensor" if tensor is None else "quantizer"
        raise ValueError(f"{missing} is None: give the weight, and the quantizer that a workspace is made or judged by")
    if fsdp_group is not None:
        raise NotImplementedError(
            "fsdp_group: FSDP1 is not supported; leave it None, FSDP2 gathers the weight before a module sees it"
        )
    if isinstance(tensor, QuantizedTensorStorage):
        return tensor, None
    weight, new, _ = weights.quantize_weight(
        tensor,
        quantizer,
        workspace,
        cache=cache,
        update_workspace=update_workspace,
        skip_update_flag=skip_update_flag,
    )
    if workspace_dtype is not None and weight is not workspace:
        weight._dtype = workspace_dtype
    return weight, new


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Return a tensor that stands for a weight gradient which was added to `main_grad`; its
    values are undefined, or zeros.

    Nobody reads it, so each shape and dtype has one such tensor.
    """
    key = (*shape, dtype)
    if key not in _dummy_wgrads:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _dummy_wgrads[key] = torch.empty(tuple(shape), dtype=dtype, device=device)
    return (_dummy_wgrads[key].zero_() if zero else _dummy_wgrads[key]).detach()


_dummy_wgrads: dict[tuple[Any, ...], torch.Tensor] = {}


def get_workspace() -> torch.Tensor:
    """Return an empty tensor, as products need no workspace of ours."""
    return torch.empty(0, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")


def is_module_grouped_tensor_path_supported(recipe: Recipe | None, dtype: torch.dtype) -> bool:
    """Return False: a GroupedLinear takes its splits from the host, and never as a tensor that only the GPU knows."""
    return False


class Workspaces(MutableMapping[str, Any]):
    """A `Workspaces` is a view of the quantized weights that a module keeps over microbatches, by the
    names that upstream gives them.

    They can be read and dropped: one that is missing is quantized again when it is needed.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def _all(self) -> dict[str, Any]:
        kept = self._module._workspaces
        if kept is None:
            return {}
        names = ["weight" if part.parts else part.weight_names[0] for part in self._module._weights]
        if len(set(names)) < len(names):  # one parameter serves all groups
            names = [f"weight{gemm}" for gemm in range(len(names))]
        return dict(zip(names, kept, strict=True))

    def __getitem__(self, name: str) -> Any:
        found = self._all().get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, workspace: Any) -> None:
        raise TypeError(f"_fp8_workspaces[{name!r}] = …: modules make their workspaces themselves; read or clear them")

    def __delitem__(self, name: str) -> None:
        self[name]
        left = [None if name == other else kept for other, kept in self._all().items()]
        if any(kept is not None for kept in left):
            self._module._workspaces = tuple(left)
        else:
            self.clear()

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, kept in self._all().items() if kept is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def clear(self) -> None:
        self._module._drop_workspaces()

    def __repr__(self) -> str:
        return f"Workspaces({list(self)})"


class LiveMeta(dict[str, Any]):
    """A `LiveMeta` is the `fp8_meta` of a module: assigning its "recipe" sets the recipe of the module, until the
    module runs with another."""

    def __init__(self, module: Any, **items: Any) -> None:
        super().__init__(**items)
        self._module = module

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "recipe":
            self._module._recipe = value


class PlainAttributes:
    """This mixin gives modules upstream's ways to set an attribute."""

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set a plain attribute, neither parameter nor buffer, the usual way, since a
        graph must see what it changes."""
        setattr(self, name, value)

    def module_setattr(self, name: str, value: Any) -> None:
        """Set an attribute as `nn.Module` does."""
        setattr(self, name, value)


class UpstreamNames(PlainAttributes):
    """This mixin gives upstream's names to the base of the linear-like modules."""

    @property
    def _fp8_workspaces(self) -> Workspaces:
        """Return the weights that are kept over microbatches, which other code counts and clears by this name."""
        return Workspaces(self)

    @_fp8_workspaces.setter
    def _fp8_workspaces(self, value: Mapping[str, Any]) -> None:
        if len(value):
            raise TypeError("_fp8_workspaces is set to a mapping that has something in it: set it to {}, or clear it")
        self._fp8_workspaces.clear()

    @property
    def fp8(self) -> bool:
        """Return whether the current region quantizes."""
        return current_state().enabled

    @property
    def fp8_calibration(self) -> bool:
        """Return whether the current region calibrates."""
        return current_state().calibrating

    @property
    def is_fsdp2(self) -> bool:
        """Return whether `fully_shard` was applied to this module."""
        fsdp = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, nothing is sharded
        return fsdp is not None and isinstance(self, fsdp.FSDPModule)

    def set_meta_tensor(self: Any, fwd: bool, recipe: Recipe) -> None:
        """Initialize the state of a recipe, as `init_fp8_meta_tensors` does: both directions
        have the state of one recipe."""
        self.init_fp8_meta_tensors(recipe)

    def prepare_forward(
        self: Any,
        inp: torch.Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> torch.Tensor:
        """Prepare the state of the recipe in force for a subclass's own forward, and return the input, contiguous
        unless `allow_non_contiguous`."""
        self.set_activation_dtype(inp)
        self.init_fp8_metadata(num_gemms)
        self._prepare_delayed()
        return inp if allow_non_contiguous else inp.contiguous()

    def end_forward(self) -> None:
        """End what `prepare_forward` began: there is nothing to undo."""

    @contextmanager
    def prepare_forward_ctx(
        self: Any,
        inp: torch.Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> Iterator[torch.Tensor]:
        """Call `prepare_forward` before and `end_forward` after the code of a forward."""
        try:
            yield self.prepare_forward(inp, num_gemms, allow_non_contiguous, allow_different_data_and_param_types)
        finally:
            self.end_forward()

    def is_debug_iter(self) -> bool:
        """Return False, because no debugging tool changes what modules compute."""
        return False

    def no_debug_features_active(self, quantizers: Any) -> bool:
        """Return True, because no debugging tool changes what modules compute."""
        return True
