"""Activations, plain and gated: what each computes is in `kernels/activation.py`.

They hand their output over quantized where the operation behind wants it so, and their gradient back likewise.
"""

import math
from typing import Any, ClassVar

import torch

from mezzotint.constants import DType
from mezzotint.functional.activation import (
    ActivationBwdArgs,
    ActivationFwdArgs,
    activate,
    activation_gradient,
    activation_gradient_quantized,
    activation_quantized,
    is_gated,
    scales_gradient,
)
from mezzotint.kernels.activation import PARAMETERS
from mezzotint.ops.basic.glu import deinterleave_columns, interleave_columns
from mezzotint.ops.op import BasicOperation, OperationContext, used
from mezzotint.ops.quantizing import enter, plain, value_and_scale
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer
from mezzotint.tensor.quantize import quantize_storage


class Activation(BasicOperation):
    """act(x). `cache_quantized_input` keeps x for backward in FP8: half the memory, its rounding in the gradient."""

    activation: ClassVar[str]
    params: tuple[float, ...] = ()
    _keywords = ()
    glu_interleave_size: int | None = None

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def op_forward_compute(
        self, input_: Any, *, next_op_input_quantizer: Any, **given: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        y, x = self._compute(input_, None, next_op_input_quantizer)
        return y, (x,)

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        self.save(ctx, *tensors_to_save)

    def save(self, ctx: OperationContext, *tensors: Any) -> None:
        """What `gradient` reads: x and, of scaled activations, the scales; which activation it was."""
        ctx.save_for_backward(*tensors)
        ctx.activation, ctx.params, ctx.glu_interleave_size = self.activation, self.params, self.glu_interleave_size

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        dx, _, _ = self.gradient(ctx, grad_output, ctx.prev_op_grad_output_quantizer, None)
        return dx, ()

    def _compute(self, input_: Any, scales: torch.Tensor | None, quantizer: Any) -> tuple[Any, Any]:
        """Output, and the input as backward gets it."""
        x: Any = plain(input_)
        self.output_width(x)
        args = ActivationFwdArgs(
            x=_halves(x, self.glu_interleave_size),
            name=self.activation,
            params=self.params,
            grad_state=None,
            scales=scales,
        )
        if quantizer is None:
            y = activate(args)
        else:
            y, amax = activation_quantized(args, *value_and_scale(quantizer))
            enter(quantizer, amax)
        if self.cache_quantized_input:
            x = quantize_storage(x, _CACHE)
        return y, x

    def output_width(self, x: torch.Tensor) -> int:
        """Of this input, which is refused where it has no halves."""
        if x.dim() < 1:
            raise ValueError("input has shape (): give at least one dimension")
        if not is_gated(self.activation):
            return x.shape[-1]
        if x.shape[-1] % 2:
            raise ValueError(f"input has shape {tuple(x.shape)}: its last dimension has two halves and must be even")
        return x.shape[-1] // 2

    def gradient(
        self, ctx: OperationContext, grad_output: Any, quantizer: Any, sums: torch.dtype | None
    ) -> tuple[Any, torch.Tensor | None, ActivationBwdArgs]:
        """The input's gradient, made with `quantizer`, and its column sums in dtype `sums` (these of plain `dy`s too).

        `ctx` is as `save` wrote it.
        """
        x, *scales = ctx.saved_tensors
        name, params, size = [used(ctx, self, each) for each in ("activation", "params", "glu_interleave_size")]
        args = ActivationBwdArgs(_halves(plain(x), size), name, params, scales[0] if scales else None)
        dy = plain(grad_output)
        if quantizer is None or size is not None:
            dx = activation_gradient(args, dy)
            if size is not None:
                dx = interleave_columns(dx, size)
            return dx, None, args
        dx, amax, summed = activation_gradient_quantized(args, dy, *value_and_scale(quantizer), sums)
        enter(quantizer, amax)
        return dx, summed, args


def _halves(x: torch.Tensor, interleave_size: int | None) -> torch.Tensor:
    """[x1 | x2], which may lie interleaved."""
    return x if interleave_size is None else deinterleave_columns(x, interleave_size)


_CACHE = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)


class GELU(Activation):
    """x · Φ(x), by its tanh approximation."""

    activation = "gelu"


class GLU(Activation):
    """sigmoid(x1) · x2, of x = [x1 | x2]."""

    activation = "glu"


