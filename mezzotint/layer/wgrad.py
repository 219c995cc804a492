"""Weight gradients that are computed later than backward: a module keeps their operands here with
`delay_wgrad_compute=True`, until `backward_dw()` is called."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class WeightGradStore:
    """A `WeightGradStore` queues the operands of weight gradients that backward left, first in, first out. A copy of a
    store is empty, as a copy of a parameter has no gradient."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        """Create an empty store; `compute(wgrad, dy, x, fast)` computes gradients."""
        self.compute = compute
        self.waiting: deque[tuple[Any, ...]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightGradStore, (self.compute,)

    def put(self, *operands: Any) -> None:
        self.waiting.append(operands)

    def run(self) -> Any:
        """Compute the oldest weight gradients that wait, and return them."""
        if not self.waiting:
            raise RuntimeError("backward_dw: no weight gradient waits; run backward first, once for each call")
        with torch.no_grad():
            return self.compute(*self.waiting.popleft())
