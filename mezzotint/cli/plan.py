"""`mezzotint plan`: what a training step of a model will need, before anything is allocated."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from mezzotint.cli.console import CommandError, as_count, as_size, make_console
from mezzotint.cli.memory import StepMemory, plan_step
from mezzotint.cli.model import MODELS, ModelConfig, find_model
from mezzotint.cli.options import takes
from mezzotint.cli.parallel import Layout
from mezzotint.cli.recipes import RECIPES, recipe_names
from mezzotint.cli.settings import TrainConfig, make_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@takes(ModelConfig, Layout, changing=ModelConfig)
def plan(
    model: Annotated[str, typer.Argument(help=f"{', '.join(MODELS)}, or a JSON or TOML file")],
    *,
    recipes: Annotated[str, typer.Option(help="recipes between commas, or all")] = "all",
    params_dtype: Annotated[str, typer.Option(help="of parameters: float32 or bfloat16")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    given: dict[str, Any],
) -> None:
    """Parameters and memory of one training step of MODEL, recipe by recipe, on any machine.

    The real modules run on tensors without data, in eager mode; options change sizes of MODEL. With --world, what one
    of many processes holds, and what it sends.
    """
    names = recipe_names(recipes)
    if params_dtype not in DTYPES:
        raise CommandError(f"--params-dtype is {params_dtype!r}: give {' or '.join(DTYPES)}")
    config, _ = make_config(find_model(model), TrainConfig(), given)
    layout = Layout(**{entry.name: given[entry.name] for entry in fields(Layout) if entry.name in given})
    plans = [plan_step(config, RECIPES[name], DTYPES[params_dtype], layout) for name in names]
    if as_json:
        rows = {name: asdict(found) for name, found in zip(names, plans, strict=True)}
        report = {"model": asdict(config), "layout": asdict(layout), "params_dtype": params_dtype, "recipes": rows}
        typer.echo(json.dumps(report, indent=1))
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
