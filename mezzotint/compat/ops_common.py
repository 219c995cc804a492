"""This module has helpers of Transformer Engine's fusible operations, for operations that a program brings."""

from typing import Any

import torch

from mezzotint.tensor.storage import QuantizedTensorStorage


def is_quantized_tensor(tensor: Any) -> bool:
    """Return whether a tensor, or the storage of one, is quantized."""
    return isinstance(tensor, QuantizedTensorStorage)


def maybe_dequantize(tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the values of a tensor in high precision, in a dtype if one is given, contiguous if they were."""
    made = tensor.dequantize(dtype=dtype) if is_quantized_tensor(tensor) else tensor
    return made if dtype is None or made.dtype == dtype else made.to(dtype)


def maybe_autocast_dtype(*, device_type: str = "cuda", default_dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of `torch.autocast` if it is on, else `default_dtype`, or PyTorch's default without one."""
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return torch.get_default_dtype() if default_dtype is None else default_dtype
