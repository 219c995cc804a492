"""What every module shares: the state asked once per call, quantizers by role, delayed scaling's buffers, workspaces.

Delayed scaling keeps, for each direction, `scale` FP32 [n] and `amax_history` FP32 (L, n) in buffers that are no part
of the state dict; n is 3 per GEMM forward (input, weight, output) and 2 backward (grad_output, grad_input). They exist
from the start, because what a graph creates in its first call would make the second call another graph. A recipe with
a shorter history uses the first rows. What was learnt is saved under `_extra_state`, one plain FP32 tensor
(1 + L, 5 per GEMM): scales, then histories; a module that has learnt nothing saves nothing.
"""

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from mezzotint.constants import HIGH_PRECISION, DType
from mezzotint.functional.autograd import GradState
from mezzotint.functional.linear import LinearFwdArgs, LinearQuantizers, Needs, Numerics, WeightGrad
from mezzotint.functional.weight import quantize_weight
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.delayed import delayed_saw_
from mezzotint.kernels.float8 import float8_amax
from mezzotint.module.parameters import attributes_of, restore_attributes
from mezzotint.module.wgrad import WeightGradStore
from mezzotint.quantization import STATE, Pending, apply_own_rule, is_own_rule, scaled_max
from mezzotint.recipe import DelayedScalingRequest, Format, QuantizerRequest, QuantizerRole, Recipe
from mezzotint.tensor.float8 import Float8Quantizer, Float8ScaledQuantizer
from mezzotint.tensor.quantizer import Quantizer

FORWARD_SLOTS = ("input", "weight", "output")
BACKWARD_SLOTS = ("grad_output", "grad_input")
HISTORY_LENGTH = 1024
_BUFFERS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


@dataclass(slots=True)
class Call:
    """One forward: what the state said, resolved for every GEMM of the module."""

    quantizers: tuple[LinearQuantizers, ...]
    needs: tuple[Needs, ...]
    numerics: Numerics
    request: DelayedScalingRequest | None
    scales: torch.Tensor | None  # forward, FP32 [3 per GEMM]
    weight_scales: torch.Tensor | None  # those that kept weights were quantized with
    grad_scales: torch.Tensor | None  # a copy, FP32 [2 per GEMM]
    grad_state: GradState | None
    records: bool  # amaxes enter the history
    caches: bool
    reuses: bool


