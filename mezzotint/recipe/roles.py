"""What a tensor of a module is (`QuantizerRole`), and where it stands among the tensors of its module (`slot`)."""

from dataclasses import dataclass

from mezzotint.tensor.graph_constant import GraphConstant

FORWARD_TENSORS = ("input", "weight", "output")
BACKWARD_TENSORS = ("grad_output", "grad_input")


def slot(gemm: int, tensor_type: str) -> int:
    """The place of a GEMM's tensor among those of its direction: the tensors of GEMM 0, then of GEMM 1, …."""
    types = BACKWARD_TENSORS if tensor_type in BACKWARD_TENSORS else FORWARD_TENSORS
    return len(types) * gemm + types.index(tensor_type)


@dataclass(frozen=True)
class QuantizerRole(GraphConstant):
    """What a tensor is: the kind of module, "input" | "weight" | "output" | "grad_output" | "grad_input", its name."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return ".".join(part for part in (self.name, self.module_type, self.tensor_type) if part)
