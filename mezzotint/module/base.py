"""What the linear-like modules share: the state asked once per call, quantizers by role, kept weights.

A forward asks `_start` what is in force, `_weights_q` for its weights, fills the arguments of its core, and gives
`_record` the maxima that came back. Delayed scaling's buffers are in `state.py`.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from mezzotint.constants import HIGH_PRECISION
from mezzotint.functional.autograd import GradState
from mezzotint.functional.linear import LinearFwdArgs, LinearQuantizers, Needs, Numerics, WeightGrad
from mezzotint.functional.weight import quantize_weight
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.delayed import delayed_saw_
from mezzotint.kernels.float8 import float8_amax
from mezzotint.module.compat import UpstreamNames
from mezzotint.module.state import StatefulModule
from mezzotint.module.weights import Weights
from mezzotint.module.wgrad import WeightGradStore
from mezzotint.quantization import STATE, Pending, apply_own_rule, is_own_rule, scaled_max
from mezzotint.recipe import (
    BACKWARD_TENSORS,
    FORWARD_TENSORS,
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    Recipe,
    element,
    slot,
)
from mezzotint.tensor.float8 import Float8Quantizer, Float8ScaledQuantizer
from mezzotint.tensor.quantizer import Quantizer


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
    skips: torch.Tensor | None = None  # FP32 [1]: kept weights are updated where this is not 1


class TransformerEngineBaseModule(UpstreamNames, StatefulModule):
    """Base of the linear-like modules."""

    module_type: ClassVar[str] = "linear"

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name or ""
        self.fuse_wgrad_accumulation = False
        self.save_original_input = False
        self.return_bias = False
        self.return_layernorm_output = False
        self.wgrad_stores: tuple[WeightGradStore, ...] = ()  # one for each GEMM where gradients are delayed
        self._weights: tuple[Weights, ...] = ()  # one for each GEMM
        self._output_role: QuantizerRole | None = None
        self._grad_input_role: QuantizerRole | None = None
        self._wgrad_hooks: list[Callable[[], None]] = []

    # State

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """State of the recipe in force, before the first forward."""
        if STATE.recipe is not None:
            self.init_fp8_meta_tensors(STATE.recipe)

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """State of a recipe: a history that is long enough."""
        self._recipe = recipe
        _, request = self._resolve(recipe, ((True, True),) * self.num_gemms)
        if request is None:
            self._request = None
        else:
            self._use_history(request)

    def set_activation_dtype(self, inp: torch.Tensor) -> None:
        """Note what a forward with this input computes in, as `activation_dtype`."""
        self.activation_dtype = activation_dtype(inp)

    @property
    def quantizers(self) -> dict[str, list[Quantizer]]:
        """Of the recipe in use, slot by slot."""
        recipe = self._recipe_in_use()
        if recipe is None:
            return {}
        return {
            key: [self._live_quantizer(recipe, gemm, kind) for gemm in range(self.num_gemms) for kind in types]
            for key, types in (("scaling_fwd", FORWARD_TENSORS), ("scaling_bwd", BACKWARD_TENSORS))
        }

    def _live_quantizer(self, recipe: Recipe, gemm: int, tensor_type: str) -> Quantizer:
        """A quantizer that reads and writes this module's state where it needs one."""
        made = recipe.quantizer(self._role(gemm, tensor_type))
        if isinstance(made, Quantizer):
            return made
        forward, i = tensor_type in FORWARD_TENSORS, slot(gemm, tensor_type)
        scale, history = (self.scale_fwd, self.amax_history_fwd) if forward else (self.scale_bwd, self.amax_history_bwd)
        return Float8Quantizer(scale[i : i + 1], history[0, i : i + 1], element(_delayed(made).fp8_format, forward))

    def _boundary_quantizer(self, gemm: int, tensor_type: str, call: Call | None = None) -> Quantizer:
        """Of a tensor that leaves the module quantized: row-wise.

        A recomputation (`call`) has the scale of the first run and writes no state.
        """
        recipe = STATE.recipe if STATE.enabled else None
        if recipe is None:
            raise ValueError("fp8_output and fp8_grad need a recipe: call the module inside autocast(recipe=...)")
        quantizer = self._live_quantizer(recipe, gemm, tensor_type)
        if call is not None and call.scales is not None and not call.records and isinstance(quantizer, Float8Quantizer):
            scale = scale_of(call.scales, gemm, tensor_type)
            quantizer = Float8Quantizer(scale, torch.zeros_like(scale), quantizer.dtype)
        return quantizer.with_usage(rowwise=True, columnwise=False)

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
        types = FORWARD_TENSORS if fwd else BACKWARD_TENSORS
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
                    quantizer = Float8ScaledQuantizer(element(asked.fp8_format, tensor_type in FORWARD_TENSORS))
                made.append(quantizer.with_usage(rowwise=rowwise, columnwise=columnwise))
            found.append(LinearQuantizers(made[0], made[1], made[2]))
        return tuple(found), request

    # One forward

    def _start(self, dtype: torch.dtype, needs: Sequence[Needs], is_first_microbatch: bool | None) -> Call:
        """Ask the state, once."""
        recipe = STATE.recipe if STATE.enabled else None
        needs = tuple(needs)
        if recipe is None:
            none = LinearQuantizers(None, None, None)
            numerics = Numerics(dtype, False, False, False, None, False)
            return Call((none,) * len(needs), needs, numerics, None, None, None, None, None, False, False, False)
        key = tuple([(need.input, need.weight) for need in needs])
        if torch.compiler.is_compiling():
            quantizers, request = self._resolve(recipe, key)  # at trace time; a memo would be state to guard on
        else:
            memo = self._resolved
            if memo is None or memo[1] != key or (memo[0] is not recipe and memo[0] != recipe):
                memo = self._resolved = (recipe, key, *self._resolve(recipe, key))
            if self._recipe is not recipe:
                self._recipe = recipe
            quantizers, request = memo[2], memo[3]
        fast_fprop, fast_dgrad, fast_wgrad = recipe.products()
        numerics = Numerics(dtype, fast_fprop, fast_dgrad, fast_wgrad, recipe.override(), recipe.keeps_wgrad())
        is_second = STATE.recomputation is not None and STATE.recomputation.is_second
        caches = is_first_microbatch is not None and not is_second
        reuses = is_first_microbatch is False
        call = Call(quantizers, needs, numerics, request, None, None, None, None, False, caches, reuses)
        if caches and STATE.skip_weight_update is not None:
            # A graph that is captured once serves every micro-batch: the flag says at each replay which one it is.
            call.reuses, call.skips = True, STATE.skip_weight_update.to(self.scale_fwd.device)
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
        self._use_history(request)
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
            call.weight_scales = self._scales_of_weights(call)
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

    def _scales_of_weights(self, call: Call) -> Any:
        """Those that the weights of this call are quantized with, or were when they were kept."""
        if call.skips is not None:
            scales = self.scale_fwd.clone()
            if self._weight_scales is not None:
                scales = torch.where(call.skips == 1, self._weight_scales, scales)
            self._weight_scales = scales
            return scales
        if call.reuses:
            return call.scales if self._weight_scales is None else self._weight_scales
        if call.caches:
            self._weight_scales = self.scale_fwd.clone()
        return call.scales

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
                scale=scale_of(call.weight_scales, gemm, "weight"),
                cache=call.caches,
                update_workspace=call.skips is not None,
                skip_update_flag=call.skips,
            )
            quantized.append(weight_q)
            kept.append(workspace if fresh is None else fresh)
            amaxes.append(amax)
        if call.caches and (held is None or any(map(operator.is_not, kept, held))):
            self._workspaces = tuple(kept)
        return tuple(quantized), amaxes

    def _record(self, call: Call, amaxes: Sequence[torch.Tensor], weight_amaxes: Sequence[torch.Tensor | None]) -> None:
        """Enter the maxima of this call into the current row of the history: those that a core gave back, one for each
        GEMM whose input has delayed scaling, and those of the weights."""
        if not call.records:
            return
        seen, rest = [], list(amaxes)
        slots: list[int] = []
        for gemm, weight_amax in enumerate(weight_amaxes):
            quantizer = call.quantizers[gemm].input
            if quantizer is not None and quantizer.takes_scale():
                seen.append(rest.pop(0))
                slots.append(slot(gemm, "input"))
            if weight_amax is not None:
                seen.append(weight_amax)
                slots.append(slot(gemm, "weight"))
        if slots:
            with torch.no_grad():
                run_op(delayed_saw_, self.amax_history_fwd[0], seen, slots)

    def _is_calibrating(self) -> bool:
        return STATE.calibrating and not STATE.enabled

    def _calibrate(self, inputs: Sequence[Any], weights: Sequence[Any]) -> None:
        """High precision, but the maxima of each GEMM's input and weight are written to the history."""
        if self._is_calibrating():
            with torch.no_grad():
                for tensor_type, tensors in (("input", inputs), ("weight", weights)):
                    for gemm, tensor in enumerate(tensors):
                        seen = scale_of(self.amax_history_fwd[0], gemm, tensor_type)
                        seen.copy_(float8_amax(tensor.detach()))

    def _outputs(self, y: Any, bias: torch.Tensor | None, dtype: torch.dtype, norm_out: Any = None) -> Any:
        """What forward returns: y, or (y[, bias][, norm's output]), as the module was asked to."""
        outputs: list[Any] = [y]
        if self.return_bias:
            outputs.append(None if bias is None else bias.to(dtype))
        if self.return_layernorm_output:
            outputs.append(norm_out)
        return y if len(outputs) == 1 else tuple(outputs)

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
            self._weight_grad(gemm, weight, gemm),
            scale_of(call.scales, gemm, "input"),
            scale_of(call.grad_scales, gemm, "grad_output"),
            self.save_original_input,
            None,
        )

    def _weight_grad(self, gemm: int, weight: Any, store: int) -> WeightGrad:
        """Where the gradient of a GEMM's weight goes; `store`: which of `wgrad_stores` takes its operands."""
        made = WeightGrad(weight.dtype, None, False, self.wgrad_stores[store] if self.wgrad_stores else None)
        if self.fuse_wgrad_accumulation and weight.requires_grad:
            parts = self._weights[gemm].main_grads(self)
            if len(parts) == 1:
                made.main_grad, made.overwrites = parts[0].main_grad, parts[0].overwrites
            else:
                made.parts = parts
        if self.wgrad_stores and torch.compiler.is_compiling():
            raise RuntimeError(
                "delay_wgrad_compute keeps tensors for a later call, which a graph cannot: use it in eager code, or "
                "compile with delay_wgrad_compute=False"
            )
        return made

    # Delayed weight gradients

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for `backward_dw`."""
        return bool(self.wgrad_stores)

    def backward_dw(self) -> None:
        """Compute the oldest weight gradients that wait, and add them to `grad` or `main_grad`."""
        for gemm in reversed(range(len(self.wgrad_stores))):  # as backward goes
            self._add_gradients(gemm, self.wgrad_stores[gemm].run())
        for hook in self._wgrad_hooks if self.wgrad_stores else ():
            hook()

    def _add_gradients(self, store: int, gradients: Any) -> None:
        """What a store gave, to the parameters."""
        self._weights[store].add_gradient(self, gradients)

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], None]
    ) -> None:
        """Called after each `backward_dw`."""
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    # Parameters

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initial values; materialises parameters that are on the meta device, unless deferred."""
        if not defer_init:
            for gemm, weights in enumerate(self._weights):
                weights.reset(self, gemm)
            self._reset_state()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The group of tensor parallelism; one of a single process changes nothing."""
        if tp_group is not None and torch.distributed.get_world_size(tp_group) > 1:
            raise NotImplementedError("tensor parallelism is not there yet: leave tp_group of one process, or None")


def activation_dtype(inp: torch.Tensor) -> torch.dtype:
    """torch.autocast's where it is on, else the input's."""
    kind = inp.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inp.dtype
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"inp has dtype {dtype}: modules take float32, float16 or bfloat16")
    return dtype


def scale_of(scales: Any, gemm: int, tensor_type: str) -> Any:
    """[1] of a GEMM's tensor, out of one direction's [n]; None of none."""
    if scales is None:
        return None
    i = slot(gemm, tensor_type)
    return scales[i : i + 1]


def _delayed(request: Any) -> DelayedScalingRequest:
    if not isinstance(request, DelayedScalingRequest):
        raise TypeError(
            f"a quantizer request is {type(request).__name__}: modules keep state for DelayedScalingRequest"
        )
    return request
