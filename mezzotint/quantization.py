"""Where quantization is switched on: `autocast` and `quantized_model_init`, which set `STATE`.

Delayed scaling: a module that ran in a region waits in `pending`; when the
outermost region ends, every one of them updates its forward scales in one op, in eager code or inside the graph that
the region lies in (`functional/delayed.py`).
"""

from functools import partial
from typing import Any

import torch

from mezzotint.availability import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    get_cudnn_version,
    get_default_recipe,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_fp8_rowwise_available,
    is_mxfp8_available,
    is_non_tn_fp8_gemm_supported,
    is_nvfp4_available,
)
from mezzotint.constants import DType
from mezzotint.distributed.groups import world_size
from mezzotint.functional.delayed import ScaleState, step, update_states
from mezzotint.meeting import agree
from mezzotint.recipe import (
    CustomRecipe,
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    Recipe,
    check_recipe,
    element,
)
from mezzotint.state import STATE, get_autocast_state, set_autocast_state

__all__ = [
    "STATE",
    "CustomRecipe",
    "DelayedScalingRequest",
    "QuantizerRequest",
    "QuantizerRole",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_fp8_rowwise_available",
    "is_mxfp8_available",
    "is_non_tn_fp8_gemm_supported",
    "is_nvfp4_available",
    "quantized_model_init",
]


class autocast:
    """Modules that run inside quantize as `recipe` says. Regions nest; the same object can be entered again later.

    `calibrating` without `enabled` computes in high precision and gathers statistics. `amax_reduction_group` is the
    process group over which delayed scaling takes its maxima.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        if recipe is not None:
            check_recipe(recipe)
        recipe = get_default_recipe() if recipe is None and (enabled or calibrating) else recipe
        self.state = (enabled, calibrating, recipe, amax_reduction_group)
        self.graph = _graph
        self.outer: Any = None

    def __enter__(self) -> "autocast":
        if self.outer is not None:
            raise RuntimeError("this autocast is entered already: make another one for a region inside of it")
        enabled, _, recipe, group = self.state
        if group is not None and torch.is_grad_enabled():  # without gradients no maxima are taken
            agree(recipe if enabled else None, group)
        self.outer = get_autocast_state()
        set_autocast_state(self.state)
        STATE.leaders = ()
        STATE.depth += 1
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        set_autocast_state(self.outer)
        self.outer = None
        STATE.leaders = ()
        STATE.depth -= 1
        if STATE.depth == 0:
            update_pending(kind is None and not self.graph and torch.is_grad_enabled())


def update_pending(updates: bool) -> None:
    """End of a region: every module that ran in it takes its new forward scales, if it `updates`, and waits no more."""
    waiting, STATE.pending = STATE.pending, None
    modules: list[tuple[Any, Any]] = []
    while waiting is not None:  # all of them before anything can go wrong
        waiting.module._turn.is_pending = waiting.module._turn.has_backward = False
        modules.append((waiting.module, waiting.groups))
        waiting = waiting.before
    if not (updates and modules):
        return
    states: list[ScaleState] = []
    for module, groups in modules:
        scale, history, request = module._forward_state()
        states.append(ScaleState(scale, history, *update_rule(request, forward=True), groups))
    if len(states) == 1 and states[0].is_alone():
        step(states[0], [], [])
    else:
        with torch.no_grad():
            update_states(states)


def reduction_groups(request: DelayedScalingRequest, tp_group: Any) -> tuple[Any, ...]:
    """Over which processes the maxima of a module are taken: `amax_reduction_group`, and those that share its weight,
    whose parts are quantized by one scale. None is no group."""
    groups = [STATE.group] if STATE.group is not None and request.reduce_amax else []
    if tp_group is not None and not (groups and groups[0].group_name == tp_group.group_name):
        groups.append(tp_group)
    return tuple([group for group in groups if world_size(group) > 1])


def update_rule(request: DelayedScalingRequest, *, forward: bool) -> tuple[float, bool, Any]:
    """How scales follow from histories: the format's largest value · 2^-margin, whether the most recent maximum alone
    counts, and a user's functions where they take the place of both."""
    top = request.fp8_format.value.max_fwd if forward else request.fp8_format.value.max_bwd
    update = partial(apply_own_rule, request=request, forward=forward) if has_own_rule(request) else None
    return float(top) * 2.0**-request.margin, request.amax_compute_algo == "most_recent", update


