"""This module counts what a rank sends, collective by collective as they run, in a real world or in a fake one.

These bytes leave this rank in the cheapest known way, if the whole tensor has n bytes and there are P ranks:

    all-gather, reduce-scatter   n · (P - 1) / P
    all-reduce                   n · (P - 1) / P twice
    all-to-all                   n less what this rank keeps
    broadcast                    n
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezzotint.comm.collectives import collective

NAMESPACES = ("c10d", "_c10d_functional")
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "recv_", "recv_any_source_"}


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def _others(size: int, group: Any) -> int:
    """Return the bytes of a tensor that are not this rank's share."""
    count = group.size()
    return size * (count - 1) // count


def _exchanged(x: torch.Tensor, splits: Any, group: Any) -> int:
    """Return the bytes of the rows that leave this rank in an all-to-all."""
    if not splits:
        return _others(_bytes(x), group)
    rows = sum(splits) - splits[dist.get_rank(group)]
    return rows * x[:1].numel() * x.element_size() if x.shape[0] else 0


# This maps the name of an operation to its kind, and to a function from (arguments, group) to bytes. Operations that
# write into an output have it as their first argument.
COLLECTIVES: dict[str, tuple[str, Callable[[Any, Any], int]]] = {
    "_allgather_base_": ("all-gather", lambda args, group: _others(_bytes(args[0]), group)),
    "allgather_": ("all-gather", lambda args, group: _others(_bytes(args[0]), group)),
    "allgather_into_tensor_coalesced_": ("all-gather", lambda args, group: _others(_bytes(args[0]), group)),
    "all_gather_into_tensor": ("all-gather", lambda args, group: _bytes(args[0]) * (group.size() - 1)),
    "all_gather_into_tensor_out": ("all-gather", lambda args, group: _bytes(args[0]) * (group.size() - 1)),
    "all_gather_into_tensor_coalesced": ("all-gather", lambda args, group: _bytes(args[0]) * (group.size() - 1)),
    "_reduce_scatter_base_": ("reduce-scatter", lambda args, group: _others(_bytes(args[1]), group)),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", lambda args, group: _others(_bytes(args[1]), group)),
    "reduce_scatter_tensor": ("reduce-scatter", lambda args, group: _others(_bytes(args[0]), group)),
    "reduce_scatter_tensor_out": ("reduce-scatter", lambda args, group: _others(_bytes(args[0]), group)),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", lambda args, group: _others(_bytes(args[0]), group)),
    "allreduce_": ("all-reduce", lambda args, group: 2 * _others(_bytes(args[0]), group)),
    "all_reduce": ("all-reduce", lambda args, group: 2 * _others(_bytes(args[0]), group)),
    "all_reduce_": ("all-reduce", lambda args, group: 2 * _others(_bytes(args[0]), group)),
    "all_reduce_coalesced": ("all-reduce", lambda args, group: 2 * _others(_bytes(args[0]), group)),
    "all_reduce_coalesced_": ("all-reduce", lambda args, group: 2 * _others(_bytes(args[0]), group)),
    "alltoall_base_": ("all-to-all", lambda args, group: _exchanged(args[1], args[4], group)),
    "all_to_all_single": ("all-to-all", lambda args, group: _exchanged(args[0], args[2], group)),
    "broadcast_": ("broadcast", lambda args, group: _bytes(args[0]) if group.size() > 1 else 0),
    "broadcast": ("broadcast", lambda args, group: _bytes(args[0]) if group.size() > 1 else 0),
}


_ONE_OP = {
    "gather": "all_gather_into_tensor",
    "scatter": "reduce_scatter_tensor",
    "sum": "all_reduce",
    "max": "all_reduce",
}


class SentBytes(TorchDispatchMode):
    """This mode counts sent bytes while it is on: `with sent: step`, then `sent.total` has
    them by the kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is collective:  # our operation on the CPU, which starts and waits in one
            x, kind, _, group = args
            self._add(_ONE_OP[kind], (x,), {"group": group})
        elif func.namespace in NAMESPACES:
            self._add(func._schema.name.split("::")[1], args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        if name in SILENT:
            return
        if name not in COLLECTIVES:
            raise NotImplementedError(f"{name} is a collective that is not counted: give it a line in COLLECTIVES")
        kind, count = COLLECTIVES[name]
        size = count(args, _find_group((*args, *kwargs.values())))
        if size:
            self.total[kind] += size


def _find_group(values: tuple[Any, ...]) -> Any:
    """Return the process group among an operation's arguments: as itself, boxed, or by its name, which comes last."""
    for value in reversed(values):
        if isinstance(value, ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return ProcessGroup.unbox(value)
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
            return _resolve_process_group(value)  # type: ignore[arg-type]
    raise ValueError("a collective without a process group")
