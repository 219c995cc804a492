"""Launches without Triton's search for the compiled kernel: `Fast` keeps what the first launch found.

`kernel[grid](…)` binds, specialises and looks up its arguments in Python at each call, which takes some 20 µs, more
than a small kernel runs. `Fast` keeps the result by what it depends on: of a tensor its dtype and 16-byte alignment, of
an int whether it is 1 or a multiple of 16 and whether it needs 64 bits, of a float nothing, all else by value. The
compiled kernel is then launched by its own `run`. With a profiler's hooks, and in the interpreter, launches go through
Triton.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction


class Fast:
    """A `Fast` wraps a jitted kernel; `kernel[grid](…)` takes tensors and numbers by position, constants by name."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.found: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if _is_traced(args):
            constants.pop("enable_fp_fusion", None)  # It is no option there: see `launch_in_graphs`.
            torch.library.wrap_triton(self.kernel)[grid](*args, **constants)
            return
        if not isinstance(self.kernel, JITFunction) or _hooked():
            self.kernel[grid](*args, **constants)
            return
        device = torch.cuda.current_device()
        kinds, raw = _prepared(args)
        key = (device, kinds, tuple(constants), tuple(constants.values()))
        found = self.found.get(key)
        if found is None:
            compiled = self.kernel[grid](*args, **constants)
            names = self.kernel.arg_names
            rest = tuple([constants[name] for name in names[len(args) :]])
            self.found[key] = (compiled, rest)
            return
        compiled, rest = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(
            grid[0],
            grid[1] if len(grid) > 1 else 1,
            grid[2] if len(grid) > 2 else 1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *raw,
            *rest,
        )


# Eager code launches with tensors of these types. With others the compiler traces the launch.
_AT_HAND = (torch.Tensor, torch.nn.Parameter)


def _is_traced(args: tuple[Any, ...]) -> bool:
    """Return whether the compiler traces a launch, by the first tensor among its arguments; some may be None."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return type(arg) not in _AT_HAND
    return False


def scratch(x: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return FP32 tensors of these sizes on the device of x, as parts of one allocation. In a graph each is its own,
    because a compiler copies all that shares an allocation with what it writes."""
    if type(x) in _AT_HAND:
        return x.new_empty(sum(sizes), dtype=torch.float32).split(list(sizes))
    return [x.new_empty(size, dtype=torch.float32) for size in sizes]


def _hooked() -> bool:
    """Return whether a profiler has hooked launches; an empty chain of hooks, as newer Tritons have it, is none."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def _prepared(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what a compiled kernel depends on, and its arguments with addresses in place of tensors, so that the
    driver is not asked about them one by one. It is written as one loop because it runs at each launch."""
    kinds: list[Any] = []
    raw: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            address = arg.data_ptr()
            kinds.append(arg.dtype)
            kinds.append(address & 15 == 0)
            kinds.append(arg.is_cuda)  # Triton checks the first of a kind, and refuses one of another device.
            raw.append(address)
            continue
        raw.append(arg)
        kind = type(arg)
        if kind is int:
            is_short = -0x80000000 <= arg < 0x80000000
            kinds.append(1 if arg == 1 else 16 if is_short and arg & 15 == 0 else (arg & 15 == 0, is_short))
        elif kind is float:
            kinds.append(float)
        elif kind is tuple:
            inner, raw[-1] = _prepared(arg)
            kinds.append(inner)
        else:
            kinds.append(arg)
    return tuple(kinds), tuple(raw)
