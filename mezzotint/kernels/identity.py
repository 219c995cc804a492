"""Identity: this module quantizes nothing. It copies x and casts it to a dtype; an op may not return its input."""

import torch

from mezzotint.kernels._lib import Buffers
from mezzotint.kernels.quantize_ops import quantize_ops


def identity_buffers(shape: tuple[int, ...], dtype: torch.dtype | None) -> Buffers:
    """Return the one buffer of the copy, in the logical shape."""
    return {"hp_data": (shape, torch.float32 if dtype is None else dtype)}


def identity_reference(x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.to(dtype, copy=True).contiguous()]


identity_quantize, identity_quantize_ = quantize_ops(
    "identity_quantize",
    "ScalarType dtype",
    geometry=identity_buffers,
    reference=identity_reference,
    cuda=None,
)
