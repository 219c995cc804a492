"""Dropout: this operation drops elements at random in training."""

from typing import Any

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.philox import draw_rng
from mezzotint.kernels.pointwise import dropout
from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import plain


class Dropout(BasicOperation):
    """This operation returns 0 with probability `p`, else x / (1 - p), in training; otherwise it returns x.

    A counter-based generator says which elements are dropped: backward asks it again, instead of keeping a mask.

    Args:
        p: The probability, from 0 to 1.

    Raises:
        ValueError: If `p` is no probability.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> torch.equal(ops.Dropout(0.5).eval()(torch.ones(4)), torch.ones(4))
        True
    """

    _keywords = ()
    _READS = ("dropout_probability", "training")

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p is {p}: give a probability")
        self.dropout_probability = float(p)
        self._end_init()

    def op_forward_compute(self, input_: Any, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        if not self._drops():
            return input_, ()
        x = plain(input_)
        rng = draw_rng(x)
        return run_op(dropout, x, rng, self.dropout_probability), (rng,)

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        ctx.save_for_backward(*tensors_to_save)
        ctx.dropout_probability = self.dropout_probability

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        if not ctx.saved_tensors:
            return grad_output, ()
        (rng,) = ctx.saved_tensors
        return run_op(dropout, plain(grad_output), rng, ctx.dropout_probability), ()

    def _drops(self) -> bool:
        return self.training and self.dropout_probability > 0.0

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"
