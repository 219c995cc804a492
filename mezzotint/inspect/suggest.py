"""suggest_rules: this function says which linears of an inspected run to keep in higher precision.

It optimises the following. The noise of a linear is the sum over its input, weight and output gradient of Σ (x - x̂)² /
Σ x², averaged over the inspected steps; in another recipe it is that of the last inspected step (`what_if`), and in
high precision it is 0. The time of a linear is that of its three products of 2 · tokens · in · out operations each; in
the time of one BF16 operation there are two in FP8 and FP6 and four in FP4. The time to quantize is left out. Of all
moves of a linear to a recipe with less noise, the one that removes the most noise for each second more is made first,
as long as a move is asked for and the budget pays for it. A linear asks for a move while one of its tensors has a lower
signal-to-noise ratio than the bound; without a bound all linears do.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mezzotint.kernels.statistics import ELEMENTS
from mezzotint.notebook import html_table
from mezzotint.recipe import RECIPES, RULED_TENSORS, QuantizerRole, Rules
from mezzotint.recipe.tables import NO_RECIPE

_SPEEDS = {4: 4.0, 6: 2.0, 8: 2.0}  # products in the time of one in BF16, by the bits of an element


@dataclass(slots=True)
class LinearChoice:
    """A `LinearChoice` is one linear: the noise of its tensors in each recipe, and the chosen recipe with the
    reason."""

    name: str
    operations: float
    noise: dict[str, dict[str, float]]  # recipe → tensor → Σ (x - x̂)² / Σ x²
    recipe: str
    why: str = ""
    base: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.base = self.recipe

    def total(self, recipe: str) -> float:
        """Return the noise of all tensors together."""
        return sum(self.noise[recipe].values())

    def worst(self, recipe: str) -> tuple[str, float]:
        """Return the tensor with the lowest signal-to-noise ratio, and that ratio in dB."""
        tensor = max(self.noise[recipe], key=lambda each: self.noise[recipe][each])
        noise = self.noise[recipe][tensor]
        return tensor, math.inf if noise == 0 else -10 * math.log10(noise)

    def time(self, recipe: str) -> float:
        """Return the time of the linear's products, in BF16 operations."""
        return self.operations / speed_of(recipe)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A `Suggestion` is what `suggest_rules` has found: each linear with its recipe, and what they cost together."""

    base: str
    linears: tuple[LinearChoice, ...]
    extra_time: float  # of the products, as a fraction of their time in the base recipe

    def _repr_html_(self) -> str:
        """Return the linears as a table for a notebook."""
        head = ("linear", "recipe", "worst tensor", "dB now", "dB then", "why")
        rows = []
        for each in self.linears:
            tensor, now = each.worst(each.base)
            then = each.worst(each.recipe)[1]
            rows.append((each.name, each.recipe, tensor, f"{now:.1f}", f"{then:.1f}", each.why))
        return html_table(rows, head, f"{self.extra_time:.2%} more time in products than in {self.base}")

    def rules(self) -> Rules:
        """Return one rule for each linear that is kept in another recipe than the run's, and one for all others."""
        kept = [(each.name, None if each.recipe == NO_RECIPE else each.recipe) for each in self.linears if _moved(each)]
        return Rules([*kept, ("*", self.base)])


def speed_of(recipe: str) -> float:
    """Return how many products of a recipe take the time of one in BF16."""
    if recipe == NO_RECIPE:
        return 1.0
    made: Any = RECIPES[recipe]().quantizer(QuantizerRole("linear", "input"))
    bits = ELEMENTS[int(made.dtype)][1] if hasattr(made, "dtype") else 8  # delayed scaling, without a dtype, is FP8
    return _SPEEDS[bits]


