"""Tensors that belong to the caller: a module or an operation writes its output, or the gradient of its input, into
them.

The tensor itself is written, because what a graph of torch 2.11 writes to an alias of it is lost.
"""

from typing import Any

import torch


def check_buffer(name: str, buffer: torch.Tensor, like: torch.Tensor) -> None:
    """Raise if a buffer does not have the shape, dtype and device of what is written into it."""
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"{name} is {type(buffer).__name__}: give a torch.Tensor that takes the result, or None")
    given = (tuple(buffer.shape), buffer.dtype, buffer.device)
    wanted = (tuple(like.shape), like.dtype, like.device)
    if given != wanted:
        raise ValueError(f"{name} is {given}: the result is {wanted}; they must be equal")


def write_result(name: str, buffer: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return the value in the memory of a buffer, or as it is if there is no buffer."""
    if buffer is None:
        return value
    check_buffer(name, buffer, value)
    buffer.copy_(value)
    return buffer.detach()


class WriteOutput(torch.autograd.Function):
    """This autograd function returns y in the memory of a buffer that the caller owns and may use again."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(y)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class WriteGradient(torch.autograd.Function):
    """This autograd function returns x, and writes its gradient to a given buffer, which is what flows on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ctx.out = out
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.out.copy_(grad.view_as(ctx.out))
        return ctx.out.view_as(grad), None
