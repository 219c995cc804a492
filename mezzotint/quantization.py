"""Regions with quantization: `autocast` and `quantized_model_init` switch it on by setting the thread's state.

With delayed scaling, a module that ran in a region waits in `pending`. When the outermost region ends, all such modules
update their forward scales in one op, in eager code or inside the graph that the region lies in
(`functional/delayed.py`).
"""

from collections.abc import Callable
from functools import partial, wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
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
from mezzotint.comm.agreement import check_agreed, nobody_answers, without_addresses
from mezzotint.comm.groups import group_by_name, world_size
from mezzotint.constants import DType
from mezzotint.finite import begin_check, end_check
from mezzotint.functional.delayed import ScaleState, update_scale_state, update_states
from mezzotint.memory import check_memory
from mezzotint.recipe import (
    CustomRecipe,
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    Recipe,
    as_recipe,
    element,
)
from mezzotint.region import Opened, current_state, leave, put_settings, settings_in
from mezzotint.tracing import call_untraced

__all__ = [
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


def _check_recipe(recipe: Recipe | None, group: Any) -> None:
    """Raise ValueError on all ranks that amaxes are reduced over unless they have the same recipe. They are asked once
    for each recipe of a group.

    A rank with another recipe would not reduce, and the others would wait for it.
    """
    if world_size(None) == 1:
        return
    group = group_by_name(group.group_name)  # the real one: in a graph Dynamo has a stand-in
    state, text = current_state(), f"{without_addresses(recipe)} in autocast"  # modules compare without these words
    if world_size(group) > 1 and not nobody_answers(group) and (group.group_name, text) not in state.agreed:
        check_agreed(group, recipe=text)
        state.agreed |= {(group.group_name, text)}


class autocast:
    """An `autocast` is a region in which modules quantize as a recipe says.

    A recipe, or its short name, may come first: `mz.autocast("mxfp8")`. A region reads the recipe when it is
    entered: a change of the recipe after that counts from the next region on. A region belongs to its thread. Regions
    nest, an object can be entered again, and it can decorate functions.

    Backward may be inside of the region or after it: it uses the recipe that forward had.

    Args:
        enabled: Whether modules quantize; or, in its place, a recipe or its short name. The default is True.
        calibrating: Whether modules compute in high precision and gather the statistics of delayed scaling. It is for
            regions with `enabled=False`. The default is False.
        recipe: A recipe of `mezzotint.recipe` or its short name, such as "mxfp8". None means the one that
            `get_default_recipe` returns for this machine.
        amax_reduction_group: The process group over whose ranks delayed scaling reduces its amaxes (the largest
            absolute values of tensors), or None for no reduction.
        memory: How much modules keep for backward: "default", "lean" (only what backward cannot compute again) or
            "compressed" (lean, and the input of an MLP's activation in FP8). None means what the region around this one
            says.
        check_finite: Whether modules count the values that are NaN or infinite in what they quantize. If there were
            some, the end of the region raises a FloatingPointError that names the module, the tensor and the step;
            every such region is a step. Put backward into the region as well, or what it finds in gradients is raised
            by the next region. None means what the region around this one says.

    Raises:
        TypeError: If `enabled` or `calibrating` is no bool, or two recipes are given.
        ValueError: If there is no recipe or memory mode of that name.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(32, 32, device="cpu")
        >>> x = torch.randn(32, 32)
        >>> with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
        ...     y = layer(x)
        >>> torch.equal(y, layer(x))  # outside of the region nothing is quantized
        False
        >>> @mz.autocast("mxfp8")
        ... def run(x):
        ...     return layer(x)
        >>> run(x).shape
        torch.Size([32, 32])
    """

    def __init__(
        self,
        enabled: "bool | Recipe | str" = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
        *,
        memory: str | None = None,
        check_finite: bool | None = None,
    ) -> None:
        switch, recipe = switch_and_recipe("autocast", enabled, recipe)
        calibrating = as_bool("autocast", "calibrating", calibrating)
        recipe = get_default_recipe() if recipe is None and (switch or calibrating) else recipe
        self.state = (switch, calibrating, recipe, amax_reduction_group)
        self.memory = None if memory is None else check_memory("autocast", memory)
        self.check_finite = None if check_finite is None else as_bool("autocast", "check_finite", check_finite)
        self.graph = _graph

    def __enter__(self) -> "autocast":
        enabled, calibrating, recipe, group = self.state
        if self.check_finite:
            begin_check()
        recipe = None if recipe is None else recipe.frozen()
        if group is not None and torch.is_grad_enabled():  # without gradients no amaxes are reduced
            call_untraced(_check_recipe, recipe if enabled else None, group)
        state = current_state()
        state.opened, options = Opened(self, settings_in(state), state.opened), state.options
        if self.memory is not None or self.check_finite is not None:
            options = options.changed(self.memory, self.check_finite)
        put_settings(state, (enabled, calibrating, recipe, group, options))
        state.depth += 1
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        state = current_state()
        state.opened, outer = leave(state.opened, self)
        if outer is not None:
            put_settings(state, outer)
        state.depth -= 1
        if state.depth == 0 and state.pending is not None:
            update_pending(kind is None and not self.graph and torch.is_grad_enabled())
        if self.check_finite:
            end_check(raises=kind is None)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function: each call of it is a region."""
        if isgeneratorfunction(function) or iscoroutinefunction(function) or isasyncgenfunction(function):
            raise TypeError(
                f"autocast decorates {function.__qualname__}, which runs after its call has returned, outside of the "
                "region: write the region inside of it, with autocast(...)"
            )
        arguments, memory, check_finite = (*self.state, self.graph), self.memory, self.check_finite

        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            # The region is made here, because Dynamo enters no region that was made outside of its graph.
            with autocast(*arguments, memory=memory, check_finite=check_finite):
                return function(*args, **kwargs)

        return inside


def switch_and_recipe(caller: str, enabled: Any, recipe: Any) -> tuple[bool, Recipe | None]:
    """Return whether a region is on, and its recipe. The argument `enabled` may be either a flag or a recipe."""
    # torch 2.11 does not trace a union with an opaque class. A class that is opaque takes long to ask.
    if not isinstance(enabled, bool) and isinstance(enabled, (Recipe, str)):
        if recipe is not None:
            raise TypeError(f"{caller} got two recipes, {enabled!r} first and recipe={recipe!r}: give one")
        return True, as_recipe(enabled)
    return as_bool(caller, "enabled", enabled), None if recipe is None else as_recipe(recipe)


def as_bool(caller: str, name: str, value: Any) -> bool:
    """Return a flag as a bool; raise TypeError for what is only truthy, since it may be meant as something else."""
    if isinstance(value, bool):
        return value
    is_numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")  # it may be absent
    if not is_numpys:
        raise TypeError(f"{caller}({name}={value!r}): give True or False, and the recipe as recipe=...")
    return bool(value)


def update_pending(updates: bool) -> None:
    """End a region: every module that ran in it gets its new forward scales, if it `updates`, and waits no more."""
    state = current_state()
    waiting, state.pending = state.pending, None
    modules: list[tuple[Any, Any]] = []
    while waiting is not None:  # first all of them, before anything can go wrong
        waiting.module._run_status.has_backward = None
        modules.append((waiting.module, waiting.groups))
        waiting = waiting.before
    if not (updates and modules):
        return
    states: list[ScaleState] = []
    for module, groups in modules:
        scale, history, request = module._forward_state()
        rule = update_rule(request, forward=True)
        states.append(ScaleState(scale, history, *rule, groups, number=module._number))
    if len(states) == 1 and states[0].is_alone():
        update_scale_state(states[0], [], [])
    else:
        with torch.no_grad():
            update_states(states)


def reduction_groups(request: DelayedScalingRequest, group: Any, tp_group: Any) -> tuple[Any, ...]:
    """Return the groups over which the amaxes of a module are reduced: the region's `amax_reduction_group`, and the
    ranks that share its weight, whose shards are quantized by one scale. Groups that are None or have one rank are left
    out."""
    if group is None and tp_group is None:
        return ()
    groups = [group] if group is not None and request.reduce_amax else []
    if tp_group is not None and not (groups and groups[0].group_name == tp_group.group_name):
        groups.append(tp_group)
    return tuple([group for group in groups if world_size(group) > 1])


def update_rule(request: DelayedScalingRequest, *, forward: bool) -> tuple[float, bool, Any]:
    """Return how scales follow from histories: the format's largest value · 2^-margin, whether only the most recent
    amax counts, and a user's functions if they replace both."""
    top = request.fp8_format.value.max_fwd if forward else request.fp8_format.value.max_bwd
    update = partial(apply_own_rule, request=request, forward=forward) if request.has_own_rule() else None
    return float(top) * 2.0**-request.margin, request.amax_compute_algo == "most_recent", update


def apply_own_rule(
    history: torch.Tensor, scale: torch.Tensor, request: DelayedScalingRequest, *, forward: bool
) -> None:
    """Update by a user's `amax_compute_algo(history)` or `scaling_factor_compute_algo(amax, scale, max, …)`."""
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
    """Return (fp8_max / amax) / 2^margin; the old scale for an amax of 0, infinity or NaN; at most the largest FP32."""
    fresh = torch.full_like(amax, float(fp8_max)).div(amax) / (2.0**margin)
    fresh = torch.where(amax > 0.0, fresh, scale)
    fresh = torch.where(torch.isfinite(amax), fresh, scale)
    return torch.where(torch.isinf(fresh), torch.full_like(fresh, _fp32_max), fresh)


def _amax_and_scale_update(amax_history: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: Any) -> None:
    """Update history and scale in plain torch, in place, with the user's functions; every column is rolled."""
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
    enabled: "bool | Recipe | str" = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | str | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """Return an `autocast`, by its former name and with its former names of arguments.

    Args:
        enabled: Whether modules quantize; or, in its place, a recipe or its short name. The default is True.
        calibrating: As in `autocast`. The default is False.
        fp8_recipe: The `recipe` of `autocast`.
        fp8_group: The `amax_reduction_group` of `autocast`.

    Returns:
        The region, to be used as a context manager or as a decorator.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(32, 32, device="cpu")
        >>> with mz.fp8_autocast(enabled=True, fp8_recipe=mz.recipe.DelayedScaling()):
        ...     y = layer(torch.randn(32, 32))
        >>> y.shape
        torch.Size([32, 32])
    """
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


class quantized_model_init:
    """A `quantized_model_init` is a region in which modules are made with quantized weights, without a copy in high
    precision.

    The parameters are then quantized tensors. `mezzotint.optimizers.FusedAdam` with `master_weights=True` keeps a copy
    of them in FP32, updates that, and quantizes the result. `fp8_model_init` is the former name of this class.

    Args:
        enabled: Whether weights are quantized; or, in its place, a recipe or its short name. The default is True.
        recipe: The recipe whose quantizer of weights is used, or its short name. None means the one that
            `get_default_recipe` returns for this machine.
        preserve_high_precision_init_val: Whether the initial values in high precision are kept on the CPU, where
            `param.get_high_precision_init_val()` returns them and `param.clear_high_precision_init_val()` drops them.
            The default is False.

    Raises:
        TypeError: If `enabled` is no bool, or two recipes are given.
        ValueError: If there is no recipe of that name.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> with mz.quantized_model_init(recipe=mz.recipe.MXFP8BlockScaling()):
        ...     layer = mz.Linear(64, 64, device="cpu")
        >>> isinstance(layer.weight, mz.MXFP8Tensor)
        True
        >>> with mz.autocast("mxfp8"):
        ...     y = layer(torch.randn(32, 64))
        >>> y.shape
        torch.Size([32, 64])
    """

    def __init__(
        self,
        enabled: "bool | Recipe | str" = True,
        recipe: Recipe | str | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        self.enabled, recipe = switch_and_recipe("quantized_model_init", enabled, recipe)
        self.recipe = get_default_recipe() if recipe is None else recipe
        self.preserves = preserve_high_precision_init_val

    def __enter__(self) -> "quantized_model_init":
        state = current_state()
        outer, recipe = (state.init_enabled, state.init_recipe, state.preserves_init), self.recipe.frozen()
        state.init_opened = Opened(self, outer, state.init_opened)
        state.init_enabled, state.init_recipe, state.preserves_init = self.enabled, recipe, self.preserves
        return self

    def __exit__(self, *error: Any) -> None:
        state = current_state()
        state.init_opened, outer = leave(state.init_opened, self)
        if outer is not None:
            state.init_enabled, state.init_recipe, state.preserves_init = outer


fp8_model_init = quantized_model_init


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Return the multiple to which the rows of a group of tokens are padded under a recipe.

    Args:
        recipe: The recipe that is asked.

    Returns:
        A number of rows, as `Fp8Padding` uses it.

    Example:
        >>> import mezzotint as mz
        >>> mz.get_align_size_for_quantization(mz.recipe.MXFP8BlockScaling())
        32
    """
    return recipe.alignment()


def get_fp8_te_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> DType:
    """Return the element type of a recipe's forward, or backward, tensors."""
    return element(fp8_recipe.fp8_format, fprop_tensor)


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """Return the torch dtype of a recipe's forward, or backward, tensors."""
    is_e5m2 = get_fp8_te_dtype(fp8_recipe, fprop_tensor) == DType.kFloat8E5M2
    return torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn


def get_fp8_max(fp8_recipe: Any, fprop_tensor: bool = True) -> float:
    """Return the largest value of the element type of a recipe's forward, or backward, tensors."""
    return 57344.0 if get_fp8_te_dtype(fp8_recipe, fprop_tensor) == DType.kFloat8E5M2 else 448.0
