"""Operators that wait for other processes stay in line with the collectives.

Inductor runs the collectives of a graph in the order in which they stand there, and all else where it saves memory. An
operator of ours in which processes meet must be one of the first kind (seen in torch 2.11 and 2.13).
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mezzotint.dynamo.late import after_import

_MODULE = "torch._inductor.lowering"


def keep_in_line(ops: Sequence[Any]) -> None:
    """Have Inductor take these operators, which give one tensor or nothing, for collectives."""

    def lowered(ir: Any, op: Any) -> Any:
        def lower(*args: Any) -> Any:
            made = ir._CollectiveKernel.create(op, *args)
            return None if made is None else ir.TensorBox.create(made)

        return lower

    def register(lowering: ModuleType) -> None:
        for op in ops:
            lowering.register_lowering(op, type_promotion_kind=None)(lowered(lowering.ir, op))

    after_import(_MODULE, register)
