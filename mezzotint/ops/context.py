"""The context of an operation: this module defines what is kept from the forward of a run to its backward."""

from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

__all__ = ["OperationContext"]


class OperationContext:
    """An `OperationContext` holds what a basic operation keeps from forward to backward: tensors, by
    `save_for_backward`, and free attributes.

    Args:
        requires_grad: Whether backward will reach the operation. The default is True.
        prev_op_grad_output_quantizer: The quantizer with which the operation before wants its gradient quantized, or
            None for high precision.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ctx = ops.OperationContext()
        >>> ctx.save_for_backward(torch.ones(4))
        >>> ctx.factor = 2.0
        >>> len(ctx.to_save)
        1
    """

    saved_tensors: tuple[Any, ...]
    to_save: tuple[Any, ...]
    requires_grad: bool  # backward reaches this operation
    prev_op_grad_output_quantizer: Any  # the previous operation wants its gradient quantized with it; or None
    _run: ClassVar[Any] = None  # what `_begin` returned, while a whole form computes

    def __init__(self, requires_grad: bool = True, prev_op_grad_output_quantizer: Any = None) -> None:
        # Backward gets a new context with the same attributes: what was made in forward is read-only to the compiler.
        object.__setattr__(self, "_names", [])
        self.requires_grad = requires_grad
        self.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        self.to_save = ()
        self.saved_tensors = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._names:
            self._names.append(name)
        object.__setattr__(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a free attribute."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Save tensors, storages of quantized ones, or None; in backward they are `saved_tensors`."""
        self.to_save = tensors


def restored(ctx: OperationContext, saved_tensors: tuple[Any, ...]) -> OperationContext:
    """Return the context as backward sees it. It is a new one each time, so that a second backward finds what the first
    found."""
    made = OperationContext()
    for name in ctx._names:
        setattr(made, name, getattr(ctx, name))
    made.saved_tensors = saved_tensors
    return made


def used(ctx: OperationContext, op: nn.Module, name: str) -> Any:
    """Return an attribute of the operation as forward used it; as it is now if a user's fused forward did not keep
    it."""
    return getattr(ctx, name) if hasattr(ctx, name) else getattr(op, name)
