"""This module reports what `bench peers` found: as a table, as a page of Markdown, and as a figure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._candidates import BASE, CANDIDATES, MODES
from bench._floors import FORMATS
from mezzotint.recipe import RECIPES

MIB = 2**20
# This maps a column to a row's key and to how its value is written.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ms": ("ms", "{:.3f}".format),
    "TFLOP/s": ("tflops", "{:.0f}".format),
    "× bf16": ("ratio", "{:.2f}".format),
    "GEMMs ms": ("gemm_ms", "{:.3f}".format),
    "floor ms": ("floor_ms", "{:.3f}".format),
    "× floor": ("of_floor", "{:.2f}".format),
    "held MiB": ("held", lambda found: f"{found / MIB:.0f}"),
    "peak MiB": ("peak", lambda found: f"{found / MIB:.0f}"),
    "graphs": ("graphs", str),
    "kernels ms": ("kernels_ms", "{:.3f}".format),
    "idle ms": ("idle_ms", "{:.3f}".format),
    "launches": ("launches", "{:.0f}".format),
    "host ms": ("host_ms", "{:.3f}".format),
    "code ms": ("code_ms", "{:.3f}".format),
}
INTRODUCTION = """\
A column such as 16384x4096x14336 is one linear layer: tokens x input features x output features. The others are two
layers of a Llama 3 8B, the same as plain linears that `convert` was given, with four microbatches, and a grouped linear
of 8 experts. A ratio to BF16 is its time in the same mode over the candidate's, so more is faster. The floor is the
time of the matrix products alone, and of moving the fewest bytes that quantization must move. Where several runs were
loaded, each ratio is to BF16 of its own run. `bench/peers.py` says how it is measured; `--markdown` wrote this.
"""
ON_CPU = "On a CPU, at tiny sizes: these times say that everything runs, and nothing else."
# These are Okabe and Ito's colours, which colour-blind readers can tell apart; torchao's are grey.
COLOURS = {
    "torchao-tensorwise": "#555555",
    "torchao-rowwise": "#888888",
    "torchao-rowwise_with_gw_hp": "#bbbbbb",
    **{name: RECIPES[name].colour for name in FORMATS},
}


def title(report: dict[str, Any]) -> str:
    peer = "without torchao" if report["torchao"] is None else f"torchao {report['torchao']}"
    told = [report["device"], f"torch {report['torch']}", peer, report["date"], f"medians of {report['reps']}"]
    told += ["backward in one thread"] if report["one_thread"] else []
    told += ["without guards"] if report.get("skip_guards") else []
    memory = report.get("memory", "default")
    return ", ".join([*told, f"{memory} memory"] if memory != "default" else told)


def columns(report: dict[str, Any]) -> list[str]:
    """Return those of COLUMNS that a row has something for."""
    return [name for name, (key, _) in COLUMNS.items() if any(key in row for row in report["rows"])]


def cells(row: dict[str, Any], names: list[str]) -> list[str]:
    """Return a cell for each of the named COLUMNS."""
    return [write(row[key]) if key in row else "" for key, write in map(COLUMNS.__getitem__, names)]


def show(report: dict[str, Any]) -> None:
    """Print one table, with a line between cases and modes."""
    table = Table(title=f"forward and backward: {title(report)}", title_justify="left")
    names = columns(report)
    for name in ("case", "mode", "candidate", *names):
        table.add_column(name, justify="right" if name in COLUMNS else "left", no_wrap=True)
    group = None
    for row in report["rows"]:
        if group not in (None, (row["case"], row["mode"])):
            table.add_section()
        group = row["case"], row["mode"]
        table.add_row(row["case"], row["mode"], row["candidate"], *cells(row, names))
    console = Console()
    console = console if console.is_terminal else Console(width=180)
    console.print(table)
    for text in absent(report):
        console.print(text, markup=False, highlight=False)
    if report["backend"] != "inductor":
        console.print(ON_CPU)


def absent(report: dict[str, Any]) -> list[str]:
    """Return what failed or was left out, and why; those with one reason share a line."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in report["rows"]:
        reason = row.get("error", row.get("left_out"))
        if reason is not None:
            found.setdefault((row["candidate"], reason), []).append(f"{row['case']} {row['mode']}")
    return [f"{candidate}: {reason} ({', '.join(where)})" for (candidate, reason), where in found.items()]


