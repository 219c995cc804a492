"""Weight gradients that are computed later than backward: `delay_wgrad_compute=True`, then `backward_dw()`."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class WeightGradStore:
    """First in, first out: the operands of weight gradients that backward left. A copy has none of them, as a copy of
    a parameter has no gradient."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        """`compute(wgrad, dy, x, fast)` gives gradients."""
        self.compute = compute
        self.waiting: deque[tuple[Any, ...]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightGradStore, (self.compute,)

    def put(self, *operands: Any) -> None:
        self.waiting.append(operands)

    def run(self) -> Any:
        """The oldest, computed."""
        if not self.waiting:
            raise RuntimeError("backward_dw: no weight gradient waits; run backward first, once for each call")
        with torch.no_grad():
            return self.compute(*self.waiting.popleft())
