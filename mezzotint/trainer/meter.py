"""The meter measures how fast a run is, and how long it compiled."""

import sys
import time

import torch


class Meter:
    """A `Meter` measures the speed of the steps that compiled nothing, and the time of those that did."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.graphs = device, 0
        self.slow: list[float] = []
        self.fast_steps, self.fast_seconds = 0, 0.0
        self._graphs_before = self._seen = _count_graphs()
        self._start = time.perf_counter()

    def step(self, waits: bool) -> None:
        """Note that a step is done, or queued on the GPU; with `waits` the GPU is waited for."""
        count = _count_graphs()
        compiled, self._seen = count != self._seen, count
        self.graphs = count - self._graphs_before
        is_slow = compiled or not self.slow  # the first is slow in any case
        if is_slow or waits:
            self._wait()
        if is_slow:
            self.slow.append(self._lap())
        else:
            self.fast_seconds += self._lap()
            self.fast_steps += 1

    def pause(self) -> None:
        """Leave out what happened since the last step."""
        self._wait()
        self._lap()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _lap(self) -> float:
        start, self._start = self._start, time.perf_counter()
        return self._start - start

    @property
    def steps_per_second(self) -> float | None:
        return self.fast_steps / self.fast_seconds if self.fast_steps else None

    @property
    def compile_seconds(self) -> float:
        """Return the time of the steps that compiled, less what as many usual steps take."""
        if not self.graphs:
            return 0.0
        usual = self.fast_seconds / self.fast_steps if self.fast_steps else 0.0
        return max(sum(self.slow) - usual * len(self.slow), 0.0)


def _count_graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")  # if it was never imported, nothing was compiled
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]
