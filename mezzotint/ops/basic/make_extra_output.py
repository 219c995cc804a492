"""MakeExtraOutput: x, and x once more, as at the start of a residual branch."""

from typing import Any

import torch

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.pointwise import add
from mezzotint.ops.op import BasicOperation, OperationContext
from mezzotint.ops.quantizing import plain


class MakeExtraOutput(BasicOperation):
    """x as the output and as an extra output; their gradients are added up.

    `in_place` gives the memory of the extra output's gradient for the sum: nothing else may read it.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def fuser_forward_compute(self, input_: Any, **given: Any) -> Any:
        return input_, [(plain(input_),)], ()

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[OperationContext], input_: Any, tensors_to_save: Any, **given: Any
    ) -> None:
        pass

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        return add_gradient(plain(grad_output), basic_op_grad_extra_outputs[0][0], self.in_place), [()], [()]

    def extra_repr(self) -> str:
        return f"in_place={self.in_place}"


def add_gradient(dx: torch.Tensor, extra: torch.Tensor | None, in_place: bool) -> torch.Tensor:
    """round(dx + extra); into the memory of `extra` where that is given, in eager code: a graph plans its own memory.

    Not where both are one tensor, as autograd hands to both sides of an addition.
    """
    if extra is None:
        return dx
    if in_place and extra.dtype == dx.dtype and not torch.compiler.is_compiling() and not _share_memory(dx, extra):
        return extra.add_(dx)
    return run_op(add, dx, extra)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
