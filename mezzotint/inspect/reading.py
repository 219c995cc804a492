"""The reading of many tensors' tables at once: they are reduced over ranks, copied to the host, and turned into
records.

The copy is the one place where an inspector waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.comm.collectives import all_reduce, all_reduce_max
from mezzotint.comm.groups import world_size
from mezzotint.functional.observation import Probe
from mezzotint.inspect.figures import Figures, as_plain, exponents_of, figures_of
from mezzotint.kernels.statistics import ROW_OF, SUMS

_COUNT = len(SUMS)


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """A `SeenTensor` is one tensor in one step: its figures, its table (16, 256), and its figures in other formats."""

    name: str
    module: str
    role: str
    figures: Figures
    table: torch.Tensor
    what_if: dict[str, Figures]

    def as_record(self, step: int, stats: Sequence[str]) -> dict[str, Any]:
        """Return a line of the file of figures, with those that `stats` names."""
        plain = as_plain(self.figures)
        kept = {name: plain[name] for name in plain if name in stats}
        return {"step": step, "tensor": self.name, "module": self.module, "role": self.role, **kept}

    def details(self, stats: Sequence[str]) -> dict[str, Any]:
        """Return histogram and figures in other formats, as the file of details has them."""
        made: dict[str, Any] = {"figures": as_plain(self.figures)}
        if "exponents" in stats:
            made["exponents"] = [[e, *counts] for e, counts in exponents_of(self.table).items()]
        if self.what_if:
            made["what_if"] = {name: as_plain(figures) for name, figures in self.what_if.items()}
        return made


def read_probes(
    names: Sequence[tuple[str, str, str]], probes: Sequence[Probe], trials: Sequence[tuple[str, ...]], group: Any
) -> list[SeenTensor]:
    """Return what was seen of each tensor (name, module, role), over all ranks of the group.

    Tensors of which nothing was seen are left out. `trials` has the names of each tensor's other formats.
    """
    if not probes:
        return []
    tables = _reduced(torch.stack([probe.table for probe in probes if probe.table is not None]), group).cpu()
    wholes = torch.cat([tables[:, :_COUNT].sum(2), tables[:, _COUNT:].amax(2)], 1).tolist()
    tried = [probe.tried for probe in probes if probe.tried is not None]
    columns = iter(_reduced(torch.cat(tried, 1).t(), group).tolist() if tried else ())
    found = []
    for (name, module, role), probe, formats, table, whole in zip(names, probes, trials, tables, wholes, strict=True):
        others = {each: figures_of(next(columns)) for each in formats} if probe.tried is not None else {}
        if whole[ROW_OF["count"]] > 0:
            found.append(SeenTensor(name, module, role, figures_of(whole), table, others))
    return found


def _reduced(tables: torch.Tensor, group: Any) -> torch.Tensor:
    """Reduce tables (n, 16, …) over the ranks of a group: add the sums, and take the largest of the maxima."""
    if world_size(group) == 1:
        return tables
    sums, maxima = all_reduce(tables[:, :_COUNT], group), all_reduce_max(tables[:, _COUNT:], group)
    return torch.cat([sums, maxima], 1)
