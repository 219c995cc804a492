"""Decompositions: a table says how to compute this package's operators with PyTorch's own, for exported programs that
run without this package.

    program = torch.export.export(model.eval(), inputs)
    program = program.run_decompositions(mezzotint.dynamo.decompositions())
    torch.export.save(program, "model.pt2")         torch.export.load needs PyTorch alone

The operators are those of the references (`mezzotint/kernels`), so the values are those of the model, bit for bit, on
the CPU. A GPU runs these references too, in place of Triton kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mezzotint.kernels._lib import composites, leaf_references


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Return a table for `ExportedProgram.run_decompositions`: operator of this package → function in PyTorch's own.

    Call it after the program has been exported, because operators are defined as they are needed. The program then
    keeps none of this package's operators, in any recipe. A product of groups whose sizes are in a tensor looks at
    values: it has no such form, and raises ValueError.

    Returns:
        The table. Operators of PyTorch that it does not name stay as they are.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> model, x = mz.Linear(32, 32, device="cpu").eval().requires_grad_(False), torch.randn(4, 32)
        >>> with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
        ...     program, y = torch.export.export(model, (x,)), model(x)
        >>> program = program.run_decompositions(mz.dynamo.decompositions())
        >>> any("mezzotint" in str(node.target) for node in program.graph.nodes), torch.equal(program.module()(x), y)
        (False, True)
    """
    references = leaf_references()
    return {**composites(), **{op: _without_writes(op, reference) for op, reference in references.items()}}


def _without_writes(op: torch._ops.OpOverload, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return the reference as a program can hold it: what it writes in place becomes new tensors."""

    def traced(*args: Any) -> Any:
        with FunctionalTensorMode(), _Fills():
            given = pytree.tree_map_only(torch.Tensor, FunctionalTensor.to_functional, args)
            try:
                made = reference(*given)
            except RuntimeError as error:
                raise ValueError(
                    f"{op} looks at values, and cannot be written in PyTorch's operators: give the sizes of groups as "
                    "a list, or keep this package's operators in the program, which torch.export does by itself"
                ) from error
        return pytree.tree_map_only(FunctionalTensor, _plain, made)

    return traced


class _Fills(TorchFunctionMode):
    """This mode makes constant tensors by operators that fill them: `run_decompositions` loses the ones it meets."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.tensor:
            return function(*args, **kwargs)
        (values,) = args
        if isinstance(values, bool | int | float):
            return torch.full((), values, **kwargs)
        return torch.stack([torch.full((), value, **kwargs) for value in values])


def _plain(tensor: FunctionalTensor) -> torch.Tensor:
    torch._sync(tensor)
    return tensor.from_functional()
