"""`checkpoint`: this is torch's activation checkpointing for code with quantized modules in it.

The recomputation runs under the recipe of the first run, wherever backward is called, with the scales of the first run.
It records no amax a second time and keeps no quantized weights. Random numbers are the same again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mezzotint.region import current_state, get_autocast_state, set_autocast_state

TORCH_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


SavedScales = tuple[torch.Tensor, torch.Tensor, bool]


class _Recomputation:
    """A `_Recomputation` has the scales of delayed scaling that the modules of one checkpoint used, in order, including
    those of a checkpoint inside.

    `outer` is that of the checkpoint around this one. When that runs again, this one is made anew, and runs with its
    scales.
    """

    __slots__ = ("has_backward", "has_run", "is_second", "outer", "position", "scales")

    def __init__(self, outer: Any) -> None:
        self.outer = outer
        self.has_backward = torch.is_grad_enabled() or (outer is not None and outer.has_backward)
        self.has_run, self.is_second, self.position = False, False, 0
        self.scales: list[SavedScales] = []

    def start(self) -> None:
        """Start a run. The first run of a checkpoint that is inside of a second run counts as a second one, too."""
        self.is_second = self.has_run or (self.outer is not None and self.outer.is_second)
        self.position = 0

    def keep_scales(self, scales: SavedScales) -> None:
        """Keep the call's scales, those that kept weights were quantized with, and whether its backward is the last."""
        self.scales.append(scales)
        if self.outer is not None:
            self.outer.keep_scales(scales)

    def next_scales(self) -> SavedScales:
        if not self.has_run:
            self.scales.append(self.outer.next_scales())
        scales = self.scales[self.position]
        self.position += 1
        return scales


class _Run:
    """A `_Run` calls the function once under the state that it met, and again under the same.

    The tracker's generators continue from where the first run ended, however often it is run again.
    """

    def __init__(self, function: Callable[..., Any], get_rng_state_tracker: Callable[[], Any] | None) -> None:
        self.function = function
        self.state = get_autocast_state()
        self.recomputation = _Recomputation(current_state().recomputation)
        self.tracker: Any = None if get_rng_state_tracker is None else get_rng_state_tracker()
        self.rng_states = None if self.tracker is None else self.tracker.get_states()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, outer = current_state(), get_autocast_state()
        outer_recomputation = state.recomputation
        outer_rng = self.tracker.get_states() if self.tracker is not None and self.recomputation.has_run else None
        self.recomputation.start()
        set_autocast_state(self.state)
        state.recomputation = self.recomputation
        if outer_rng is not None:
            self.tracker.set_states(self.rng_states)
        try:
            return self.function(*args, **kwargs)
        finally:
            if outer_rng is not None:
                self.tracker.set_states(outer_rng)
            set_autocast_state(outer)
            state.recomputation = outer_recomputation
            self.recomputation.has_run = True


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Return `function(*args, **kwargs)`, whose intermediate results are not kept but computed again in backward.

    Unlike `torch.utils.checkpoint.checkpoint`, the second run quantizes as the first one did, with the same recipe and
    the same scales.

    Args:
        function: The function, or module, that is called.
        *args: Its positional arguments.
        use_reentrant: Which of PyTorch's two implementations is used, as in `torch.utils.checkpoint.checkpoint`. The
            default is True; compiled code always uses the one that is not reentrant.
        distribute_saved_activations: It must be False: what is saved stays whole on each rank.
        tp_group: The process group of tensor parallelism. It is accepted and has no effect.
        get_rng_state_tracker: A function without arguments that returns the `CudaRNGStatesTracker` which `function`
            forks, so that it draws the same random numbers again, or None.
        **kwargs: Keyword arguments of `torch.utils.checkpoint.checkpoint`, which go to that; all others go to
            `function`.

    Returns:
        What `function` returns.

    Raises:
        NotImplementedError: If `distribute_saved_activations` is True.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.LayerNormMLP(32, 64, device="cpu")
        >>> x = torch.randn(32, 32, requires_grad=True)
        >>> with mz.autocast("mxfp8"):
        ...     y = mz.checkpoint(layer, x, use_reentrant=False)
        >>> y.sum().backward()
        >>> x.grad.shape
        torch.Size([32, 32])
    """
    if distribute_saved_activations:
        raise NotImplementedError(
            "distribute_saved_activations: what is saved stays whole on each rank; leave it False, and split tokens "
            "with sequence_parallel"
        )
    if torch.compiler.is_compiling():
        # The compiler recomputes operations, not Python: there is no second run. But it would read delayed scaling's
        # scales again, after they were written: modules refuse that.
        state = current_state()
        outer, state.recomputes_in_graph = state.recomputes_in_graph, True
        made = torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        state.recomputes_in_graph = outer
        return made
    if use_reentrant:  # torch then takes no keyword arguments for the function
        function = partial(function, **{name: kwargs.pop(name) for name in [*kwargs] if name not in TORCH_OPTIONS})
    return torch_checkpoint(_Run(function, get_rng_state_tracker), *args, use_reentrant=use_reentrant, **kwargs)
