"""Activations: this module computes them and their gradients, and quantizes the result in the same pass where it is
asked to."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from mezzotint.constants import DType
from mezzotint.functional.autograd import Core, GradState, Saved
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.activation import (
    ACTIVATIONS,
    PARAMETERS,
    activation_backward,
    activation_forward,
    activation_scale_gradient,
    is_gated,
)
from mezzotint.tensor.float8_block import Float8BlockQuantizer
from mezzotint.tensor.quantize import quantize_scaled, quantize_source
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.scale_slot import DelayedScale
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import left_to_backward

__all__ = ["ACTIVATION_CORE", "ActivationFwdArgs", "is_gated", "resolve_activation"]


_COMPRESSION = Float8BlockQuantizer(
    DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=False, block_scaling_dim=1
)


def resolve_activation(name: str, params: dict[str, Any] | None) -> tuple[str, tuple[float, ...]]:
    """Check an activation's `name` and its `params`, given by name, and return both as the kernels take them: the
    values in the kernels' order, with defaults where none was given."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is {name!r}: give one of {', '.join(ACTIVATIONS)}")
    defaults = PARAMETERS.get(name, {})
    given = params or {}
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        known = ", ".join(defaults) or "none"
        raise ValueError(f"activation_params has {', '.join(unknown)}: {name} takes {known}")
    return name, tuple([float(given.get(key, value)) for key, value in defaults.items()])


@dataclass(slots=True)
class ActivationFwdArgs:
    """The arguments of an activation's forward: `x` has the shape (…, N), or (…, 2N) where the activation is gated;
    `scales` (…), if given, multiply the rows of the result."""

    x: torch.Tensor
    name: str
    params: tuple[float, ...]
    grad_state: GradState | None = None
    scales: torch.Tensor | None = None


@dataclass(slots=True)
class ActivationBwdArgs(Saved):
    x: Any  # a tensor, or what `compress` made of it
    name: str
    params: tuple[float, ...]
    scales: torch.Tensor | None = None

    SAVED = ("x", "scales")


def activation_quantized(
    a: ActivationFwdArgs, quantizer: Quantizer, scale: DelayedScale
) -> tuple[Any, torch.Tensor | None]:
    """Return act(x), its rows scaled, quantized in the same pass, and its amax if `scale` was given."""
    x = a.x
    width = x.shape[-1] // 2 if is_gated(a.name) else x.shape[-1]
    arguments = (x, None, a.name, a.params, a.scales)
    y_q, amax, _ = quantize_source("activation", arguments, (*x.shape[:-1], width), x.dtype, quantizer, scale)
    return y_q, amax


def activation_gradient_quantized(
    b: ActivationBwdArgs,
    dy: torch.Tensor,
    quantizer: Quantizer,
    scale: DelayedScale,
    bias_dtype: torch.dtype | None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient of x, quantized in the same pass, its amax, and its column sums, which are the bias
    gradient."""
    arguments = (dy, b.x, None, b.name, b.params, b.scales)
    return quantize_source("activation_backward", arguments, b.x.shape, b.x.dtype, quantizer, scale, bias_dtype)


def activation_setup(a: ActivationFwdArgs, made: None) -> ActivationBwdArgs:
    return ActivationBwdArgs(a.x, a.name, a.params, a.scales)


def activation_quantized_again(b: ActivationBwdArgs, quantizer: Quantizer, scale: DelayedScale) -> Any:
    """Compute act(x) again in backward and return it quantized."""
    with left_to_backward():
        return activation_quantized(ActivationFwdArgs(b.x, b.name, b.params, None, b.scales), quantizer, scale)[0]


def compress(x: torch.Tensor) -> Any:
    """Return x (M, N) in FP8 with one scale for every 128 elements of a row, to be held for backward."""
    return quantize_scaled(x, _COMPRESSION, None)[0]


def decompress(b: ActivationBwdArgs) -> ActivationBwdArgs:
    """Return the arguments with x in high precision, as the kernels take it."""
    if not isinstance(b.x, QuantizedTensorStorage):
        return b
    with left_to_backward():
        return replace(b, x=b.x.dequantize())


def activation_gradient(b: ActivationBwdArgs, dy: torch.Tensor) -> torch.Tensor:
    return run_op(activation_backward, dy, b.x, None, b.name, b.params, b.scales)


def scales_gradient(b: ActivationBwdArgs, dy: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of `scales`, in their shape and dtype, or None if there are none."""
    if b.scales is None:
        return None
    summed = run_op(activation_scale_gradient, dy, b.x, b.name, b.params)
    return summed.view(b.scales.shape).to(b.scales.dtype)


def activate(a: ActivationFwdArgs) -> torch.Tensor:
    return run_op(activation_forward, a.x, None, a.name, a.params, a.scales)


def _forward(a: ActivationFwdArgs) -> tuple[torch.Tensor, None]:
    return activate(a), None


def _outputs(a: ActivationFwdArgs, y: torch.Tensor, made: None) -> tuple[Any, ...]:
    return (y,), ()


def _backward(b: ActivationBwdArgs, dy: torch.Tensor) -> tuple[Any, ...]:
    return (activation_gradient(b, dy), scales_gradient(b, dy)), ()


ACTIVATION_CORE = Core(_forward, _outputs, activation_setup, _backward, ("x", "scales"))