def matrix(report: dict[str, Any], mode: str, key: str) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return the cases of a mode, and for each candidate and case what its row has under `key`."""
    rows = [row for row in report["rows"] if row["mode"] == mode and key in row and row["candidate"] in COLOURS]
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["candidate"], {})[row["case"]] = row[key]
    return list(dict.fromkeys(row["case"] for row in rows)), {name: found[name] for name in COLOURS if name in found}


def markdown(report: dict[str, Any]) -> str:
    """Return a page: the ratios of each mode, then every number."""
    options = [flag for flag in ("one_thread", "skip_guards") if report.get(flag)]
    command = " ".join(["peers", *[f"--{flag.replace('_', '-')}" for flag in options]])
    command = f'ARGS="{command}"' if options else "ARGS=peers"
    lines = ["# Against the peers", "", f"As `make bench {command}` found it: {title(report)}.", ""]
    lines += [INTRODUCTION]
    for mode in MODES:
        for key, what in (("ratio", "times as fast as BF16"), ("of_floor", "time over the floor's")):
            cases, found = matrix(report, mode, key)
            if not found:
                continue
            lines += [f"## {mode}: {what}", "", "| |" + "".join(f" {case} |" for case in cases)]
            lines += ["|---|" + "---:|" * len(cases)]
            for name, row in found.items():
                values = [f"{row[case]:.2f}" if case in row else "" for case in cases]
                lines += [f"| {name} |" + "".join(f" {value} |" for value in values)]
            lines += [""]
    names = columns(report)
    lines += ["## Every number", "", "| case | mode | candidate |" + "".join(f" {name} |" for name in names)]
    lines += ["|---|---|---|" + "---:|" * len(names)]
    for row in report["rows"]:
        text = [row["case"], row["mode"], row["candidate"], *cells(row, names)]
        lines += ["| " + " | ".join(text) + " |"]
    lines += ["", *[f"- {text}" for text in absent(report)]]
    return "\n".join(lines).rstrip() + "\n"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw bars of the ratios to BF16, a panel for each mode, cases side by side."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = [(mode, *matrix(report, mode, "ratio")) for mode in MODES]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise SystemExit("--figure: nothing was measured beside BF16")
    names = [name for name in CANDIDATES if any(name in found for _, _, found in panels)]
    most = max(len(cases) for _, cases, _ in panels)
    with rc_context({"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 2.4 * len(panels) + 0.6), dpi=120, layout="constrained")
        figure.suptitle(title(report), fontsize=8)
        for axes, (mode, cases, found) in zip(
            figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
        ):
            width = 0.8 / len(names)
            for i, name in enumerate(names):
                row = found.get(name, {})
                places = [j - 0.4 + (i + 0.5) * width for j, case in enumerate(cases) if case in row]
                bars = [row[case] for case in cases if case in row]
                axes.bar(places, bars, width * 0.92, color=COLOURS[name])
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_xticks(range(len(cases)), [_label(case) for case in cases])
            axes.set(title=f"{mode}: times as fast as {BASE}", xlim=(-0.5, most - 0.5))
        handles = [Patch(color=COLOURS[name], label=name) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(path)


def _label(case: str) -> str:
    """Return the label of a case in two lines: tokens and sizes of a linear, or what stands on each side of a comma."""
    return (
        case.replace("x", " tokens,\n", 1) if case[:1].isdigit() and case.count("x") == 2 else case.replace(", ", ",\n")
    )
