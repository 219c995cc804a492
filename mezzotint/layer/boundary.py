"""Quantized tensors that cross a module's boundary: this module dequantizes inputs that come quantized, and quantizes
gradients that are to be returned so."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mezzotint.functional.autograd import GradState
from mezzotint.functional.delayed import SCALE_UPDATES, catch_up, hand_over
from mezzotint.layer.base import activation_dtype
from mezzotint.layer.parameters import check_module_input
from mezzotint.recipe import slot
from mezzotint.tensor.float8 import Float8Tensor
from mezzotint.tensor.quantize import quantize, quantize_scaled
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tracing import eager_only


def dequantized(inp: Any) -> torch.Tensor:
    """Return a quantized input in its nominal dtype, differentiably, and any other as it is."""
    return _Dequantize.apply(inp) if isinstance(inp, QuantizedTensor) else inp


def input_of_module(inp: Any, features: int, name: str) -> torch.Tensor:
    """Check the input of a module, and return it in high precision, in the dtype of activations."""
    check_module_input(inp, features, name)
    x = dequantized(inp) if isinstance(inp, QuantizedTensor) else inp  # most are not, and spare a call
    dtype = activation_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def quantize_gradient(x: torch.Tensor, module: Any, gemm: int) -> torch.Tensor:
    """Return x, whose gradient is then passed on quantized."""
    quantizer, state = module._handed_over(gemm, "grad_input")
    if state is not None:
        return _QuantizeHandedGradient.apply(x, quantizer, state, slot(gemm, "grad_input"))
    quantizer = module._boundary_quantizer(gemm, "grad_input")
    return _QuantizeGradient.apply(x, quantizer, _waits(module.scale_bwd))


@eager_only()
def _waits(scale: torch.Tensor) -> Callable[[], None]:
    """Return a function that updates a scale if it waits for the end of a backward. A graph gets None, because nothing
    waits there."""
    return partial(SCALE_UPDATES.before, scale)


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
        if ctx.before is not None:  # so that the scale follows from what the module has seen
            ctx.before()
        return quantize(grad.detach(), ctx.quantizer), None, None


class _QuantizeHandedGradient(torch.autograd.Function):
    """This function does what `_QuantizeGradient` does in a graph, which hands over what backward sees to an
    operator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Quantizer, state: GradState, place: int) -> torch.Tensor:
        ctx.quantizer, ctx.state, ctx.place = quantizer, state, place
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        scale = catch_up(ctx.state)[ctx.place : ctx.place + 1]
        made, amax = quantize_scaled(grad.detach(), ctx.quantizer, scale)
        assert amax is not None
        hand_over(ctx.state, [amax], [ctx.place], False)
        return Float8Tensor._build(made.shape, made._dtype, made.get_metadata()), None, None, None
