"""`convert`, `unconvert`, and the report of what was done."""

import copy
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from mezzotint.convert.modules import (
    Converted,
    ConvertedLinear,
    convert_linear,
    convert_root,
    convert_sequential,
    restore,
)
from mezzotint.convert.rules import Filter, Neighbours, find_heads, find_neighbours, why_kept
from mezzotint.layer.names import Named
from mezzotint.recipe import Recipe, check_recipe

_REPORT = "_mezzotint_report"
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Entry:
    """What became of one layer: `after` is None where it is as it was, and `why` says why; else `why` is the recipe."""

    fqn: str
    before: str
    after: str | None
    why: str
    num_weights: int


@dataclass(frozen=True)
class ConversionReport:
    """The linear layers of a model, in its order. Printed, layers whose names differ only in numbers are one line."""

    entries: tuple[Entry, ...]

    @property
    def converted(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.after is not None]

    @property
    def kept(self) -> list[Entry]:
        """In high precision."""
        return [entry for entry in self.entries if entry.after is None]

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], list[str]] = {}
        for entry in self.entries:
            pattern = re.sub(r"\b\d+\b", "*", entry.fqn)
            groups.setdefault((pattern, entry.before, entry.after or "kept", entry.why), []).append(entry.fqn)
        table = [("layer", "number", "was", "is", "why")]
        for (pattern, *row), names in groups.items():
            name = pattern if len(names) > 1 else names[0] or "(the model)"
            table.append((name, str(len(names)), row[0], row[1], row[2]))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        total = sum(entry.num_weights for entry in self.entries)
        part = sum(entry.num_weights for entry in self.converted) / max(total, 1)
        lines.append(
            f"{len(self.converted)} of {len(self.entries)} linear layers converted, {part:.1%} of their weights"
        )
        return "\n".join(lines)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}: give an nn.Module")


def convert_report(model: nn.Module) -> ConversionReport:
    """What became of the linear layers of a model that `convert` was called with."""
    _check_model(model)
    report = vars(model).get(_REPORT)
    if report is None:
        raise ValueError(
            f"model is a {type(model).__name__} that was not converted: call mezzotint.convert(model) first"
        )
    return report


def convert(model: Model, recipe: Recipe | None = None, *, filter: Filter | None = None, inplace: bool = True) -> Model:
    """The model, its `nn.Linear` swapped for ours, which share the parameters. `convert_report` says what was done.

    With a `recipe`, the model and each converted layer run under it by themselves, whatever an `autocast` around them
    says. Without a recipe the `autocast` around the call decides, and outside of any nothing is quantized.

    `filter(module, fully_qualified_name)`: True converts, False does not, None leaves it to the defaults, which keep
    output heads and small layers as they are. `inplace=False` converts a copy.
    """
    _check_model(model)
    if recipe is not None:
        check_recipe(recipe)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter is {type(filter).__name__}: give a function of (module, name), or None")
    if not inplace:
        model = copy.deepcopy(model)
    linears = {fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
    unused = {id(inner) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for inner in m.modules()}
    heads, neighbours = find_heads(model), find_neighbours(model)
    # All is decided before the first layer is touched: a filter may raise.
    kept = {
        fqn: why_kept(linear, fqn, filter, id(linear) in unused, heads.get(fqn))
        for fqn, linear in linears.items()
        if not isinstance(linear, ConvertedLinear)
    }
    for fqn, module in model.named_modules():  # one that was converted before keeps the name that its recipe knows
        if isinstance(module, Named) and not isinstance(module, Converted):
            module._take_path(fqn)
    for fqn, why in kept.items():
        if why is None:
            _convert(linears[fqn], recipe, neighbours.get(id(linears[fqn])))
            linears[fqn]._take_path(fqn)  # type: ignore[operator]
    if recipe is not None:
        convert_root(model, recipe)
    entries = [_entry(fqn, linear, kept.get(fqn), neighbours.get(id(linear))) for fqn, linear in linears.items()]
    vars(model)[_REPORT] = ConversionReport(tuple(entries))
    return model


def _convert(linear: nn.Linear, recipe: Recipe | None, neighbours: Neighbours | None) -> None:
    if neighbours is None or neighbours.why_apart:
        convert_linear(linear, recipe, None)
    else:
        convert_linear(linear, recipe, neighbours.norm)
        convert_sequential(neighbours.sequential)


def _entry(fqn: str, linear: Any, why: str | None, neighbours: Neighbours | None) -> Entry:
    size = linear.in_features * linear.out_features
    if not isinstance(linear, ConvertedLinear):
        return Entry(fqn, type(linear).__name__, None, why or "", size)
    why = "as autocast says" if linear.recipe is None else type(linear.recipe).__name__
    if neighbours is not None and not linear.pair:
        why += f"; apart from the norm before it: {neighbours.why_apart}"
    return Entry(fqn, linear.theirs.__name__, linear.ours.__name__.removeprefix("Converted"), why, size)


def unconvert(model: Model) -> Model:
    """The model with the layers that it had before `convert`, and the parameters that it has now. In place."""
    _check_model(model)
    converted = [(fqn, module) for fqn, module in model.named_modules() if isinstance(module, Converted)]
    for fqn, module in converted:
        if "theirs" not in vars(type(module)):
            raise ValueError(f"{fqn!r} is a {type(module).__name__}, made of a converted module: undo that first")
    for _, module in converted:
        restore(module)
    vars(model).pop(_REPORT, None)
    return model
