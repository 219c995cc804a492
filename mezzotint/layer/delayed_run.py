"""Delayed scaling at the start of a module's run: this module finds the scales of the run, and has it wait for their
update.

These are functions of a module and not its methods, because in a graph each look-up of a method in a module has its
guards.
"""

from typing import Any

import torch

from mezzotint.functional.autograd import GradState
from mezzotint.functional.delayed import ORDER_TOKEN, take
from mezzotint.layer.plan import LayerConfig
from mezzotint.layer.run import Delayed, RunSettings, backward_clears, live_grad_state
from mezzotint.layer.scaling_state import prepare_state, scaling_tensors, use_history
from mezzotint.quantization import reduction_groups
from mezzotint.recipe import DelayedScalingRequest
from mezzotint.region import Pending, State
from mezzotint.tracing import call_untraced, lasting


def start_delayed(module: Any, config: LayerConfig, call: RunSettings, state: State) -> RunSettings:
    """Fill in the tensors of a run with delayed scaling, and have its scales updated at the end of the region."""
    request, status = call.plan.request, module._run_status
    assert request is not None
    if state.recomputes_in_graph:
        raise RuntimeError(
            "delayed scaling in a checkpoint inside a compiled function: its scales are written before backward reads "
            "them again. Call checkpoint outside of torch.compile, use LayerNormMLP(checkpoint=True), or a recipe "
            "without state such as Float8CurrentScaling"
        )
    call_untraced(prepare_state, module, request)
    # The ranks that hold the other shards of the weights have the same scales.
    groups = reduction_groups(request, state.group, module.tp_group if config.is_parallel else None)
    recomputation = state.recomputation
    is_second = recomputation is not None and recomputation.is_second
    if not is_second:  # runs with other histories may have come after the first
        use_history(module, request, backward_clears(request))
    scale_fwd, history_fwd, scale_bwd, _ = scaling_tensors(module)
    # Among the runs that have a backward, that of the first one comes last. A checkpoint's first run has no gradients.
    has_backward = (torch.is_grad_enabled() and call.plan.has_backward) or (
        recomputation is not None and recomputation.has_backward
    )
    is_first = has_backward and not status.has_backward
    if has_backward and not is_first and not is_second:
        take(grad_state_of(module, request, groups, False), history_fwd)
    call.records = not is_second
    # If backward quantizes again, it needs the scales of forward, which are written before that. So are those of
    # gradients, by the backward of another run.
    quantizes_again = (config.recomputes or call.plan.quantizes_again()) and not is_second
    needs_gradients = torch.is_grad_enabled()
    call.scales, call.copies_scales = scale_fwd, quantizes_again
    if needs_gradients:
        call.grad_scales = scale_bwd
    if is_second:
        # These are the scales of the first run, whose amaxes have been entered.
        call.scales, call.weight_scales, is_first = recomputation.next_scales()
    else:
        call.weight_scales = weight_scales(module, call) if call.caches or call.reuses else call.scales
        if recomputation is not None:
            recomputation.keep_scales((call.scales.clone(), call.weight_scales.clone(), is_first))
        await_update(module, groups, state)
        if is_first and state.depth > 0:
            status.has_backward = True
    if needs_gradients:
        call.groups, call.is_first = groups, is_first
    return call


def await_update(module: Any, groups: tuple[Any, ...], state: State) -> None:
    """Have the module's forward scales updated at the end of the region."""
    if state.depth > 0 and module._run_status.has_backward is None:
        module._run_status.has_backward = False
        state.pending = Pending(module, groups, state.pending)


def grad_state_of(module: Any, request: DelayedScalingRequest, groups: tuple[Any, ...], is_first: bool) -> GradState:
    """Return the module's live state of gradients."""
    number = module._number if groups else None  # ranks compare by it which modules they reduce
    state = module.scale_bwd, module.amax_history_bwd, number
    return live_grad_state(request, *state, groups, is_first, backward_clears(request))


def weight_scales(module: Any, call: RunSettings) -> Any:
    """Return the scales that the weights of this run are quantized with, or were quantized with when they were kept."""
    if call.skips is not None:
        with lasting():
            scales = module.scale_fwd.clone()
            if module._weight_scales is not None:
                scales = torch.where(call.skips == 1, module._weight_scales, scales)
        module._weight_scales = scales
        return scales
    if call.reuses:
        return call.scales if module._weight_scales is None else module._weight_scales
    if call.caches:
        with lasting():
            module._weight_scales = module.scale_fwd.clone()
    return call.scales


def delayed_of(module: Any, call: RunSettings) -> Delayed | None:
    """Return delayed scaling's tensors as the function of a module takes them, or None if the plan has none."""
    if call.scales is None or call.plan.request is None:
        return None
    _, history_fwd, scale_bwd, history_bwd = scaling_tensors(module)
    return Delayed(
        call.scales,
        None if call.weight_scales is call.scales else call.weight_scales,
        call.grad_scales,
        history_fwd,
        scale_bwd,
        history_bwd,
        module._number if call.groups else None,
        ORDER_TOKEN if call.groups else None,
        call.records,
        call.copies_scales,
        tuple([group.group_name for group in call.groups]),
        call.is_first,
        backward_clears(call.plan.request),
    )
