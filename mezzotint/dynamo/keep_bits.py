"""AOTInductor with the bits of eager code: this module says which operators it must not compute in its own way.

Inductor adds the elements of a sum in another order than PyTorch's kernels do, and computes functions such as tanh with
other code. A quantization behind it then rounds some elements to the next code.
"""

from typing import Any

import torch

# Each adds floating-point numbers, or is no single operation of IEEE 754. All others round as eager code does.
_OTHERWISE = frozenset(
    {
        *("sum", "mean", "prod", "cumsum", "var", "var_mean", "linalg_vector_norm", "_softmax", "_log_softmax"),
        *("native_layer_norm", "_fused_rms_norm", "pow", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log1p"),
        *("sin", "cos", "tan", "tanh", "sigmoid", "erf", "gelu", "silu", "softplus", "logsumexp"),
    }
)


def keep_bits(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """Mark what Inductor may compile of a program, and return the options with which it gives the bits of eager code.

    What is not marked (sums of floating-point numbers, and functions such as tanh) runs in PyTorch's own kernels, and
    BF16 is rounded wherever the program says so. The program is changed in place.

    Args:
        program: The program, after `run_decompositions(decompositions())`.

    Returns:
        The `inductor_configs` of `torch._inductor.aoti_compile_and_package`.

    Raises:
        TypeError: If `program` is no `ExportedProgram`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> program = torch.export.export(mz.RMSNorm(16, device="cpu").eval(), (torch.randn(4, 16),))
        >>> mz.dynamo.keep_bits(program.run_decompositions(mz.dynamo.decompositions()))
        {'fallback_by_default': True, 'emulate_precision_casts': True}
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise TypeError(f"program is a {type(program).__name__}: give what torch.export.export returns")
    for node in program.graph.nodes:
        if node.op == "call_function" and not _differs(node):
            node.meta["custom"] = {**node.meta.get("custom", {}), "compile_with_inductor": {}}
    return {"fallback_by_default": True, "emulate_precision_casts": True}


def _differs(node: torch.fx.Node) -> bool:
    """Return whether Inductor would compute the node in another way: it is in the table, and gives no integers."""
    value = node.meta.get("val")
    is_float = not isinstance(value, torch.Tensor) or value.is_floating_point()
    return isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _OTHERWISE and is_float
