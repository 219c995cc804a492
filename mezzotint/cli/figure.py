"""The figure of a comparison: losses, and their gaps to BF16."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from mezzotint.trainer.loop import Result
from mezzotint.trainer.recipes import COMMAND_RECIPES

STYLE: Any = {"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False}
COLOURS = {name: "black" if recipe is None else recipe.colour for name, recipe in COMMAND_RECIPES.items()}


def draw(path: Path, title: str, results: Sequence[Result], last: int) -> None:
    """Two panels, in running means of `last` steps; the first result is what the others are compared with."""
    width = min(last, len(results[0].losses))
    means = [running_mean(result.losses, width) for result in results]
    steps = range(width, len(results[0].losses) + 1)
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), dpi=120, layout="constrained")
        figure.suptitle(title, fontsize=8)
        left, right = figure.subplots(1, 2)
        for result, mean in zip(results, means, strict=True):
            colour = COLOURS[result.recipe]
            # A curve of one point is a dot.
            options = {"color": colour, "linewidth": 0.9, "marker": "." if len(mean) == 1 else ""}
            left.plot(steps, mean, label=result.recipe, **options)
            right.plot(steps, [a - b for a, b in zip(mean, means[0], strict=True)], **options)
        left.set(title=f"loss, mean of {width} steps", xlabel="step", ylabel="nats a token")
        left.legend(frameon=False)
        right.set(title=f"gap to {results[0].recipe}, mean of {width} steps", xlabel="step", ylabel="nats a token")
        figure.savefig(path)


def running_mean(losses: Sequence[float], width: int) -> list[float]:
    """Of `width` values each."""
    return [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]
