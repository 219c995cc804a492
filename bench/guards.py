"""Guards: count those of a compiled model, and measure how long PyTorch takes to evaluate them before each call.

    python -m bench guards [--layers 32] [--recipes current,delayed,mxfp8] [--json out.json]

The model is a Llama with layers so small that a CPU runs them; its guards are those of a large one. It comes in plain
PyTorch, also with its linears converted, and as `TransformerLayer`s, each compared with the same model in BF16. It is
compiled whole, by the backend that generates no code, because guards do not depend on the backend. The time is the
least of several means, of evaluations that directly follow each other; the candidates take turns.
"""

import argparse
import json
import math
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import mezzotint as mz
from bench._models import LlamaSizes, OurLlama, PlainLlama, converted_llama
from mezzotint.recipe import RECIPES

BASE = "bf16"
ROUNDS, EVALUATIONS = 100, 20

Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench guards", description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--recipes", default="current,delayed,mxfp8", help="beside BF16, of " + ", ".join(RECIPES))
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args(argv)
    recipes = args.recipes.split(",")
    if unknown := set(recipes) - set(RECIPES):
        parser.error(f"--recipes: there is no {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    rows = measure(args.layers, recipes)
    show(rows, args.layers)
    if args.json:
        Path(args.json).write_text(json.dumps({"torch": torch.__version__, "layers": args.layers, "rows": rows}) + "\n")
    return 0


@dataclass(frozen=True, slots=True)
class Guarded:
    """A `Guarded` is a model that was compiled: the number of its guards, and one evaluation of all of them."""

    count: int
    root: Any  # the guards, as a tree
    scope: dict[str, Any]  # what the next call of the model passes to them
    region: Callable[[], mz.autocast]

    def seconds(self) -> float:
        """Return the mean of some evaluations."""
        with self.region():
            return timeit.timeit(lambda: self.root.check(self.scope), number=EVALUATIONS) / EVALUATIONS


def measure(layers: int, recipes: list[str]) -> list[Row]:
    """Return a row for each model and recipe. All take turns, because a machine is not always as fast."""
    sizes = LlamaSizes(hidden=64, ffn=128, heads=2, kv_heads=1, sequence=16, batch=1, layers=layers)
    models: dict[str, list[tuple[str, Callable[[LlamaSizes, str], nn.Module]]]] = {
        "nn.Linear": [(BASE, PlainLlama), *((name, converted_llama) for name in recipes)],
        "TransformerLayer": [(name, OurLlama) for name in (BASE, *recipes)],
    }
    torch._dynamo.reset()  # not later: the guards of what was compiled would go
    cases = [(model, *case) for model, made in models.items() for case in made]
    guarded: dict[tuple[str, str], Guarded] = {}
    for model, name, make in track(cases, "compile", console=Console(stderr=True), transient=True):
        with torch._dynamo.config.patch(recompile_limit=len(cases)):
            guarded[model, name] = compile_whole(make(sizes, "cpu"), sizes, None if name == BASE else RECIPES[name]())
    least = dict.fromkeys(guarded, math.inf)
    for _ in track(range(ROUNDS), "evaluate", console=Console(stderr=True), transient=True):
        for key, found in guarded.items():
            least[key] = min(least[key], found.seconds())
    return [
        {
            "model": model,
            "recipe": name,
            "guards": found.count,
            "us": least[model, name] * 1e6,
            "ratio": least[model, name] / least[model, BASE],
        }
        for (model, name), found in guarded.items()
    ]


def compile_whole(model: nn.Module, sizes: LlamaSizes, chosen: mz.recipe.Recipe | None) -> Guarded:
    """Compile a model by a call, and return its guards."""
    counted: list[int] = []

    def keep_all(guards: Any) -> list[bool]:
        counted.append(len(guards))
        return [True] * len(guards)

    x = torch.randn(sizes.batch, sizes.sequence, sizes.hidden, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager", options={"guard_filter_fn": keep_all})
    region = partial(mz.autocast, enabled=chosen is not None, recipe=chosen)
    with region():
        y = compiled(x)
    y.backward(torch.ones_like(y))
    scope = {"self": model, "x": x, "is_first_microbatch": None}
    with region():  # models of one class share a `forward`, compiled for each
        roots = [entry.guard_manager.root for entry in _debug_get_cache_entry_list(type(model).forward.__code__)]
        (root,) = [root for root in roots if root.check(scope)]
    return Guarded(counted[-1], root, scope, region)


def show(rows: list[Row], layers: int) -> None:
    """Print the table."""
    table = Table(title=f"Guards of {layers} layers of a Llama, compiled whole; torch {torch.__version__}")
    for column in ("model", "recipe", "guards", "us", "of bf16"):
        table.add_column(column, justify="left" if column in ("model", "recipe") else "right")
    for row in rows:
        table.add_row(row["model"], row["recipe"], str(row["guards"]), f"{row['us']:.0f}", f"{row['ratio']:.2f}")
    Console().print(table)
