"""Weight gradients that are computed later than backward: `delay_wgrad_compute=True`, then `backward_dw()`."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class WeightGradStore:
    """First in, first out: the operands of weight gradients that backward left."""

    def __init__(self, compute: Callable[..., Any], accept: Callable[[Any], None]) -> None:
        """`compute(wgrad, dy, x, fast)` gives gradients, `accept` puts them where they belong."""
        self.compute, self.accept = compute, accept
        self.waiting: deque[tuple[Any, ...]] = deque()

    def put(self, *operands: Any) -> None:
        self.waiting.append(operands)

    def run(self) -> None:
        """Compute the oldest."""
        if not self.waiting:
            raise RuntimeError("backward_dw: no weight gradient waits; run backward first, once for each call")
        with torch.no_grad():
            self.accept(self.compute(*self.waiting.popleft()))


def add_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """As autograd accumulates; None went to `main_grad`."""
    if gradient is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
