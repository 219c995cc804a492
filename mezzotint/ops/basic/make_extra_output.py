"""MakeExtraOutput: this operation returns x, and x once more, as at the start of a residual branch."""

from typing import Any

import torch

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.pointwise import add
from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import plain


class MakeExtraOutput(BasicOperation):
    """This operation returns x as the output and as an extra output, as at the start of a residual branch; their
    gradients are added up.

    Args:
        in_place: Whether the sum of gradients may be written over the extra output's gradient. Here it only asks for
            the fusion with a linear, and nothing is written over: autograd hands one tensor to all terms of a sum, and
            nobody can know who else reads it. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> y, x_again = ops.Sequential(ops.MakeExtraOutput(), ops.ReLU())(torch.full((4,), -1.0))
        >>> torch.equal(y, torch.zeros(4)), torch.equal(x_again, torch.full((4,), -1.0))
        (True, True)
    """

    num_extra_outputs = 1
    _keywords = ()
    _READS = ("in_place",)

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self._end_init()

    def fuser_forward_compute(self, input_: Any, **given: Any) -> Any:
        return input_, [(plain(input_),)], ()

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[OperationContext], input_: Any, tensors_to_save: Any, **given: Any
    ) -> None:
        pass

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        return add_gradient(plain(grad_output), basic_op_grad_extra_outputs[0][0]), [()], [()]

    def extra_repr(self) -> str:
        return f"in_place={self.in_place}"


def add_gradient(dx: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
    """Return round(dx + extra), or dx if there is no extra gradient."""
    return dx if extra is None else run_op(add, dx, extra)
