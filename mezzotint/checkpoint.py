"""`checkpoint`: torch's activation checkpointing for code with quantized modules in it.

The recomputation runs under the recipe of the first run, wherever backward is called, with the scales of the first
run; it enters no maximum a second time and keeps no workspace.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mezzotint.quantization import STATE


class _Recomputation:
    """The scales of delayed scaling that the modules of one region used, in order."""

    __slots__ = ("is_second", "position", "scales")

    def __init__(self) -> None:
        self.is_second, self.position = False, 0
        self.scales: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep_scales(self, scales: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Those of this call, and those that kept weights were quantized with."""
        self.scales.append(scales)

    def next_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self.scales[self.position]
        self.position += 1
        return scales


class _Run:
    """The function, run once under the state that it met, and again under the same."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.state = (STATE.enabled, STATE.calibrating, STATE.recipe, STATE.group)
        self.recomputation = _Recomputation()
        self.has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = (STATE.enabled, STATE.calibrating, STATE.recipe, STATE.group)
        outer_recomputation = STATE.recomputation
        recomputation = self.recomputation
        recomputation.is_second, recomputation.position = self.has_run, 0
        STATE.enabled, STATE.calibrating, STATE.recipe, STATE.group = self.state
        STATE.recomputation = recomputation
        try:
            return self.function(*args, **kwargs)
        finally:
            STATE.enabled, STATE.calibrating, STATE.recipe, STATE.group = outer
            STATE.recomputation = outer_recomputation
            self.has_run = True


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, whose intermediate results are not kept but computed again in backward.

    Further keyword arguments of `torch.utils.checkpoint.checkpoint` (`determinism_check`, `debug`, …) go to it.
    """
    if distribute_saved_activations:
        raise NotImplementedError("distribute_saved_activations: tensor parallelism is not there yet; leave it False")
    if torch.compiler.is_compiling():
        # The compiler recomputes operations, not Python: there is no second run. But it would read delayed scaling's
        # scales again, after they were written: modules refuse that.
        outer, STATE.recomputes_in_graph = STATE.recomputes_in_graph, True
        made = torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        STATE.recomputes_in_graph = outer
        return made
    return torch_checkpoint(_Run(function), *args, use_reentrant=use_reentrant, **kwargs)
