"""Compile, run and compare, for tests of quantizers in graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mezzotint import QuantizedTensorStorage
from tests.quantizer_formats import FORMATS, buffers

# One of each kind: per tensor, stateful, blocks, Hadamard, two formats.
SOME = ("float8_current", "float8_delayed", "mxfp8", "nvfp4_rht_stochastic", "hybrid")


def over_every_format(always: tuple[str, ...] = SOME, **wanted: Any) -> pytest.MarkDecorator:
    """Parametrize `fmt` over all formats, or those with some options; all but those that run always are slow."""
    picked = [fmt for fmt in FORMATS.values() if all(getattr(fmt, option) == value for option, value in wanted.items())]
    return pytest.mark.parametrize(
        "fmt",
        [pytest.param(fmt, marks=() if fmt.name in always else pytest.mark.slow, id=fmt.name) for fmt in picked],
    )


def firsts() -> tuple[str, ...]:
    """Return the first format of each class of quantizers: the compiler sees a class and its fields."""
    first = {type(fmt.make()): name for name, fmt in reversed(FORMATS.items())}
    return (*first.values(), *SOME)


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> tuple[Any, Any]:
    """The function compiled whole, and the counter of its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def leaves(value: Any) -> list[Any]:
    """Tensors and plain values inside a result."""
    if isinstance(value, QuantizedTensorStorage):
        return [type(value).__name__, value.get_usages(), *buffers(value).values()]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def assert_same(actual: Any, expected: Any) -> None:
    """Bitwise equality of results, whatever they are made of."""
    actual, expected = leaves(actual), leaves(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            assert torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))
        else:
            assert a == b


def run(function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(0)
    return function(*args)
