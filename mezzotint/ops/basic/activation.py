"""Activations, plain and gated: these operations call the kernels of `kernels/activation.py`, which define them.

They hand their output over quantized if the operation behind wants it so, and their gradient back likewise.
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
from mezzotint.ops.context import OperationContext, used
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import enter, plain, value_and_scale
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer
from mezzotint.tensor.quantize import quantize_storage


class Activation(BasicOperation):
    """This operation computes act(x). `cache_quantized_input` keeps x for backward in FP8: that takes half the memory,
    and its rounding shows in the gradient."""

    activation: ClassVar[str]
    params: tuple[float, ...] = ()
    _keywords = ()
    _READS = ("params", "cache_quantized_input", "glu_interleave_size")
    glu_interleave_size: int | None = None

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input
        self._end_init()

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
        """Save what `gradient` reads: x and, for scaled activations, the scales; and which activation it was."""
        ctx.save_for_backward(*tensors)
        ctx.activation, ctx.params, ctx.glu_interleave_size = self.activation, self.params, self.glu_interleave_size

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        dx, _, _ = self.gradient(ctx, grad_output, ctx.prev_op_grad_output_quantizer, None)
        return dx, ()

    def _compute(self, input_: Any, scales: torch.Tensor | None, quantizer: Any) -> tuple[Any, Any]:
        """Return the output, and the input as backward gets it."""
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
        """Return the width of the output for this input, and raise if a gated one has no two halves."""
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
        """Return the input's gradient, made with `quantizer`; its column sums in dtype `sums`, or None if it was not
        quantized; and the arguments of the activation's backward.

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
    """Return [x1 | x2], which may lie interleaved in x."""
    return x if interleave_size is None else deinterleave_columns(x, interleave_size)


_CACHE = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)