class TransformerEngineBaseModule(nn.Module):
    """Base of the linear-like modules."""

    module_type: ClassVar[str] = "linear"

    num_gemms: int
    scale_fwd: torch.Tensor
    amax_history_fwd: torch.Tensor
    scale_bwd: torch.Tensor
    amax_history_bwd: torch.Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name or ""
        self.num_gemms = 1
        self.fuse_wgrad_accumulation = False
        self.save_original_input = False
        self.wgrad_stores: tuple[WeightGradStore, ...] = ()  # one for each GEMM where gradients are delayed
        self._output_role: QuantizerRole | None = None
        self._grad_input_role: QuantizerRole | None = None
        self._workspaces: tuple[Any, ...] | None = None
        self._weight_scales: torch.Tensor | None = None
        self._is_pending = False
        self._request: DelayedScalingRequest | None = None
        self._recipe: Recipe | None = None
        self._resolved: Any = None  # (recipe, what it was resolved for, quantizers, request): a memo of eager code
        self._wgrad_hooks: list[Callable[[], None]] = []

    # State

    def _init_state(self, num_gemms: int, device: torch.device) -> None:
        """Buffers of delayed scaling."""
        self.num_gemms = num_gemms
        for direction, per_gemm in (("fwd", len(FORWARD_SLOTS)), ("bwd", len(BACKWARD_SLOTS))):
            n = per_gemm * num_gemms
            self.register_buffer(f"scale_{direction}", torch.ones(n, device=device), persistent=False)
            history = torch.zeros(HISTORY_LENGTH, n, device=device)
            self.register_buffer(f"amax_history_{direction}", history, persistent=False)

    def _reset_state(self) -> None:
        for name in _BUFFERS:
            buffer = getattr(self, name)
            if buffer.is_meta:
                buffer = torch.empty_like(buffer, device=self._parameter_device())
            setattr(self, name, buffer.fill_(1.0) if name.startswith("scale") else buffer.zero_())
        self._workspaces = None

    def _parameter_device(self) -> torch.device:
        return next(p.device for p in self.parameters(recurse=False))

    def adjust_amax_history_length(self, length: int, fwd: bool | None = None) -> None:
        """Keep the first rows, or add rows of zeros."""
        for direction in ("fwd", "bwd"):
            if fwd is not None and fwd != (direction == "fwd"):
                continue
            old = getattr(self, f"amax_history_{direction}")
            if length > old.shape[0]:
                more = old.new_zeros(length - old.shape[0], old.shape[1])
                setattr(self, f"amax_history_{direction}", torch.cat((old, more)))
            else:
                old[length:].zero_()

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """State of the recipe in force, before the first forward."""
        if STATE.recipe is not None:
            self.init_fp8_meta_tensors(STATE.recipe)

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """State of a recipe: a history that is long enough."""
        self._recipe = recipe
        _, self._request = self._resolve(recipe, ((True, True),) * self.num_gemms)
        if self._request is not None:
            self._grow_history(self._request.amax_history_len)

    def _grow_history(self, length: int) -> None:
        if length > self.amax_history_fwd.shape[0]:
            self.adjust_amax_history_length(length)

    def _forward_state(self) -> tuple[torch.Tensor, torch.Tensor, DelayedScalingRequest]:
        """Scale, history, and the request that they serve: what the end of an autocast region updates."""
        assert self._request is not None
        return self.scale_fwd, self.amax_history_fwd[: self._request.amax_history_len], self._request

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Delayed scaling's live state, and the recipe in use."""
        length = self.amax_history_fwd.shape[0] if self._request is None else self._request.amax_history_len
        return {
            "recipe": self._recipe,
            "num_gemms": self.num_gemms,
            "scaling_fwd": MetaTensors(self.scale_fwd, self.amax_history_fwd[:length]),
            "scaling_bwd": MetaTensors(self.scale_bwd, self.amax_history_bwd[:length]),
        }

    @property
    def quantizers(self) -> dict[str, list[Quantizer]]:
        """Of the recipe in use, slot by slot."""
        recipe = self._recipe or STATE.recipe
        if recipe is None:
            return {}
        made: dict[str, list[Quantizer]] = {}
        for key, forward in (("scaling_fwd", True), ("scaling_bwd", False)):
            roles = self.get_quantizer_roles(fwd=forward)
            made[key] = [self._live_quantizer(recipe, role, slot, forward) for slot, role in enumerate(roles)]
        return made

    def _live_quantizer(self, recipe: Recipe, role: QuantizerRole, slot: int, forward: bool) -> Quantizer:
        """A quantizer that reads and writes this module's state where it needs one."""
        made = recipe.quantizer(role)
        if isinstance(made, Quantizer):
            return made
        scale, history = (self.scale_fwd, self.amax_history_fwd) if forward else (self.scale_bwd, self.amax_history_bwd)
        return Float8Quantizer(scale[slot : slot + 1], history[0, slot : slot + 1], _element(_delayed(made), forward))

    def _boundary_quantizer(self, gemm: int, tensor_type: str) -> Quantizer:
        """Of a tensor that leaves the module quantized: row-wise."""
        recipe = STATE.recipe if STATE.enabled else None
        if recipe is None:
            raise ValueError("fp8_output and fp8_grad need a recipe: call the module inside autocast(recipe=...)")
        forward = tensor_type == "output"
        slot = len(FORWARD_SLOTS) * gemm + 2 if forward else len(BACKWARD_SLOTS) * gemm + 1
        quantizer = self._live_quantizer(recipe, self._role(gemm, tensor_type), slot, forward)
        return quantizer.with_usage(rowwise=True, columnwise=False)

    def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Copies of scales and histories."""
        return {
            f"scaling_{d}": [getattr(self, f"{n}_{d}").clone() for n in ("scale", "amax_history")]
            for d in ("fwd", "bwd")
        }

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: dict[str, list[torch.Tensor]] | None = None) -> None:
        """Back to the start, or to what `get_fp8_meta_tensors` gave."""
        if fp8_meta_tensors is None:
            self._reset_state()
            return
        for key, tensors in fp8_meta_tensors.items():
            for name, tensor in zip(("scale", "amax_history"), tensors, strict=True):
                getattr(self, f"{name}_{key.removeprefix('scaling_')}").copy_(tensor)

    # Roles

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """Of the module's output, which knows who reads it; None: of this module."""
        return self._output_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._output_role, self._resolved = role, None

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        return self._grad_input_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._grad_input_role, self._resolved = role, None

    def _gemm_name(self, gemm: int) -> str:
        """What a role calls the GEMM."""
        return self.name

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int | None = None) -> list[QuantizerRole]:
        """Roles slot by slot."""
        types = FORWARD_SLOTS if fwd else BACKWARD_SLOTS
        roles = [self._role(gemm, kind) for gemm in range(self.num_gemms) for kind in types]
        return roles if num_quantizers is None else roles[:num_quantizers]

    def _role(self, gemm: int, tensor_type: str) -> QuantizerRole:
        if tensor_type == "output" and gemm == self.num_gemms - 1 and self._output_role is not None:
            return self._output_role
        if tensor_type == "grad_input" and gemm == 0 and self._grad_input_role is not None:
            return self._grad_input_role
        return QuantizerRole(self.module_type, tensor_type, self._gemm_name(gemm))

    def _resolve(
        self, recipe: Recipe, needs: tuple[tuple[bool, bool], ...]
    ) -> tuple[tuple[LinearQuantizers, ...], DelayedScalingRequest | None]:
        """Recipe → a quantizer for each tensor of each GEMM, making the directions that are read. `needs`: gradients of
        (input, weight) of each GEMM."""
        override, keeps_wgrad = recipe.override(), recipe.keeps_wgrad()
        saves_input = self.save_original_input or keeps_wgrad
        request: DelayedScalingRequest | None = None
        found: list[LinearQuantizers] = []
        for gemm, (needs_input, needs_weight) in enumerate(needs):
            made: list[Quantizer | None] = []
            for tensor_type, rowwise, columnwise in (
                ("input", True, needs_weight and override is None and not saves_input),
                ("weight", True, needs_input and override is None),
                ("grad_output", needs_input, needs_weight and not keeps_wgrad),
            ):
                if tensor_type == "grad_output" and (override is not None or not (rowwise or columnwise)):
                    made.append(None)
                    continue
                quantizer = recipe.quantizer(self._role(gemm, tensor_type))
                if isinstance(quantizer, QuantizerRequest):
                    asked = _delayed(quantizer)
                    if request is not None and asked != request:
                        raise ValueError(
                            f"{self._role(gemm, tensor_type)} asks for {asked}, another tensor of the module for "
                            f"{request}: the requests of one module must be equal"
                        )
                    request = asked
                    quantizer = Float8ScaledQuantizer(_element(asked, tensor_type in FORWARD_SLOTS))
                made.append(quantizer.with_usage(rowwise=rowwise, columnwise=columnwise))
            found.append(LinearQuantizers(made[0], made[1], None, made[2], None))
        return tuple(found), request

    # One forward

    def _start(
        self, dtype: torch.dtype, needs: Sequence[Needs], is_first_microbatch: bool | None, weight: torch.Tensor
    ) -> Call:
        """Ask the state, once."""
        recipe = STATE.recipe if STATE.enabled else None
        needs = tuple(needs)
        if recipe is None:
            none = LinearQuantizers(None, None, None, None, None)
            numerics = Numerics(dtype, False, False, False, None, False)
            return Call((none,) * len(needs), needs, numerics, None, None, None, None, None, False, False, False)
        key = tuple([(need.input, need.weight) for need in needs])
        if torch.compiler.is_compiling():
            quantizers, request = self._resolve(recipe, key)  # at trace time; a memo would be state to guard on
        else:
            memo = self._resolved
            if memo is None or memo[1] != key or (memo[0] is not recipe and memo[0] != recipe):
                memo = self._resolved = (recipe, key, *self._resolve(recipe, key))
                self._recipe = recipe
            quantizers, request = memo[2], memo[3]
        fast_fprop, fast_dgrad, fast_wgrad = recipe.products()
        numerics = Numerics(dtype, fast_fprop, fast_dgrad, fast_wgrad, recipe.override(), recipe.keeps_wgrad())
        is_second = STATE.recomputation is not None and STATE.recomputation.is_second
        caches = is_first_microbatch is not None and not is_second
        call = Call(
            quantizers, needs, numerics, request, None, None, None, None, False, caches, is_first_microbatch is False
        )
        return call if request is None else self._start_delayed(call)

    def _start_delayed(self, call: Call) -> Call:
        request = call.request
        assert request is not None
        if STATE.recomputes_in_graph:
            raise RuntimeError(
                "delayed scaling in a checkpoint inside a compiled function: its scales are written before backward "
                "reads them again. Call checkpoint outside of torch.compile, use LayerNormMLP(checkpoint=True), or a "
                "recipe without state such as Float8CurrentScaling"
            )
        self._request = request
        self._grow_history(request.amax_history_len)
        recomputation = STATE.recomputation
        is_first = not self._is_pending
        call.records = True
        # Where backward quantizes again it needs the scales of forward, which are written before.
        call.scales = self.scale_fwd.clone() if self._requantizes() else self.scale_fwd
        if recomputation is not None and recomputation.is_second:
            # The scales of the first run, whose maxima have been entered.
            call.scales, call.weight_scales = recomputation.next_scales()
            call.records, is_first = False, True
        else:
            call.weight_scales = call.scales
            if call.reuses:
                call.weight_scales = call.scales if self._weight_scales is None else self._weight_scales
            elif call.caches:
                self._weight_scales = self.scale_fwd.clone()
            if recomputation is not None:
                recomputation.keep_scales((call.scales.clone(), call.weight_scales.clone()))
            if is_first and STATE.depth > 0:
                self._is_pending = True
                STATE.pending = Pending(self, STATE.pending)
        if torch.is_grad_enabled():
            call.grad_scales = self.scale_bwd.clone()
            update = partial(apply_own_rule, request=request, forward=False) if is_own_rule(request) else None
            call.grad_state = GradState(
                self.scale_bwd,
                self.amax_history_bwd[: request.amax_history_len],
                scaled_max(request, False),
                request.amax_compute_algo == "most_recent",
                update,
                is_first,
            )
        return call

    def _requantizes(self) -> bool:
        """Whether backward quantizes the input again."""
        return self.save_original_input

    def _weights_q(self, call: Call, weights: Sequence[Any]) -> tuple[tuple[Any, ...], list[torch.Tensor | None]]:
        """Weights as the GEMMs take them, from the workspaces where these are to be reused, and their amaxes."""
        held = self._workspaces if call.reuses and call.caches else None
        quantized: list[Any] = []
        kept: list[Any] = []
        amaxes: list[torch.Tensor | None] = []
        for gemm, weight in enumerate(weights):
            workspace = None if held is None else held[gemm]
            weight_q, fresh, amax = quantize_weight(
                weight,
                call.quantizers[gemm].weight,
                workspace,
                scale=_slot(call.weight_scales, len(FORWARD_SLOTS) * gemm + 1),
                cache=call.caches,
                update_workspace=False,
            )
            quantized.append(weight_q)
            kept.append(workspace if fresh is None else fresh)
            amaxes.append(amax)
        if call.caches and (held is None or any(map(operator.is_not, kept, held))):
            self._workspaces = tuple(kept)
        return tuple(quantized), amaxes

    def _record(self, call: Call, amaxes: Sequence[torch.Tensor | None]) -> None:
        """Enter the maxima of this call, slot by slot, into the current row of the history."""
        slots = [slot for slot, amax in enumerate(amaxes) if amax is not None]
        if call.records and slots:
            with torch.no_grad():
                run_op(delayed_saw_, self.amax_history_fwd[0], [amax for amax in amaxes if amax is not None], slots)

    def _is_calibrating(self) -> bool:
        return STATE.calibrating and not STATE.enabled

    def _calibrate(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """High precision, but the maxima of these tensors, slot by slot, are written to the history."""
        if self._is_calibrating():
            with torch.no_grad():
                for slot, tensor in enumerate(tensors):
                    if tensor is not None:
                        self.amax_history_fwd[0, slot : slot + 1].copy_(float8_amax(tensor.detach()))

    def _linear_args(
        self, call: Call, gemm: int, weight: Any, bias: torch.Tensor | None, weight_q: Any
    ) -> LinearFwdArgs:
        """The arguments of one GEMM's linear, without x."""
        return LinearFwdArgs(
            None,
            weight,
            bias,
            None,
            weight_q,
            call.needs[gemm],
            call.quantizers[gemm],
            call.numerics,
            self._weight_grad(weight, gemm),
            _slot(call.scales, len(FORWARD_SLOTS) * gemm),
            _slot(call.grad_scales, len(BACKWARD_SLOTS) * gemm),
            self.save_original_input,
            None,
        )

    def _weight_grad(self, weight: Any, gemm: int) -> WeightGrad:
        """Where the gradient of a weight goes."""
        main_grad, overwrites = None, False
        if self.fuse_wgrad_accumulation and weight.requires_grad:
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is None:
                raise ValueError("fuse_wgrad_accumulation needs weight.main_grad, a tensor to add into: set it first")
            overwrites = bool(getattr(weight, "overwrite_main_grad", False))
        if self.wgrad_stores and torch.compiler.is_compiling():
            raise RuntimeError(
                "delay_wgrad_compute keeps tensors for a later call, which a graph cannot: use it in eager code, or "
                "compile with delay_wgrad_compute=False"
            )
        return WeightGrad(weight.dtype, main_grad, overwrites, self.wgrad_stores[gemm] if self.wgrad_stores else None)

    # Delayed weight gradients

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for `backward_dw`."""
        return bool(self.wgrad_stores)

    def backward_dw(self) -> None:
        """Compute the oldest weight gradients that wait, and add them to `grad` or `main_grad`."""
        for store in reversed(self.wgrad_stores):  # as backward goes
            store.run()
        for hook in self._wgrad_hooks if self.wgrad_stores else ():
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], None]
    ) -> None:
        """Called after each `backward_dw`."""
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    # Parameters

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initial values; materialises parameters that are on the meta device, unless deferred."""
        raise NotImplementedError

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The group of tensor parallelism; one of a single process changes nothing."""
        if tp_group is not None and torch.distributed.get_world_size(tp_group) > 1:
            raise NotImplementedError("tensor parallelism is not there yet: leave tp_group of one process, or None")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves keep what users put on parameters, and delayed scaling in FP32."""
        attributes = attributes_of(self)
        state = {name: self._buffers[name] for name in _BUFFERS if name in self._buffers}
        made = super()._apply(fn, recurse)
        for name, buffer in state.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != torch.float32:
                self._buffers[name] = buffer.to(moved.device)
        restore_attributes(self, attributes)
        self._workspaces = None
        return made

    # Checkpoints

    def get_extra_state(self) -> torch.Tensor | None:
        """Scales and histories of delayed scaling as one FP32 tensor; None where nothing was learnt."""
        if "scale_fwd" not in self._buffers or self.scale_fwd.is_meta:
            return None
        parts = [
            torch.cat((getattr(self, f"scale_{d}")[None], getattr(self, f"amax_history_{d}"))) for d in ("fwd", "bwd")
        ]
        state = torch.cat(parts, 1)
        return None if bool((state[0] == 1).all()) and not bool(state[1:].any()) else state

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """What `get_extra_state` gave."""
        if state is None or state.numel() == 0:
            return
        wanted = (len(FORWARD_SLOTS) + len(BACKWARD_SLOTS)) * self.num_gemms
        if state.dim() != 2 or state.shape[1] != wanted or state.shape[0] < 2:
            raise ValueError(f"_extra_state has shape {tuple(state.shape)}: this module takes (1 + history, {wanted})")
        self.adjust_amax_history_length(state.shape[0] - 1)
        state = state.to(self.scale_fwd.device, torch.float32)
        first = len(FORWARD_SLOTS) * self.num_gemms
        for direction, part in (("fwd", state[:, :first]), ("bwd", state[:, first:])):
            getattr(self, f"scale_{direction}").copy_(part[0])
            getattr(self, f"amax_history_{direction}")[: part.shape[0] - 1].copy_(part[1:])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination.get(f"{prefix}_extra_state") is None:
            destination.pop(f"{prefix}_extra_state", None)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        key = f"{prefix}_extra_state"
        if key in missing_keys:  # a checkpoint of a recipe without state, or of torch's own modules
            missing_keys.remove(key)
        self._workspaces = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As torch copies, but with what users put on parameters, which `nn.Parameter` leaves behind."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        restore_attributes(made, copy.deepcopy(attributes_of(self), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_workspaces=None, _resolved=None, _is_pending=False)
        return state


@dataclass(frozen=True)
class MetaTensors:
    """Delayed scaling's state of one direction: views of the module's buffers."""

    scale: torch.Tensor
    amax_history: torch.Tensor


def activation_dtype(inp: torch.Tensor) -> torch.dtype:
    """torch.autocast's where it is on, else the input's."""
    kind = inp.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inp.dtype
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"inp has dtype {dtype}: modules take float32, float16 or bfloat16")
    return dtype


def _slot(scales: torch.Tensor | None, slot: int) -> torch.Tensor | None:
    return None if scales is None else scales[slot : slot + 1]


def _element(request: DelayedScalingRequest, forward: bool) -> DType:
    is_e5m2 = request.fp8_format is Format.E5M2 or (request.fp8_format is Format.HYBRID and not forward)
    return DType.kFloat8E5M2 if is_e5m2 else DType.kFloat8E4M3


def _delayed(request: Any) -> DelayedScalingRequest:
    if not isinstance(request, DelayedScalingRequest):
        raise TypeError(
            f"a quantizer request is {type(request).__name__}: modules keep state for DelayedScalingRequest"
        )
    return request
