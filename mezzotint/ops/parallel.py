"""What operations ask of a process group."""

from typing import Any

import torch
import torch.distributed


def world_size(group: Any) -> int:
    """Processes of the group; 1 where torch.distributed is not in use. None is the default group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size(group)


def local_size(name: str, size: int, group: Any) -> int:
    """This process's part of a dimension."""
    count = world_size(group)
    if size % count:
        raise ValueError(f"{name} is {size}: it must be divisible by the {count} processes of the group")
    return size // count
