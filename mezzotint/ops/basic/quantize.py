"""Quantize: this operation makes x a quantized tensor, or the gradient, or both."""

from typing import Any

from mezzotint.ops.op import BasicOperation, OperationContext
from mezzotint.ops.quantizing import quantized
from mezzotint.tensor.storage import QuantizedTensorStorage


class Quantize(BasicOperation):
    """This operation quantizes x as the recipe in force quantizes inputs.

    Without a recipe, and for what is quantized already, it is the identity.

    Args:
        forward: Whether x is quantized. The default is True.
        backward: Whether the gradient of x is quantized, as the recipe quantizes gradients. The default is False.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantize = mz.ops.Quantize()
        >>> with mz.autocast("mxfp8"):
        ...     y = quantize(torch.randn(32, 32))
        >>> isinstance(y, mz.MXFP8Tensor)
        True
    """

    _takes_run = True
    _keywords = ()

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward, self._quantize_backward = forward, backward

    def num_quantizers(self, mode: str) -> int:
        return int(self._quantize_forward if mode == "forward" else self._quantize_backward)

    def _input_quantizer(self, run: Any) -> Any:
        return None  # this operation quantizes itself, in all directions of the recipe

    def _grad_output_quantizer(self, run: Any) -> Any:
        return None

    def op_forward_compute(self, input_: Any, *, run: Any, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        return _quantized(input_, self._run_quantizer(run, "forward", 0) if self._quantize_forward else None), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], *, run: Any, **given: Any
    ) -> None:
        ctx.quantizer = self._run_quantizer(run, "backward", 0) if self._quantize_backward else None

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        return _quantized(grad_output, ctx.quantizer), ()

    def extra_repr(self) -> str:
        return f"forward={self._quantize_forward}, backward={self._quantize_backward}"


def _quantized(x: Any, quantizer: Any) -> Any:
    return x if quantizer is None or isinstance(x, QuantizedTensorStorage) else quantized(x, quantizer)