class GELU(Activation):
    """This operation computes x · Φ(x), by its tanh approximation.

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.GELU()(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    activation = "gelu"


class GLU(Activation):
    """This operation computes sigmoid(x1) · x2. The input x = [x1 | x2] is twice as wide as the output.

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.GLU()(torch.randn(4, 16)).shape
        torch.Size([4, 8])
    """

    activation = "glu"


class GEGLU(Activation):
    """This operation computes gelu(x1) · x2. The input x = [x1 | x2] is twice as wide as the output.

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.GEGLU()(torch.randn(4, 16)).shape
        torch.Size([4, 8])
    """

    activation = "geglu"


class QGELU(Activation):
    """This operation computes x · sigmoid(1.702 x).

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.QGELU()(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    activation = "qgelu"


class QGEGLU(Activation):
    """This operation computes qgelu(x1) · x2. The input x = [x1 | x2] is twice as wide as the output.

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.QGEGLU()(torch.randn(4, 16)).shape
        torch.Size([4, 8])
    """

    activation = "qgeglu"


class ReLU(Activation):
    """This operation computes max(x, 0).

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.ReLU()(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    activation = "relu"


class ReGLU(Activation):
    """This operation computes relu(x1) · x2. The input x = [x1 | x2] is twice as wide as the output.

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.ReGLU()(torch.randn(4, 16)).shape
        torch.Size([4, 8])
    """

    activation = "reglu"


class SReLU(Activation):
    """This operation computes max(x, 0)².

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.SReLU()(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    activation = "srelu"


class SReGLU(Activation):
    """This operation computes srelu(x1) · x2. The input x = [x1 | x2] is twice as wide as the output.

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.SReGLU()(torch.randn(4, 16)).shape
        torch.Size([4, 8])
    """

    activation = "sreglu"


class SiLU(Activation):
    """This operation computes x · sigmoid(x).

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.SiLU()(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    activation = "silu"


class SwiGLU(Activation):
    """This operation computes silu(x1) · x2. The input x = [x1 | x2] is twice as wide as the output.

    Args:
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.
        glu_interleave_size: If the two halves of the input lie in turns of a few columns, how many columns a turn has.
            None (the default) means that they lie one behind the other.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.SwiGLU()(torch.randn(4, 16)).shape
        torch.Size([4, 8])
    """

    activation = "swiglu"

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size


class ClampedSwiGLU(SwiGLU):
    """This operation computes min(x1, limit) · sigmoid(alpha · min(x1, limit)) · (clamp(x2, ±limit) +
    glu_linear_offset). The input x = [x1 | x2] is twice as wide as the output.

    Args:
        limit: The bound of both halves. The default is 7.0.
        alpha: The factor inside of the sigmoid. The default is 1.702.
        glu_linear_offset: What is added to the second half. The default is 1.0.
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.
        glu_interleave_size: If the two halves of the input lie in turns of a few columns, how many columns a turn has.
            None (the default) means that they lie one behind the other.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.ClampedSwiGLU(limit=5.0)(torch.randn(4, 16)).shape
        torch.Size([4, 8])
    """

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
    """Return the bounds as floats, and raise unless each is finite and above 0."""
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}: give a finite number above 0")
    return tuple(float(value) for value in given.values())


class SiTUGLU(SwiGLU):
    """This operation computes beta1 · tanh(x1 / beta1) · sigmoid(x1) · beta2 · tanh(x2 / beta2). The input x = [x1 |
    x2] is twice as wide as the output.

    Args:
        beta1: The bound of the first half, finite and above 0. The default is 4.0.
        beta2: The bound of the second half, finite and above 0. The default is 25.0.
        cache_quantized_input: Whether the input is kept for backward in FP8 instead of its own dtype. That takes half
            the memory of BF16, and its rounding shows in the gradient. The default is False.
        glu_interleave_size: If the two halves of the input lie in turns of a few columns, how many columns a turn has.
            None (the default) means that they lie one behind the other.

    Raises:
        ValueError: If `beta1` or `beta2` is not finite and above 0.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.SiTUGLU()(torch.randn(4, 16)).shape
        torch.Size([4, 8])
    """

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
    """This operation computes act(x) and multiplies its rows by the extra input `scales` (…), one for each: the weights
    of a router."""

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
    """Check that there is one scale for each row."""
    if not isinstance(scales, torch.Tensor):
        raise TypeError(f"the scales are {type(scales).__name__}: give a torch.Tensor")
    if tuple(scales.shape) != tuple(leading):
        raise ValueError(f"the scales have shape {tuple(scales.shape)}: give one for each row, {tuple(leading)}")


class ScaledSReLU(ScaledActivation):
    """This operation computes max(x, 0)² · scales. The extra input `scales` has one number for each row, such as the
    weights of a router.

    Args:
        activation_recompute_in_mlp: It is accepted and changes nothing: only the input is kept for backward in any
            case. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.ScaledSReLU()(torch.randn(4, 16), torch.rand(4)).shape
        torch.Size([4, 16])
    """

    activation = "srelu"

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp


class ScaledSwiGLU(ScaledActivation):
    """This operation computes silu(x1) · x2 · scales. The input x = [x1 | x2] is twice as wide as the output. The extra
    input `scales` has one number for each row, such as the weights of a router.

    Args:
        glu_interleave_size: If the two halves of the input lie in turns of a few columns, how many columns a turn has.
            None (the default) means that they lie one behind the other.
        activation_recompute_in_mlp: It must be False: the output is not kept for backward in any case.

    Raises:
        ValueError: If `activation_recompute_in_mlp` is True.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.ScaledSwiGLU()(torch.randn(4, 16), torch.rand(4)).shape
        torch.Size([4, 8])
    """

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
    """This operation computes `SiTUGLU`, multiplied by scales. The input x = [x1 | x2] is twice as wide as the output.
    The extra input `scales` has one number for each row, such as the weights of a router.

    Args:
        glu_interleave_size: If the two halves of the input lie in turns of a few columns, how many columns a turn has.
            None (the default) means that they lie one behind the other.
        activation_recompute_in_mlp: It must be False: the output is not kept for backward in any case.
        beta1: The bound of the first half, finite and above 0. The default is 4.0.
        beta2: The bound of the second half, finite and above 0. The default is 25.0.

    Raises:
        ValueError: If `activation_recompute_in_mlp` is True, or `beta1` or `beta2` is not finite and above 0.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.ScaledSiTUGLU()(torch.randn(4, 16), torch.rand(4)).shape
        torch.Size([4, 8])
    """

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
    """This operation computes `ClampedSwiGLU`, multiplied by scales. The input x = [x1 | x2] is twice as wide as the
    output. The extra input `scales` has one number for each row, such as the weights of a router.

    Args:
        glu_interleave_size: If the two halves of the input lie in turns of a few columns, how many columns a turn has.
            None (the default) means that they lie one behind the other.
        activation_recompute_in_mlp: It must be False: the output is not kept for backward in any case.
        limit: The bound of both halves. The default is 7.0.
        alpha: The factor inside of the sigmoid. The default is 1.702.
        glu_linear_offset: What is added to the second half. The default is 1.0.

    Raises:
        ValueError: If `activation_recompute_in_mlp` is True.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.ScaledClampedQGeGLU()(torch.randn(4, 16), torch.rand(4)).shape
        torch.Size([4, 8])
    """

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
