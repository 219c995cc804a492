"""Roles of tensors: a `QuantizerRole` says what a tensor of a module is, and `slot` where it stands among the
others."""

from dataclasses import dataclass

from mezzotint.tensor.graph_constant import GraphConstant

FORWARD_TENSORS = ("input", "weight", "output")
BACKWARD_TENSORS = ("grad_output", "grad_input")


def slot(gemm: int, tensor_type: str) -> int:
    """Return the place of a GEMM's tensor among those of its pass, forward or backward: those of GEMM 0, of 1, …."""
    types = BACKWARD_TENSORS if tensor_type in BACKWARD_TENSORS else FORWARD_TENSORS
    return len(types) * gemm + types.index(tensor_type)


@dataclass(frozen=True)
class QuantizerRole(GraphConstant):
    """A role says what a tensor is: the kind of module, the kind of tensor ("input" | "weight" | "output" |
    "grad_output" | "grad_input"), and the name of the module."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return ".".join(part for part in (self.name, self.module_type, self.tensor_type) if part)
