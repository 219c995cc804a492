"""Fusible operations: compare a block as one pipeline with its operations one by one, forward and backward.

    python -m bench ops [--recipes none,current] [--blocks mlp] [--tokens 16384] [--hidden 4096] [--ffn 14336] [--bias]
                        [--reps 15] [--no-compile] [--backend inductor] [--json out.json]

`fused` is `ops.Sequential`: neighbours run as one, and a norm or an activation hands its output over quantized.
`unfused` are the same operations, each called on its own: no fusion (the registries are empty), nothing handed over.
`module` is `LayerNormMLP`, the same block written by hand. Times are medians of CUDA events; the candidates of a row
take turns, so that the clock of a warm card affects all alike. `gain` is unfused over fused. On a CPU the sizes are
tiny and the times mean nothing: it shows that everything runs.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import mezzotint as mz
from bench._timing import turns_ms
from mezzotint import ops, recipe
from mezzotint.ops import fusion
from mezzotint.recipe import Recipe

RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
BLOCKS = ("mlp", "residual")
SIZES = {"cuda": (16384, 4096, 14336), "cpu": (64, 64, 128)}  # tokens, hidden, ffn
WARMUP = 3
Step = Callable[[], Any]


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, hidden, ffn = SIZES[device]
    parser = argparse.ArgumentParser(prog="python -m bench ops", description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of " + ", ".join(RECIPES))
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="of " + ", ".join(BLOCKS))
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--ffn", type=int, default=ffn)
    parser.add_argument("--bias", action="store_true", help="linears with biases")
    parser.add_argument("--reps", type=int, default=15 if device == "cuda" else 3, help="timed steps of each candidate")
    parser.add_argument("--no-compile", action="store_true", help="eager code alone")
    # Inductor needs a C++ compiler on a CPU, and tens of seconds for each graph.
    parser.add_argument("--backend", default="inductor" if device == "cuda" else "aot_eager", help="of torch.compile")
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args(argv)
    report = measure(device, args)
    show(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def chosen(names: str, known: Any) -> list[str]:
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in known:
            raise SystemExit(f"there is no {name!r}: give some of {', '.join(known)}")
    return found


@contextmanager
def no_fusions() -> Iterator[None]:
    """Keep pipelines that are built and run inside from fusing anything."""
    registries = (fusion.FORWARD_BACKWARD_FUSIONS, fusion.FORWARD_FUSIONS, fusion.BACKWARD_FUSIONS)
    kept = [list(functions) for functions in registries]
    for functions in registries:
        functions.clear()
    try:
        yield
    finally:
        for functions, before in zip(registries, kept, strict=True):
            functions.extend(before)


def operations(hidden: int, ffn: int, bias: bool, device: str) -> list[Any]:
    """Return RMSNorm, linear, SwiGLU, linear."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    return [
        ops.RMSNorm(hidden, **options),
        ops.Linear(hidden, 2 * ffn, bias=bias, **options),
        ops.SwiGLU(),
        ops.Linear(ffn, hidden, bias=bias, **options),
    ]


def fused(block: str, *sizes: Any) -> ops.Sequential:
    """Return one pipeline; in a residual block the input goes from end to end by a channel."""
    inner = operations(*sizes)
    if block == "mlp":
        return ops.Sequential(*inner)
    start, end = ops.MakeExtraOutput(), ops.AddExtraInput()
    start.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    return ops.Sequential(start, *inner, end)


class Unfused(nn.Module):
    """An `Unfused` runs each basic operation in a pipeline of its own."""

    def __init__(self, block: str, *sizes: Any) -> None:
        super().__init__()
        basic = [op for part in operations(*sizes) for op in getattr(part, "basic_ops", [part])]
        self.inner = nn.ModuleList(basic)
        self.is_residual = block == "residual"
        self.start, self.end = ops.MakeExtraOutput(), ops.AddExtraInput()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = None
        if self.is_residual:
            x, residual = self.start(x)
        for op in self.inner:
            x = op(x)
        return x if residual is None else self.end(x, residual)


