"""`mezzotint plan`: what a training step of a model will need, before anything is allocated."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from rich.table import Table

from mezzotint.cli.console import CommandError, as_count, as_size, make_console
from mezzotint.cli.layout import Layout
from mezzotint.cli.memory import StepMemory, plan_step
from mezzotint.cli.recipe_names import recipe_names
from mezzotint.cli.recipes import RECIPES
from mezzotint.cli.settings import TrainConfig, make_config
from mezzotint.cli.sizes import ModelConfig, find_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plan(*, model: str, recipes: str, params_dtype: str, as_json: bool, given: dict[str, Any]) -> None:
    """The command; see `app.py`."""
    names = recipe_names(recipes)
    if params_dtype not in DTYPES:
        raise CommandError(f"--params-dtype is {params_dtype!r}: give {' or '.join(DTYPES)}")
    config, _ = make_config(find_model(model), TrainConfig(), given)
    layout = Layout(**{entry.name: given[entry.name] for entry in fields(Layout) if entry.name in given})
    plans = [plan_step(config, RECIPES[name], DTYPES[params_dtype], layout) for name in names]
    if as_json:
        rows = {name: asdict(found) for name, found in zip(names, plans, strict=True)}
        report = {"model": asdict(config), "layout": asdict(layout), "params_dtype": params_dtype, "recipes": rows}
        print(json.dumps(report, indent=1))
        return
    console = make_console()
    console.print(_table(model, config, layout, names, plans))
    if layout.world > 1:
        console.print(_traffic(names, plans))
    console.print(
        "saved: kept by autograd from forward to backward, each storage once, parameters left out. peak: of a step in "
        "eager mode with AdamW, one micro-batch; kernels' own workspace and a fragmented allocator come on top.",
        highlight=False,
    )


def _table(model: str, config: ModelConfig, layout: Layout, names: Sequence[str], plans: Sequence[StepMemory]) -> Table:
    count = as_count(plans[0].parameters)
    title = f"{model}: {count} parameters, {config.layers} layers, batch {config.batch} × {config.sequence} tokens"
    if layout.world > 1:
        ways = {f"tp {layout.tp}": layout.tp > 1, "fsdp": layout.fsdp, f"ep {layout.ep}": layout.ep > 1}
        title += "; ".join([f"\none of {layout.world} processes", *[way for way, used in ways.items() if used]])
    table = Table(title=title, title_justify="left")
    table.add_column("recipe")
    for name in ("saved per layer", "saved in all", "weights", "gradients", "optimizer", "peak", "peak in"):
        table.add_column(name, justify="left" if name == "peak in" else "right")
    for name, found in zip(names, plans, strict=True):
        sizes = (
            found.saved_per_layer,
            found.saved,
            found.weights,
            found.gradients,
            found.optimizer,
            found.peak,
        )
        table.add_row(name, *map(as_size, sizes), found.peak_in)
    return table


def _traffic(names: Sequence[str], plans: Sequence[StepMemory]) -> Table:
    kinds = sorted({kind for found in plans for kind in found.sent})
    table = Table(title="sent to other processes in a step, with one micro-batch", title_justify="left")
    table.add_column("recipe")
    for kind in (*kinds, "in all"):
        table.add_column(kind, justify="right")
    for name, found in zip(names, plans, strict=True):
        sizes = [*[found.sent.get(kind, 0) for kind in kinds], sum(found.sent.values())]
        table.add_row(name, *map(as_size, sizes))
    return table
