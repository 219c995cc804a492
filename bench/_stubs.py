"""This module replaces kernels by ones that compute nothing: each returns again what it returned the
first time for such arguments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import mezzotint.functional.gemm
from mezzotint.kernels import _lib, quantize_ops
from mezzotint.kernels._recorder import Recorder
from mezzotint.layer.rerun import RECORDED_RUNS


class _Stub:
    """A `_Stub` stands in the place of a kernel."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel, self.given = kernel, dict[Any, Any]()

    def __call__(self, *args: Any) -> Any:
        # It calls no function, because what a stub takes counts as time of a step.
        key = tuple(
            [arg.shape if isinstance(arg, torch.Tensor) else len(arg) if isinstance(arg, list) else arg for arg in args]
        )
        if key not in self.given:
            self.given[key] = self.kernel(*args)
        return self.given[key]


def _run_stub(recorder: Recorder, stub: Callable[..., Any], *args: Any) -> Any:
    """Have a recorded run find what a stub returns in no time, as it finds its launches."""
    with torch._C.DisableTorchFunction():
        result = stub(*args)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        recorder.note(lambda *tensors: result, tensors, {}, result)
    return result


@contextmanager
def stubbed_kernels() -> Iterator[None]:
    """Replace the kernels that eager code on a CPU calls, the products among them.

    What is left of a step is Python, autograd and the allocation of tensors.
    """
    tables = [
        (table, dict(table))
        for table in (_lib._IMPLEMENTATIONS, quantize_ops._ENTERING, quantize_ops._ENTERING_SOURCES)
    ]
    product = mezzotint.functional.gemm.product_of
    for table, kernels in tables:
        table.update({op: (_Stub(cpu), cuda) for op, (cpu, cuda) in kernels.items()})
    mezzotint.functional.gemm.product_of = lambda *operands: _no_product
    RECORDED_RUNS.clear()
    try:
        with mock.patch.object(Recorder, "run_op", _run_stub):
            yield
    finally:
        RECORDED_RUNS.clear()
        for table, kernels in tables:
            table.update(kernels)
        mezzotint.functional.gemm.product_of = product


def _no_product(*args: Any) -> None: ...
