"""The report on what `convert` did: it has an entry for every parameter with two or more
dimensions, in the order of the model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mezzotint.notebook import html_table


@dataclass(frozen=True)
class ReportEntry:
    """A `ReportEntry` says what became of one weight: if `after` is None it is as it was, and `why` says
    why; else `why` is the recipe.

    `fqn` is the parameter's name, without ".weight"; `before` is the class of the module that has it. `num_weights` is
    the number of its elements, 0 if an earlier entry has counted them (tied weights) or they are not known yet.
    """

    fqn: str
    before: str
    after: str | None
    why: str
    num_weights: int


@dataclass(frozen=True, repr=False)
class ConversionReport:
    """A `ConversionReport` lists the weights of a model, in its order. Printed, those whose names differ
    only in numbers are one line."""

    entries: tuple[ReportEntry, ...]

    @property
    def converted(self) -> list[ReportEntry]:
        """Return the entries whose products are quantized as the recipe says."""
        return [entry for entry in self.entries if entry.after is not None]

    @property
    def kept(self) -> list[ReportEntry]:
        """Return the entries that stay in high precision."""
        return [entry for entry in self.entries if entry.after is None]

    @property
    def num_weights(self) -> int:
        """Return the number of elements of all parameters with two or more dimensions."""
        return sum(entry.num_weights for entry in self.entries)

    @property
    def share(self) -> float:
        """Return the fraction of these elements that is converted, 0 to 1."""
        return sum(entry.num_weights for entry in self.converted) / max(self.num_weights, 1)

    def __str__(self) -> str:
        table = list(self._rows())
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join([*("  ".join(map(str.ljust, row, widths)).rstrip() for row in table), self._summary()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the report as a table for a notebook."""
        head, *rows = self._rows()
        return html_table(rows, head, self._summary())

    def _summary(self) -> str:
        return (
            f"{len(self.converted)} of {len(self.entries)} weights converted, {self.share:.1%} of the parameters with "
            "two or more dimensions"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the head, then a row for each group of entries that are alike."""
        groups: dict[tuple[str, ...], list[ReportEntry]] = {}
        for entry in self.entries:
            pattern = re.sub(r"\b\d+\b", "*", entry.fqn)
            groups.setdefault((pattern, entry.before, entry.after or "kept", entry.why), []).append(entry)
        yield "weight", "number", "share", "in", "is", "why"
        for (pattern, before, after, why), entries in groups.items():
            name = pattern if len(entries) > 1 else entries[0].fqn or "(the model)"
            share = sum(entry.num_weights for entry in entries) / max(self.num_weights, 1)
            yield name, str(len(entries)), f"{share:.1%}", before, after, why