def has_own_rule(request: DelayedScalingRequest) -> bool:
    """Whether a user's function says how scales follow from histories, or what of them counts."""
    return callable(request.amax_compute_algo) or request.scaling_factor_compute_algo is not None


def apply_own_rule(
    history: torch.Tensor, scale: torch.Tensor, request: DelayedScalingRequest, *, forward: bool
) -> None:
    """The update with a user's `amax_compute_algo(history)` or `scaling_factor_compute_algo(amax, scale, max, …)`."""
    value = request.fp8_format.value
    _amax_and_scale_update(history, scale, value.max_fwd if forward else value.max_bwd, request)


def _default_amax(history: torch.Tensor, algorithm: Any) -> torch.Tensor:
    if callable(algorithm):
        return algorithm(history)
    return history[0].clone() if algorithm == "most_recent" else history.amax(0)


def _default_sf_compute(
    amax: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: float,
    margin: int,
    _fp32_max: float = torch.finfo(torch.float32).max,
) -> torch.Tensor:
    """(fp8_max / amax) / 2^margin; as it was for 0, infinity and NaN; the largest FP32 where it overflows."""
    fresh = torch.full_like(amax, float(fp8_max)).div(amax) / (2.0**margin)
    fresh = torch.where(amax > 0.0, fresh, scale)
    fresh = torch.where(torch.isfinite(amax), fresh, scale)
    return torch.where(torch.isinf(fresh), torch.full_like(fresh, _fp32_max), fresh)


def _amax_and_scale_update(amax_history: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: Any) -> None:
    """In plain torch, in place, with functions of the user's in it; it rolls every column."""
    amax = _default_amax(amax_history, recipe.amax_compute_algo)
    if recipe.scaling_factor_compute_algo is None:
        fresh = _default_sf_compute(amax, scale, fp8_max, recipe.margin)
    else:
        fresh = recipe.scaling_factor_compute_algo(amax, scale, fp8_max, recipe)
    scale.copy_(fresh)
    if amax_history.shape[0] > 1:
        amax_history.copy_(amax_history.roll(-1, 0))
    amax_history[0].zero_()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` by its former name."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


class quantized_model_init:
    """Modules made inside keep their weights quantized, as `recipe` says, without a copy in high precision.

    `preserve_high_precision_init_val` keeps the initial values on the CPU: `param.get_high_precision_init_val()`.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        if recipe is not None:
            check_recipe(recipe)
        self.enabled = enabled
        self.recipe = get_default_recipe() if recipe is None else recipe
        self.preserves = preserve_high_precision_init_val
        self.outer: list[Any] = []

    def __enter__(self) -> "quantized_model_init":
        self.outer.append((STATE.init_enabled, STATE.init_recipe, STATE.preserves_init))
        STATE.init_enabled, STATE.init_recipe, STATE.preserves_init = self.enabled, self.recipe, self.preserves
        return self

    def __exit__(self, *error: Any) -> None:
        STATE.init_enabled, STATE.init_recipe, STATE.preserves_init = self.outer.pop()


fp8_model_init = quantized_model_init


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Rows of a group of tokens are padded to a multiple of this."""
    return recipe.alignment()


def get_fp8_te_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> DType:
    """The element type of a recipe's forward, or backward, tensors."""
    return element(fp8_recipe.fp8_format, fprop_tensor)


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """As torch names it."""
    is_e5m2 = get_fp8_te_dtype(fp8_recipe, fprop_tensor) == DType.kFloat8E5M2
    return torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn


def get_fp8_max(fp8_recipe: Any, fprop_tensor: bool = True) -> float:
    """The largest value of that type."""
    return 57344.0 if get_fp8_te_dtype(fp8_recipe, fprop_tensor) == DType.kFloat8E5M2 else 448.0
