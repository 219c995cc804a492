"""This module finds what a step is made of: its kernels on the GPU, the time between them, and the host's time, in all
and in the code of its graphs."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import CompiledFxGraph

from bench._timing import MOST_BEFORE, SETTLED_MS

STEPS = 3  # the last ones of a profile, which count
TIMED = 60  # with a clock around each graph; the first half warms up


@dataclass(frozen=True, slots=True)
class Kernels:
    """A `Kernels` says what one step does on the GPU."""

    by_name: dict[str, tuple[float, float]]  # how often each is launched, and its milliseconds
    idle_ms: float  # between the first and the last kernel, while none runs

    @property
    def launches(self) -> float:
        return sum(launches for launches, _ in self.by_name.values())

    @property
    def ms(self) -> float:
        return sum(ms for _, ms in self.by_name.values())


def kernels(step: Callable[[], Any], ms: float) -> Kernels:
    """Return the kernels of a step that takes about `ms` milliseconds.

    As where steps are timed, the card first runs this work alone until its clock has settled. All steps are profiled,
    because the host runs ahead of the GPU, and those that count are the last, by the number of their kernels.
    """
    count = STEPS + min(MOST_BEFORE, math.ceil(SETTLED_MS / ms))
    activities = [torch.profiler.ProfilerActivity.CUDA]
    # Without `acc_events` it warns that it may lose some.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    events = events[len(events) * (count - STEPS) // count :]
    found: dict[str, tuple[float, float]] = {}
    idle, end = 0.0, math.inf
    for event in events:
        launches, so_far = found.get(event.name, (0.0, 0.0))
        found[event.name] = launches + 1 / STEPS, so_far + event.device_time / 1e3 / STEPS
        idle += max(0.0, event.time_range.start - end)
        end = event.time_range.end if end == math.inf else max(end, event.time_range.end)
    return Kernels(dict(sorted(found.items(), key=lambda item: -item[1][1])), idle / 1e3 / STEPS)


def host_ms(step: Callable[[], Any], wait: Callable[[], Any]) -> tuple[float, float]:
    """Return the host's milliseconds of a step, in all and inside of the code that Inductor wrote for its graphs:
    launches and allocations, without guards, autograd or modules. `wait` empties the GPU's queue, so that no launch
    waits for it."""
    whole: list[float] = []
    spent: list[float] = []
    call = CompiledFxGraph.__call__

    def timed(graph: CompiledFxGraph, inputs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(graph, inputs)
        finally:
            spent[-1] += time.perf_counter() - start

    with mock.patch.object(CompiledFxGraph, "__call__", timed):
        for _ in range(TIMED):
            wait()
            spent.append(0.0)
            start = time.perf_counter()
            step()
            whole.append(time.perf_counter() - start)
    in_all, in_code = (statistics.median(times[TIMED // 2 :]) * 1e3 for times in (whole, spent))
    return in_all, in_code
