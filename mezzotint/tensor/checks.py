"""Checks of the arguments of quantizers: each error names the argument, what was given, and what to give instead."""

import math
from typing import Any

import torch

from mezzotint.constants import DType

NO_GROUP = (
    "no quantizer reduces over ranks. Modules do: give tp_group to the module, or, for delayed scaling, "
    "amax_reduction_group to autocast"
)


def check_fp8_dtype(fp8_dtype: Any) -> DType:
    """Return E4M3 or E5M2, given as a `DType`, its int or the torch dtype, as a `DType`; raise ValueError otherwise."""
    by_torch = {torch.float8_e4m3fn: DType.kFloat8E4M3, torch.float8_e5m2: DType.kFloat8E5M2}
    dtype = by_torch.get(fp8_dtype, fp8_dtype) if isinstance(fp8_dtype, torch.dtype) else fp8_dtype
    if dtype in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        return DType(dtype)
    raise ValueError(f"fp8_dtype is {fp8_dtype!r}: give DType.kFloat8E4M3 or DType.kFloat8E5M2")


def check_scale(name: str, tensor: Any) -> torch.Tensor:
    """Return `tensor` if it is an FP32 tensor of one element; raise TypeError or ValueError otherwise."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}: give an FP32 tensor of one element")
    if tensor.dtype != torch.float32 or tensor.numel() != 1:
        raise ValueError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: give an FP32 tensor of one element")
    return tensor


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return `value` if it is one of `choices`; raise ValueError otherwise."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: give one of {', '.join(map(repr, choices))}")
    return value


def check_reduction(with_amax_reduction: bool, group: Any) -> None:
    """Raise ValueError if an amax reduction is asked for without a group, because it would not be done."""
    if with_amax_reduction and group is None:
        raise ValueError(f"with_amax_reduction is True, and amax_reduction_group None: {NO_GROUP}")


def check_epsilon(epsilon: Any, name: str = "amax_epsilon") -> float:
    """Return `epsilon` as a float if it is 0, which has no effect, or positive and finite; raise ValueError otherwise.

    A quantizer raises each amax to at least its epsilon; a norm adds its epsilon before it divides.
    """
    if not isinstance(epsilon, int | float) or isinstance(epsilon, bool) or not 0 <= epsilon < math.inf:
        raise ValueError(f"{name} is {epsilon!r}: give 0 or a positive number")
    return float(epsilon)
