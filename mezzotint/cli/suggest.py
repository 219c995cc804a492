"""`mezzotint suggest` writes rules per layer, made from a run whose tensors were inspected."""

import math
from pathlib import Path

from rich.table import Table

from mezzotint.cli.inspect import find_figures
from mezzotint.inspect.store import read_details, read_records
from mezzotint.inspect.suggest import LinearChoice, Suggestion, read_linears, suggest_rules
from mezzotint.recipe import Recipe
from mezzotint.recipe.tables import NO_RECIPE
from mezzotint.trainer.console import CommandError, as_size, make_console, make_table
from mezzotint.trainer.memory import plan_step
from mezzotint.trainer.recipe_names import BF16, recipe_name, recipe_names
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.runs import CONFIG, read_run_config

DEFAULT_SNR = 20.0


def run_suggest(
    *, run: str, out: str | None, recipe: str | None, recipes: str, min_snr: float | None, budget: str | None
) -> None:
    """Run the command that `app.py` describes."""
    folder = Path(run)
    figures = find_figures(folder)
    share = None if budget is None else parse_share(budget)
    if min_snr is None and share is None:
        min_snr = DEFAULT_SNR
    base = _base(folder, recipe)
    allowed = [NO_RECIPE if name == BF16 else name for name in recipe_names(recipes)]
    try:
        linears = read_linears(read_records(figures), read_details(figures), base, allowed)
        found = suggest_rules(linears, min_snr=min_snr, budget=share)
    except ValueError as error:
        raise CommandError(str(error), 1) from None
    path = folder / "rules.toml" if out is None else Path(out)
    rules = found.rules()
    try:
        rules.to_toml(path)
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror}): give another --out") from None
    console = make_console()
    console.print(_table(found))
    for line in [*_summary(found, min_snr, share), *_memory(folder, found, rules)]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"rules: {path}; train with mezzotint train --rules {path}", highlight=False, soft_wrap=True)


def parse_share(given: str) -> float:
    """Return a fraction of the time, 0.05 for "5%"; a number without the sign counts as percent, too."""
    try:
        share = float(given.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise CommandError(f"--budget is {given!r}: give the time that may be added, in percent, as 5%")
    return share


def _base(folder: Path, recipe: str | None) -> str:
    """Return the recipe that the run was trained in."""
    if (folder / CONFIG).exists():
        label = read_run_config(folder).train.recipe_label
        if label not in COMMAND_RECIPES:
            raise CommandError(f"{folder} was trained with --rules: suggest begins with a run in one recipe")
        if recipe is not None and recipe_name(recipe) != label:
            raise CommandError(f"--recipe is {recipe}, and {folder} was trained in {label}: leave it out")
        return label
    if recipe is None:
        raise CommandError(f"{folder} has no {CONFIG}, which says in which recipe it was trained: give --recipe")
    if recipe_name(recipe) == BF16:
        raise CommandError(f"--recipe is {recipe}, which quantizes nothing: give that of the run")
    return recipe_name(recipe)


def _table(found: Suggestion) -> Table:
    title = (
        f"recipes of {len(found.linears)} linears, out of a run in {found.base}\n"
        "signal to noise of the worst tensor in dB, now and then"
    )
    table = make_table(
        title,
        {
            "linear": "left",
            "recipe": "left",
            "worst tensor": "left",
            "now": "right",
            "then": "right",
            "more time": "right",
        },
    )
    before = sum(each.time(each.base) for each in found.linears)
    for each in found.linears:
        tensor, now = each.worst(each.base)
        more = (each.time(each.recipe) - each.time(each.base)) / before
        then = _decibels(each.worst(each.recipe)[1])
        table.add_row(each.name, each.recipe, tensor, _decibels(now), then, f"{more:.1%}" if more else "")
    return table


def _decibels(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f}"


def _summary(found: Suggestion, min_snr: float | None, budget: float | None) -> list[str]:
    """Say what was optimized, and how far that got."""
    asked = [] if min_snr is None else [f"no tensor below {min_snr:g} dB"]
    asked += [] if budget is None else [f"at most {budget:.1%} more time in products"]
    moved = [each for each in found.linears if each.recipe != each.base]
    lines = [
        f"asked: {', and '.join(asked)}; moved first: what loses the most noise, Σ (x - x̂)² / Σ x², for its time",
        f"{len(moved)} of {len(found.linears)} linears move, for {found.extra_time:.2%} more time in products, of "
        "which FP8 has two and FP4 four in the time of one of BF16; quantizing and all else is left out",
    ]
    left = [each for each in found.linears if min_snr is not None and _is_below(each, min_snr)]
    if left:
        lines.append(f"{len(left)} linears stay below {min_snr:g} dB: a larger --budget would move them")
    return lines


def _is_below(linear: LinearChoice, min_snr: float) -> bool:
    return linear.worst(linear.recipe)[1] < min_snr


def _memory(folder: Path, found: Suggestion, rules: Recipe) -> list[str]:
    """Say how much memory `plan` counts for a step, before and after, if the run says which model it has."""
    if not (folder / CONFIG).exists():
        return []
    model = read_run_config(folder).model
    before, after = [plan_step(model, each).peak for each in (COMMAND_RECIPES[found.base], rules)]
    return [f"peak memory of a step in one process, as plan counts it: {as_size(before)} before, {as_size(after)} then"]
