"""Clocks: this module times with CUDA events around queued calls, lets steps take turns, interleaves timings on the
host, and measures the bandwidth of a copy."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

SETTLED_MS, MOST_BEFORE = 60.0, 40  # of a step's own work, before it is timed in its turn

ONE_THREAD = "run backward in the thread that calls it, for all (torch.autograd.set_multithreading_enabled(False))"


def cuda_ms(call: Callable[[torch.Tensor], Any], inputs: Sequence[torch.Tensor], warmup: int, reps: int) -> float:
    """Return the median milliseconds of `call`, with the inputs taken in turn.

    Nothing waits between the calls: the queue is ahead of the GPU, so that the host's share of a launch shows only if
    it is longer than the kernels before it.
    """
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    torch.cuda.synchronize()
    for i in range(warmup):
        call(inputs[i % len(inputs)])
    for i, (start, end) in enumerate(events):
        start.record()
        call(inputs[i % len(inputs)])
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def copy_gbps(x: torch.Tensor, warmup: int, reps: int) -> float:
    """Return the GB/s, read plus written, of a device-to-device copy of x."""
    target = torch.empty_like(x)
    return 2 * x.nbytes / cuda_ms(target.copy_, [x], warmup, reps) / 1e6


def interleaved_ms(
    calls: Sequence[Callable[[], Any]], reps: int, budget_s: float, clock: Callable[[], float]
) -> tuple[list[list[float]], int]:
    """Return the host milliseconds of each call, and how often each was timed.

    The calls take turns, and take turns at going first, so that whatever else the machine does affects all alike. A
    first round warms up; if it alone exceeds the budget, its times are the result.
    """

    def turn(order: range) -> None:
        for which in order:
            start = clock()
            calls[which]()
            times[which].append((clock() - start) * 1e3)

    times: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    turn(range(len(calls)))
    once = time.perf_counter() - begin
    count = min(reps, int(budget_s / max(once, 1e-9)))
    if count:
        times = [[] for _ in calls]
        for i in range(count):
            turn(range(len(calls))[:: -1 if i % 2 else 1])
    return times, max(1, count)


def turns_ms(steps: Sequence[Callable[[], Any]], device: str, reps: int) -> list[float]:
    """Return the median milliseconds of each step, which must be warm; they take turns, and take turns at going first.

    On a GPU they are timed by events. In its turn a step runs alone for `SETTLED_MS`, and only then counts, for two
    reasons. A card at its power limit has a clock for each kind of work, and a step would inherit that of the one
    before it. And what lies before it in the queue is then its own work, as in training, not that of another candidate,
    behind which a slow host could hide.
    """
    if device == "cpu":
        times, _ = interleaved_ms(steps, reps, 5.0, time.perf_counter)
        return [statistics.median(own) for own in times]

    def once(step: Callable[[], Any], before: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(before):
            step()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    torch.cuda.synchronize()
    before = [min(MOST_BEFORE, math.ceil(SETTLED_MS / once(step, 1))) for step in steps]
    times: list[list[float]] = [[] for _ in steps]
    for i in range(reps):
        for which in range(len(steps))[:: -1 if i % 2 else 1]:
            times[which].append(once(steps[which], before[which]))
    return [statistics.median(own) for own in times]
