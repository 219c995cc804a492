"""FusedOperation: this module defines an operation that does the work of several basic ones at once."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation, FusibleOperation, run_alone

__all__ = ["FusedOperation"]


class FusedOperation(FusibleOperation, is_base=True):
    """A `FusedOperation` does the work of several basic operations at once. Derive from it to write a fusion of your
    own.

    Write `fuser_forward_compute` and `fuser_forward_save_ctx`, or `fuser_backward`, or all of them; a pass that is not
    written runs operation by operation.

    Args:
        basic_ops: The operations whose work it does, in order.

    Raises:
        ValueError: If there is none.

    Example:
        >>> from mezzotint import ops
        >>> linear = ops.Linear(16, 16, device="cpu")
        >>> isinstance(linear, ops.FusedOperation)
        True
        >>> [type(each).__name__ for each in linear.basic_ops]
        ['BasicLinear', 'Bias']
    """

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        self.basic_ops = nn.ModuleList(basic_ops)
        if not basic_ops:
            raise ValueError(f"basic_ops is empty: {type(self).__name__} needs the operations that it stands for")

    @property
    def is_fused_op(self) -> bool:
        return True

    def _parts_in_order(self) -> list[BasicOperation]:
        """Return the basic operations, without the iterator of a container (see `module_groups`)."""
        parts: dict[str, Any] = self.basic_ops._modules
        return list(parts.values())

    def get_input_quantizer(self) -> Any:
        return _basic(self.basic_ops[0]).get_input_quantizer()

    def get_grad_output_quantizer(self) -> Any:
        return _basic(self.basic_ops[-1]).get_grad_output_quantizer()

    def pre_first_fuser_forward(self) -> None:
        for op in self.basic_ops:
            _basic(op).pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.basic_ops:
            _basic(op).pre_fuser_forward(requires_grad=requires_grad)

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Any, **given: Any
    ) -> tuple[Any, Iterable[Iterable[Any]]]:
        parts = zip(self.basic_ops, basic_op_ctxs, given["basic_op_kwargs"], strict=True)
        given["basic_op_kwargs"] = [_basic(op)._with_run(ctx, kwargs) for op, ctx, kwargs in parts]
        return super().fuser_forward(basic_op_ctxs, input_, **given)

    def forward(
        self, input: torch.Tensor, *extra_inputs: Any, basic_op_kwargs: list[dict[str, Any]] | None = None
    ) -> torch.Tensor | Any:
        """Run this operation alone, and return the output, or (output, *extra outputs)."""
        return run_alone(self)(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)

    if TYPE_CHECKING:
        __call__ = forward


def _basic(op: Any) -> BasicOperation:
    return op
