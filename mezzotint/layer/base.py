"""The base of modules and operations with weights: it reads the state once per run, finds the plan, and keeps quantized
weights.

A forward asks `start_run` what is in force; the plan that it gets says all else (`plan.py`). Delayed scaling's buffers
are in `scaling_state.py`, what it does at the start of a run in `delayed_run.py`.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from mezzotint.constants import HIGH_PRECISION
from mezzotint.finite import await_check, make_counters
from mezzotint.functional.autograd import GradState
from mezzotint.functional.linear import Needs, WeightGrad
from mezzotint.functional.observation import Probes, join_probes
from mezzotint.functional.weight import quantize_weight
from mezzotint.layer.bind import of_module, of_tensor, recipe_for
from mezzotint.layer.configured import Configured, config_of
from mezzotint.layer.delayed_run import grad_state_of, start_delayed
from mezzotint.layer.names import Named, join_path
from mezzotint.layer.parallel_module import ParallelModule
from mezzotint.layer.plan import LayerConfig, Plan, delayed_request, plan_anew
from mezzotint.layer.run import KeptWeights, RunSettings, quantized_weights, scale_of
from mezzotint.layer.scaling_state import note_recipe
from mezzotint.layer.weights import Weights, named
from mezzotint.layer.wgrad import WeightGradStore
from mezzotint.memory import check_memory
from mezzotint.quantization import reduction_groups
from mezzotint.recipe import (
    FORWARD_TENSORS,
    DelayedScalingRequest,
    QuantizerRole,
    Recipe,
    Rules,
    choose_recipe,
    element,
    slot,
)
from mezzotint.region import NO_OPTIONS, RegionOptions, RunStatus, State, current_state
from mezzotint.tensor.float8 import Float8Quantizer
from mezzotint.tensor.fsdp_directions import copies_saved, saving_hooks
from mezzotint.tensor.identity import IdentityQuantizer
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import backward_task, call_untraced, in_inference_mode, traced_as


class Layer(Configured, Named, ParallelModule):
    """A `Layer` has GEMMs, each with a weight, that a recipe quantizes."""

    module_type: ClassVar[str] = "linear"
    _config: LayerConfig
    _CONFIGURED = frozenset(
        {
            "_activation",
            "_activation_params",
            "_modes",
            "_probes",
            "_ruled",
            "_weights",
            "checkpoint",
            "eps",
            "fuse_wgrad_accumulation",
            "hidden_size",
            "in_features",
            "memory",
            "num_gemms",
            "return_bias",
            "return_layernorm_output",
            "return_layernorm_output_gathered",
            "rms",
            "save_original_input",
            "sequence_parallel",
            "tp_group",
            "tp_size",
            "wgrad_stores",
            "zero_centered_gamma",
        }
    )
    gathers_one_direction: bool | None = None  # the `one_direction` of `low_precision_gather`
    _ruled: tuple[tuple[Rules, Recipe | None], ...] = ()  # the recipe that each `Rules` gives the module
    _probes: tuple[Probes, ...] | None = None  # one for each GEMM, while the module is inspected

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fuse_wgrad_accumulation = False
        self.save_original_input = False
        self.memory: str | None = None
        self.wgrad_stores: tuple[WeightGradStore, ...] = ()  # one for each GEMM where gradients are delayed
        self._weights: tuple[Weights, ...] = ()  # one for each GEMM
        self._wgrad_hooks: list[Callable[[], None]] = []

    # Roles and quantizers

    def _inner_name(self, gemm: int) -> str:
        """Return the part of a GEMM's role name that follows the name of the module."""
        return ""

    def _linear_names(self) -> tuple[str, ...]:
        return tuple([self._inner_name(gemm) for gemm in range(self.num_gemms)])

    def _take_rule(self, path: str, rules: Rules, recipe: Recipe | None) -> None:
        for gemm, weights in enumerate(self._weights):
            weights.check_rule(self, gemm, join_path(path, self._inner_name(gemm)), rules, recipe)
        self._ruled = (*[known for known in self._ruled if known[0] != rules], (rules, recipe))

    def _role(self, gemm: int, tensor_type: str) -> QuantizerRole:
        return QuantizerRole(self.module_type, tensor_type, join_path(self._name, self._inner_name(gemm)))

    def _live_quantizer(self, recipe: Recipe, gemm: int, tensor_type: str) -> Quantizer:
        """Return a quantizer for a tensor of a GEMM; if it needs state, it reads and writes this module's."""
        own = of_tensor(self, recipe, gemm, tensor_type)
        made = IdentityQuantizer() if own is None else own.quantizer(self._role(gemm, tensor_type))
        if isinstance(made, Quantizer):
            return made
        forward, i = tensor_type in FORWARD_TENSORS, slot(gemm, tensor_type)
        scale, history = (self.scale_fwd, self.amax_history_fwd) if forward else (self.scale_bwd, self.amax_history_bwd)
        return Float8Quantizer(
            scale[i : i + 1], history[0, i : i + 1], element(delayed_request(made).fp8_format, forward)
        )

    def _request_of(self, recipe: Recipe) -> DelayedScalingRequest | None:
        """Return the state that a recipe asks for in a run with all gradients."""
        needs = (Needs(True, True, True),) * self.num_gemms
        return plan_of(self, config_of(self), of_module(self, recipe), torch.float32, needs, False, NO_OPTIONS).request

    def _init_state(self, num_gemms: int, device: torch.device) -> None:
        super()._init_state(num_gemms, device)
        self._configure()

    def _make_config(self) -> LayerConfig:
        return LayerConfig(**self._config_fields())

    def _config_fields(self) -> dict[str, Any]:
        """Return the fields of the configuration."""
        gemms, weights = range(self.num_gemms), self._weights
        is_plain = len(weights) > 0 and all(type(each).is_plain(each) for each in weights)
        return {
            "module_type": self.module_type,
            "gemm_names": tuple([self._inner_name(gemm) for gemm in gemms]),
            "saves_original_input": self.save_original_input,
            "memory": None if self.memory is None else check_memory(type(self).__name__, self.memory),
            "parallels": tuple([self._parallel(gemm) for gemm in gemms]),
            "is_parallel": bool(self._modes),
            "weight_names": tuple([tuple(each.weight_names) for each in weights]) if is_plain else (),
            "bias_names": tuple([tuple(each.bias_names) for each in weights]) if is_plain else (),
            "accumulates": self.fuse_wgrad_accumulation or bool(self.wgrad_stores),
            "is_inspected": self._probes is not None,
            "ruled": self._ruled,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = super().__deepcopy__(memo)
        made._configure()
        return made

    # One forward

    def _reads_rows_again(self, recipe: Recipe | None) -> bool:
        """Return whether backward reads the row-wise copies of weights: it does if it computes on what forward
        multiplied, or if this run is computed again. A checkpoint is recognized by its hooks on saved tensors; other
        hooks are taken for one."""
        if not self._run_status.held[1] and self.gathers_one_direction is None and copies_saved():
            raise ValueError(
                "saved_tensors_hooks inside of what FSDP2 gathers at once may copy what is saved for backward before "
                "the column-wise copies of weights are there. Enter them around the model, or call "
                "low_precision_gather(model, recipe, one_direction=False), which sends both directions"
            )
        return saving_hooks() is not None or recipe is None or recipe.override() is not None

    def _handed_over(self, gemm: int, tensor_type: str) -> tuple[Quantizer | None, GradState | None]:
        """Return the row-wise quantizer and the state for a gradient that the module returns quantized, if a graph
        hands over what backward sees to an operator; else (None, None)."""
        recipe = recipe_for(self)
        recipe = None if recipe is None else recipe.of(gemm, tensor_type)
        request = None if recipe is None else recipe.quantizer(self._role(gemm, tensor_type))
        if not isinstance(request, DelayedScalingRequest):
            return None, None
        groups = reduction_groups(request, current_state().group, self._sharing_group())
        state = grad_state_of(self, request, groups, False)
        if not state.is_handed_over():
            return None, None
        quantizer = request.scaled_quantizer(tensor_type in FORWARD_TENSORS)
        return quantizer.with_usage(rowwise=True, columnwise=False), state

    def _kept(self, call: RunSettings, weights: Sequence[Any]) -> KeptWeights:
        """Return the quantized weights that are kept for other microbatches, and their amaxes. Those of an earlier run
        are used if this run reuses them."""
        # FSDP2 frees again what it has gathered. A kept copy would stay for good, so it is made again instead.
        if self._is_fully_sharded:
            return KeptWeights(*quantized_weights(call.plan, weights, call))
        if in_inference_mode():
            with torch.inference_mode(False), torch.no_grad():  # what is kept may be used in training later
                return self._kept(call, weights)
        held = self._workspaces if call.reuses else None
        if held is not None and torch.is_grad_enabled() and self._keeps_inference():
            held = None
        if held is None:
            made, amaxes = quantized_weights(call.plan, weights, call)
            self._workspaces = tuple(
                [
                    None if quantizers.weight is None or isinstance(weight, QuantizedTensorStorage) else weight_q
                    for weight, weight_q, quantizers in zip(weights, made, call.plan.quantizers, strict=True)
                ]
            )
            return KeptWeights(made, amaxes)
        return KeptWeights(*self._reused(call, weights, held))

    def _reused(
        self, call: RunSettings, weights: Sequence[Any], held: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], list[torch.Tensor | None]]:
        """Return the kept weights and their amaxes. A weight whose kept copy does not serve is quantized anew, and
        kept."""
        quantized: list[Any] = []
        kept: list[Any] = []
        amaxes: list[torch.Tensor | None] = []
        for gemm, (weight, workspace) in enumerate(zip(weights, held, strict=True)):
            weight_q, fresh, amax = quantize_weight(
                weight,
                call.plan.quantizers[gemm].weight,
                workspace,
                scale=scale_of(call.weight_scales, gemm, "weight"),
                parallel=call.plan.parallels[gemm],
                cache=True,
                update_workspace=call.skips is not None,
                skip_update_flag=call.skips,
            )
            quantized.append(weight_q)
            kept.append(workspace if fresh is None else fresh)
            amaxes.append(amax)
        if any(map(operator.is_not, kept, held)):
            self._workspaces = tuple(kept)
        return tuple(quantized), amaxes

    def _wgrads(self, weights: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        """Return where the gradient of each weight goes, as fields of `WeightGrad`."""
        return tuple([self._weight_grad(gemm, weight, gemm).fields() for gemm, weight in enumerate(weights)])

    def _keeps_inference(self) -> bool:
        """Return whether kept weights come from a graph that ran in inference mode, which backward cannot use."""
        return call_untraced(_has_inference_workspaces, self)  # graphs differ by the kind of their inputs

    def _weight_grad(self, gemm: int, weight: Any, store: int) -> WeightGrad:
        """Return where the gradient of a GEMM's weight goes. `store` is the index of the one of `wgrad_stores` that
        takes its operands."""
        made = WeightGrad(weight.dtype, None, False, self.wgrad_stores[store] if self.wgrad_stores else None)
        if self.fuse_wgrad_accumulation and weight.requires_grad:
            parts = self._weights[gemm].main_grads(self)
            if len(parts) == 1:
                made.main_grad, made.overwrites = parts[0].main_grad, parts[0].overwrites
            else:
                made.parts = parts
            made.is_told = not self.wgrad_stores and self._weights[gemm].tell_added(self)
        if self.wgrad_stores:
            _check_delayed_wgrad()
        return made

    # Delayed weight gradients

    def need_backward_dw(self) -> bool:
        """Return whether weight gradients wait for `backward_dw`."""
        return bool(self.wgrad_stores)

    def backward_dw(self) -> None:
        """Compute the oldest weight gradients that wait, and add them to `grad` or `main_grad`."""
        for gemm in reversed(range(len(self.wgrad_stores))):  # in the order of backward
            self._add_gradients(gemm, self.wgrad_stores[gemm].run())
        for hook in self._wgrad_hooks if self.wgrad_stores else ():
            hook()

    def _add_gradients(self, store: int, gradients: Any) -> None:
        """Add the weight gradients that a store computed to the parameters."""
        self._weights[store].add_gradient(self, gradients)

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], None]
    ) -> None:
        """Register a function that is called after each `backward_dw`."""
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    # Parameters

    def _gathered_weights(self) -> dict[str, int]:
        """Return the names of the weights that FSDP2 may gather quantized, with the GEMM of each; weights that consist
        of parts are left out."""
        return {w.weight_names[0]: gemm for gemm, w in enumerate(self._weights) if not w.parts}

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Set the initial values, and materialize parameters that are on the meta device; do nothing if
        `defer_init`."""
        if not defer_init:
            for gemm, weights in enumerate(self._weights):
                weights.reset(self, gemm)
            self._reset_state()


def _find_plan(module: Layer, config: LayerConfig, recipe: Recipe | None, *request: Any) -> Plan:
    if recipe is None or recipe.answers_once():
        return config.plan(recipe, "", *request)
    return plan_anew(config, recipe, module._name, *request)


@traced_as(_find_plan)
def plan_of(
    module: Layer,
    config: LayerConfig,
    recipe: Recipe | None,
    dtype: torch.dtype,
    needs: tuple[Needs, ...],
    keeps_weights: bool,
    options: RegionOptions,
) -> Plan:
    """Return the plan of a run under this recipe. Eager code takes that of the last run, if nothing changed."""
    # This is no method, because in a graph each look-up of a method in a module has its guards.
    request = dtype, needs, keeps_weights, options
    key, memo = (config, recipe, *request), module.__dict__.get("_planned")
    if memo is not None and memo[0] == key:
        return memo[1]
    plan = _find_plan(module, config, recipe, *request)
    if recipe is None or recipe.answers_once():
        module.__dict__["_planned"] = key, plan
    return plan


def start_run(
    module: Layer, config: LayerConfig, dtype: torch.dtype, needs: Sequence[Needs], is_first_microbatch: bool | None
) -> RunSettings:
    """Read the state of the region once, and return the settings of this run."""
    state = current_state()
    recipe = choose_recipe(state.recipe, config) if state.enabled else None
    recipe, options = _settings_of_run(module, recipe, state)
    keeps_weights = recipe is not None and is_first_microbatch is not None
    plan = plan_of(module, config, recipe, dtype, tuple(needs), keeps_weights, options)
    if plan.request is not None and not state.enabled:
        raise RuntimeError(_SCALES_ARE_GONE)
    call = RunSettings(plan)
    if plan.checks_finite:
        call_untraced(make_counters, module)
        await_check(module, state)
    if plan.is_inspected or plan.checks_finite:
        call.probes = probes_of(module, plan, state)
    if recipe is None:
        call.calibrates = state.calibrating
        return call
    if keeps_weights:
        is_first_microbatch = as_microbatch(is_first_microbatch)  # without a recipe it has no effect
    is_second = state.recomputation is not None and state.recomputation.is_second
    # A graph writes no attribute inside of a checkpoint, so weights are quantized for each microbatch there.
    call.caches = is_first_microbatch is not None and not is_second and not state.recomputes_in_graph
    call.reuses = is_first_microbatch is False
    if call.caches and state.skip_weight_update is not None:
        # A graph that is captured once serves every microbatch: the flag says at each replay which one it is.
        call.reuses, call.skips = True, state.skip_weight_update.to(module.scale_fwd.device)
    return call if plan.request is None else start_delayed(module, config, call, state)


def probes_of(module: Layer, plan: Plan, state: State) -> tuple[Probes, ...] | None:
    """Return the probes of a run of the module: an inspector's, and those of a region that counts values that are not
    finite. A run that is computed again for its backward was seen the first time, but for its gradients."""
    is_second = state.recomputation is not None and state.recomputation.is_second
    probes = module._probes if plan.is_inspected else None
    if plan.checks_finite:
        probes = join_probes(probes, module._counters)
    if probes is None or not (is_second or backward_task() != -1):
        return probes
    return tuple([Probes(None, None, each.grad_output) for each in probes])


def weights_of(module: Any, config: LayerConfig) -> list[tuple[Any, Any]]:
    """Return the weight and the bias (or None) of each GEMM."""
    if config.weight_names:
        both = zip(config.weight_names, config.bias_names, strict=True)
        return [(named(module, weights), named(module, biases)) for weights, biases in both]
    return [(each.weight(module), each.bias(module)) for each in module._weights]


@traced_as(lambda module, recipe, state: (recipe, state.options))
def _settings_of_run(module: Layer, recipe: Recipe | None, state: State) -> tuple[Recipe | None, RegionOptions]:
    """Return the recipe and the options of a module's run, note them, and check that it may run. A graph notes nothing,
    because it serves many runs and would have to guard on what was noted before."""
    status = module._run_status
    if not status.held[0]:
        raise ValueError(
            "FSDP2 has gathered a weight in the one direction that backward reads, and forward runs on it: again, "
            "in backward (activation checkpointing), or without a gather (set_reshard_after_backward(False)). Call "
            "low_precision_gather(model, recipe, one_direction=False), which sends both directions"
        )
    recipe, options = settings_of_run(status, recipe, state)
    if module._is_fully_sharded and torch.is_grad_enabled() and backward_task() == -1:
        status.reads_rows_again = status.reads_rows_again or module._reads_rows_again(recipe)
    if recipe is not None:
        note_recipe(module, recipe)
    return recipe, options


@traced_as(lambda status, recipe, state: (recipe, state.options))
def settings_of_run(status: RunStatus, recipe: Recipe | None, state: State) -> tuple[Recipe | None, RegionOptions]:
    """Return the recipe and the options of a run, and note them. A run inside of backward and outside of any region is
    one of `torch.utils.checkpoint`: it gets those of the module's last run before."""
    settings = recipe, state.options
    if backward_task() == -1:
        status.settings = settings
    elif recipe is None and state.depth == 0 and state.recomputation is None:
        return status.settings
    return settings


