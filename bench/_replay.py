"""This module finds the floor of an eager step: the calls of PyTorch and the launches of kernels that the step makes,
with nothing in between.

They are those of one real step. Each is recorded with its arguments, and made again with the same ones by an autograd
function: forward's in its forward, backward's in its backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from mezzotint.kernels._relaunch import Relaunched, call_of

Calls = list[Callable[[], Any]]


class _Recorder(TorchFunctionMode):
    """A `_Recorder` notes the calls that make or write tensors. Attributes, and questions such as that of a size, are
    left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else (result,)
        if any(isinstance(each, torch.Tensor) for each in made) and func.__name__ != "__get__":
            self.calls.append(partial(func, *args, **(kwargs or {})))
        return result


@contextmanager
def recorded() -> Iterator[Calls]:
    """Record the calls of PyTorch, and the launches of this package's kernels, that this thread makes meanwhile."""
    recorder = _Recorder()
    # Each op runs its own code, in which each launch is seen.
    runs_its_code = mock.patch.object(Relaunched, "__call__", lambda op, *args: op.run(*args))
    with recorder, runs_its_code:
        if not torch.cuda.is_available():
            yield recorder.calls
            return
        from mezzotint.kernels.triton import _launch

        def noted(compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], runtime: Any) -> None:
            stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
            recorder.calls.append(partial(compiled.run, *call_of(compiled, grid, stream, args)))

        with mock.patch.object(_launch, "note_launch", noted):
            yield recorder.calls


class _Replay(torch.autograd.Function):
    """This function makes recorded calls, and returns tensors that were computed before."""

    @staticmethod
    def forward(ctx: Any, replay: "Replay", *tensors: torch.Tensor) -> torch.Tensor:
        ctx.replay = replay
        ctx.save_for_backward(*tensors)
        for call in replay.forward:
            call()
        return replay.y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018 (unpacking takes time)
        for call in ctx.replay.backward:
            call()
        return None, *ctx.replay.gradients


class Replay:
    """A `Replay` is the floor of a module's step: `forward` and `backward` are the calls of one that was recorded."""

    def __init__(self, run: Callable[[], torch.Tensor], leaves: list[torch.Tensor], gradient: torch.Tensor) -> None:
        """Record `run`, which returns y, and the backward from its `gradient` to the `leaves`. It must have run
        before."""
        self.leaves, self.gradient = leaves, gradient
        for leaf in leaves:
            leaf.grad = None
        with torch.autograd.set_multithreading_enabled(False):
            with recorded() as self.forward:
                y = run()
            with recorded() as self.backward:
                # The engine itself: `y.backward` would be one call, in which nothing is recorded.
                engine: Any = torch.autograd.Variable._execution_engine
                engine.run_backward((y,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        self.y, self.gradients = y.detach(), [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None

    def __call__(self) -> None:
        """Make the calls of the step again, and add gradients to the leaves."""
        _Replay.apply(self, *self.leaves).backward(self.gradient)

    def count(self) -> int:
        """Return the number of calls."""
        return len(self.forward) + len(self.backward)