def suggest_rules(
    linears: Sequence[LinearChoice], *, min_snr: float | None = None, budget: float | None = None
) -> Suggestion:
    """Choose a recipe for each linear so that no tensor is below `min_snr` dB and the products take at most `budget`
    more time, 0.05 for 5 %. The budget comes first; without `min_snr` it is spent where it removes the most noise."""
    if min_snr is None and budget is None:
        raise ValueError("suggest_rules needs a bound: give min_snr in dB, budget as a part of the time, or both")
    if budget is not None and not 0 <= budget < math.inf:
        raise ValueError(f"budget is {budget}: give a part of the time, 0.05 for 5 %")
    before = sum(each.time(each.recipe) for each in linears)
    left = math.inf if budget is None else budget * before
    while True:
        moves = [
            (_gain(each, other), each, other)
            for each in linears
            if _asks(each, min_snr)
            for other in _better(each, min_snr)
        ]
        moves = [move for move in moves if move[1].time(move[2]) - move[1].time(move[1].recipe) <= left]
        if not moves:
            break
        _, chosen, other = max(moves, key=lambda move: move[0])
        left -= chosen.time(other) - chosen.time(chosen.recipe)
        chosen.recipe = other
    for each in linears:
        each.why = _reason(each, min_snr)
    after = sum(each.time(each.recipe) for each in linears)
    return Suggestion(linears[0].base, tuple(linears), after / before - 1)


def _moved(linear: LinearChoice) -> bool:
    return linear.recipe != linear.base


def _asks(linear: LinearChoice, min_snr: float | None) -> bool:
    return linear.total(linear.recipe) > 0 if min_snr is None else linear.worst(linear.recipe)[1] < min_snr


def _better(linear: LinearChoice, min_snr: float | None) -> list[str]:
    """Return the recipes with less noise; if there is a bound, only those that meet it."""
    found = [each for each in linear.noise if linear.total(each) < linear.total(linear.recipe)]
    return found if min_snr is None else [each for each in found if linear.worst(each)[1] >= min_snr]


def _gain(linear: LinearChoice, other: str) -> float:
    """Return the noise that a move removes for each operation's time more; infinity if it takes no more time."""
    less, more = linear.total(linear.recipe) - linear.total(other), linear.time(other) - linear.time(linear.recipe)
    return math.inf if more <= 0 else less / more


def _reason(linear: LinearChoice, min_snr: float | None) -> str:
    tensor, snr = linear.worst(linear.base)
    if _moved(linear):
        return f"{tensor} has {snr:.1f} dB" + ("" if min_snr is None else f", below {min_snr:g}")
    if min_snr is None:
        return "the budget goes to others"
    return f"no tensor is below {min_snr:g} dB" if snr >= min_snr else f"below {min_snr:g} dB: the budget is spent"


def read_linears(
    records: Iterable[Mapping[str, Any]], details: Mapping[str, Any], recipe: str, allowed: Iterable[str]
) -> list[LinearChoice]:
    """Return the linears of an inspected run in `recipe`.

    `records` are the lines of its figures (`read_records`), `details` has the other formats that the last step was
    tried in (`read_details`), and `allowed` names the recipes that linears may move to.
    """
    others = set(allowed) - {recipe}
    noise: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for record in records:
        missing = [key for key in ("step", "module", "role", "count", "snr_db") if key not in record]
        if missing:
            raise ValueError(f"the figures of the run lack {missing[0]!r}: inspect with stats that have it")
        name, role = record["module"], record["role"]
        noise[name][role][record["step"]] = _noise_of(record["snr_db"])  # the last one of a step counts
        counts[name][role] = record["count"]
    found: list[LinearChoice] = []
    for name, tensors in noise.items():
        held = {role: sum(steps.values()) / len(steps) for role, steps in tensors.items()}
        by_recipe = {recipe: held}
        if NO_RECIPE in others:
            by_recipe[NO_RECIPE] = dict.fromkeys(held, 0.0)
        tried = {role: details["tensors"].get(f"{name}.{role}", {}).get("what_if", {}) for role in held}
        for other in RECIPES:
            if other in others and all(other in each for each in tried.values()):
                by_recipe[other] = {role: _noise_of(each[other]["snr_db"]) for role, each in tried.items()}
        found.append(LinearChoice(name, _operations(counts[name]), by_recipe, recipe))
    if not found:
        raise ValueError("the run has no figures: no step of it was inspected")
    return found


def _noise_of(snr_db: float | None) -> float:
    """Return Σ (x - x̂)² / Σ x², which is 0 if the ratio is infinite, null in JSON."""
    return 0.0 if snr_db is None else 10 ** (-snr_db / 10)


def _operations(counts: Mapping[str, int]) -> float:
    """Return the operations of the three products, from the sizes of their operands: (tokens · in) · (out · in) ·
    (tokens · out) is the square of tokens · in · out. A tensor that was not seen is taken to be as large as the
    others."""
    sizes = [counts[role] for role in RULED_TENSORS if role in counts]
    return 6 * math.prod(sizes) ** (3 / (2 * len(sizes)))
