"""QuantizeCall: this class is the frozen description of what a quantizer does. Quantizers can be assigned to, as in
Transformer Engine; what runs goes by this description, which is worked out once and cannot change."""

from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from mezzotint.tensor.graph_constant import GraphConstant


@dataclass(frozen=True)
class QuantizeCall(GraphConstant):
    """A `QuantizeCall` is one call of a quantize operator, but for its tensors."""

    op: OpOverload
    tensors: tuple[str, ...]  # names of its tensor arguments after x; "rng!" is drawn if it is not given
    options: tuple[Any, ...]
    takes_scale: bool  # the scale comes with each call, and the amax of x is returned behind the buffers
    alone: tuple[Any, ...] | None  # all arguments after x where no tensor is given; None if one must be
    # The storage for the buffers: its class by name, its constructor kwargs for them, its plain values. None for a
    # quantizer that is no constant of a graph.
    holder: tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...]] | None

    def is_same_as(self, other: "QuantizeCall") -> bool:
        """Return whether both are equal. It is a method since torch 2.11's compiler has no `==` for such values."""
        return self == other
