"""Fusions: this module decides which operations are run as one, by lists of functions that rewrite lists of operations.

A fusion is `function(ops, *, recipe) -> ops`: it gets the operations of a pipeline in order and returns them with some
runs of basic operations replaced by a `FusedOperation` of them. `recipe` is None if nothing is quantized. Joint fusions
come first and hold for forward and backward; then forward and backward are fused independently.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from mezzotint.ops.fused_operation import FusedOperation
from mezzotint.ops.op import BasicOperation, FusibleOperation

__all__ = [
    "PlacedOperation",
    "computes_as",
    "fuse",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "replace_windows",
]

Fusion = Callable[..., list[FusibleOperation]]
PlacedOperation = tuple[
    FusibleOperation, tuple[int, ...]
]  # an operation and the places of its basic operations in the pipeline

FORWARD_BACKWARD_FUSIONS: list[Fusion] = []
FORWARD_FUSIONS: list[Fusion] = []
BACKWARD_FUSIONS: list[Fusion] = []


def register_forward_fusion(op_fusion_func: Fusion, prepend: bool = False) -> None:
    """Register a function that fuses operations for the forward pass.

    Args:
        op_fusion_func: A function (ops, *, recipe) -> ops: it gets the operations of a pipeline in order and returns
            them with some runs of basic operations replaced by a `FusedOperation` of them. `recipe` is None if nothing
            is quantized.
        prepend: Whether it comes before all functions that were registered earlier. The default is False.

    Raises:
        TypeError: If it is no function.

    Example:
        >>> from mezzotint import ops
        >>> def fuse_nothing(operations, *, recipe):
        ...     return operations
        >>> ops.register_forward_fusion(fuse_nothing)
        >>> ops.OperationFuser.forward_fusion_functions.remove(fuse_nothing)
    """
    _register(FORWARD_FUSIONS, op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: Fusion, prepend: bool = False) -> None:
    """Register a function that fuses operations for the backward pass.

    Args:
        op_fusion_func: A function (ops, *, recipe) -> ops: it gets the operations of a pipeline in order and returns
            them with some runs of basic operations replaced by a `FusedOperation` of them. `recipe` is None if nothing
            is quantized.
        prepend: Whether it comes before all functions that were registered earlier. The default is False.

    Raises:
        TypeError: If it is no function.

    Example:
        >>> from mezzotint import ops
        >>> def fuse_nothing(operations, *, recipe):
        ...     return operations
        >>> ops.register_backward_fusion(fuse_nothing)
        >>> ops.OperationFuser.backward_fusion_functions.remove(fuse_nothing)
    """
    _register(BACKWARD_FUSIONS, op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: Fusion, prepend: bool = False) -> None:
    """Register a function that fuses both passes alike, before they are fused independently.

    Args:
        op_fusion_func: A function (ops, *, recipe) -> ops: it gets the operations of a pipeline in order and returns
            them with some runs of basic operations replaced by a `FusedOperation` of them. `recipe` is None if nothing
            is quantized.
        prepend: Whether it comes before all functions that were registered earlier. The default is False.

    Raises:
        TypeError: If it is no function.

    Example:
        >>> from mezzotint import ops
        >>> def fuse_nothing(operations, *, recipe):
        ...     return operations
        >>> ops.register_forward_backward_fusion(fuse_nothing)
        >>> ops.OperationFuser.forward_backward_fusion_functions.remove(fuse_nothing)
    """
    _register(FORWARD_BACKWARD_FUSIONS, op_fusion_func, prepend)


def _register(fusions: list[Fusion], function: Fusion, prepend: bool) -> None:
    if not callable(function):
        raise TypeError(f"op_fusion_func is {type(function).__name__}: give a function (ops, *, recipe) -> ops")
    fusions.insert(0 if prepend else len(fusions), function)


def are_fusions_ours() -> bool:
    """Return whether no user has registered a fusion or removed one."""
    registered = (*FORWARD_BACKWARD_FUSIONS, *FORWARD_FUSIONS, *BACKWARD_FUSIONS)
    return len(registered) == len(_OURS) and all(map(operator.is_, registered, _OURS))


_OURS: list[Fusion] = []  # those that this package registers (`fused/__init__.py`)


def end_own_fusions() -> None:
    """Note that all fusions of this package are registered."""
    _OURS.extend((*FORWARD_BACKWARD_FUSIONS, *FORWARD_FUSIONS, *BACKWARD_FUSIONS))


def replace_windows(
    ops: Sequence[FusibleOperation],
    size: int,
    fuse_window: Callable[..., FusibleOperation | None],
) -> list[FusibleOperation]:
    """Move a window of `size` operations over the list; if `fuse_window(*window)` returns an operation, it takes their
    place.

    The first window that fits wins; what was replaced is not looked at again.
    """
    made: list[FusibleOperation] = []
    start = 0
    while start < len(ops):
        window = ops[start : start + size]
        fused = fuse_window(*window) if len(window) == size else None
        if fused is None:
            made.append(ops[start])
            start += 1
        else:
            made.append(fused)
            start += size
    return made


def computes_as(op: FusibleOperation, *classes: type[FusibleOperation]) -> bool:
    """Return whether an operation computes as one of these classes does, so that a fusion of that class can stand for
    it, too.

    A subclass with a forward, a backward or a helper of its own does not; one that adds attributes does.
    """
    return any(op._computes_as is cls for cls in classes)


def fuse(ops: Sequence[FusibleOperation], recipe: Any) -> tuple[list[PlacedOperation], list[PlacedOperation]]:
    """Return the pipeline's forward and backward groups, both in the order of forward."""
    basic_ops = expand(ops)
    both = _apply(_opened(ops, ops, "forward", "backward"), FORWARD_BACKWARD_FUSIONS, recipe, basic_ops)
    forward = _apply(_opened(both, ops, "forward"), FORWARD_FUSIONS, recipe, basic_ops)
    backward = _apply(_opened(both, ops, "backward"), BACKWARD_FUSIONS, recipe, basic_ops)
    return _places(forward), _places(backward)


