"""LayerNorm and RMSNorm: this file defines both as modules."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mezzotint.compat.base_module import PlainAttributes
from mezzotint.compat.extra_state import IgnoresExtraState
from mezzotint.functional.autograd import run_core
from mezzotint.functional.norm import NORM_CORE, NormFwdArgs, NormOptions
from mezzotint.layer.boundary import input_of_module
from mezzotint.layer.norm import norm_parameters, register_norm, reset_norm, split_norm
from mezzotint.layer.parameters import PlaceParameter, check_features, resolve_device, resolve_dtype
from mezzotint.tensor.checks import check_epsilon


class _Norm(PlainAttributes, IgnoresExtraState):
    rms: bool
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        shape = hidden_size if normalized_shape is None else normalized_shape
        if shape is None or shape == ():
            raise ValueError(f"normalized_shape is {shape}: give the size of the last dimension, or a tuple of sizes")
        self.normalized_shape = (shape,) if isinstance(shape, int) else tuple(shape)
        check_features(**{f"normalized_shape[{i}]": size for i, size in enumerate(self.normalized_shape)})
        if sequence_parallel is not None:
            self.sequence_parallel = sequence_parallel  # the parameters are marked with it, for whoever sums gradients
        device = resolve_device(kwargs.pop("device", None))
        dtype = resolve_dtype(params_dtype, kwargs.pop("dtype", None))
        margin = kwargs.pop("sm_margin", 0)
        for direction, short in (("forward", "fwd"), ("backward", "bwd"), ("inference", "inf")):
            # These are upstream's names, which nothing reads: kernels take the whole GPU.
            name = f"{short}_{'rmsnorm' if self.rms else 'ln'}_sm_margin"
            setattr(self, name, margin.get(direction, 0) if isinstance(margin, dict) else margin)
        if kwargs:
            raise TypeError(f"{type(self).__name__} got {sorted(kwargs)}: it takes device, dtype and sm_margin beside")
        self._norm_group: Any = None
        self.eps, self.zero_centered_gamma = check_epsilon(eps, "eps"), zero_centered_gamma
        size = 1
        for extent in self.normalized_shape:
            size *= extent
        self.hidden_size = size
        register_norm(self, "", self.normalized_shape, self.rms, device, dtype)
        if device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, defer_init: bool = False) -> None:
        if not defer_init:
            reset_norm(self, "", self.zero_centered_gamma)

    def split_over(self, tp_group: Any, sequence_parallel: bool, place: PlaceParameter, *modes: str) -> None:
        """Make the parameters DTensors that stay whole; with `sequence_parallel` their gradients are sums over the
        ranks."""
        if modes:
            raise ValueError(f"{type(self).__name__} has no weight to split {modes[0]}-wise: use SequenceParallel")
        self.sequence_parallel = sequence_parallel
        split_norm(self, "", tp_group, place)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return `inp` normalized over its last dimensions, `normalized_shape`."""
        x = input_of_module(inp, self.normalized_shape[-1], "inp")
        shape, (gamma, beta) = inp.shape, norm_parameters(self, "")
        if len(self.normalized_shape) > 1:
            leading = len(shape) - len(self.normalized_shape)
            if leading < 0 or tuple(shape[leading:]) != self.normalized_shape:
                raise ValueError(f"inp has shape {tuple(shape)}: its last dimensions must be {self.normalized_shape}")
            x = x.reshape(*shape[:leading], self.hidden_size)
            gamma, beta = gamma.flatten(), None if beta is None else beta.flatten()
        needs_grad = x.requires_grad or gamma.requires_grad or (beta is not None and beta.requires_grad)
        options = NormOptions(self.eps, self.zero_centered_gamma, self.rms)
        (y,) = run_core(NORM_CORE, NormFwdArgs(x, gamma, beta, options), needs_grad)
        return y.reshape(shape)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """This module computes (x - mean) / sqrt(var + eps) · weight + bias over the last dimensions.

    It always computes in high precision: recipes quantize the products behind it. `LayerNormLinear` and `LayerNormMLP`
    take such a norm and the product behind it together.

    Args:
        normalized_shape: The size of the last dimension, or a tuple with the sizes of the last dimensions, over which
            the norm is taken.
        eps: A small number that the norm adds to the variance before it takes the square root. The default is 1e-5.
        sequence_parallel: Whether the gradients of the parameters come from the tokens of this rank only. The
            parameters are marked with it, so that `mezzotint.distributed.reduce_gradients` sums them. None marks
            nothing.
        params_dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        zero_centered_gamma: Whether the weight is stored minus one, so that its initial value is 0. The default is
            False.
        hidden_size: Another name for `normalized_shape`, which is read if that is None.
        **kwargs: `device` and `dtype` of the parameters, as in `torch.nn.LayerNorm`; and `sm_margin`, which Transformer
            Engine has, and which is accepted and has no effect.

    Raises:
        ValueError: If no size is given, or one is not positive.
        TypeError: If another keyword argument is given.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> norm = mz.LayerNorm(64, device="cpu")
        >>> norm(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
        >>> [name for name, _ in norm.named_parameters()]
        ['weight', 'bias']
    """

    fwd_ln_sm_margin: int
    bwd_ln_sm_margin: int
    inf_ln_sm_margin: int

    rms = False


class RMSNorm(_Norm):
    """This module computes x / sqrt(mean(x²) + eps) · weight over the last dimensions.

    It always computes in high precision: recipes quantize the products behind it. `LayerNormLinear` and `LayerNormMLP`
    take such a norm and the product behind it together.

    Args:
        normalized_shape: The size of the last dimension, or a tuple with the sizes of the last dimensions, over which
            the norm is taken.
        eps: A small number that the norm adds to the variance before it takes the square root. The default is 1e-5.
        sequence_parallel: Whether the gradients of the parameters come from the tokens of this rank only. The
            parameters are marked with it, so that `mezzotint.distributed.reduce_gradients` sums them. None marks
            nothing.
        params_dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        zero_centered_gamma: Whether the weight is stored minus one, so that its initial value is 0. The default is
            False.
        hidden_size: Another name for `normalized_shape`, which is read if that is None.
        **kwargs: `device` and `dtype` of the parameters, as in `torch.nn.LayerNorm`; and `sm_margin`, which Transformer
            Engine has, and which is accepted and has no effect.

    Raises:
        ValueError: If no size is given, or one is not positive.
        TypeError: If another keyword argument is given.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> norm = mz.RMSNorm(64, device="cpu")
        >>> norm(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
        >>> [name for name, _ in norm.named_parameters()]
        ['weight']
    """

    fwd_rmsnorm_sm_margin: int
    bwd_rmsnorm_sm_margin: int
    inf_rmsnorm_sm_margin: int

    rms = True
