"""Shared inputs: linears that read the same tensor, as q, k and v do, hold one quantized copy of it for backward.

In a graph the compiler sees that they make the same copy. In eager code the run of a linear leaves word of its input
and of the column-wise copy that it holds (`State.shared_input`). If the next linear of this thread reads the same input
and would make the same copy, it takes that over, and makes only the row-wise one, which no one holds: it is freed as
soon as it is multiplied.

What is left are weak references, so nothing is held longer than without them. While the copy exists a backward that
needs it is to come, and a program must leave the input as it is until then: `nn.Linear` would hold the input itself.
"""

from typing import Any, NamedTuple
from weakref import ref

import torch

from mezzotint.kernels._lib import matrix_shape
from mezzotint.kernels._relaunch import TENSOR_CLASSES
from mezzotint.layer.plan import Plan
from mezzotint.region import THREAD
from mezzotint.tensor.fsdp_directions import saving_hooks
from mezzotint.tensor.quantize import assemble
from mezzotint.tensor.quantizer import Quantizer

Place = tuple[int | None, Any]


class SharedInput(NamedTuple):
    """A `SharedInput` refers to the input of a run, and to the column-wise buffers that the run holds of it."""

    x: "ref[torch.Tensor]"
    version: int  # how often x had been written to
    quantizer: Quantizer
    place: Place
    columns: "tuple[ref[torch.Tensor], ...]"


def place_of(x: torch.Tensor) -> Place | None:
    """Return what must be equal for two runs to hold one copy of x: the stream, in whose order kernels write and read
    it, and the hooks that get what is saved. Return None where nothing is shared: below Dynamo, where x is a tensor of
    another class, and while a CUDA graph is captured, because each graph is replayed without the others."""
    if type(x) not in TENSOR_CLASSES:
        return None
    if not x.is_cuda:
        return None, saving_hooks()
    if torch._C._cuda_isCurrentStreamCapturing():
        return None
    return torch._C._cuda_getCurrentRawStream(x.get_device()), saving_hooks()


def held_columns(plan: Plan, x: torch.Tensor, place: Place) -> tuple[torch.Tensor, ...] | None:
    """Return the column-wise buffers of x that another run holds and that a run of this plan would make, or None."""
    word: SharedInput | None = THREAD.own.shared_input
    if word is None or word.x() is not x or word.version != x._version:
        return None
    if word.quantizer is not plan.shared_input or word.place != place:
        return None
    held: list[torch.Tensor] = []
    for each in word.columns:
        buffer = each()
        if buffer is None:
            return None
        held.append(buffer)
    return tuple(held)


def leave_word(plan: Plan, x: torch.Tensor, place: Place, y: torch.Tensor) -> None:
    """Leave word of the column-wise buffers that the run from x to y holds."""
    assert plan.shared_input is not None
    columns: tuple[ref[torch.Tensor], ...] = y.grad_fn.first_saved  # type: ignore[union-attr]
    THREAD.own.shared_input = SharedInput(ref(x), x._version, plan.shared_input, place, columns)


def shared_columns(plan: Plan, x: torch.Tensor, columns: tuple[torch.Tensor, ...]) -> Any:
    """Return the column-wise buffers of x as a storage."""
    assert plan.shared_input is not None
    return assemble(columns, plan.shared_input, True, matrix_shape(x.shape), x.dtype, plan.shared_input)
