"""Process groups: these functions say how many ranks a group has, which one this is, and what its share is."""

from typing import Any

import torch
import torch.distributed


def is_initialized() -> bool:
    """Return whether torch.distributed is in use."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size(group: Any) -> int:
    """Return how many ranks the group has; 1 if torch.distributed is not in use. None is the default group."""
    return torch.distributed.get_world_size(group) if is_initialized() else 1


def rank_in(group: Any) -> int:
    """Return the rank of this process in the group; 0 if torch.distributed is not in use. None is the default group."""
    return torch.distributed.get_rank(group) if is_initialized() else 0


def device_of(group: Any) -> torch.device:
    """Return the device whose tensors the group takes; the CPU if it is one of several."""
    kinds = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def group_by_name(name: str) -> Any:
    """Return the group that an operator in a graph is given by its name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def shard_size(name: str, size: int, count: int) -> int:
    """Return this rank's share of a dimension that `count` ranks share evenly; raise ValueError otherwise."""
    if size % count:
        raise ValueError(f"{name} is {size}: it must be divisible by the {count} ranks of the group")
    return size // count


def local_size(name: str, size: int, group: Any) -> int:
    """Return this rank's share of a dimension that the ranks of a group share evenly; raise ValueError otherwise."""
    return shard_size(name, size, world_size(group))


def resolve_size(tp_group: Any, tp_size: int) -> int:
    """Return how many ranks share a weight: those of the group, or as many as a group that is set later will have."""
    if not isinstance(tp_size, int) or tp_size < 1:
        raise ValueError(f"tp_size is {tp_size!r}: give the number of ranks, 1 or more")
    if tp_group is None:
        return tp_size
    size = world_size(tp_group)
    if tp_size not in (1, size):
        raise ValueError(
            f"tp_size is {tp_size}, the size of tp_group is {size}: give a group of {tp_size}, or no tp_size"
        )
    return size


def check_group(tp_group: Any, tp_size: int) -> None:
    """Raise ValueError unless a group that a module gets later has as many ranks as the module was made for."""
    size = tp_size if tp_group is None else world_size(tp_group)
    if size != tp_size:
        raise ValueError(
            f"the size of tp_group is {size}, the module was made for tp_size={tp_size}: give a group of that many"
        )
