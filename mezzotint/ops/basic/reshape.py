"""Reshape: this operation changes the shape of a tensor."""

from collections.abc import Iterable
from typing import Any

from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import plain


class Reshape(BasicOperation):
    """This operation returns x in another shape of as many elements.

    Args:
        shape: The sizes of all dimensions, of which one may be -1.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.Reshape((-1, 16))(torch.randn(4, 8)).shape
        torch.Size([2, 16])
    """

    _keywords = ()
    _READS = ("target_shape",)

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.target_shape = tuple(shape)
        self._end_init()

    def op_forward_compute(self, input_: Any, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        return plain(input_).reshape(self.target_shape), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        ctx.input_shape = tuple(input_.shape)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        return plain(grad_output).reshape(ctx.input_shape), ()

    def extra_repr(self) -> str:
        return f"{self.target_shape}"
