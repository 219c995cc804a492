"""Clocks: CUDA events around queued calls, steps that take turns, interleaved host timings, the bandwidth of a copy."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

SETTLED_MS, MOST_BEFORE = 60.0, 40  # of its own work, before a step is timed in its turn

ONE_THREAD = "run backward in the thread that calls it, for all (torch.autograd.set_multithreading_enabled(False))"


def cuda_ms(call: Callable[[torch.Tensor], Any], inputs: Sequence[torch.Tensor], warmup: int, reps: int) -> float:
    """Median milliseconds of `call`, the inputs taken in turn.

    Nothing waits between the calls: the queue is ahead of the GPU, so that the host's share of a launch shows only
    where it is longer than the kernels before it.
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
    """GB/s, read plus written, of a device-to-device copy of x."""
    target = torch.empty_like(x)
    return 2 * x.nbytes / cuda_ms(target.copy_, [x], warmup, reps) / 1e6


def interleaved_ms(
    calls: Sequence[Callable[[], Any]], reps: int, budget_s: float, clock: Callable[[], float]
) -> tuple[list[list[float]], int]:
    """Host milliseconds of each call, and how often each was timed.

    They take turns, and take turns at going first, so that what else the machine does meets all alike. A first round
    warms up; where it alone is over the budget it is all there is.
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
    """Median milliseconds of each step, warm before. They take turns, and take turns at going first.

    On a GPU by events. In its turn a step runs alone for `SETTLED_MS`, and then counts: a card at its power limit has a
    clock for each kind of work, and would lend a step that of the one before it; and what lies before it in the queue
    is its own work, as in training, not that of another candidate, behind which a slow host could hide.
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
