"""Conformance: every test vector, every 16-bit pattern and every scale code, and what differs from the expected bytes.

    python -m bench conformance [--device cuda] [--write docs/conformance.md]

Expected bytes come from other projects' reference code (the vectors), and from integer arithmetic in numpy
(`tests/exact.py`) for the exhaustive sets. On CUDA the kernels are also compared with the CPU reference, every option
set of every format. The exit code is 1 where anything differs.
"""

import argparse
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels import elements
from mezzotint.kernels.float8 import float8_dequantize, float8_quantize_scaled
from mezzotint.kernels.float8_rowwise import float8_rowwise_quantize
from mezzotint.kernels.mxfp8 import mxfp8_dequantize, mxfp8_quantize
from mezzotint.kernels.nvfp4 import nvfp4_dequantize
from tests import compare, exact
from tests.formats import VARIANTS, Variant
from tests.values import CONTENTS, fill, raw

FP8 = {"e4m3": E4M3, "e5m2": E5M2}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLUMNS = ("format", "input set", "against", "items", "mismatches")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. An item is an element, a packed pair of them, a scale; between two devices, a byte."""

    format: str
    inputs: str
    against: str
    items: int
    mismatches: int

    @property
    def family(self) -> str:
        return self.format.split()[0]

    def cells(self) -> tuple[str, ...]:
        return self.format, self.inputs, self.against, f"{self.items:,}", f"{self.mismatches:,}"


def main(argv: list[str] | None = None) -> int:
    """Print the table, write it where asked; 1 where a row has a mismatch."""
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
    yield from rowwise_rows(device)
    if device != "cpu":
        yield from device_rows(device)


def by_family(rows: Iterable[Row]) -> list[Row]:
    """Rows of one format together, formats in the order in which they come up."""
    rows = list(rows)
    order = list(dict.fromkeys(row.family for row in rows))
    return sorted(rows, key=lambda row: order.index(row.family))


# The vectors


def vector_rows(device: str) -> Iterator[Row]:
    """One row for each format and content: all option sets and shapes, both directions, padding of scales included."""
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
        for name, count in compare.compare_casts(entry, device).items():
            yield Row(f"cast {name}", patterns, "vectors", *count)


# Everything there is


def count(got: torch.Tensor, want: np.ndarray) -> tuple[int, int]:
    """Items and mismatches; bytes as they are, FP32 by its bits with any NaN equal to any other."""
    actual = got.cpu().numpy()
    assert actual.shape == want.shape, f"{actual.shape} instead of {want.shape}"
    wrong = ~exact.same_bits(actual, want) if want.dtype == np.float32 else actual != want
    return wrong.size, int(wrong.sum())


def pattern_rows(device: str) -> Iterator[Row]:
    """Every 16-bit pattern through every cast, alone and inside the ops."""
    for name, values in exact.PATTERNS.items():
        x, inputs = values(), f"every {name.upper()} pattern"
        value = torch.from_numpy(x).to(device)
        for elem, dtype in FP8.items():
            want = exact.encode(x, elem)
            yield Row(f"cast {elem}", inputs, "integers", *count(elements.cast_fp8(value.clone(), dtype), want))
            given = value.to(DTYPES[name]).view(256, 256)
            data = float8_quantize_scaled(given, torch.ones(1, device=device), dtype, True, True)
            codes = torch.stack((data[0], data[1].t()))
            both = np.broadcast_to(want.reshape(256, 256), (2, 256, 256))
            yield Row(f"fp8_tensor {elem}", f"{inputs}, scale 1", "integers", *count(codes, both))
        yield Row("cast e2m1", inputs, "integers", *count(elements.cast_e2m1(value), exact.encode(x, "e2m1")))
        yield Row("cast e8m0 up", inputs, "integers", *count(elements.e8m0_up(value), exact.encode_e8m0_up(x)))
        for elem, dtype in FP8.items():
            blocks = torch.zeros(1 << 16, 32, dtype=DTYPES[name], device=device)
            blocks[:, 0] = value.to(DTYPES[name])
            scale_inv = mxfp8_quantize(blocks, dtype, False, False, False, True, False)[1]
            top = {"e4m3": 448.0, "e5m2": 57344.0}[elem]
            want = exact.encode_e8m0_up(exact.dropped_amax(x[:, None], 1) * np.float32(1 / top))
            yield Row(f"mxfp8 {elem} scale", f"{inputs} as amax", "integers", *count(scale_inv[:, 0], want))


def code_rows(device: str) -> Iterator[Row]:
    """Every code and every scale code back."""
    codes = np.arange(256, dtype=np.uint8)
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    f32 = torch.float32
    powers = exact.decode_e8m0(codes)
    yield Row("cast e8m0 decode", "256 codes", "float64", *count(elements.e8m0_decode(byte), powers.astype(np.float32)))
    inverse = (1 / powers).astype(np.float32)
    yield Row("cast e8m0 inverse", "256 codes", "float64", *count(elements.e8m0_inverse(byte), inverse))
    for elem, dtype in FP8.items():
        value, scale = exact.decode(codes, elem), torch.tensor([0.3], device=device)
        want = exact.fl32(value * scale.double().item()).astype(np.float32)
        got = float8_dequantize(byte, scale, dtype, False, f32)
        yield Row(f"fp8_tensor {elem} dequantize", "256 codes", "float64", *count(got, want))
        grid = byte.expand(256, 256).contiguous()
        want = exact.fl32(powers[:, None] * value[None, :]).astype(np.float32)
        got = mxfp8_dequantize(grid, byte[:, None].expand(256, 8).contiguous(), dtype, False, False, f32)
        yield Row(f"mxfp8 {elem} dequantize", "256 scales × 256 codes", "float64", *count(got, want))
    scale_inv = torch.zeros(256, 4, dtype=torch.uint8, device=device)
    scale_inv[:, 0] = byte
    data = elements.pack_fp4(byte[:16]).expand(256, 8).contiguous()
    amax = torch.tensor([0.3], device=device)
    got = nvfp4_dequantize(data, scale_inv, amax, 448, False, False, 16, f32)
    sf = exact.fl32(exact.decode(codes, "e4m3") * amax.double().item())
    factor = exact.fl32(sf * exact.fl32(np.array(1 / 2688)))
    want = exact.fl32(exact.decode(codes[:16], "e2m1")[None, :] * factor[:, None]).astype(np.float32)
    yield Row("nvfp4 dequantize", "256 scales × 16 codes", "float64", *count(got, want))


# What no vector covers


def rowwise_rows(device: str) -> Iterator[Row]:
    """FP8 per row has no vectors: the formula in numpy."""
    for content in CONTENTS:
        items = mismatches = 0
        for elem, dtype in FP8.items():
            for pow2 in (False, True):
                for x in (fill((37, 53), high, content, 0) for high in DTYPES.values()):
                    out = float8_rowwise_quantize(x.to(device), None, None, dtype, pow2, 0.0, True, True)
                    for side, buffers in ((x, out[:2]), (x.t(), out[2:])):
                        want = exact.quantize_rows_fp8(side.float().contiguous().numpy(), elem, pow2, 0.0)
                        for pair in zip(buffers, want, strict=True):
                            compared, wrong = count(*pair)
                            items, mismatches = items + compared, mismatches + wrong
        yield Row("float8_rowwise", f"{content}, 12 cases", "numpy", items, mismatches)


def device_rows(device: str) -> Iterator[Row]:
    """Every option set of every op on the device against the CPU reference; the vectors have few of them."""
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
    """The page: the command that made it, what is compared, the table."""
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
