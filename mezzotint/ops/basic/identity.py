"""Identity: this operation changes nothing."""

from typing import Any

from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation


class Identity(BasicOperation):
    """This operation returns x.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> torch.equal(ops.Identity()(torch.ones(4)), torch.ones(4))
        True
    """

    _keywords = ()

    def __init__(self) -> None:
        super().__init__()
        self._end_init()

    def op_forward_compute(self, input_: Any, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        return input_, ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        pass

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        return grad_output, ()
