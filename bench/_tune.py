"""This module tunes launch configurations: it times a grid around each one that a kernel uses, and
compares the outputs byte for byte.

Every kernel takes its tile and its warps from a function `<what>_config(...)` of its file. A first call shows which of
them a format uses and what they return; then each is replaced, in turn, by one that returns a neighbour.

- First come tile sizes and warps, all combinations within a factor of `reach`; then, from the best of these, one by
  one, whatever else there is (order of tiles, order of rows, pipeline stages).
- Processes beside this one compile ahead into Triton's cache. What fails there is reported and not tried here.
- Outputs start as garbage and must equal those of the configuration that is in the code.
"""

import importlib
import itertools
import multiprocessing
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench._cases import CASES
from bench._timing import copy_gbps, cuda_ms

PACKAGE = "mezzotint.kernels.triton"
Config = dict[str, int]
Overrides = dict[str, Config]  # "module.function" → what it shall return

# The format itself fixes the values of these keys, by (format, direction); "" stands for every direction.
FIXED = {
    ("float8_block_1d", "row"): {"BN"},
    ("float8_block_1d", "column"): {"BM"},
    ("float8_block_1d", "both"): {"BM", "BN"},
    ("float8_block_2d", ""): {"BM", "BN"},
}
OTHERS = {"GROUP": (1, 2, 4, 8, 16), "STAGES": (1, 2, 3, 4), "num_stages": (2, 4)}
ELEMENTS = range(4, 257)  # elements that a thread may hold
WARMUP, REPS, SHOWN, REFINED = 3, 20, 5, 3


@dataclass(frozen=True, slots=True)
class Job:
    """A `Job` is one thing to time: a format in one direction, quantized or dequantized."""

    format: str
    direction: str  # "row" | "column" | "both" | "dequantize row" | "dequantize column"

    def prepared(self, x: torch.Tensor) -> tuple[Callable[[torch.Tensor], Any], int, int]:
        return CASES[self.format].prepared(self.direction, x)


