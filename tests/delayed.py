"""Recipes with delayed scaling, and what tests of them ask for."""

from collections.abc import Callable
from typing import Any

import torch

from mezzotint.recipe import (
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
)
from mezzotint.region import current_state


def in_force() -> tuple[Any, ...]:
    state = current_state()
    return state.enabled, state.calibrating, state.recipe, state.group, state.depth


CURRENT, MX, NV = Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()


def amax_of(x: torch.Tensor) -> float:
    return float(x.detach().float().abs().max())


DELAYED = {
    "max-3": DelayedScaling(amax_history_len=3),
    "max-1": DelayedScaling(amax_history_len=1),
    "most_recent-3": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
    "most_recent-1": DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
    "margin": DelayedScaling(amax_history_len=2, margin=3),
    "negative margin": DelayedScaling(amax_history_len=2, margin=-1),
    "e4m3": DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3),
}


def only(*wanted: str) -> Callable[[QuantizerRole], Any]:
    """Delayed scaling for these tensors, "input" or "fc2.input"; current scaling for the others."""

    def factory(role: QuantizerRole) -> Any:
        if role.tensor_type in wanted or f"{role.name}.{role.tensor_type}" in wanted:
            return DelayedScalingRequest(amax_history_len=2)
        return CURRENT.quantizer(role)

    return factory
