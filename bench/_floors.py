"""This module finds the floor of a step, which it cannot be faster than: its matrix products alone, and the bytes
that quantization must move.

The products are those of one real step: each call is recorded with its operands, quantized as they are, and called
again with nothing in between.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import BaseTorchFunctionMode

from bench import _cases as cases
from bench._cases import Case, Shape
from mezzotint.functional import grouped_linear, linear

# The cores multiply by calling these functions.
PRODUCTS = ((linear, "multiply"), (grouped_linear, "grouped_gemm"), (grouped_linear, "grouped_gemm_packed"))
# This maps a recipe to how it quantizes x, the weight and the gradient.
FORMATS: dict[str, tuple[Case, Case, Case]] = {
    "delayed": (cases.float8_delayed(),) * 3,
    "current": (cases.float8_current(),) * 3,
    "rowwise": (cases.float8_rowwise(),) * 3,
    "block": (
        cases.float8_block("1x128", two_d=False),
        cases.float8_block("128x128", two_d=True),
        cases.float8_block("1x128", two_d=False),
    ),
    "mxfp8": (cases.mxfp8("mxfp8"),) * 3,
    "nvfp4": (cases.nvfp4("x"), cases.nvfp4("weight", two_d=True), cases.nvfp4("gradient", training=True)),
}


@contextmanager
def recorded() -> Iterator[list[Callable[[], Any]]]:
    """Record the products that run meanwhile in eager code, and yield the list of them, each to be called again."""
    calls: list[Callable[[], Any]] = []

    def record(product: Callable[..., Any]) -> Callable[..., Any]:
        def multiply(*args: Any, **kwargs: Any) -> Any:
            calls.append(lambda: product(*args, **kwargs))
            return product(*args, **kwargs)

        return multiply

    patches = [mock.patch.object(module, name, record(getattr(module, name))) for module, name in PRODUCTS]
    for patch in patches:
        patch.start()
    try:
        # In a mode of PyTorch's no run makes recorded calls, which would not come by here.
        with BaseTorchFunctionMode():
            yield calls
    finally:
        for patch in patches:
            patch.stop()


@dataclass(slots=True)
class Products:
    """A `Products` holds the matrix products of a step, and runs them as a step of their own."""

    calls: list[Callable[[], Any]]

    @classmethod
    def of(cls, step: Callable[[], Any]) -> "Products":
        with recorded() as calls:
            step()
        return cls(calls)

    @torch.no_grad()
    def __call__(self) -> None:
        for call in self.calls:
            call()


def least_bytes(name: str, m: int, k: int, n: int) -> int:
    """Return the bytes that one linear moves beyond its products: x (M, K), weight (N, K) and gradient
    (M, N) are quantized both ways."""
    shapes: tuple[Shape, Shape, Shape] = ((m, k), (n, k), (m, n))
    formats = FORMATS.get(name)
    if formats is None:
        return 0
    return sum(case.moved(shape, torch.bfloat16, True, True) for case, shape in zip(formats, shapes, strict=True))