def fuse_for(
    ops: Sequence[FusibleOperation], basic_ops: Sequence[BasicOperation], recipe: Any, first: int
) -> tuple[list[PlacedOperation], list[PlacedOperation]]:
    """Return the forward groups, and the backward groups from the end, of a run in which `first` is the first operation
    that needs a gradient."""
    forward, backward = fuse(ops, recipe)
    # A fused operation within which backward ends runs operation by operation. So does the forward of a joint fusion,
    # because it knows its backward.
    ends_within = [op for op, places in backward if places[0] < first <= places[-1]]
    return _without(forward, ends_within, basic_ops), _without(backward, ends_within, basic_ops)[::-1]


def _without(
    groups: list[PlacedOperation], fused: list[FusibleOperation], basic_ops: Sequence[BasicOperation]
) -> list[PlacedOperation]:
    made: list[PlacedOperation] = []
    for op, places in groups:
        if any(op is other for other in fused):
            made.extend([(basic_ops[i], (i,)) for i in places])
        else:
            made.append((op, places))
    return made


def _opened(ops: Sequence[FusibleOperation], given: Sequence[FusibleOperation], *passes: str) -> list[FusibleOperation]:
    """Replace fused operations among the `given` ones, not those made by a fusion, by their basic operations if they
    write none of these passes."""
    made: list[FusibleOperation] = []
    for op in ops:
        is_given = isinstance(op, FusedOperation) and any(op is other for other in given)
        made.extend(expand([op]) if is_given and not any(name in op._writes for name in passes) else [op])
    return made


def _apply(
    ops: list[FusibleOperation], fusions: list[Fusion], recipe: Any, basic_ops: Sequence[BasicOperation]
) -> list[FusibleOperation]:
    for fusion in fusions:
        ops = list(fusion(ops, recipe=recipe))
        expanded = expand(ops)
        if len(expanded) != len(basic_ops) or any(a is not b for a, b in zip(expanded, basic_ops, strict=False)):
            names = [type(op).__name__ for op in expanded]
            raise RuntimeError(
                f"the fusion {getattr(fusion, '__name__', fusion)} gave operations that expand to {names}: they must "
                f"be the pipeline's, in order: {[type(op).__name__ for op in basic_ops]}"
            )
    return ops


def expand(ops: Sequence[FusibleOperation]) -> list[BasicOperation]:
    """Return the basic operations that these stand for."""
    made: list[BasicOperation] = []
    for op in ops:
        if isinstance(op, FusedOperation):
            made.extend(op._parts_in_order())
        elif isinstance(op, BasicOperation):
            made.append(op)
        else:
            raise TypeError(f"a pipeline holds {type(op).__name__}: give a BasicOperation or a FusedOperation")
    return made


def _places(ops: list[FusibleOperation]) -> list[PlacedOperation]:
    groups: list[PlacedOperation] = []
    start = 0
    for op in ops:
        count = len(op._parts_in_order()) if isinstance(op, FusedOperation) else 1
        groups.append((op, tuple(range(start, start + count))))
        start += count
    return groups
