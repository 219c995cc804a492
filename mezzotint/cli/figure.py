"""This module draws the figure of a comparison: losses, and their gaps to BF16."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mezzotint.trainer.loop import Result
from mezzotint.trainer.recipes import COMMAND_RECIPES

STYLE: Any = {"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False}
COLOURS = {name: "black" if recipe is None else recipe.colour for name, recipe in COMMAND_RECIPES.items()}


def draw(path: Path, title: str, baselines: Sequence[Result], others: Sequence[Result], last: int) -> None:
    """Draw two panels, of losses and of gaps, in running means of `last` steps.

    The others are compared with the first of the baselines, which are one recipe with several seeds: the band between
    the lowest and the highest of them is grey.
    """
    width = min(last, len(baselines[0].losses))
    steps = range(width, len(baselines[0].losses) + 1)
    seeds = [running_mean(result.losses, width) for result in baselines]
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), dpi=120, layout="constrained")
        figure.suptitle(title, fontsize=8)
        left, right = figure.subplots(1, 2)
        if len(seeds) > 1:
            draw_band(left, right, steps, seeds, f"{len(seeds)} seeds of {baselines[0].recipe}")
        for result in (baselines[0], *others):
            mean = running_mean(result.losses, width)
            colour = COLOURS[result.recipe]
            # A curve of one point would be invisible, so it gets a dot.
            options = {"color": colour, "linewidth": 0.9, "marker": "." if len(mean) == 1 else ""}
            left.plot(steps, mean, label=result.recipe, **options)
            right.plot(steps, [a - b for a, b in zip(mean, seeds[0], strict=True)], **options)
        left.set(title=f"loss, mean of {width} steps", xlabel="step", ylabel="nats a token")
        left.legend(frameon=False)
        right.set(title=f"gap to {baselines[0].recipe}, mean of {width} steps", xlabel="step", ylabel="nats a token")
        figure.savefig(path)


def draw_band(left: Axes, right: Axes, steps: Sequence[int], seeds: Sequence[Sequence[float]], label: str) -> None:
    """Fill the area between the lowest and the highest of several curves and, among the
    gaps, as much on both sides of 0."""
    low, high = ([pick(values) for values in zip(*seeds, strict=True)] for pick in (min, max))
    width = [b - a for a, b in zip(low, high, strict=True)]
    left.fill_between(steps, low, high, color="0.8", linewidth=0, label=label)
    right.fill_between(steps, [-value for value in width], width, color="0.85", linewidth=0)


def running_mean(losses: Sequence[float], width: int) -> list[float]:
    """Return the means of `width` consecutive values each."""
    return [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]
