"""ConstantScale: this operation computes x · scale."""

from typing import Any

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.pointwise import scale
from mezzotint.ops.context import OperationContext, used
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import plain


class ConstantScale(BasicOperation):
    """This operation computes x · `scale`.

    Args:
        scale: A number that is not trained.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> torch.equal(ops.ConstantScale(2.0)(torch.ones(4)), torch.full((4,), 2.0))
        True
    """

    _keywords = ()
    _READS = ("scale",)

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = float(scale)
        self._end_init()

    def op_forward_compute(self, input_: Any, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        return run_op(scale, plain(input_), self.scale), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        ctx.scale = self.scale

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        return run_op(scale, plain(grad_output), used(ctx, self, "scale")), ()

    def extra_repr(self) -> str:
        return f"scale={self.scale}"