class Module(nn.Module):
    """A `Module` is LayerNormMLP, with the input added if the block is a residual one."""

    def __init__(self, block: str, hidden: int, ffn: int, bias: bool, device: str) -> None:
        super().__init__()
        self.is_residual = block == "residual"
        self.mlp = mz.LayerNormMLP(
            hidden,
            ffn,
            activation="swiglu",
            normalization="RMSNorm",
            bias=bias,
            device=device,
            params_dtype=torch.bfloat16,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(x)
        return x + y if self.is_residual else y


CANDIDATES: dict[str, Callable[..., nn.Module]] = {"fused": fused, "unfused": Unfused, "module": Module}


def make_step(call: Any, model: nn.Module, x: torch.Tensor, chosen_recipe: Recipe | None, fuses: bool) -> Step:
    """Return a step: forward under the recipe, then backward; gradients are new each time,
    as after an optimizer's step."""
    leaf = x.detach().requires_grad_()
    gradient = torch.randn(x.shape, device=x.device, dtype=x.dtype)

    def step() -> None:
        leaf.grad = None
        model.zero_grad(set_to_none=True)
        with nullcontext() if fuses else no_fusions():
            with mz.autocast(enabled=chosen_recipe is not None, recipe=chosen_recipe):
                y = call(leaf)
            y.backward(gradient)

    return step


def medians(steps: list[Step], device: str, reps: int) -> list[float]:
    """Return the median milliseconds of each step, after a warm-up."""
    for step in steps:
        for _ in range(WARMUP if device == "cuda" else 1):
            step()
    return turns_ms(steps, device, reps)


def measure(device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the report: for each block and recipe, the milliseconds of each candidate, eager and compiled."""
    blocks, recipes = chosen(args.blocks, BLOCKS), chosen(args.recipes, RECIPES)
    x = torch.randn(args.tokens, args.hidden, device=device, dtype=torch.bfloat16)
    rows = []
    with Progress(transient=True, disable=not Console().is_terminal) as progress:
        for block, name in progress.track([(b, r) for b in blocks for r in recipes], description="blocks"):
            models = {kind: make(block, args.hidden, args.ffn, args.bias, device) for kind, make in CANDIDATES.items()}
            row: dict[str, Any] = {"block": block, "recipe": name}
            for mode in ("eager",) if args.no_compile else ("eager", "compiled"):
                torch._dynamo.reset()
                steps = [
                    make_step(
                        model if mode == "eager" else torch.compile(model, fullgraph=True, backend=args.backend),
                        model,
                        x,
                        RECIPES[name],
                        kind != "unfused",
                    )
                    for kind, model in models.items()
                ]
                row[mode] = dict(zip(models, medians(steps, device, args.reps), strict=True))
            rows.append(row)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    sizes = {"tokens": args.tokens, "hidden": args.hidden, "ffn": args.ffn, "bias": args.bias}
    return {"device": where, "torch": torch.__version__, "backend": args.backend, **sizes, "rows": rows}


def show(report: dict[str, Any]) -> None:
    """Print a table for each mode."""
    console = Console(width=120 if not Console().is_terminal else None)
    sizes = f"{report['tokens']} tokens, hidden {report['hidden']}, ffn {report['ffn']}"
    for mode in ("eager", "compiled"):
        rows = [row for row in report["rows"] if mode in row]
        if not rows:
            continue
        by = f" by {report['backend']}" if mode == "compiled" else ""
        title = f"{mode}{by}, forward + backward, ms: {sizes}; {report['device']}, torch {report['torch']}"
        table = Table(title=title, title_justify="left")
        for name in ("block", "recipe", "fused", "unfused", "gain", "module", "module / fused"):
            table.add_column(name, justify="left" if name in ("block", "recipe") else "right")
        for row in rows:
            ms = row[mode]
            gain, module = ms["unfused"] / ms["fused"], ms["module"] / ms["fused"]
            table.add_row(
                row["block"],
                row["recipe"],
                f"{ms['fused']:.2f}",
                f"{ms['unfused']:.2f}",
                f"{gain:.2f}",
                f"{ms['module']:.2f}",
                f"{module:.2f}",
            )
        console.print(table)
    if report["device"] == "CPU":
        console.print("On a CPU, at tiny sizes: these times say that everything runs, and nothing else.")
