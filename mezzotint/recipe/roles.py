"""Roles of tensors: a `QuantizerRole` says what a tensor of a module is, and `slot` where it stands among the
others."""

from dataclasses import dataclass

from mezzotint.tensor.graph_constant import GraphConstant

FORWARD_TENSORS = ("input", "weight", "output")
BACKWARD_TENSORS = ("grad_output", "grad_input")


def slot(gemm: int, tensor_type: str) -> int:
    """Return the index of a tensor among those of its pass, forward or backward, in which the tensors of matrix product
    0 come first, then those of product 1, and so on.

    Args:
        gemm: The number of the matrix product in its module, from 0.
        tensor_type: "input", "weight", "output", "grad_output" or "grad_input".

    Returns:
        The index, from 0.

    Example:
        >>> from mezzotint.recipe import slot
        >>> slot(0, "weight"), slot(1, "input"), slot(1, "grad_output")
        (1, 3, 2)
    """
    types = BACKWARD_TENSORS if tensor_type in BACKWARD_TENSORS else FORWARD_TENSORS
    return len(types) * gemm + types.index(tensor_type)


@dataclass(frozen=True)
class QuantizerRole(GraphConstant):
    """A role says what a tensor of a module is. A recipe is asked for the quantizer of a role.

    Args:
        module_type: The kind of module, such as "linear" or "grouped_linear".
        tensor_type: The kind of tensor: "input", "weight", "output", "grad_output" or "grad_input".
        name: The name of the module, which is its path in the model if it has been told.

    Example:
        >>> import mezzotint as mz
        >>> role = mz.QuantizerRole("linear", "weight", "layers.0.proj")
        >>> str(role)
        'layers.0.proj.linear.weight'
        >>> isinstance(mz.recipe.MXFP8BlockScaling().quantizer(role), mz.MXFP8Quantizer)
        True
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return ".".join(part for part in (self.name, self.module_type, self.tensor_type) if part)
