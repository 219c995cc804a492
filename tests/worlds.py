"""A world of processes with gloo on the CPU: what each of them computes, for a test to look at.

    CHECKS = (one, another)                     # functions of a module, `one(rank) -> dict`; collectives inside
    world = shared_world(factory, CHECKS, size=2)   # for each rank: name of a check → what it gave, or its traceback
    results(world, "one")                       # of each rank; fails here with the traceback from there

A world is for a whole file of tests (a fixture of scope "module"). Where checks read or write a folder of the test's:
`run_world(folder, CHECKS, size=2)`. The processes are forked from one that has imported what takes seconds to import:
`preloaded.py`, once for each worker of a test run.
"""

import faulthandler
import fcntl
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 900  # seconds, after which all processes are ended: a slow machine is no failure
Result = dict[str, Any]
World = list[dict[str, Any]]
Check = Callable[[int], Result]


def work(rank: int, folder: str, checks: Sequence[Check], size: int, environment: dict[str, str]) -> None:
    """One process. Its environment is the one of the test now, not of when the first world was made."""
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()  # where it was, if it dies of a signal
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", ".*script_method", DeprecationWarning)  # of what Inductor imports
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)  # ARM without BF16 instructions
    warnings.filterwarnings("ignore", "delayed scaling begins with scales of 1", UserWarning)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    found: dict[str, Any] = {}
    for check in checks:
        try:
            found[check.__name__] = check(rank)
        except Exception:
            found[check.__name__] = traceback.format_exc()
            break  # the others would wait for a process that is elsewhere
    torch.save(found, f"{folder}/{rank}.pt")
    if len(found) == len(checks):
        with suppress(RuntimeError):  # another one has failed, and gone
            dist.barrier()
    dist.destroy_process_group()


def run_world(folder: Path, checks: Sequence[Check], size: int = 2) -> World:
    """One at a time on a machine: its processes take all cores, and of two worlds beside each other one has died."""
    with (Path(tempfile.gettempdir()) / f"mezzotint-world-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _run(folder, checks, size)


def _run(folder: Path, checks: Sequence[Check], size: int) -> World:
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    arguments = (str(folder), checks, size, {**os.environ})
    context = mp.start_processes(work, arguments, nprocs=size, join=False, daemon=True, start_method="forkserver")
    end = time.monotonic() + TIMEOUT
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > end:
                raise TimeoutError(f"the processes have not come to an end in {TIMEOUT} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def shared_world(factory: pytest.TempPathFactory, checks: Sequence[Check], size: int = 2) -> World:
    """Run once for all workers of a test run, which share out the tests of a file: one starts the processes, the others
    wait and read what it got."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    names = ".".join([checks[0].__module__, *[check.__name__ for check in checks], str(size)])
    folder = root / f"world-{zlib.crc32(names.encode()):08x}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "world.pt"
        if not made.exists():
            world = run_world(Path(tempfile.mkdtemp(dir=folder)), checks, size)
            torch.save(world, made)
        return torch.load(made)


def results(world: World, check: str) -> list[Any]:
    """Of each rank; a check that failed there fails here."""
    for rank, found in enumerate(world):
        made = found.get(check, "another check failed before")
        assert not isinstance(made, str), f"rank {rank}: {made}"
    return [found[check] for found in world]


def attempt(found: Result, name: str, function: Callable[[], Any]) -> None:
    """Under that name, what it is refused with."""
    try:
        function()
    except (TypeError, ValueError) as error:
        found[name] = f"{type(error).__name__}: {error}"
