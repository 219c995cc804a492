"""LayerNorm and RMSNorm: these operations hand their output over quantized if the operation behind wants it so."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mezzotint.functional.norm import (
    NormBwdArgs,
    NormFwdArgs,
    NormOptions,
    norm_forward,
    norm_forward_quantized,
    norm_gradients,
)
from mezzotint.layer.norm import register_norm, reset_norm
from mezzotint.layer.parameters import check_features, resolve_device, resolve_dtype
from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import enter, plain, value_and_scale
from mezzotint.tensor.checks import check_epsilon


class Normalization(BasicOperation):
    """The base of LayerNorm and RMSNorm, which has all but `rms`."""

    rms: bool
    _keywords = ()
    _parameter_names = ("weight", "bias")
    _READS = ("normalized_shape", "eps", "zero_centered_gamma")
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape:
            raise ValueError("normalized_shape is (): give the size of the last dimension, or a tuple of sizes")
        check_features(**{f"normalized_shape[{i}]": size for i, size in enumerate(shape)})
        self.normalized_shape, self.zero_centered_gamma = shape, zero_centered_gamma
        self.eps = check_epsilon(eps, "eps")
        device = resolve_device(device)
        register_norm(self, "", shape, self.rms, device, resolve_dtype(dtype))
        self.reset_parameters(defer_init=device.type == "meta")
        self._end_init()

    def reset_parameters(self, defer_init: bool = False) -> None:
        if not defer_init:
            reset_norm(self, "", self.zero_centered_gamma)

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            self.reset_parameters()

    def _args(self, x: torch.Tensor) -> NormFwdArgs:
        """Return the arguments of the functional core, with the normalized dimensions as one."""
        gamma: torch.Tensor = self.weight
        beta: torch.Tensor | None = self.bias
        if len(self.normalized_shape) > 1:
            x = _flat(x, self.normalized_shape)
            gamma, beta = gamma.flatten(), None if beta is None else beta.flatten()
        return NormFwdArgs(x, gamma, beta, self._options())

    def _options(self) -> NormOptions:
        return NormOptions(self.eps, self.zero_centered_gamma, self.rms)

    def op_forward_compute(
        self, input_: Any, *, next_op_input_quantizer: Any, **given: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        x = plain(input_)
        _check_shape(x, self.normalized_shape)
        args = self._args(x)
        if next_op_input_quantizer is None or len(self.normalized_shape) > 1:
            y, made = norm_forward(args)
            return y.view(x.shape), (x, made.mu, made.rs)
        y_q, amax, made = norm_forward_quantized(args, *value_and_scale(next_op_input_quantizer))
        enter(next_op_input_quantizer, amax)
        return y_q, (x, made.mu, made.rs)

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        ctx.save_for_backward(*tensors_to_save, self.weight)
        ctx.options, ctx.has_beta = self._options(), self.bias is not None

    def backward_args(self, ctx: OperationContext) -> NormBwdArgs:
        """Return what the functional core's backward takes, from what was saved."""
        x, mu, rs, gamma = ctx.saved_tensors
        if gamma.dim() > 1:
            x, gamma = _flat(x, gamma.shape), gamma.flatten()
        return NormBwdArgs(x=x, mu=mu, rs=rs, gamma=gamma, beta=None, options=ctx.options, has_beta=ctx.has_beta)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        saved = self.backward_args(ctx)
        dx, dgamma, dbeta = norm_gradients(saved, plain(grad_output).reshape(saved.x.shape))
        return dx.view(ctx.saved_tensors[0].shape), self.param_gradients(ctx, dgamma, dbeta)

    def param_gradients(
        self, ctx: OperationContext, dgamma: torch.Tensor, dbeta: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """Return the gradients of the parameters that there are, in their shape."""
        grads = (dgamma,) if dbeta is None else (dgamma, dbeta)
        return tuple([grad.view(ctx.saved_tensors[3].shape) for grad in grads])

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _check_shape(x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if x.dim() < len(shape) or tuple(x.shape[x.dim() - len(shape) :]) != shape:
        raise ValueError(f"input has shape {tuple(x.shape)}: its last dimensions must be {shape}")


def _flat(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    size = 1
    for extent in shape:
        size *= extent
    return x.reshape(*x.shape[: x.dim() - len(shape)], size)


class LayerNorm(Normalization):
    """This operation computes (x - mean) / sqrt(var + eps) · weight + bias over the last dimensions.

    In a pipeline it hands its output over quantized, if the operation behind it wants it so.

    Args:
        normalized_shape: The size of the last dimension, or the sizes of the last dimensions, over which the norm is
            taken.
        eps: A small number that is added before the square root is taken. The default is 1e-5.
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU.
        dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        zero_centered_gamma: Whether the weight is stored minus one, so that its initial value is 0. The default is
            False.
        sm_margin: An option of Transformer Engine that is accepted and has no effect.

    Raises:
        ValueError: If no size is given, or one is not positive.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.LayerNorm(16, device="cpu")(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    rms = False


class RMSNorm(Normalization):
    """This operation computes x / sqrt(mean(x²) + eps) · weight over the last dimensions.

    In a pipeline it hands its output over quantized, if the operation behind it wants it so.

    Args:
        normalized_shape: The size of the last dimension, or the sizes of the last dimensions, over which the norm is
            taken.
        eps: A small number that is added before the square root is taken. The default is 1e-5.
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU.
        dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        zero_centered_gamma: Whether the weight is stored minus one, so that its initial value is 0. The default is
            False.
        sm_margin: An option of Transformer Engine that is accepted and has no effect.

    Raises:
        ValueError: If no size is given, or one is not positive.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.RMSNorm(16, device="cpu")(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    rms = True
