"""Quantization: measure it on CUDA against the bandwidth of a device copy, on a CPU against torchao's eager functions.

    python -m bench quantize [--shape 16384x14336] [--dtype bf16] [--formats mxfp8,amax] [--quick] [--json out.json]
    python -m bench quantize --device cpu [--threads 0]
    python -m bench quantize --tune mxfp8 [--only both] [--knob mxfp8.tile_config] [--reach 4]

Every call goes through the leaf op, allocation included, which is what users get.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench._cases import DIRECTIONS, TARGETS, Case, chosen
from bench._timing import copy_gbps, cuda_ms, interleaved_ms

if TYPE_CHECKING:
    from bench._peers import Pair

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status says whether everything ran, not whether it is fast."""
    args = _parser().parse_args(argv)
    dtype = DTYPES[args.dtype]
    if args.tune:
        from bench._tune import tune

        shape = args.shape or (16384, 14336)
        report = tune(args.tune, args.knob, args.only, args.reach, shape, dtype, args.jobs, console())
    elif args.device == "cuda":
        report = on_cuda(args.shape or (16384, 14336), dtype, args.formats, args.quick)
    else:
        torch.set_num_threads(args.threads or torch.get_num_threads())
        shape = args.shape or ((1024, 2048) if args.quick else (2048, 4096))
        report = on_cpu(shape, dtype, args.formats, args.quick)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any("error" in row for row in report["rows"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench quantize", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=_shape, help="MxK; 16384x14336 on CUDA, 2048x4096 on a CPU")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--formats", help="comma-separated parts of format names")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, on a CPU a smaller shape")
    parser.add_argument(
        "--threads", type=int, default=1, help="on a CPU; 1: CPU time, else wall time; 0: PyTorch's own"
    )
    parser.add_argument("--json", help="write the numbers to this file, too")
    parser.add_argument("--tune", metavar="FORMAT", help="time a grid of launch configurations (CUDA)")
    parser.add_argument("--knob", help="with --tune: only configuration functions so named, e.g. float8.amax_config")
    parser.add_argument("--only", help="with --tune: only directions so named, e.g. both")
    parser.add_argument("--reach", type=int, choices=(2, 4), default=2, help="with --tune: largest factor of a size")
    parser.add_argument("--jobs", type=int, default=8, help="with --tune: processes that compile ahead; 0: none")
    return parser


def _shape(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    return int(rows), int(cols)


def console() -> Console:
    """Return a console that does not fold tables to 80 columns if the output is a file."""
    found = Console()
    return found if found.is_terminal else Console(width=150)


def progress(items: list[Any], what: Callable[[Any], str]) -> Iterator[Any]:
    """Yield each item in turn, under a progress bar if a person looks on."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=what(item))
            yield item
            bar.advance(task)


def random_inputs(shape: tuple[int, int], dtype: torch.dtype, device: str, count: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(count)]


def versions(device: str) -> Row:
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {threads} thread{'s' * (threads > 1)}"
    return {"device": name, "torch": torch.__version__}


# ---------------------------------------------------------------------------------------------------------------- CUDA


def on_cuda(shape: tuple[int, int], dtype: torch.dtype, formats: str | None, quick: bool) -> Row:
    """Measure every format in every direction of quantization and dequantization, and print the table."""
    warmup, reps = (3, 20) if quick else (10, 50)
    inputs = random_inputs(shape, dtype, "cuda", 2)
    copies, rows = [], []
    for case in progress(chosen(formats), lambda case: case.name):
        # A copy is timed before each format, because the card's clocks drift while it works.
        copies.append(copy_gbps(inputs[0], warmup, reps))
        for row in _measure(case, inputs, warmup, reps):
            rows.append(row | ({} if "error" in row else _judged(row, copies[-1])))
    copies.append(copy_gbps(inputs[0], warmup, reps))
    report = versions("cuda") | {"shape": shape, "dtype": str(dtype), "reps": reps, "copy_gbps": copies, "rows": rows}
    _print_cuda(report)
    return report


def _measure(case: Case, inputs: list[torch.Tensor], warmup: int, reps: int) -> Iterator[Row]:
    for job in case.jobs():
        label = {"format": case.name, "direction": job if len(case.jobs()) > 1 else ""}
        try:
            call, reads, moved = case.prepared(job, inputs[0])
            yield label | {"reads": reads, "bytes": moved, "ms": cuda_ms(call, inputs, warmup, reps)}
        except Exception as error:  # a failure must not cost the other kernels their numbers
            yield label | {"error": first_line(error)}


def _judged(row: Row, copy: float) -> Row:
    gbps = row["bytes"] / row["ms"] / 1e6
    target = TARGETS[row["reads"]]
    return {"gbps": gbps, "of_copy": gbps / copy, "target": target, "reached": gbps / copy >= target}


def first_line(error: Exception) -> str:
    """Return what went wrong, for a cell of a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:120]


def _print_cuda(report: Row) -> None:
    copies, out = report["copy_gbps"], console()
    title = f"{report['shape'][0]}x{report['shape'][1]} {report['dtype']}, {report['device']}, torch {report['torch']}"
    table = Table("format", "direction", "reads", "MB", "ms", "GB/s", "of copy", "target", "reached", title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in report["rows"]:
        if "error" in row:
            table.add_row(row["format"], row["direction"], *[""] * 6, row["error"], style="red")
            continue
        table.add_row(
            row["format"],
            row["direction"],
            str(row["reads"]),
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['ms']:.3f}",
            f"{row['gbps']:.0f}",
            f"{row['of_copy']:.3f}",
            f"{row['target']:.2f}",
            _mark(row["reached"]),
        )
    out.print(table)
    done = [row for row in report["rows"] if "error" not in row]
    out.print(
        f"device copy: {copies[0]:.0f} GB/s first, {copies[-1]:.0f} last"
        f" ({min(copies):.0f} to {max(copies):.0f} in between); median of {report['reps']}."
        f" {sum(row['reached'] for row in done)} of {len(report['rows'])} rows reach their target."
    )


def _mark(good: bool) -> str:
    return "[green]yes[/]" if good else "[red]no[/]"


# ----------------------------------------------------------------------------------------------------------------- CPU


def on_cpu(shape: tuple[int, int], dtype: torch.dtype, formats: str | None, quick: bool) -> Row:
    """Measure our reference against torchao's eager functions; with a ratio theirs / ours of 1
    or more, ours is not slower."""
    from bench._peers import pairs

    # One thread can be timed by what it computed, whatever else the machine is doing.
    is_alone = torch.get_num_threads() == 1
    clock = time.thread_time if is_alone else time.perf_counter
    (x,) = random_inputs(shape, dtype, "cpu", 1)
    parts = [part.strip() for part in (formats or "").split(",") if part.strip()]
    wanted = [pair for pair in pairs() if not parts or any(part in pair.case.name for part in parts)]
    reps, budget = (5, 2.0) if quick else (11, 5.0)
    rows = []
    with torch.no_grad():
        for pair in progress(wanted, lambda pair: f"{pair.case.name}, {pair.direction}"):
            label = {"format": pair.case.name, "direction": pair.direction, "against": pair.against}
            try:
                rows.append(label | _versus(pair, x, reps, budget, clock))
            except Exception as error:
                rows.append(label | {"error": first_line(error)})
    kind = "CPU time" if is_alone else "wall time"
    report = versions("cpu") | {"shape": shape, "dtype": str(dtype), "clock": kind, "rows": rows}
    _print_cpu(report)
    return report


def _versus(pair: "Pair", x: torch.Tensor, reps: int, budget: float, clock: Callable[[], float]) -> Row:
    """Return the times of a pair, and how many of the bits differ."""
    is_back = pair.direction == "dequantize"
    ours, _, _ = pair.case.prepared("dequantize row" if is_back else pair.direction, x)
    if pair.theirs is None or pair.compare is None:
        (ms,), count = interleaved_ms([lambda: ours(x)], reps, budget, clock)
        return {"ours_ms": statistics.median(ms), "reps": count, "note": pair.note}
    theirs = pair.theirs(x) if is_back else functools.partial(pair.theirs, x)
    named = {"out": ours(x)} if is_back else pair.case.run(x, *DIRECTIONS[pair.direction])
    differ = {what: (int((a != b).sum()), a.numel()) for what, a, b in pair.compare(named, theirs())}
    (ms, their_ms), count = interleaved_ms([lambda: ours(x), theirs], reps, budget, clock)
    return {
        "ours_ms": statistics.median(ms),
        "theirs_ms": statistics.median(their_ms),
        "ratio": statistics.median(their_ms) / statistics.median(ms),
        "best_ratio": min(their_ms) / min(ms),
        "reps": count,
        "differ": differ,
        "note": pair.note if any(n for n, _ in differ.values()) else "",
    }


def _print_cpu(report: Row) -> None:
    title = f"{report['shape'][0]}x{report['shape'][1]} {report['dtype']}, {report['device']}, torch {report['torch']}"
    table = Table("format", "direction", "against", "ours ms", "theirs ms", "ratio", "≥ 1", "of minima", title=title)
    table.columns[2].overflow = "fold"
    table.add_column("bits, remarks", overflow="fold")
    for column in table.columns[3:8]:
        column.justify = "right"
    for row in report["rows"]:
        label = row["format"], row["direction"], row["against"]
        if "error" in row:
            table.add_row(*label, *[""] * 5, row["error"], style="red")
        elif "ratio" not in row:
            table.add_row(*label, f"{row['ours_ms']:.1f}", *[""] * 4, row["note"])
        else:
            few = f"{row['reps']} repetition{'s' * (row['reps'] > 1)}" if row["reps"] < 5 else ""
            table.add_row(
                *label,
                f"{row['ours_ms']:.1f}",
                f"{row['theirs_ms']:.1f}",
                f"{row['ratio']:.2f}",
                _mark(row["ratio"] >= 1),
                f"{row['best_ratio']:.2f}",
                "; ".join(filter(None, (_differences(row["differ"].items()), row["note"], few))),
            )
    out = console()
    out.print(table)
    peers = [row for row in report["rows"] if "ratio" in row]
    slower = sum(row["ratio"] < 1 for row in peers)
    out.print(
        f"{report['clock']}, medians of interleaved runs; ratio: theirs / ours. Slower: {slower} of {len(peers)}."
    )


def _differences(differ: Iterable[tuple[str, tuple[int, int]]]) -> str:
    wrong = [f"{count} of {total} {what} differ" for what, (count, total) in differ if count]
    return ", ".join(wrong) or "equal"
