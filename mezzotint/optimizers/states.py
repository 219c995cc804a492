"""Tensors of an optimizer in fewer bits: this module keeps moments and masters in BF16, or in FP16 and FP8 with a
scale; and masters of BF16 parameters as the 16 bits that the parameter does not have.

    dtype      tensor                      value
    float32    FP32                        itself
    bfloat16   BF16                        itself
    float16    FP16                        tensor · scale
    uint8      E4M3 codes                  code · scale

A scale, FP32 [1], is the least power of two that brings the largest magnitude into the range. So a value that was
stored once is stored again without loss, and a checkpoint, which holds FP32, resumes bit for bit.

A remainder, int16, is master bits - (parameter bits · 2¹⁶): the parameter is the master rounded to the nearest BF16,
ties away from zero, and both together are the master.
"""

import torch

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.optimizer import join_master

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
RANGES = {torch.float16: 65504.0, torch.uint8: 448.0}  # the largest magnitude of the dtypes that have a scale
NAN_BITS = 0x7FC00000
Kept = tuple[torch.Tensor, torch.Tensor | None]  # a tensor and its scale


def decode_state(data: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the value in FP32; the tensor itself if it is FP32."""
    if data.dtype == torch.uint8:
        data = data.view(torch.float8_e4m3fn)
    value = data.float()
    return value if scale is None else value.mul_(scale.view(()))  # a value may have no dimensions


def pack_(data: torch.Tensor, scale: torch.Tensor | None, value: torch.Tensor) -> None:
    """Store an FP32 value in `data`, and its scale in `scale` if there is one."""
    if value is data or data.numel() == 0:
        return
    if scale is None:
        data.copy_(value)
        return
    top = RANGES[data.dtype]
    scale.copy_(_scale_of(value.abs().amax(), top))
    value = (value / scale.view(())).clamp(-top, top)
    data.copy_(value.to(torch.float8_e4m3fn).view(torch.uint8) if data.dtype == torch.uint8 else value)


def unpack_all(kept: list[Kept]) -> list[torch.Tensor]:
    return [decode_state(data, scale) for data, scale in kept]


def pack_all_(kept: list[Kept], values: list[torch.Tensor]) -> None:
    """Store values that `unpack_all` returned and that have changed since. Those in FP32 are where they belong
    already."""
    plain, rounded = [], []
    for (data, scale), value in zip(kept, values, strict=True):
        if scale is not None:
            pack_(data, scale, value)
        elif data.dtype != torch.float32:
            plain.append(data)
            rounded.append(value)
    if plain:
        torch._foreach_copy_(plain, rounded)


def _scale_of(amax: torch.Tensor, top: float) -> torch.Tensor:
    """Return the least power of two, FP32, that is no less than amax / top; 1 if amax is 0 or NaN."""
    ratio = (amax / top).clamp(2.0**-126, 2.0**126)
    power = ((ratio.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    return torch.where(amax > 0, power, 1.0)


def join_remainder(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Join a BF16 parameter and its int16 remainder into the FP32 master."""
    return run_op(join_master, param, remainder)


def split_(param: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    """Store an FP32 master as a BF16 parameter and an int16 remainder."""
    # A NaN whose bits are all ones, as a GPU makes it, would turn the parameter into -0.
    bits = torch.where(master.isnan(), NAN_BITS, master.view(torch.int32))
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    remainder.copy_(low)
    param.copy_(((bits - low) >> 16).to(torch.int16).view(torch.bfloat16))
