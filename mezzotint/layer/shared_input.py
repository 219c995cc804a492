"""Shared inputs: linears that read the same tensor, as q, k and v do, hold one quantized copy of it for backward.

In a graph the compiler sees that they make the same copy. In eager code each run of a linear leaves word
(`State.shared_input`) of its input and of the column-wise copy that it holds for backward. If the next linear of this
thread reads the same input and would make the same copy, it takes that one over. It then quantizes row-wise alone: the
row-wise copy serves forward's product, after which no one holds it.

Word is left by weak references, so nothing is held for longer. The copy exists as long as a backward that reads it may
come, and until then a program leaves the input as it is: `nn.Linear` would hold the input itself.
"""

from typing import Any, NamedTuple
from weakref import ref

import torch

from mezzotint.kernels._lib import matrix_shape
from mezzotint.kernels._relaunch import TENSOR_CLASSES
from mezzotint.layer.plan import Plan
from mezzotint.region import THREAD
from mezzotint.tensor.fsdp_directions import are_of_checkpoint, saving_hooks
from mezzotint.tensor.quantize import assemble
from mezzotint.tensor.quantizer import Quantizer

SMALLEST_SHARED = 1 << 16  # elements; of a smaller input each linear holds its own copy, which costs less than the look


class SharedInput(NamedTuple):
    """A `SharedInput` refers to the input of a run, and to the column-wise buffers that the run holds of it."""

    x: "ref[torch.Tensor]"
    version: int  # how often x had been written to
    quantizer: Quantizer
    stream: int
    columns: "tuple[ref[torch.Tensor], ...]"


def sharing_stream(x: torch.Tensor) -> int | None:
    """Return the stream in whose order kernels write and read what is shared of x, or None where nothing is shared.

    That is for a small x; below Dynamo, where x is a tensor of another class; inside of a checkpoint, whose second run
    would not find what its first one found; and while a CUDA graph is captured, because each graph is replayed without
    the others.
    """
    if type(x) not in TENSOR_CLASSES or x.numel() < SMALLEST_SHARED:
        return None
    hooks = saving_hooks()
    if hooks is not None and are_of_checkpoint(hooks):
        return None
    if not x.is_cuda:
        return 0
    return None if torch._C._cuda_isCurrentStreamCapturing() else torch._C._cuda_getCurrentRawStream(x.get_device())


def held_columns(plan: Plan, x: torch.Tensor, stream: int) -> tuple[torch.Tensor, ...] | None:
    """Return the column-wise buffers of x that another run holds and that a run of this plan would make, or None."""
    word: SharedInput | None = THREAD.own.shared_input
    if word is None or word.x() is not x or word.version != x._version:
        return None
    if word.quantizer is not plan.shared_input or word.stream != stream:
        return None
    held: list[torch.Tensor] = []
    for each in word.columns:
        buffer = each()
        if buffer is None:
            return None
        held.append(buffer)
    return tuple(held)


def leave_word(plan: Plan, x: torch.Tensor, stream: int, y: torch.Tensor) -> None:
    """Leave word of the column-wise buffers that the run from x to y holds."""
    assert plan.shared_input is not None
    columns: tuple[ref[torch.Tensor], ...] = y.grad_fn.first_saved  # type: ignore[union-attr]
    THREAD.own.shared_input = SharedInput(ref(x), x._version, plan.shared_input, stream, columns)


def shared_columns(plan: Plan, x: torch.Tensor, columns: tuple[torch.Tensor, ...]) -> Any:
    """Return the column-wise buffers of x as a storage."""
    assert plan.shared_input is not None
    return assemble(columns, plan.shared_input, True, matrix_shape(x.shape), x.dtype, plan.shared_input)
