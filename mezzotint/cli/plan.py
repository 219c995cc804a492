"""`mezzotint plan` says what a training step of a model will need, before anything is allocated."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

import torch
from rich.console import JustifyMethod
from rich.table import Table

from mezzotint.recipe import Recipe
from mezzotint.trainer.console import CommandError, as_count, as_size, make_console, make_table, size_unit
from mezzotint.trainer.layout import Layout
from mezzotint.trainer.memory import StepMemory, count_parameters, plan_step
from mezzotint.trainer.recipe_names import recipe_names
from mezzotint.trainer.recipes import COMMAND_RECIPES, read_rules, schedule_of
from mezzotint.trainer.savings import Savings, parse_size
from mezzotint.trainer.settings import TrainConfig, make_config
from mezzotint.trainer.sizes import ModelConfig, find_model

_T = TypeVar("_T")
PARAMETER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_plan(
    *,
    model: str,
    recipes: str,
    rules: str | None,
    params_dtype: str,
    fits: str | None,
    as_json: bool,
    given: dict[str, Any],
) -> int:
    """Run the command that `app.py` describes, and return its exit status."""
    limit = None if fits is None else parse_size(fits)
    if rules is not None and recipes != "all":
        raise CommandError("--rules and --recipes: give one of them")
    chosen = {name: COMMAND_RECIPES[name] for name in recipe_names(recipes)} if rules is None else _of_file(rules)
    names = list(chosen)
    if params_dtype not in PARAMETER_DTYPES:
        raise CommandError(f"--params-dtype is {params_dtype!r}: give {' or '.join(PARAMETER_DTYPES)}")
    config, _ = make_config(find_model(model, given), TrainConfig(), given)
    layout, savings = _given(Layout, given), _given(Savings, given)
    try:
        plans = [plan_step(config, each, PARAMETER_DTYPES[params_dtype], layout, savings) for each in chosen.values()]
    except ValueError as error:
        if rules is None:
            raise
        raise CommandError(f"--rules: {error}") from None
    whole = count_parameters(config)
    code = 0 if limit is None or all(found.peak <= limit for found in plans) else 1
    if as_json:
        rows = {name: asdict(found) for name, found in zip(names, plans, strict=True)}
        if limit is not None:
            rows = {name: {**row, "fits": row["peak"] <= limit} for name, row in rows.items()}
        parts: dict[str, Any] = {"model": config, "layout": layout, "savings": savings}
        report = {
            **{name: asdict(part) for name, part in parts.items()},
            "parameters": whole,
            "params_dtype": params_dtype,
            "limit": limit,
            "recipes": rows,
        }
        print(json.dumps(report, indent=1))
        return code
    console = make_console()
    title = _title(model, config, layout, savings, whole, plans[0].parameters)
    console.print(_table(title, names, plans, fits, limit))
    if layout.world > 1:
        console.print(_traffic(names, plans))
    console.print(
        "saved: kept by autograd from forward to backward, each storage once, parameters left out. peak: of a step in "
        "eager mode with AdamW, one microbatch; kernels' own workspace and a fragmented allocator come on top.",
        highlight=False,
    )
    return code


def _of_file(path: str) -> dict[str, Recipe | None]:
    """Return the rules of a file, or what each phase of its schedule has."""
    phases = schedule_of(TrainConfig(rules=read_rules(path))).phases
    return {"rules": phases[0][1]} if len(phases) == 1 else {f"from step {step}": each for step, each in phases}


def _given(kind: type[_T], given: dict[str, Any]) -> _T:
    names = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in names})


def _title(model: str, config: ModelConfig, layout: Layout, savings: Savings, whole: int, own: int) -> str:
    """Return the title of the table; `whole` counts the parameters of the model, `own` those that one rank has."""
    parts = [f"{as_count(whole)} parameters", f"{config.layers} layers"]
    title = f"{model}: {', '.join(parts)}, batch {config.batch} × {config.sequence} tokens"
    if layout.world > 1:
        ways = {f"tp {layout.tp}": layout.tp > 1, "fsdp": layout.fsdp, f"ep {layout.ep}": layout.ep > 1}
        used = [way for way, is_used in ways.items() if is_used]
        title += "\n" + "; ".join([f"one of {layout.world} ranks", *used, f"{as_count(own)} parameters each"])
    return "\n".join([title, *(["; ".join(savings.words())] if savings.words() else [])])


def _table(title: str, names: Sequence[str], plans: Sequence[StepMemory], fits: str | None, limit: int | None) -> Table:
    """Return the table of memory; all sizes are in the unit of the largest one, which the title names."""
    power, unit = size_unit(max(found.peak for found in plans))
    sizes = ("saved per layer", "saved in all", "weights", "gradients", "optimizer", "peak")
    columns: dict[str, JustifyMethod] = {"recipe": "left", **dict.fromkeys(sizes, "right"), "peak in": "left"}
    table = make_table(f"{title}\nsizes in {unit}", columns | ({} if limit is None else {f"fits {fits}": "left"}))
    for name, found in zip(names, plans, strict=True):
        held = (found.saved_per_layer, found.saved, found.weights, found.gradients, found.optimizer, found.peak)
        more = [] if limit is None else ["yes" if found.peak <= limit else "no"]
        table.add_row(name, *(f"{each / 2**power:,.2f}" for each in held), found.peak_in, *more)
    return table


def _traffic(names: Sequence[str], plans: Sequence[StepMemory]) -> Table:
    kinds = sorted({kind for found in plans for kind in found.sent})
    title = "sent to other ranks in a step, with one microbatch"
    table = make_table(title, {"recipe": "left", **dict.fromkeys((*kinds, "in all"), "right")})
    for name, found in zip(names, plans, strict=True):
        sizes = [*[found.sent.get(kind, 0) for kind in kinds], sum(found.sent.values())]
        table.add_row(name, *map(as_size, sizes))
    return table
