"""ScaleSlot: this class says by which scale delayed scaling quantizes a tensor, and where the tensor's amax goes."""

from dataclasses import dataclass

import torch

from mezzotint.tracing import traced_as


@dataclass(slots=True)
class ScaleSlot:
    """A `ScaleSlot` says which of a module's scales is that of a tensor, and into which history the tensor's amax is
    entered, at the same slot. Without a history nobody asks for the amax."""

    scales: torch.Tensor  # FP32 [n]
    slot: int
    history: torch.Tensor | None  # FP32 (L, n), live: row 0 is raised to the amax


DelayedScale = torch.Tensor | ScaleSlot | None  # a tensor is the scale itself; None without delayed scaling


@traced_as(lambda scales, slot, history: scales[slot : slot + 1])
def scale_slot(scales: torch.Tensor, slot: int, history: torch.Tensor | None) -> DelayedScale:
    """Return the `ScaleSlot` with these fields. Where Dynamo traces, return the scale alone, which makes quantization
    return the amax: a function of autograd's that Dynamo traces must not write what it did not make."""
    return ScaleSlot(scales, slot, history)


def without_amax(scale: DelayedScale) -> DelayedScale:
    """Return the scale for quantizing a tensor again, whose amax has been entered."""
    return ScaleSlot(scale.scales, scale.slot, None) if isinstance(scale, ScaleSlot) else scale


def scale_alone(scale: DelayedScale) -> torch.Tensor | None:
    """Return the scale, FP32 [1], without the place of the amax."""
    return scale.scales[scale.slot : scale.slot + 1] if isinstance(scale, ScaleSlot) else scale
