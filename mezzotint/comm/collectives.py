"""PyTorch's functional collectives, which can be compiled, along the first dimension. In a group of one rank they are
the identity.

`start_…` returns something that `wait` makes into a result: what is computed in between overlaps with the
communication. On the CPU `start_…` waits: functional collectives of gloo that are under way at the same time corrupt
memory (torch 2.11, 2.13: three all-gathers, started and then waited for, end in SIGABRT or SIGSEGV after some
thousands; one at a time does not). A compiler may separate what starts a collective from what waits for it, and put
another one between them. So there, on the CPU, both are in one operator of this package.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as functional

from mezzotint.comm.groups import group_by_name, world_size
from mezzotint.kernels._lib import leaf, run_op

# These are torch 2.13's names if it has them, else those of 2.11.
_all_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

_KINDS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "gather": lambda x, group: _all_gather(x, 0, group),
    "scatter": lambda x, group: _reduce_scatter(x, "sum", 0, group),
    "sum": lambda x, group: functional.all_reduce(x, "sum", group),
    "max": lambda x, group: functional.all_reduce(x, "max", group),
}


def _group(group: Any) -> Any:
    return torch.distributed.group.WORLD if group is None else group


def wait(started: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective that was started."""
    return started if started.is_cpu else functional.wait_tensor(started)


def _start(kind: str, x: torch.Tensor, group: Any) -> torch.Tensor:
    x, group = x.contiguous(), _group(group)
    if not x.is_cpu:
        return _KINDS[kind](x, group)
    return run_op(collective, x, kind, world_size(group), group.group_name)


def _run(kind: str, x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.wait_tensor(_KINDS[kind](x, group))


def _fake(x: torch.Tensor, kind: str, count: int, group: str) -> torch.Tensor:
    if kind == "gather":
        return x.new_empty((x.shape[0] * count, *x.shape[1:]))
    return x.new_empty((x.shape[0] // count, *x.shape[1:])) if kind == "scatter" else torch.empty_like(x)


collective = leaf(
    "collective(Tensor x, str kind, int count, str group) -> Tensor",
    fake=_fake,
    cpu=lambda x, kind, count, group: _run(kind, x, group_by_name(group)),
)


def start_all_gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Start to gather (m, …) of each rank into (m · ranks, …); `wait` gives the result."""
    return _start("gather", x, group)


def all_gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather (m, …) of each rank into (m · ranks, …)."""
    return x if world_size(group) == 1 else wait(start_all_gather(x, group))


def start_all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Start the sum over ranks; `wait` gives the result."""
    return _start("sum", x, group)


def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum over ranks."""
    return x if world_size(group) == 1 else wait(start_all_reduce(x, group))


def all_reduce_max(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the largest values over ranks, element by element."""
    return x if world_size(group) == 1 else wait(_start("max", x, group))


def start_reduce_scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Start the sum over ranks, (m, …), of which each rank gets its shard, (m / ranks, …); `wait` gives the result."""
    count = world_size(group)
    if x.shape[0] % count:
        raise ValueError(f"input has shape {tuple(x.shape)}: {count} ranks must divide its first dimension")
    return _start("scatter", x, group)


def reduce_scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return this rank's shard, (m / ranks, …), of the sum over ranks, (m, …)."""
    return x if world_size(group) == 1 else wait(start_reduce_scatter(x, group))


def all_to_all(x: torch.Tensor, received: Any, sent: Any, group: Any) -> torch.Tensor:
    """Exchange rows between all ranks: (sum of sent, …) → (sum of received, …).

    `sent` and `received` say how many rows go to, and come from, each rank; None means as many to each.
    """
    received, sent = (None, None) if sent is None else (list(received), list(sent))
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), received, sent, _group(group)))


def broadcast_(x: torch.Tensor, group: Any) -> None:
    """Write into x what the first rank of the group has. This works in eager code only."""
    torch.distributed.broadcast(x, group=group, group_src=0)


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return what each rank gives, anything that can be pickled: ranks must trust each other. For eager code only."""
    found: list[Any] = [None] * world_size(group)
    torch.distributed.all_gather_object(found, value, group)
    return found
