"""The layout of a group's buffers: this module says where the buffers of members go, and what may be a member.

A format declares its buffers; a group has one of each kind, in which those of all members lie one behind the other.
"""

from typing import Any

import torch

from mezzotint.constants import HIGH_PRECISION
from mezzotint.tensor.grouped_shapes import Shape
from mezzotint.tensor.quantize import check_directions
from mezzotint.tensor.quantizer import Quantizer

# The buffers of a direction go here, by their place in the declaration of the format. What both directions share (the
# one scale of FP8 per tensor) goes under the row-wise name.
ROW = ("rowwise_data", "scale_inv", "amax_rowwise")
COLUMN = ("columnwise_data", "columnwise_scale_inv", "amax_columnwise")


def member_buffers(
    shape: Shape, quantizer: Quantizer | None, dtype: torch.dtype
) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return slot of the group → (shape, dtype) for each buffer of one member, in the quantizer's order."""
    if quantizer is None:
        return {ROW[0]: (shape, dtype)}
    rowwise, columnwise, _ = quantizer._targets()
    described = quantizer.for_dtype(dtype)._describe_buffers(shape)
    slots: dict[str, tuple[Shape, torch.dtype]] = {}
    for name, spec in described.items():
        for slot_names, declared in ((ROW, rowwise), (COLUMN, columnwise)):
            if f"_{name}" in declared[: len(slot_names)]:
                slots[slot_names[declared.index(f"_{name}")]] = spec
                break
        else:
            raise ValueError(
                f"quantizer is {type(quantizer).__name__}, which makes a buffer {name!r}: a group holds data, scales "
                "and amax of each direction"
            )
    return slots


# Arguments


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"dtype is {dtype}: members stand for float32, float16 or bfloat16")


def check_quantizer(quantizer: Any) -> None:
    if quantizer is None:
        return
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"quantizer is {type(quantizer).__name__}: give a Quantizer, or None for plain members")
    if quantizer.is_custom():
        raise ValueError(
            f"quantizer is {type(quantizer).__name__}, which makes objects of its own: a group holds buffers that "
            "`_describe_buffers` tells; quantize tensors one by one"
        )
    check_directions(quantizer)