class GEGLU(Activation):
    """gelu(x1) · x2."""

    activation = "geglu"


class QGELU(Activation):
    """x · sigmoid(1.702 x)."""

    activation = "qgelu"


class QGEGLU(Activation):
    """qgelu(x1) · x2."""

    activation = "qgeglu"


class ReLU(Activation):
    """max(x, 0)."""

    activation = "relu"


class ReGLU(Activation):
    """relu(x1) · x2."""

    activation = "reglu"


class SReLU(Activation):
    """max(x, 0)²."""

    activation = "srelu"


class SReGLU(Activation):
    """srelu(x1) · x2."""

    activation = "sreglu"


class SiLU(Activation):
    """x · sigmoid(x)."""

    activation = "silu"


class SwiGLU(Activation):
    """silu(x1) · x2. `glu_interleave_size`: x1 and x2 lie in turns of that many columns."""

    activation = "swiglu"

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size


class ClampedSwiGLU(SwiGLU):
    """min(x1, limit) · sigmoid(alpha · min(x1, limit)) · (clamp(x2, ±limit) + glu_linear_offset)."""

    activation = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.params = (float(limit), float(alpha), float(glu_linear_offset))


def _bounds(**given: float) -> tuple[float, ...]:
    """What a half cannot exceed: finite and above 0."""
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}: give a finite number above 0")
    return tuple(float(value) for value in given.values())


class SiTUGLU(SwiGLU):
    """beta1 · tanh(x1 / beta1) · sigmoid(x1) · beta2 · tanh(x2 / beta2)."""

    activation = "situglu"

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.params = _bounds(beta1=beta1, beta2=beta2)


class ScaledActivation(Activation):
    """act(x), its rows multiplied by the extra input `scales` (…), one for each: the weights of a router."""

    num_extra_inputs = 1
    _keywords = ()

    def fuser_forward_compute(
        self, input_: Any, *, basic_op_extra_inputs: Any, next_op_input_quantizer: Any, **given: Any
    ) -> Any:
        scales = basic_op_extra_inputs[0][0]
        check_row_scales(scales, input_.shape[:-1])
        y, x = self._compute(input_, scales, next_op_input_quantizer)
        return y, [()], (x, scales)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[OperationContext], input_: Any, tensors_to_save: Any, **given: Any
    ) -> None:
        self.save(basic_op_ctxs[0], *tensors_to_save)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ctx, dy = basic_op_ctxs[0], plain(grad_output)
        dx, _, args = self.gradient(ctx, dy, ctx.prev_op_grad_output_quantizer, None)
        return dx, [()], [(scales_gradient(args, dy),)]


def check_row_scales(scales: torch.Tensor, leading: Any) -> None:
    """One for each row."""
    if not isinstance(scales, torch.Tensor):
        raise TypeError(f"the scales are {type(scales).__name__}: give a torch.Tensor")
    if tuple(scales.shape) != tuple(leading):
        raise ValueError(f"the scales have shape {tuple(scales.shape)}: give one for each row, {tuple(leading)}")


class ScaledSReLU(ScaledActivation):
    """max(x, 0)² · scales. Only the input is kept for backward, with `activation_recompute_in_mlp` and without."""

    activation = "srelu"

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp


class ScaledSwiGLU(ScaledActivation):
    """silu(x1) · x2 · scales."""

    activation = "swiglu"

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        if activation_recompute_in_mlp:
            raise ValueError(
                f"activation_recompute_in_mlp: {type(self).__name__} does not support activation recomputation; its "
                "output is not kept for backward in any case, so leave it False"
            )
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
        self.glu_interleave_size = glu_interleave_size


class ScaledSiTUGLU(ScaledSwiGLU):
    """SiTUGLU · scales."""

    activation = "situglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.params = _bounds(beta1=beta1, beta2=beta2)


class ScaledClampedQGeGLU(ScaledSwiGLU):
    """ClampedSwiGLU · scales."""

    activation = "clamped_swiglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = PARAMETERS["clamped_swiglu"]["limit"],
        alpha: float = PARAMETERS["clamped_swiglu"]["alpha"],
        glu_linear_offset: float = PARAMETERS["clamped_swiglu"]["glu_linear_offset"],
    ) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.params = (float(limit), float(alpha), float(glu_linear_offset))
