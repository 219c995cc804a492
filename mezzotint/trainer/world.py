"""The world is the ranks that torchrun started: this module says which one this is, and makes
all of them take the same path.

What only rank 0 does (folders, logs) and what each does for itself (reading text) can fail on one rank. The others
learn of it (`together`, `on_first`) before they would wait for it.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mezzotint.comm.agreement import check_agreed
from mezzotint.comm.collectives import all_reduce_max, gather_objects
from mezzotint.trainer.console import CommandError, is_one_of_many

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class World:
    """A `World` says which rank of `size` this process is; `local_rank` is its number among those of its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0


ONE_RANK_WORLD = World()


def find_world() -> World:
    """Return the world of torchrun's environment, or of the process group that this process is in already."""
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK", "0"))
    if not is_one_of_many():
        return ONE_RANK_WORLD
    world = World(_number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK", "0"))
    if world.rank >= world.size:
        raise CommandError(f"RANK is {world.rank} of WORLD_SIZE {world.size}: {_START}", is_own=True)
    return world


_START = "start the ranks with torchrun, or unset RANK for one alone"


def _number(name: str, default: str | None = None) -> int:
    """Return the number in a variable that torchrun sets."""
    said = os.environ[name] if default is None else os.environ.get(name, default)
    if not (said.isascii() and said.isdecimal()):
        raise CommandError(f"{name} is {said!r}, which is no number: {_START}", is_own=True)
    return int(said)


@contextmanager
def joined(world: World, device: str, timeout: int) -> Iterator[None]:
    """Join the ranks of the world in a process group: gloo, and NCCL if `device` (auto, cpu
    or cuda) lets them use GPUs.

    `timeout` is how many seconds one rank waits for another.
    """
    if world.size == 1 or dist.is_initialized():
        yield
        return
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if world.local_rank >= count:
            raise CommandError(f"there are {count} GPUs here: give torchrun --nproc-per-node {count}, or --device cpu")
        torch.cuda.set_device(world.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise CommandError(f"the {world.size} ranks do not meet ({error}): start them with torchrun", 1) from None
    try:
        yield
    except CommandError as error:
        if not error.is_own:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # not after errors of this rank alone: it would wait for others


def together(world: World, work: Callable[[], _T]) -> _T:
    """Return what `work` returns on this rank; if it fails on one rank, its error is raised on all."""
    result, error = _attempt(world, work)
    _share(world, error)
    return result


def on_first(world: World, work: Callable[[], _T]) -> _T:
    """Run `work` on rank 0, and return its result on all ranks."""
    result, error = _attempt(world, work) if world.is_first else (None, None)
    return _share(world, error, result)


def _attempt(world: World, work: Callable[[], Any]) -> tuple[Any, tuple[str, int] | None]:
    """Return the result of `work`, and its error as a message and an exit status."""
    if world.size == 1:
        return work(), None
    try:
        return work(), None
    except CommandError as error:
        return None, (str(error), error.code)
    except OSError as error:
        return None, (f"{error}: see to it, and try again", 1)


def _share(world: World, error: tuple[str, int] | None, result: Any = None) -> Any:
    """Return rank 0's result on all ranks, or raise the error of the first rank that has one."""
    if world.size == 1:
        return result
    found = gather_objects((result, error))
    for rank, (_, failed) in enumerate(found):
        if failed is not None:
            raise CommandError(f"rank {rank}: {failed[0]}" if rank else failed[0], failed[1])
    return found[0][0]


def check_same_options(world: World, values: Mapping[str, Any]) -> None:
    """Raise an error on every rank that names the option that differs between ranks."""
    if world.size == 1:
        return
    try:
        check_agreed(None, **{name: str(value) for name, value in values.items()})
    except ValueError as error:
        raise CommandError(str(error)) from None


def largest_number(world: World, number: int) -> int:
    """Return the largest number of all ranks, reduced on the CPU so that no GPU is waited for."""
    return number if world.size == 1 else int(all_reduce_max(torch.tensor(number), None))


@contextmanager
def losing_none(world: World) -> Iterator[None]:
    """Turn an error of a collective, as when another rank is gone or waited for too long, into a
    one-line error of this rank."""
    try:
        yield
    except RuntimeError as error:
        is_theirs = isinstance(error, dist.DistError) or "gloo" in str(error) or "process group" in str(error)
        if world.size == 1 or not is_theirs:
            raise
        how = "see what that one said; --resume goes on from the last checkpoint"
        message = f"rank {world.rank} lost another one ({str(error).splitlines()[0]}): {how}"
        raise CommandError(message, 1, is_own=True) from None
