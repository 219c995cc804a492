"""Quantized tensors between operations: this module says how operations hand them to each other.

The operation before one with an input quantizer makes its output with it; the operation behind one with a grad-output
quantizer makes the gradient with that. A quantizer is a value or, in delayed scaling, a `DelayedQuantizer`.
"""

from typing import Any

import torch

from mezzotint.functional.autograd import enter_amaxes
from mezzotint.functional.weight import as_storage
from mezzotint.tensor.flatten import class_by_name, qualified_name
from mezzotint.tensor.quantize import quantize_scaled
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.scale_slot import DelayedScale, scale_slot
from mezzotint.tensor.storage import QuantizedTensorStorage


class DelayedQuantizer:
    """A `DelayedQuantizer` quantizes one tensor in one run of delayed scaling, by the scale that the run found; the
    amax enters the history."""

    __slots__ = ("history", "quantizer", "scales", "slot", "state")

    def __init__(
        self,
        quantizer: Quantizer,
        scales: torch.Tensor | None,
        slot: int,
        history: torch.Tensor | None,
        state: Any = None,
    ) -> None:
        self.quantizer, self.slot = quantizer, slot
        self.scales = scales  # FP32 [n]; None if it is a gradient, and the run has no backward
        self.history = history  # FP32 (L, n); None if the run enters nothing
        self.state = state  # the GradState if it is a gradient, else None

    def takes_scale(self) -> bool:
        return True

    def place(self) -> DelayedScale:
        """Return the scale, and where quantization is to enter the amax, as `layer/run.py` does for modules: not if a
        graph hands the amax over, and not if a user's own rule reads it."""
        if self.scales is None:
            return None
        if self.state is not None and (self.state.is_handed_over() or self.state.update is not None):
            return self.scales[self.slot : self.slot + 1]
        return scale_slot(self.scales, self.slot, self.history)

    def saw(self, amax: torch.Tensor) -> None:
        """Enter an amax, FP32 [1], into the history."""
        if self.history is not None:
            enter_amaxes(self.state, self.history, [amax], [self.slot])

    def quantize(self, tensor: Any) -> Any:
        """Return a storage of the tensor with the directions that are wanted."""
        return quantized(tensor, self)

    def __call__(self, tensor: Any) -> Any:
        return quantized(tensor, self)


def value_and_scale(quantizer: Any) -> tuple[Any, DelayedScale]:
    """Return the quantizer and its scale, or None, as the functional cores take them."""
    return (quantizer.quantizer, quantizer.place()) if quantizer.takes_scale() else (quantizer, None)


def enter(quantizer: Any, amax: torch.Tensor | None) -> None:
    """Enter the amax that a core returned, if there is one, by the quantizer that was used."""
    if amax is not None:
        quantizer.saw(amax)


def quantized(x: Any, quantizer: Any) -> Any:
    """Return x as a storage made by the quantizer; as it is if it holds that already."""
    value, scale = value_and_scale(quantizer)
    if isinstance(x, QuantizedTensorStorage):
        if holds(x, value):
            return as_storage(x)
        x = x.dequantize()
    made, amax = quantize_scaled(x.detach(), value, scale)
    enter(quantizer, amax)
    return made


def plain(x: Any) -> torch.Tensor:
    """Return x in high precision."""
    return x.dequantize() if isinstance(x, QuantizedTensorStorage) else x


def holds(x: Any, quantizer: Any) -> bool:
    """Return whether a quantized tensor holds what the quantizer would make: the format, its options, and each
    direction that is wanted."""
    if quantizer.is_custom():
        return _is_made_by(x, quantizer)
    name, _, values = quantizer._holder(True)
    cls = getattr(type(x), "_STORAGE", type(x))
    if qualified_name(cls) != name:
        return False
    if any(getattr(x, attribute) != values[kwarg] for attribute, kwarg, _ in cls._VALUES if kwarg in values):
        return False
    held, wanted = x.get_usages(), quantizer.get_usages()
    return all(held[usage] or not wanted[usage] for usage in ("rowwise", "columnwise"))


def _is_made_by(x: Any, quantizer: Quantizer) -> bool:
    """Return whether a user's own quantizer made x, or one that differs in nothing but its directions. What its
    attributes mean is up to the user, so objects count as equal only if they are the same."""
    maker = x._quantizer
    if type(maker) is not type(quantizer):
        return False
    held, wanted = x.get_usages(), quantizer.get_usages()
    if any(wanted[usage] and not held[usage] for usage in wanted):
        return False
    ours, theirs = [{k: v for k, v in vars(q).items() if k not in _OF_DIRECTIONS} for q in (quantizer, maker)]
    return ours.keys() == theirs.keys() and all(
        value is theirs[name] or (isinstance(value, _PLAIN) and value == theirs[name]) for name, value in ours.items()
    )


_OF_DIRECTIONS = ("rowwise_usage", "columnwise_usage", "_memo")
_PLAIN = (bool, int, float, str)


def as_tensor(x: Any) -> Any:
    """Return a storage as the quantized tensor that users see; anything else, and what a user's own quantizer made, as
    it is."""
    if isinstance(x, torch.Tensor) or not isinstance(x, QuantizedTensorStorage):
        return x
    if x._quantizer is not None and x._quantizer.is_custom():
        return x
    name = x._quantizer._holder(False)[0]  # type: ignore[union-attr]
    return class_by_name(name)._build(x.shape, x._dtype, x.get_metadata())
