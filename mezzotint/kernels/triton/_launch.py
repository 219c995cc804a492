"""Launches without Triton's search for the compiled kernel: `Fast` keeps what the first launch found.

`kernel[grid](…)` binds, specialises and looks up its arguments in Python at each call, which takes some 20 µs, more
than a small kernel runs. `Fast` keeps the result by what it depends on: of a tensor its dtype and 16-byte alignment, of
an int whether it is 1 or a multiple of 16 and whether it needs 64 bits, of a float nothing, all else by value. The
compiled kernel is then launched by its own `run`. With a profiler's hooks, and in the interpreter, launches go through
Triton.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from mezzotint.kernels._relaunch import call_of, has_hooks, note_launch, taker


class Fast:
    """A `Fast` wraps a jitted kernel; `kernel[grid](…)` takes tensors and numbers by position, constants by name."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.is_compiled = isinstance(kernel, JITFunction)
        self.found: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        types = tuple(map(type, args))
        places = _places(types)
        if places.is_traced:
            constants.pop("enable_fp_fusion", None)  # It is no option there: see `launch_in_graphs`.
            torch.library.wrap_triton(self.kernel)[grid](*args, **constants)
            return
        if not self.is_compiled or has_hooks(knobs.runtime):
            note_launch(None, grid, args, knobs.runtime)
            self.kernel[grid](*args, **constants)
            return
        device = torch.cuda.current_device()
        kinds, raw = _prepared(args, places)
        key = (device, types, kinds, tuple(constants), tuple(constants.values()))
        found = self.found.get(key)
        if found is None:
            compiled = self.kernel[grid](*args, **constants)
            rest = tuple([constants[name] for name in self.kernel.arg_names[len(args) :]])
            self.found[key] = (compiled, rest)
        else:
            compiled, rest = found
            stream = torch._C._cuda_getCurrentRawStream(device)
            compiled.run(*call_of(compiled, grid, stream, (*raw, *rest)))
        note_launch(compiled, grid, (*args, *rest), knobs.runtime)


# Eager code launches with tensors of these types. With others the compiler traces the launch.
_AT_HAND = (torch.Tensor, torch.nn.Parameter)


class _Places(NamedTuple):
    """A `_Places` says what is where among the arguments of a launch. None and floats are not looked at: of them the
    compiled kernel depends on the type alone."""

    is_traced: bool  # the compiler traces the launch, as the type of the first tensor tells
    tensors: tuple[int, ...]
    tensors_of: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...]]
    ints_of: Callable[[tuple[Any, ...]], tuple[int, ...]]
    tuples: tuple[int, ...]
    others_of: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # they count by value


@lru_cache(maxsize=4096)
def _places(types: tuple[type, ...]) -> _Places:
    """Return the places of arguments of these types."""
    tensors = tuple([i for i, kind in enumerate(types) if issubclass(kind, torch.Tensor)])
    ints, tuples = [tuple([i for i, kind in enumerate(types) if kind is one]) for one in (int, tuple)]
    known = {*tensors, *ints, *tuples, *[i for i, kind in enumerate(types) if kind in (float, type(None))]}
    is_traced = bool(tensors) and types[tensors[0]] not in _AT_HAND
    others = tuple([i for i in range(len(types)) if i not in known])
    return _Places(is_traced, tensors, taker(tensors), taker(ints), tuples, taker(others))


def scratch(x: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return FP32 tensors of these sizes on the device of x, as parts of one allocation. In a graph each is its own,
    because a compiler copies all that shares an allocation with what it writes."""
    if type(x) in _AT_HAND:
        return x.new_empty(sum(sizes), dtype=torch.float32).split(list(sizes))
    return [x.new_empty(size, dtype=torch.float32) for size in sizes]


def _prepared(args: tuple[Any, ...], places: _Places) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what a compiled kernel depends on beside the types of its arguments, and these with addresses in place of
    tensors, so that the driver is not asked about them one by one. It runs at each launch, and calls functions that are
    written in C."""
    tensors = places.tensors_of(args)
    addresses = tuple(map(_address_of, tensors))
    is_aligned = reduce(or_, addresses, 0) & 15 == 0 or tuple([address & 15 == 0 for address in addresses])
    raw = list(args)
    for i, address in zip(places.tensors, addresses, strict=True):
        raw[i] = address
    inner: list[Any] = []
    for i in places.tuples:
        types = tuple(map(type, args[i]))
        kinds, raw[i] = _prepared(args[i], _places(types))
        inner.append((types, kinds))
    kinds_of_tensors = tuple(map(_kind_of_tensor, tensors))
    kinds_of_ints = tuple(map(_kind_of_int, places.ints_of(args)))
    return (is_aligned, kinds_of_tensors, kinds_of_ints, tuple(inner), places.others_of(args)), tuple(raw)


_address_of = torch.Tensor.data_ptr
# Triton checks the first of a kind, and refuses one of another device.
_kind_of_tensor = attrgetter("dtype", "is_cuda")


@lru_cache(maxsize=4096)
def _kind_of_int(value: int) -> Any:
    """Return what a compiled kernel depends on of an int."""
    is_short = -0x80000000 <= value < 0x80000000
    return 1 if value == 1 else 16 if is_short and value & 15 == 0 else (value & 15 == 0, is_short)
