"""Delayed scaling's state in a module: this file defines its buffers, how they move, and how they are saved.

Each direction has a `scale` FP32 [n] and an `amax_history` FP32 (L, n), in buffers that are no part of the state dict;
n is 3 per GEMM forward (input, weight, output) and 2 backward (grad_output, grad_input). They exist from the start,
because what a graph creates in its first call would make the second call another graph. A recipe with a shorter history
uses the first rows.

They are saved under `_extra_state`, one plain FP32 tensor (1 + L, 5 per GEMM): scales, then histories. A module that
has learnt nothing saves scales of 1 and histories of 0, in the same shape: loaders that read into the state dict of a
fresh model (torch.distributed.checkpoint, Megatron's dist_checkpointing) read only what they find there, and refuse
another shape. A state dict without it loads, strictly too; a module that then runs with delayed scaling warns.

What Transformer Engine saves under this name, a pickle in a tensor of bytes, is read too
(`compat/extra_state_bytes.py`).
"""

import copy
import itertools
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from mezzotint.compat.base_module import LiveMeta
from mezzotint.compat.extra_state_bytes import EXTRA_STATE, read_extra_state, write_extra_state
from mezzotint.layer.bind import of_module
from mezzotint.layer.parameters import attributes_of, resolve_device, restore_attributes
from mezzotint.quantization import autocast
from mezzotint.recipe import BACKWARD_TENSORS, FORWARD_TENSORS, DelayedScaling, DelayedScalingRequest, Recipe
from mezzotint.region import RunStatus, current_state, get_autocast_state
from mezzotint.tracing import call_untraced, eager_only, lasting, traced_as

HISTORY_LENGTH = 1024
PER_GEMM = len(FORWARD_TENSORS) + len(BACKWARD_TENSORS)
_BUFFERS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


@dataclass(frozen=True)
class MetaTensors:
    """A `MetaTensors` holds delayed scaling's state of one direction, as views of the module's buffers."""

    scale: torch.Tensor
    amax_history: torch.Tensor


