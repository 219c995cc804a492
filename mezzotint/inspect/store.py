"""The files of an inspected run: this module writes and reads them.

    <out>/figures.jsonl   a line for each tensor of each inspected step: step, tensor, module, role, figures
          details.json    of the last inspected step: histograms, maps, other formats
          tensorboard/    the same figures as scalars, if they are asked for

A run that is resumed writes again lines of steps that it had written: the last one counts.
"""

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mezzotint.inspect.figures import MEASURED
from mezzotint.inspect.maps import pack_maps, unpack_map
from mezzotint.inspect.reading import SeenTensor

FIGURES, DETAILS, SCALARS = "figures.jsonl", "details.json", "tensorboard"


class Store:
    """A `Store` writes what was seen into a folder."""

    def __init__(self, folder: Path, stats: Sequence[str], has_scalars: bool) -> None:
        self.folder, self.stats = folder, tuple(stats)
        self.scalars: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        if has_scalars:
            try:
                writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            except ImportError as missing:
                raise ImportError(
                    "tensorboard=True needs tensorboard, which is not installed: pip install 'mezzotint[cli]'"
                ) from missing
            self.scalars = writer(str(folder / SCALARS))

    def write(self, step: int, seen: Sequence[SeenTensor]) -> None:
        """Append a step to the figures, and replace the details by its own."""
        records = [each.as_record(step, self.stats) for each in seen]
        with (self.folder / FIGURES).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        tensors = {each.name: each.details(self.stats) for each in seen}
        if "map" in self.stats and seen:
            maps = pack_maps(torch.stack([each.table for each in seen]))  # one by one it would take much longer
            for made, packed in zip(tensors.values(), maps, strict=True):
                made["map"] = packed
        details = {"step": step, "tensors": tensors}
        aside = self.folder / f".{DETAILS}.writing"
        aside.write_text(json.dumps(details), encoding="utf-8")
        os.replace(aside, self.folder / DETAILS)
        if self.scalars is not None:
            self._add_scalars(step, records)

    def _add_scalars(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            for name in MEASURED:
                if record.get(name) is not None:
                    self.scalars.add_scalar(f"{name}/{record['tensor']}", record[name], step)
        self.scalars.flush()


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of an inspected run. A last line that was cut off is left out."""
    path = folder / FIGURES
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):
                    return
                raise ValueError(f"{path}, line {number}, is no JSON ({error}): remove the line") from None
            yield record


def read_details(folder: Path) -> dict[str, Any]:
    """Return the details of the last inspected step: {"step": …, "tensors": {name: …}}."""
    path = folder / DETAILS
    if not path.exists():
        return {"step": None, "tensors": {}}
    details = json.loads(path.read_text(encoding="utf-8"))
    for tensor in details["tensors"].values():
        if "map" in tensor:
            tensor["map"] = unpack_map(tensor["map"])
    return details
