"""What is asked of a process group: how many there are, which one this is, whether all of them agree."""

import json
import re
from typing import Any

import torch
import torch.distributed


def is_initialized() -> bool:
    """Whether torch.distributed is in use."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size(group: Any) -> int:
    """Processes of the group; 1 where torch.distributed is not in use. None is the default group."""
    return torch.distributed.get_world_size(group) if is_initialized() else 1


def rank_in(group: Any) -> int:
    """The number of this process in the group; 0 where torch.distributed is not in use. None is the default group."""
    return torch.distributed.get_rank(group) if is_initialized() else 0


def group_by_name(name: str) -> Any:
    """The group that an operator in a graph is given by its name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def part_of(name: str, size: int, count: int) -> int:
    """This process's part of a dimension that `count` processes share evenly."""
    if size % count:
        raise ValueError(f"{name} is {size}: it must be divisible by the {count} processes of the group")
    return size // count


def local_size(name: str, size: int, group: Any) -> int:
    """The same, of the processes of a group."""
    return part_of(name, size, world_size(group))


def resolve_size(tp_group: Any, tp_size: int) -> int:
    """Processes that share a weight: those of the group, or as many as a group that is set later will have."""
    if not isinstance(tp_size, int) or tp_size < 1:
        raise ValueError(f"tp_size is {tp_size!r}: give the number of processes, 1 or more")
    if tp_group is None:
        return tp_size
    size = world_size(tp_group)
    if tp_size not in (1, size):
        raise ValueError(
            f"tp_size is {tp_size}, tp_group has {size} processes: give a group of {tp_size}, or no tp_size"
        )
    return size


def check_group(tp_group: Any, tp_size: int) -> None:
    """A group that a module gets later has as many processes as the module was made for."""
    size = tp_size if tp_group is None else world_size(tp_group)
    if size != tp_size:
        raise ValueError(
            f"tp_group has {size} processes, the module was made for tp_size={tp_size}: give a group of that many"
        )


def check_agreed(group: Any, **values: str) -> None:
    """The same on every process of the group, or an error on every one of them. All must ask, in the same order.

    They meet in torch.distributed's store. A collective cannot be had while a graph is traced, and processes that go on
    as before would take it for one of theirs. One that is alone raises after the timeout of the default group.
    """
    store = _store(group)
    if store is None:
        return
    rank, count = rank_in(group), world_size(group)
    number = store.add(f"{rank}", 1)  # how often this process has asked
    keys = [f"{number}/{other}" for other in range(count)]
    store.set(keys[rank], json.dumps(values))
    try:
        store.wait(keys)
    except RuntimeError:
        absent = ", ".join(f"rank {other}" for other in range(count) if not store.check([keys[other]]))
        store.delete_key(keys[rank])
        store.add(f"{rank}", -1)
        listed = "; ".join(f"{name} is {value}" for name, value in values.items())
        raise ValueError(
            f"rank {rank} of the {count} processes of the group has asked alone, {absent} did not: {listed}. Run the "
            "same modules on all of them, in eager code or in the same graphs, and change recipes at the same step"
        ) from None
    found = [json.loads(each) for each in store.multi_get(keys)]
    if number > 1:
        store.delete_key(f"{number - 1}/{rank}")  # all have read it, or they would not ask again
    for name in values:
        _check_same(name, [other.get(name, "none") for other in found])  # it may be somewhere else


def without_addresses(value: Any) -> str:
    """The repr, less what differs between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def note_agreed(group: Any, value: str) -> None:
    """For `has_agreed`, of every process, after `check_agreed`."""
    store = _store(group)
    if store is not None:
        store.set(f"agreed/{value}", "")


def has_agreed(group: Any, value: str) -> bool:
    """Whether the processes have agreed on it before. Where nobody answers there is nothing to ask."""
    store = _store(group)
    return store is None or store.check([f"agreed/{value}"])


def _store(group: Any) -> Any:
    """Where the processes of a group meet; None where they are fake, and nobody answers."""
    group = torch.distributed.group.WORLD if group is None else group
    if torch.distributed.get_backend(group) == "fake":
        return None
    shared = torch.distributed.distributed_c10d._get_default_store()
    members = torch.distributed.get_process_group_ranks(group)
    return torch.distributed.PrefixStore(f"mezzotint/{group.group_name}/{members}", shared)


def _check_same(name: str, given: list[str]) -> None:
    if any(other != given[0] for other in given):
        listed = "; ".join(f"rank {rank} has {other}" for rank, other in enumerate(given))
        raise ValueError(
            f"{name} is not the same on the {len(given)} processes of the group: {listed}. Their parts belong to one "
            "tensor: give all of them the same"
        )