def first_rows(history: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` rows, those that a request uses; mostly these are all, and then the history itself is
    returned."""
    return history if history.shape[0] == length else history[:length]


_NUMBERS = itertools.count()


def _draw_number() -> int:
    return next(_NUMBERS)


def next_module_number() -> torch.Tensor:
    """Return the number of the next module that this rank makes, int64 [1]. It is a tensor on the CPU, because an
    operator in a graph that layers share reads it when the graph runs."""
    with lasting():
        return torch.tensor([call_untraced(_draw_number)], device="cpu")  # torch 2.11 does not trace a count


class StatefulModule(nn.Module):
    """A `StatefulModule` keeps delayed scaling's state, and quantized weights that serve several microbatches."""

    num_gemms: int
    _is_operation = False  # an operation of `ops`, whose state Transformer Engine saves in another form
    _config: Any  # a `LayerConfig` in a `Layer`
    scale_fwd: torch.Tensor
    amax_history_fwd: torch.Tensor
    scale_bwd: torch.Tensor
    amax_history_bwd: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num_gemms = 1
        self._workspaces: tuple[Any, ...] | None = None
        self._weight_scales: torch.Tensor | None = None
        self._run_status = RunStatus()
        self._is_fully_sharded = False
        self._number: torch.Tensor | None = None  # None on the meta device, where a process may plan a model alone
        self._lacks_scales = False  # weights were loaded without their scales and histories
        self._loading: tuple[str, list[str]] | None = None  # while a state dict is read: its prefix, and errors
        self._recipe: Recipe | None = None
        self._counters: Any = None  # counters of values that are not finite (`finite.py`)
        self._planned: Any = None  # the last run's plan and its key: a memo of eager code

    def _init_state(self, num_gemms: int, device: torch.device) -> None:
        """Register the buffers of delayed scaling."""
        self.num_gemms = num_gemms
        with lasting():
            for direction, per_gemm in (("fwd", len(FORWARD_TENSORS)), ("bwd", len(BACKWARD_TENSORS))):
                n = per_gemm * num_gemms
                scale = torch.ones(n, dtype=torch.float32, device=device)  # whatever torch's default dtype is
                self.register_buffer(f"scale_{direction}", scale, persistent=False)
                history = torch.zeros(HISTORY_LENGTH, n, dtype=torch.float32, device=device)
                self.register_buffer(f"amax_history_{direction}", history, persistent=False)
        self._take_number()

    def _take_number(self) -> None:
        if self._number is None and not self.scale_fwd.is_meta:
            self._number = next_module_number()

    def _reset_state(self) -> None:
        with lasting():
            for name in _BUFFERS:
                buffer = getattr(self, name)
                if buffer.is_meta:
                    buffer = torch.empty_like(buffer, device=self._parameter_device())
                setattr(self, name, buffer.fill_(1.0) if name.startswith("scale") else buffer.zero_())
        self._take_number()
        self._drop_workspaces()
        self._tie_weights()

    def _has_state(self) -> bool:
        """Return whether there are buffers: an operation without quantizers has none, nor has a user's module before
        its first run with a recipe."""
        return "scale_fwd" in self._buffers

    def _is_fresh(self) -> bool:
        """Return whether nothing was learnt yet. This waits for the GPU."""
        if not self._has_state() or self.scale_fwd.is_meta:
            return True
        scales, histories = (self.scale_fwd, self.scale_bwd), (self.amax_history_fwd, self.amax_history_bwd)
        return all(bool((scale == 1).all()) for scale in scales) and not any(bool(each.any()) for each in histories)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, and move the buffers of delayed scaling to its device; from the meta device they come
        as new. Assignments and `load_state_dict(assign=True)` call this too."""
        super().register_parameter(name, param)
        if param is not None and not param.is_meta and self._has_state() and self.scale_fwd.device != param.device:
            was_meta = self.scale_fwd.is_meta
            with lasting():
                for buffer in _BUFFERS:
                    old = getattr(self, buffer)
                    moved = torch.empty_like(old, device=param.device) if was_meta else old.to(param.device)
                    setattr(self, buffer, moved)
            if was_meta:
                self._reset_state()
            self._drop_workspaces()
            self._tie_weights()

    def _tie_weights(self) -> None:
        """Make weights that delayed scaling keeps quantized read and write this module's scales, and not those of the
        module that they were assigned from, or buffers that have been replaced."""
        weights: Any = self.__dict__.get("_weights", ())
        for gemm, each in enumerate(weights):
            each.tie(self, gemm)

    def _drop_workspaces(self) -> None:
        """Drop the kept weights, because the parameters have changed or moved."""
        self._workspaces = self._weight_scales = None

    def _parameter_device(self) -> torch.device:
        """Return the device of the module's own parameters, or of its parts'; without any, the device of new ones."""
        for parameters in (self.parameters(recurse=False), self.parameters()):
            for parameter in parameters:
                return parameter.device
        return resolve_device(None)

    def adjust_amax_history_length(self, length: int, fwd: bool | None = None) -> None:
        """Clear the rows of the histories behind the first `length`, or add rows of zeros if they are fewer. `fwd`
        selects one direction; None means both."""
        for direction in ("fwd", "bwd"):
            if fwd is not None and fwd != (direction == "fwd"):
                continue
            old = getattr(self, f"amax_history_{direction}")
            if length > old.shape[0]:
                with lasting():
                    more = old.new_zeros(length - old.shape[0], old.shape[1])
                    setattr(self, f"amax_history_{direction}", torch.cat((old, more)))
                if direction == "fwd":
                    self._tie_weights()
            else:
                old[length:].zero_()

    @property
    def _request(self) -> DelayedScalingRequest | None:
        """Return the request of the last run with delayed scaling."""
        return self._run_status.request

    def _forward_state(self) -> tuple[torch.Tensor, torch.Tensor, DelayedScalingRequest]:
        """Return the scale, the history, and the request that they serve, which the end of an autocast region
        updates."""
        request = self._run_status.request
        scale, history, _, _ = scaling_tensors(self)
        return scale, first_rows(history, request.amax_history_len), request

    def _recipe_in_use(self) -> Recipe | None:
        """Return the recipe of the region around this call, else the last that eager code ran with; a graph does not
        note what it ran with."""
        state = current_state()
        return of_module(self, state.recipe) if state.enabled or self._recipe is None else self._recipe

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Return delayed scaling's live state, and the recipe in use."""
        length = self.amax_history_fwd.shape[0] if self._request is None else self._request.amax_history_len
        return LiveMeta(
            self,
            recipe=self._recipe_in_use(),
            fp8_checkpoint=self._recipe_in_use() is not None,
            num_gemms=self.num_gemms,
            scaling_fwd=MetaTensors(self.scale_fwd, self.amax_history_fwd[:length]),
            scaling_bwd=MetaTensors(self.scale_bwd, self.amax_history_bwd[:length]),
        )

    def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return copies of scales and histories."""
        return {
            f"scaling_{d}": [getattr(self, f"{n}_{d}").clone() for n in ("scale", "amax_history")]
            for d in ("fwd", "bwd")
        }

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: dict[str, list[torch.Tensor]] | None = None) -> None:
        """Reset the state to the start, or to what `get_fp8_meta_tensors` returned."""
        if fp8_meta_tensors is None:
            self._reset_state()
            return
        for key, tensors in fp8_meta_tensors.items():
            for name, tensor in zip(("scale", "amax_history"), tensors, strict=True):
                getattr(self, f"{name}_{key.removeprefix('scaling_')}").copy_(tensor)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the module, but keep what users put on parameters, and keep delayed scaling's state in FP32."""
        attributes = attributes_of(self)
        state = {name: self._buffers[name] for name in _BUFFERS if name in self._buffers}
        was_meta = any(buffer is not None and buffer.is_meta for buffer in state.values())
        with lasting():
            made = super()._apply(fn, recurse)
        for name, buffer in state.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != torch.float32:
                self._buffers[name] = buffer.to(moved.device)
        restore_attributes(self, attributes)
        self._drop_workspaces()
        if was_meta and not self.scale_fwd.is_meta:
            self._reset_state()
        else:
            self._tie_weights()
        return made

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        """Register a hook, and note whether FSDP2 does so. It registers one for each of this module's own parameters
        that it holds, and leaves no other sign."""
        self._is_fully_sharded |= "FSDPParam" in getattr(hook, "__qualname__", "")
        return super().register_load_state_dict_post_hook(hook)

    # Checkpoints

    def get_extra_state(self) -> torch.Tensor | None:
        """Return the scales and histories of delayed scaling as one FP32 tensor (1 + L, 5 per GEMM), or None if there
        are none."""
        if not self._has_state() or not self._saves_state():
            return None
        parts = [
            torch.cat((getattr(self, f"scale_{d}")[None], getattr(self, f"amax_history_{d}"))) for d in ("fwd", "bwd")
        ]
        return torch.cat(parts, 1)

    def upstream_extra_state(self, recipe: DelayedScaling) -> torch.Tensor:
        """Return this module's `_extra_state` as Transformer Engine writes it: a tensor of bytes, which is empty if
        nothing was learnt."""
        state = self.get_extra_state()
        if state is None or self._is_fresh():
            return torch.empty(0, dtype=torch.uint8)
        return write_extra_state(state, recipe, self._is_operation)

    def _saves_state(self) -> bool:
        """Return whether the state dict has `_extra_state`. It always has, for loaders that take a fresh model's as a
        template."""
        return True

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Load what `get_extra_state` returned, or Transformer Engine's state. None, and a tensor without elements or
        on the meta device, change nothing."""
        try:
            state = _as_saved_here(state)
            if state is None:
                return
            misfit = self._misfit(state)
            if misfit is not None:
                raise ValueError(misfit)
        except ValueError as error:
            if self._loading is None:
                raise
            prefix, errors = self._loading
            errors.append(f"{prefix}{error}")  # torch reports it with all else that does not fit
            return
        self._lacks_scales = False
        if not self._has_state():
            self._init_state(state.shape[1] // PER_GEMM, self._parameter_device())
        if self.scale_fwd.is_meta:  # torch does not load parameters there either, and says so
            return
        state = state.to(self.scale_fwd.device, torch.float32)
        if not bool((state[0].isfinite() & (state[0] > 0)).all()) or not bool((state[1:] >= 0).all()):
            raise ValueError(
                f"{EXTRA_STATE} has scales that are not positive and finite, or amaxes that are negative or NaN: it is "
                "damaged; load another checkpoint, or leave it out and begin with scales of 1"
            )
        self.adjust_amax_history_length(state.shape[0] - 1)
        first = len(FORWARD_TENSORS) * self.num_gemms
        for direction, part in (("fwd", state[:, :first]), ("bwd", state[:, first:])):
            getattr(self, f"scale_{direction}").copy_(part[0])
            getattr(self, f"amax_history_{direction}")[: part.shape[0] - 1].copy_(part[1:])

    def _misfit(self, state: torch.Tensor) -> str | None:
        """Return what is wrong with the shape of an `_extra_state`, or None. If the module has no state yet, any number
        of GEMMs fits."""
        wanted = PER_GEMM * self.num_gemms
        fits = state.dim() == 2 and state.shape[0] > 1
        if fits and (state.shape[1] == wanted if self._has_state() else state.shape[1] % PER_GEMM == 0):
            return None
        return f"{EXTRA_STATE} has shape {tuple(state.shape)}: this module takes (1 + history, {wanted})"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination.get(f"{prefix}{EXTRA_STATE}") is None:
            destination.pop(f"{prefix}{EXTRA_STATE}", None)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        key = f"{prefix}{EXTRA_STATE}"
        has_weights = any(f"{prefix}{name}" in state_dict for name in self._parameters)
        self._lacks_scales |= has_weights
        # What is under the key is known only after hooks have run, which may put it together: torch then calls
        # set_extra_state.
        self._loading = prefix, rest[-1]
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        finally:
            self._loading = None
        if key in missing_keys:  # the checkpoint may come from torch's own modules
            missing_keys.remove(key)
        if has_weights and self._lacks_scales:
            self._lacks_scales = self._is_fresh()
        self._drop_workspaces()
        self._tie_weights()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as torch does, but with what users put on parameters, which `nn.Parameter` leaves behind."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        restore_attributes(made, copy.deepcopy(attributes_of(self), memo))
        made._number = None if made._number is None else next_module_number()
        return made

    def _replicate_for_data_parallel(self) -> Any:
        """Return a replica for `nn.DataParallel`, which runs it in a thread of its own, but in the autocast region of
        this one."""
        replica: Any = super()._replicate_for_data_parallel()
        fresh = dict.fromkeys(("_workspaces", "_weight_scales", "_planned", "_counters"))
        replica.__dict__.update(fresh, _run_status=RunStatus())
        *region, options = get_autocast_state()
        own = autocast(*region, memory=options.memory, check_finite=options.checks_finite or None)
        replica.forward = own(partial(type(self).forward, replica))
        return replica

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the module from a pickle, and give it a number of its own on this rank."""
        super().__setstate__(state)
        self._number = None if self.__dict__.get("_number") is None else next_module_number()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        status = RunStatus(self._run_status.request)
        state.update(_workspaces=None, _weight_scales=None, _planned=None, _counters=None, _run_status=status)
        return state


@traced_as(lambda module: (module.scale_fwd, module.amax_history_fwd, module.scale_bwd, module.amax_history_bwd))
def scaling_tensors(module: StatefulModule) -> tuple[Any, Any, Any, Any]:
    """Return the scale and the history of forward, then those of backward."""
    held = module._buffers  # `nn.Module` looks for an attribute in Python, after all else has failed
    return held["scale_fwd"], held["amax_history_fwd"], held["scale_bwd"], held["amax_history_bwd"]


def use_history(module: StatefulModule, request: DelayedScalingRequest, backward_clears: bool = False) -> None:
    """Have the module use the rows of its histories that this request asks for, and that `grow_history` has made. The
    rows behind them are cleared, because a longer history would find them again. Those of gradients are left to
    backward if it clears them."""
    before = _request_before(module)
    if before is request:
        return
    length = request.amax_history_len
    is_shorter = before is None or before.amax_history_len > length
    if is_shorter and length < module.amax_history_fwd.shape[0]:
        module.adjust_amax_history_length(length, True if backward_clears else None)
    module._run_status.request = request


@eager_only()
def note_recipe(module: StatefulModule, recipe: Recipe) -> None:
    """Note the recipe that a module runs with. A graph does not note it."""
    if module._recipe is not recipe:
        module._recipe = recipe


@eager_only()
def _request_before(module: StatefulModule) -> DelayedScalingRequest | None:
    """Return the request of the last run. A graph, which would have to guard on it, takes it for unknown, and always
    clears rows."""
    return module._run_status.request


def grow_history(module: StatefulModule, length: int) -> None:
    """Make the histories at least this long. This happens outside of a graph and of inference mode: a buffer that a
    graph makes cannot be written by its backward, and one of inference mode not by training."""
    if length > module.amax_history_fwd.shape[0] or length > module.amax_history_bwd.shape[0]:
        with torch.inference_mode(False), torch.no_grad():
            module.adjust_amax_history_length(length)


def prepare_state(module: StatefulModule, request: DelayedScalingRequest) -> None:
    """Prepare the module's state for a run: warn if weights were loaded without scales, and make the histories long
    enough. It is called outside of a graph, which would guard on what it reads."""
    if module._lacks_scales:
        module._lacks_scales = False
        warnings.warn(LOST_SCALES, stacklevel=4)
    if module._run_status.request is not request:
        grow_history(module, request.amax_history_len)


LOST_SCALES = (
    "delayed scaling begins with scales of 1: the state dict that a module was loaded from has its weights, but no "
    "_extra_state. Where training goes on, load the state dict whole; where it begins from weights alone, this is as "
    "it should be"
)


def _as_saved_here(state: Any) -> torch.Tensor | None:
    """Return what is under `_extra_state` in the form of `get_extra_state`, or None if it says nothing, like a tensor
    without elements, which Transformer Engine writes for a recipe without state."""
    if state is not None and not isinstance(state, torch.Tensor):
        raise TypeError(
            f"{EXTRA_STATE} is {type(state).__name__}: this module takes a tensor that it has saved itself, or that "
            "Transformer Engine has. Leave out what another library has written there"
        )
    if state is None or state.is_meta or state.numel() == 0:
        return None
    return read_extra_state(state) if state.dtype == torch.uint8 else state
