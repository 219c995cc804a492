"""Quantized tensors that cross a module's boundary: given to it, or asked of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mezzotint.quantization import STATE
from mezzotint.tensor.quantize import quantize
from mezzotint.tensor.quantized_tensor import QuantizedTensor


def dequantized(inp: Any) -> torch.Tensor:
    """A quantized input in its nominal dtype, differentiable; any other as it is."""
    return _Dequantize.apply(inp) if isinstance(inp, QuantizedTensor) else inp


def quantize_gradient(x: torch.Tensor, module: Any, gemm: int) -> torch.Tensor:
    """x, whose gradient is given on quantized."""
    quantizer = module._boundary_quantizer(gemm, "grad_input")
    if torch.compiler.is_compiling():
        return _QuantizeGradient.apply(x, quantizer, None)
    return _QuantizeGradient.apply(x, quantizer, partial(STATE.ending.before, module.scale_bwd))


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        return x.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _QuantizeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Any, before: Callable[[], None] | None) -> torch.Tensor:
        ctx.quantizer, ctx.before = quantizer, before
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.before is not None:  # by the scale that follows from what the module has seen
            ctx.before()
        return quantize(grad.detach(), ctx.quantizer), None, None
