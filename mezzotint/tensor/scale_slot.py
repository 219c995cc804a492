"""ScaleSlot: this class says by which scale delayed scaling quantizes a tensor, and where the tensor's amax goes."""

from dataclasses import dataclass

import torch

from mezzotint.tracing import traced_as


@dataclass(slots=True)
class ScaleSlot:
    """A `ScaleSlot` holds the scale of one tensor, and the place in a history at which the tensor's amax is entered.
    Without a history nobody asks for the amax."""

    scale: torch.Tensor  # FP32 [1]
    history: torch.Tensor | None = None  # FP32 (L, n), live: row 0 is raised to the amax
    slot: int = 0


DelayedScale = torch.Tensor | ScaleSlot | None  # None where there is no delayed scaling


@traced_as(lambda scale, history, slot: scale)
def scale_slot(scale: torch.Tensor, history: torch.Tensor | None, slot: int) -> DelayedScale:
    """Return the `ScaleSlot` with these fields. Where Dynamo traces, return the scale alone, which makes quantization
    return the amax: a function of autograd's that Dynamo traces must not write what it did not make."""
    return ScaleSlot(scale, history, slot)


def without_amax(scale: DelayedScale) -> DelayedScale:
    """Return the scale for quantizing a tensor again, whose amax has been entered."""
    return ScaleSlot(scale.scale) if isinstance(scale, ScaleSlot) else scale


def scale_alone(scale: DelayedScale) -> torch.Tensor | None:
    """Return the scale, FP32 [1], without the place of the amax."""
    return scale.scale if isinstance(scale, ScaleSlot) else scale
