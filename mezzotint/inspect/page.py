"""The page of an inspected run: it is one HTML file that needs nothing else, no server and no network.

It holds the figures of every tensor at every inspected step, as FP32 in base64, and the details of the last step. If a
run has more steps than `COLUMNS`, a column stands for several steps, and shows the worst of them.
"""

import base64
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from mezzotint.files import bytes_of
from mezzotint.inspect.store import FIGURES, read_details, read_records

TEMPLATE = Path(__file__).with_name("page.html")
COLUMNS = 512

# This maps a figure to how several steps become one: by the worst of them, where NaN means no figure.
WORST: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "snr_db": torch.fmin,
    "underflow": torch.fmax,
    "saturated": torch.fmax,
    "relative_error": torch.fmax,
    "mse": torch.fmax,
    "amax": torch.fmax,
    "nonfinite": torch.fmax,
}


def write_page(folder: Path, page: Path, title: str) -> int:
    """Write the page of the inspected run in `folder`; return how many steps it shows."""
    tensors, steps = gather_figures(read_records(folder))
    if not steps:
        raise ValueError(f"{folder / FIGURES} has no record: inspect at least one step")
    made = page_data(tensors, steps, read_details(folder), title)
    text = json.dumps(made, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    page.write_text(TEMPLATE.read_text(encoding="utf-8").replace("{{DATA}}", text), encoding="utf-8")
    return len(steps)


Rows = tuple["array[int]", "array[float]"]  # indices of tensors; for each, the figures in the order of `WORST`


def gather_figures(records: Iterable[dict[str, Any]]) -> tuple[dict[str, tuple[str, str]], dict[int, Rows]]:
    """Return the tensors, name → (module, role), and the figures of each step. There may be millions of records."""
    tensors: dict[str, tuple[str, str]] = {}
    numbers: dict[str, int] = {}
    steps: dict[int, Rows] = {}
    for record in records:
        name = record["tensor"]
        if name not in numbers:
            numbers[name] = len(numbers)
            tensors[name] = record["module"], record["role"]
        places, values = steps.setdefault(record["step"], (array("i"), array("f")))
        places.append(numbers[name])
        values.extend([_figure(record, figure) for figure in WORST])
    return tensors, dict(sorted(steps.items()))


def page_data(
    tensors: dict[str, tuple[str, str]], steps: dict[int, Rows], details: dict[str, Any], title: str
) -> dict[str, Any]:
    """Return what the page's script reads."""
    columns = in_columns(list(steps))
    whole = torch.full((len(WORST), len(tensors), len(columns)), torch.nan)
    for column, grouped in enumerate(columns):
        part = torch.full((len(grouped), len(tensors), len(WORST)), torch.nan)
        for i, step in enumerate(grouped):
            places, values = steps[step]
            last = {place: row for row, place in enumerate(places)}  # of several records of a tensor
            found = torch.frombuffer(values, dtype=torch.float32).view(-1, len(WORST))
            part[i, list(last)] = found[list(last.values())]
        for row, worst in enumerate(WORST.values()):
            whole[row, :, column] = reduce(worst, part[:, :, row])
    packed = {name: base64.b64encode(bytes_of(whole[row])).decode("ascii") for row, name in enumerate(WORST)}
    return {
        "title": title,
        "columns": [[column[0], column[-1]] for column in columns],
        "tensors": [[name, module, role] for name, (module, role) in tensors.items()],
        "figures": packed,
        "details": details["tensors"],
        "details_step": details["step"],
    }


def in_columns(steps: Sequence[int]) -> list[Sequence[int]]:
    """Return the steps in at most `COLUMNS` groups of neighbours, as even as they can be."""
    count = min(len(steps), COLUMNS)
    edges = [len(steps) * i // count for i in range(count + 1)]
    return [steps[edges[i] : edges[i + 1]] for i in range(count)]


def _figure(record: dict[str, Any], figure: str) -> float:
    """Return a figure of a record, or NaN if it has none."""
    if figure == "nonfinite":
        return float(sum(record.get(name) or 0 for name in ("nan", "posinf", "neginf")))
    value = record.get(figure)
    return float("nan") if value is None else float(value)
