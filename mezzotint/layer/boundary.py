"""Quantized tensors that cross a module's boundary: given to it, or asked of it."""

from typing import Any

import torch

from mezzotint.tensor.quantize import quantize
from mezzotint.tensor.quantized_tensor import QuantizedTensor


def dequantized(inp: Any) -> torch.Tensor:
    """A quantized input in its nominal dtype, differentiable; any other as it is."""
    return _Dequantize.apply(inp) if isinstance(inp, QuantizedTensor) else inp


def quantize_gradient(x: torch.Tensor, module: Any, gemm: int) -> torch.Tensor:
    """x, whose gradient is given on quantized."""
    return _QuantizeGradient.apply(x, module._boundary_quantizer(gemm, "grad_input"))


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        return x.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _QuantizeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Any) -> torch.Tensor:
        ctx.quantizer = quantizer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return quantize(grad.detach(), ctx.quantizer), None