_SCALES_ARE_GONE = (
    "torch.utils.checkpoint computes again outside of autocast what it first computed inside, and delayed scaling has "
    "taken new scales since. Use mezzotint.checkpoint, which keeps those of the first run, or call backward inside the "
    "region"
)


def _refuse_delayed_wgrad() -> None:
    raise RuntimeError(
        "delay_wgrad_compute keeps tensors for a later call, which a graph cannot: use it in eager code, or "
        "compile with delay_wgrad_compute=False"
    )


@traced_as(_refuse_delayed_wgrad)
def _check_delayed_wgrad() -> None:
    """Raise in a graph, for a module whose weight gradients wait for `backward_dw`; in eager code do nothing."""


def _has_inference_workspaces(module: Layer) -> bool:
    kept = [each for each in module._workspaces or () if isinstance(each, QuantizedTensorStorage)]
    return any(buffer.is_inference() for workspace in kept for _, buffer in workspace._buffers())


def as_microbatch(is_first: Any) -> bool | None:
    """Return `is_first_microbatch` as a bool or None; False may also be written as `np.False_` or 0."""
    if is_first is None or isinstance(is_first, bool):
        return is_first
    if isinstance(is_first, torch.Tensor) or is_first not in (0, 1):
        raise TypeError(f"is_first_microbatch is {is_first!r}: give True, False or None")
    return bool(is_first)


def activation_dtype(inp: torch.Tensor) -> torch.dtype:
    """Return the dtype of activations: torch.autocast's if that is on, else the input's."""
    kind = "cuda" if inp.is_cuda else "cpu" if inp.is_cpu else inp.device.type
    is_cast = kind != "meta" and torch.is_autocast_enabled(kind)  # torch knows no autocast of the meta device
    dtype = torch.get_autocast_dtype(kind) if is_cast else inp.dtype
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"inp has dtype {dtype}: modules take float32, float16 or bfloat16")
    return dtype
