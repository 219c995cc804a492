"""The fused functions of Transformer Engine's `jit` are plain PyTorch here, which a
compiled caller fuses with the rest.

Called eagerly they run operation by operation. `jit_fuser` compiles a function on its first call.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mezzotint.tracing import memoized

Function = TypeVar("Function", bound=Callable[..., Any])

_SQRT_2_OVER_PI = 0.79788456
_CUBIC = 0.044715


def lazy_compile(func: Function) -> Function:
    """Compile a function when it is first called; inside a function that is being
    compiled, it becomes a part of that."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return memoized(wrapper, "_compiled", None, lambda: torch.compile(func))(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


jit_fuser = dropout_fuser = lazy_compile


def no_torch_dynamo(recursive: bool = True, when: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return a decorator that changes nothing, as all code here compiles;
    `torch.compiler.disable` keeps a function out."""
    return lambda function: function


def set_jit_fusion_options() -> None:
    """Do nothing: the options belong to a former compiler of PyTorch."""


def _warm_up(*args: Any, **kwargs: Any) -> None:
    """Do nothing: nothing is compiled that needs warming up."""


warmup_jit_bias_dropout_add = warmup_jit_bias_dropout_add_all_dtypes = _warm_up
warmup_jit_bias_gelu = warmup_jit_bias_gelu_all_dtypes = _warm_up
warmup_jit_l2normalization = warmup_jit_l2normalization_all_dtypes = _warm_up


def _no_autocast(x: torch.Tensor) -> Any:
    return torch.autocast(x.device.type, enabled=False)


# GELU, by its approximation with tanh


def gelu_fused_(inp: torch.Tensor) -> torch.Tensor:
    """Return gelu(inp)."""
    return inp * 0.5 * (1.0 + torch.tanh(_SQRT_2_OVER_PI * inp * (1 + _CUBIC * inp * inp)))


def dgelu_fused_(grad_output: torch.Tensor, inp: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `gelu_fused_`'s input."""
    t = torch.tanh(_SQRT_2_OVER_PI * inp * (1 + _CUBIC * inp * inp))
    slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * inp * inp)
    return grad_output * (0.5 * (1 + t) + 0.5 * inp * (1 - t * t) * slope)


def bias_gelu_fused_(inp: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(inp + bias)."""
    return gelu_fused_(inp + bias)


def bgrad_dgelu_fused_(
    grad_output: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `bias_gelu_fused_`'s bias and input."""
    dgelu = dgelu_fused_(grad_output, inp + bias)
    return dgelu.sum(dim=0), dgelu


def bias_gelu_fused(inp: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return gelu(inp + bias), outside of `torch.autocast`; a bias that is None or empty is not added."""
    with _no_autocast(inp):
        return gelu_fused_(inp) if bias is None or not bias.numel() else bias_gelu_fused_(inp, bias)


def bgrad_dgelu_fused(
    grad_output: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the gradients of `bias_gelu_fused`'s bias, or None without one, and of its input."""
    with _no_autocast(inp):
        if bias is None or not bias.numel():
            return None, dgelu_fused_(grad_output, inp)
        return bgrad_dgelu_fused_(grad_output, inp, bias)


# x / sqrt(Σ x² + eps), in FP32


def l2normalization_fwd_fused_(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x divided by its L2 norm, and the reciprocal of the norm in FP32."""
    wide = x.float()
    reciprocal = torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + eps)
    return (wide * reciprocal).to(x.dtype), reciprocal


def l2normalization_fused_(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x divided by its L2 norm."""
    return l2normalization_fwd_fused_(x, eps)[0]


def l2normalization_backward_fused_(
    grad_output: torch.Tensor, x: torch.Tensor, rsqrt_norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the gradient of x, given `rsqrt_norm`, the reciprocal of its L2 norm."""
    wide, grad = x.float(), grad_output.float()
    along = (wide * grad).sum(dim=-1, keepdim=True)
    length = wide.square().sum(dim=-1, keepdim=True) + eps
    return (rsqrt_norm * (grad - wide * along / length)).to(x.dtype)


def l2normalization_fused(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x divided by its L2 norm, outside of `torch.autocast`."""
    with _no_autocast(x):
        return l2normalization_fused_(x, eps)


def l2normalization_fwd_fused(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x divided by its L2 norm, and the reciprocal of the norm, outside of `torch.autocast`."""
    with _no_autocast(x):
        return l2normalization_fwd_fused_(x, eps)


def l2normalization_backward_fused(
    grad_output: torch.Tensor, x: torch.Tensor, rsqrt_norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the gradient of x, given the reciprocal of its L2 norm, outside of `torch.autocast`."""
    with _no_autocast(x):
        return l2normalization_backward_fused_(grad_output, x, rsqrt_norm, eps)


# residual + dropout(x + bias)


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float, training: bool
) -> torch.Tensor:
    """Return residual + dropout(x + bias)."""
    return residual + torch.nn.functional.dropout(x + bias, p=prob, training=training)


def get_bias_dropout_add(training: bool) -> Callable[..., torch.Tensor]:
    """Return `bias_dropout_add` with or without dropout."""
    return functools.partial(bias_dropout_add, training=training)


def bias_dropout_add_fused_train(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """Return residual + dropout(x + bias), with gradients, outside of `torch.autocast`."""
    with torch.enable_grad(), _no_autocast(x):
        return bias_dropout_add(x, bias, residual, prob, True)


def bias_dropout_add_fused_inference(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """Return residual + x + bias, outside of `torch.autocast`."""
    with _no_autocast(x):
        return bias_dropout_add(x, bias, residual, prob, False)


bias_dropout_add_fused_train_ = bias_dropout_add_fused_train
bias_dropout_add_fused_inference_ = bias_dropout_add_fused_inference