def outputs(call: Callable[[torch.Tensor], Any], x: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what `call` returns, from memory that was just given back to the allocator full of 0xA5."""
    garbage = [torch.empty_like(t).view(torch.uint8).fill_(0xA5) for t in like]
    del garbage
    out = call(x)
    torch.cuda.synchronize()
    return out if isinstance(out, list) else [out]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(s.view(torch.uint8), t.view(torch.uint8)) for s, t in zip(a, b, strict=True))


def config_functions() -> dict[str, tuple[Callable[..., Config], list[Any]]]:
    """Return every configuration function of the kernels, by "module.function", with the modules that call it by its
    name: its own, and those that import it."""
    package = importlib.import_module(PACKAGE)
    modules = [importlib.import_module(f"{PACKAGE}.{info.name}") for info in pkgutil.iter_modules(package.__path__)]
    found = {}
    for module in modules:
        for name, value in vars(module).items():
            if name.endswith("_config") and getattr(value, "__module__", "") == module.__name__:
                holders = [other for other in modules if vars(other).get(name) is value]
                found[f"{module.__name__.rsplit('.', 1)[-1]}.{name}"] = value, holders
    return found


@contextmanager
def replaced(overrides: Overrides, seen: Overrides | None = None) -> Iterator[None]:
    """Put the configurations in `overrides` in force, and note in `seen` what all of them return."""
    functions = config_functions()

    def stand_in(key: str) -> Callable[..., Config]:
        def config(*args: Any, **kwargs: Any) -> Config:
            # It is always a new dict: launches fill in what is missing, and `seen` then shows it.
            value = dict(overrides[key] if key in overrides else functions[key][0](*args, **kwargs))
            if seen is not None:
                seen[key] = value
            return value

        return config

    def put(made: Callable[[str], Callable[..., Config]]) -> None:
        for key, (_, holders) in functions.items():
            for module in holders:
                setattr(module, key.rsplit(".", 1)[-1], made(key))

    try:
        put(stand_in)
        yield
    finally:
        put(lambda key: functions[key][0])


def _threads_fit(config: Config) -> bool:
    size = 1
    for key, value in config.items():
        size *= value if key in ("BM", "BN", "BK", "BLOCK", "BP", "BS") else 1
    return size // (32 * config.get("num_warps", 4)) in ELEMENTS


def first_round(config: Config, fixed: set[str], reach: int) -> list[Config]:
    """Return every combination of sizes and warps within `reach`, the given one first."""
    keys = [k for k in config if k not in fixed and k not in OTHERS and k != "SPAN"]
    most = len(keys) if len(keys) <= 3 else 2  # how many change at once
    factors = [f for f in (0.25, 0.5, 1.0, 2.0, 4.0) if 1 / reach <= f <= reach]
    grid = [config]
    for choice in itertools.product(factors, repeat=len(keys)):
        if sum(f != 1 for f in choice) > most:
            continue
        values = {k: int(config[k] * f) for k, f in zip(keys, choice, strict=True)}
        near = {k: v for k, v in config.items() if k != "SPAN"} | values  # SPAN follows from the tile
        if min(values.values()) >= 1 and near.get("num_warps", 1) <= 32 and _threads_fit(near) and near not in grid:
            grid.append(near)
    return grid


def second_round(config: Config) -> list[Config]:
    """Return configurations with one other key changed at a time."""
    grid = []
    for key, values in (OTHERS | {"SPAN": tuple(config.get("SPAN", 1) * f // 2 for f in (1, 4))}).items():
        if key in config or key == "num_stages":
            grid += [config | {key: v} for v in values if v >= 1 and v != config.get(key)]
    return grid


# ------------------------------------------------------------------------------------------------------ compiling ahead

_worker_x: torch.Tensor


def _start_worker(shape: tuple[int, int], dtype: torch.dtype) -> None:
    global _worker_x
    _worker_x = torch.randn(shape, dtype=dtype, device="cuda")


def _compile(job: Job, overrides: Overrides) -> str | None:
    """Run a job once, and return the error if there is one."""
    try:
        with replaced(overrides):
            job.prepared(_worker_x)[0](_worker_x)
        torch.cuda.synchronize()
    except Exception as error:
        return _brief(error)
    return None


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:100]


class Tuner:
    """A `Tuner` times jobs under overrides, compiles ahead, and keeps the failures."""

    def __init__(self, x: list[torch.Tensor], jobs: int) -> None:
        self.x = x
        self.failures: list[dict[str, Any]] = []
        shape = (x[0].shape[0], x[0].shape[1])
        spawn = multiprocessing.get_context("spawn")  # a fork would share the CUDA context
        self.pool = (
            ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_start_worker, initargs=(shape, x[0].dtype))
            if jobs
            else None
        )

    def usable(self, job: Job, key: str, base: Overrides, grid: list[Config]) -> list[Config]:
        """Return those of `grid` that compile and run in a process beside this one."""
        if self.pool is None:
            return grid
        good: list[Config] = []
        done = 0
        try:
            waiting = [self.pool.submit(_compile, job, base | {key: config}) for config in grid]
            for config, future in zip(grid, waiting, strict=True):
                error = future.result()
                done += 1
                if error is None:
                    good.append(config)
                else:
                    self.failures.append({"job": job, "key": key, "config": config, "error": error})
        except BrokenProcessPool:  # a configuration crashed its process: compile the rest here
            self.pool = None
        return good + grid[done:]

    def time(
        self, job: Job, key: str, overrides: Overrides, reference: list[torch.Tensor]
    ) -> tuple[float, Config] | None:
        """Return the median milliseconds and the configuration as the launch completed it, or None if
        it failed or gave other bytes."""
        seen: Overrides = {}
        try:
            with replaced(overrides, seen):
                call, _, _ = job.prepared(self.x[0])
                if not same(outputs(call, self.x[0], reference), reference):
                    raise ArithmeticError("other bytes than the configuration in the code")
                return cuda_ms(call, self.x, WARMUP, REPS), dict(seen[key])
        except Exception as error:
            self.failures.append({"job": job, "key": key, "config": overrides[key], "error": _brief(error)})
            torch.cuda.synchronize()  # raises if the device itself is lost: nothing more can be timed then
            return None

    def tune(self, job: Job, reach: int, knob: str | None) -> Iterator[dict[str, Any]]:
        """Yield a row for each configuration function and configuration, best first; what was best
        stays for the next function."""
        seen: Overrides = {}
        with replaced({}, seen):
            call, _, moved = job.prepared(self.x[0])
            if job.direction.startswith("dequantize"):
                seen.clear()  # keep only those of dequantization
            reference = [t.clone() for t in outputs(call, self.x[0], [])]
        fixed = FIXED.get((job.format, job.direction), FIXED.get((job.format, ""), set()))
        best: Overrides = {}
        for key, default in {key: dict(config) for key, config in seen.items()}.items():
            if knob and knob not in key:
                continue
            times: list[tuple[float, Config]] = []
            grid = first_round(default, fixed, reach)
            for _ in range(2):
                for config in self.usable(job, key, best, grid):
                    timed = self.time(job, key, best | {key: config}, reference)
                    if timed is not None and timed[1] not in (c for _, c in times):
                        times.append(timed)
                times.sort(key=lambda pair: pair[0])
                tried = [config for _, config in times]
                grid = [c for _, config in times[:REFINED] for c in second_round(config) if c not in tried]
                grid = [c for i, c in enumerate(grid) if c not in grid[:i]]
            copy = copy_gbps(self.x[0], WARMUP, REPS)
            for ms, config in times:
                gbps = moved / ms / 1e6
                yield {
                    "format": job.format,
                    "direction": job.direction,
                    "function": key,
                    "config": config,
                    "is_default": config == default,
                    "ms": ms,
                    "of_copy": gbps / copy,
                }
            if times:
                best[key] = times[0][1]


def tune(
    name: str,
    knob: str | None,
    only: str | None,
    reach: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    jobs: int,
    console: Console,
) -> dict[str, Any]:
    """Tune one format in each direction, and print the best configurations of each function."""
    if name not in CASES:
        raise SystemExit(f"unknown format {name!r}: one of {', '.join(CASES)}")
    if not torch.cuda.is_available():
        raise SystemExit("--tune needs a CUDA GPU")
    x = [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2)]
    tuner, rows = Tuner(x, jobs), []
    for direction in CASES[name].jobs():
        if only and only not in direction:
            continue
        found = []
        try:
            for row in tuner.tune(Job(name, direction), reach, knob):
                found.append(row)
        except Exception as error:
            console.print(f"[red]{name}, {direction}: {_brief(error)}[/]")
            tuner.failures.append({"job": Job(name, direction), "key": "", "config": {}, "error": _brief(error)})
        rows += found
        _print(console, name, direction, found)
    if tuner.pool is not None:
        tuner.pool.shutdown(wait=False, cancel_futures=True)
    failures = [f | {"job": f"{f['job'].format}, {f['job'].direction}"} for f in tuner.failures]
    reasons: dict[str, int] = {}
    for failure in failures:
        reasons[failure["error"]] = reasons.get(failure["error"], 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        console.print(f"{count} configurations left out: {reason}")
    return {"shape": shape, "dtype": str(dtype), "rows": rows, "failures": failures}


def _print(console: Console, name: str, direction: str, rows: list[dict[str, Any]]) -> None:
    for key in dict.fromkeys(row["function"] for row in rows):
        table = Table("", "configuration", "ms", "of copy", title=f"{name}, {direction}: {key}")
        group = [row for row in rows if row["function"] == key]
        for i, row in enumerate(group):
            if i < SHOWN or row["is_default"]:
                words = " ".join(f"{k}={v}" for k, v in row["config"].items())
                mark = "in the code" if row["is_default"] else ""
                table.add_row(f"{i + 1}/{len(group)} {mark}", words, f"{row['ms']:.4f}", f"{row['of_copy']:.3f}")
        console.print(table)
