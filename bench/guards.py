"""Guards: count those of a compiled model, and measure how long PyTorch takes to evaluate them before each call.

    python -m bench guards [--layers 32] [--recipes current,delayed,mxfp8] [--json out.json]

The model is a Llama with layers so small that a CPU runs them; its guards are those of a large one. It comes in plain
PyTorch, also with its linears converted, and as `TransformerLayer`s, each compared with the same model in BF16. It is
compiled whole, by the backend that generates no code, because guards do not depend on the backend. The time is the
least of several means, of evaluations that directly follow each other.
"""

import argparse
import json
import timeit
from collections.abc import Callable
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

ROUNDS, EVALUATIONS = 60, 20

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


def measure(layers: int, recipes: list[str]) -> list[Row]:
    """Return a row for each model and recipe; that of a model in BF16 comes before its others."""
    sizes = LlamaSizes(hidden=64, ffn=128, heads=2, kv_heads=1, sequence=16, batch=1, layers=layers)
    models: dict[str, list[tuple[str, Callable[[LlamaSizes, str], nn.Module]]]] = {
        "nn.Linear": [("bf16", PlainLlama), *((name, converted_llama) for name in recipes)],
        "TransformerLayer": [(name, OurLlama) for name in ("bf16", *recipes)],
    }
    cases = [(model, *case) for model, made in models.items() for case in made]
    rows: list[Row] = []
    for model, name, make in track(cases, "guards", console=Console(stderr=True), transient=True):
        guards, us = guards_of(make(sizes, "cpu"), sizes, None if name == "bf16" else RECIPES[name]())
        base = next((row["us"] for row in rows if (row["model"], row["recipe"]) == (model, "bf16")), us)
        rows.append({"model": model, "recipe": name, "guards": guards, "us": us, "ratio": us / base})
    return rows


def guards_of(model: nn.Module, sizes: LlamaSizes, chosen: mz.recipe.Recipe | None) -> tuple[int, float]:
    """Return the number of guards of the compiled model, and the microseconds of one evaluation of all."""
    counted: list[int] = []

    def keep_all(guards: Any) -> list[bool]:
        counted.append(len(guards))
        return [True] * len(guards)

    torch._dynamo.reset()
    x = torch.randn(sizes.batch, sizes.sequence, sizes.hidden, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager", options={"guard_filter_fn": keep_all})
    with mz.autocast(enabled=chosen is not None, recipe=chosen):
        y = compiled(x)
    y.backward(torch.ones_like(y))
    with mz.autocast(enabled=chosen is not None, recipe=chosen):  # the next call, up to where the guards are evaluated
        (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
        scope = {"self": model, "x": x, "is_first_microbatch": None}
        root = entry.guard_manager.root
        assert root.check(scope), "a second call would compile again"
        timer = timeit.Timer(lambda: root.check(scope))
        seconds = min(timer.repeat(ROUNDS, EVALUATIONS)) / EVALUATIONS
    return counted[-1], seconds * 1e6


def show(rows: list[Row], layers: int) -> None:
    """Print the table."""
    table = Table(title=f"Guards of {layers} layers of a Llama, compiled whole; torch {torch.__version__}")
    for column in ("model", "recipe", "guards", "us", "of bf16"):
        table.add_column(column, justify="left" if column in ("model", "recipe") else "right")
    for row in rows:
        table.add_row(row["model"], row["recipe"], str(row["guards"]), f"{row['us']:.0f}", f"{row['ratio']:.2f}")
    Console().print(table)
