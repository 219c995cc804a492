"""QuantizeCall: the frozen description of what a quantizer does. Quantizers are mutable shells, as upstream has them;
what runs goes by this, which is worked out once and cannot change."""

from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from mezzotint.tensor.graph_constant import GraphConstant


@dataclass(frozen=True)
class QuantizeCall(GraphConstant):
    """One call of a quantize operator, but for its tensors."""

    op: OpOverload
    tensors: tuple[str, ...]  # names of its tensor arguments behind x; "rng!" is drawn where it is not given
    options: tuple[Any, ...]
    takes_scale: bool  # the scale comes with each call, and the amax of x comes back behind the buffers

    def is_same_as(self, other: "QuantizeCall") -> bool:
        """Return whether both are equal: a method, since the compiler of torch 2.11 has no `==` of such values."""
        return self == other
