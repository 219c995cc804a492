"""Conformance: count what differs from the expected bytes in every test vector, 16-bit pattern and scale code.

    python -m bench conformance [--device cuda] [--write docs/conformance.md]

Expected bytes come from other projects' reference code (the vectors), and from integer arithmetic in numpy
(`tests/exact.py`) for the exhaustive sets; `tests/conformance/` has those of each format. On CUDA the kernels are also
compared with the CPU reference, every option set of every format. The exit status is 1 if anything differs.
"""

import argparse
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mezzotint.kernels import elements
from tests import compare, exact
from tests.conformance import DTYPES, FP8, Row, count, format_rows
from tests.formats import VARIANTS, Variant
from tests.values import CONTENTS, fill, raw

COLUMNS = ("format", "input set", "against", "items", "mismatches")


def main(argv: list[str] | None = None) -> int:
    """Print the table, and write it if asked; return 1 if a row has a mismatch."""
    parser = argparse.ArgumentParser(prog="python -m bench conformance", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as Markdown")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA GPU here")
    rows = by_family(all_rows(args.device))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(as_table(rows, args.device))
    wrong = sum(row.mismatches > 0 for row in rows)
    console.print(f"{len(rows)} rows, {sum(row.items for row in rows):,} items, {wrong} rows with mismatches")
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(as_markdown(rows, args.device, args.write))
        console.print(f"wrote {args.write}")
    return 1 if wrong else 0


def all_rows(device: str) -> Iterator[Row]:
    yield from vector_rows(device)
    yield from cast_vector_rows(device)
    yield from pattern_rows(device)
    yield from code_rows(device)
    yield from format_rows(device)
    if device != "cpu":
        yield from device_rows(device)


def by_family(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with those of one format together, formats in the order in which they come up."""
    rows = list(rows)
    order = list(dict.fromkeys(row.family for row in rows))
    return sorted(rows, key=lambda row: order.index(row.family))


# The vectors


def vector_rows(device: str) -> Iterator[Row]:
    """Yield a row for each format and content: all option sets and shapes, both
    directions, padding of scales included."""
    totals: dict[tuple[str, str], list[int]] = {}
    for entry in track(compare.checked_entries(), "vectors", transient=True):
        kernel_rule = "kernel rule" if entry["options"].get("nonfinite") else ""
        total = totals.setdefault((entry["format"], f"{entry['content']} {kernel_rule}".strip()), [0, 0, 0])
        counts = compare.compare(entry, device).values()
        total[0] += 1
        total[1] += sum(count.items for count in counts)
        total[2] += sum(count.mismatches for count in counts)
    for (name, content), (cases, items, mismatches) in totals.items():
        yield Row(name, f"{content}, {cases} cases", "vectors", items, mismatches)


def cast_vector_rows(device: str) -> Iterator[Row]:
    for entry in compare.cast_entries():
        patterns = {"cast_bf16_all": "every BF16 pattern"}.get(entry["name"], "FP32 edges and midpoints")
        for name, found in compare.compare_casts(entry, device).items():
            yield Row(f"cast {name}", patterns, "vectors", *found)


# Everything there is


def pattern_rows(device: str) -> Iterator[Row]:
    """Yield the rows of every 16-bit pattern through every cast."""
    for name, values in exact.PATTERNS.items():
        x, inputs = values(), f"every {name.upper()} pattern"
        value = torch.from_numpy(x).to(device)
        for elem, dtype in FP8.items():
            codes = elements.cast_fp8(value.clone(), dtype)
            yield Row(f"cast {elem}", inputs, "integers", *count(codes, exact.encode(x, elem)))
        yield Row("cast e2m1", inputs, "integers", *count(elements.cast_e2m1(value), exact.encode(x, "e2m1")))
        yield Row("cast e8m0 up", inputs, "integers", *count(elements.e8m0_up(value), exact.encode_e8m0_up(x)))


def code_rows(device: str) -> Iterator[Row]:
    """Yield the rows of decoding every scale code."""
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    powers = exact.decode_e8m0(np.arange(256, dtype=np.uint8))
    yield Row("cast e8m0 decode", "256 codes", "float64", *count(elements.e8m0_decode(byte), powers.astype(np.float32)))
    inverse = (1 / powers).astype(np.float32)
    yield Row("cast e8m0 inverse", "256 codes", "float64", *count(elements.e8m0_inverse(byte), inverse))


# Between two devices


def device_rows(device: str) -> Iterator[Row]:
    """Yield the rows of every option set of every op on the device against the CPU reference;
    the vectors have few of them."""
    for variant in track(VARIANTS, "against the CPU", transient=True):
        for name, dtype in DTYPES.items():
            if dtype in variant.dtypes:
                yield Row(
                    str(variant),
                    f"{name}: every pattern or kind of value",
                    "CPU",
                    *device_count(variant, dtype, device),
                )


def device_count(variant: Variant, dtype: torch.dtype, device: str) -> tuple[int, int]:
    inputs = [fill(shape, dtype, content, 0) for content in CONTENTS for shape in ((128, 256), (50, 72))]
    if dtype != torch.float32:
        inputs.append(torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).view(256, 256))
    items = mismatches = 0
    for x in inputs:
        want, got = variant.buffers(x), variant.buffers(x.to(device))
        for buffer in want:
            wrong = raw(got[buffer]).cpu() != raw(want[buffer])
            items, mismatches = items + wrong.numel(), mismatches + int(wrong.sum())
    return items, mismatches


# The table


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"


def as_table(rows: list[Row], device: str) -> Table:
    table = Table(title=f"Conformance on {device_name(device)}, torch {torch.__version__}")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in COLUMNS[-2:] else "left")
    previous = None
    for row in rows:
        if previous is not None and previous.family != row.family:
            table.add_section()
        table.add_row(*row.cells(), style="bold red" if row.mismatches else None)
        previous = row
    return table


EXPLANATION = """\
An item is an element (FP4: a packed pair) or a scale, padding included; against the CPU it is a byte. `vectors` are
bytes that other projects' reference code made (`tests/vectors.npz`); `integers`, `float64` and `numpy` are computed
apart from the package (`tests/exact.py`). Any NaN code equals any other, and the E2M1 code of NaN is free; in the NVFP4
vectors the sign of a zero and the codes under a scale of zero do not count.
"""


def as_markdown(rows: list[Row], device: str, path: Path) -> str:
    """Return the page: the command that made it, what is compared, and the table."""
    option = "" if device == "cpu" else f" --device {device}"
    items, mismatches = sum(row.items for row in rows), sum(row.mismatches for row in rows)
    lines = [
        "# Conformance",
        "",
        f"    python -m bench conformance{option} --write {path}",
        "",
        f"torch {torch.__version__}, {device_name(device)}: {items:,} items compared, {mismatches:,} mismatches.",
        "",
        EXPLANATION,
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|---|---:|---:|",
        *(f"| {' | '.join(row.cells())} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
