"""Eager overhead: measure the microseconds of one small Linear, forward and backward, and where they go.

    python -m bench overhead [--device cuda] [--features 64] [--tokens 64] [--repeat 300] [--one-thread]
                             [--stub] [--json out.json]

A 64x64 Linear on 64 tokens computes next to nothing: what is measured is Python, the dispatcher and launches. Times are
medians of wall-clock blocks, interleaved over the candidates; the split comes from one profile of each. `ops` is the
time inside operators that are called from Python, launches and allocations included, `launch` the part of it inside the
CUDA launch calls, `python` what is left.

"autograd.Function alone" is the least that a linear with a backward in Python takes: the same products and the same sum
as `nn.Linear`, and nothing else. `floor` is the time in which such a function makes the calls of PyTorch and the
launches of kernels that a step of ours makes, one after the other, with the arguments that they had in a real step.
What the step takes beyond that are modules, regions, plans and quantized tensors.

With `--stub`, on a CPU, our kernels compute nothing: what is measured is the Python of a step and what autograd and the
allocator add. "autograd.Function alone" computes nothing there either, and takes the place of `nn.Linear`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import mezzotint as mz
from bench._peers import quiet_import
from bench._replay import Replay
from bench._stubs import stubbed_kernels
from bench._timing import ONE_THREAD
from mezzotint import recipe

OPERATORS = ("aten::", "mezzotint::")
BLOCK = 20  # steps between two looks at the clock

RECIPES: dict[str, recipe.Recipe | None] = {
    "mezzotint, no recipe": None,
    **{f"mezzotint {name}": kind() for name, kind in recipe.RECIPES.items()},
}


class _BareLinear(torch.autograd.Function):
    """This is a linear whose backward is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x, grads[0].sum(0)


class _BareShell(torch.autograd.Function):
    """This has the arguments and results of a linear and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(x.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[0])


class _BareModule(torch.nn.Linear):
    """This module calls one of the functions above."""

    function: type[torch.autograd.Function] = _BareLinear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.function.apply(input, self.weight, self.bias)


class _BareShellModule(_BareModule):
    function = _BareShell


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=300, help="steps of each candidate")
    parser.add_argument("--one-thread", action="store_true", help=ONE_THREAD)
    parser.add_argument("--stub", action="store_true", help="on a CPU, with kernels of ours that compute nothing")
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args(argv)
    if args.stub:
        args.device = "cpu"
    if args.device == "cpu":
        torch.set_num_threads(1)
    with (
        stubbed_kernels() if args.stub else nullcontext(),
        torch.autograd.set_multithreading_enabled(not args.one_thread),
    ):
        report = measure(args.device, args.features, args.tokens, args.repeat, args.stub)
    report |= {"one_thread": args.one_thread, "stub": args.stub}
    show(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def candidates(device: str, features: int, tokens: int, is_stubbed: bool) -> dict[str, "Step"]:
    """Return one step of each candidate, by name; the first is what the others are compared with."""
    made: dict[str, Step] = {}
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    if is_stubbed:
        made["autograd.Function alone"] = Step(_BareShellModule(features, features, **options), tokens)
    else:
        made["nn.Linear bf16"] = Step(torch.nn.Linear(features, features, **options), tokens)
        made["autograd.Function alone"] = Step(_BareModule(features, features, **options), tokens)
    for name, chosen in RECIPES.items():
        linear = mz.Linear(features, features, device=device, params_dtype=torch.bfloat16)
        made[name] = Step(linear, tokens, chosen)
    made["mezzotint current, kept weight"] = Step(
        mz.Linear(features, features, device=device, params_dtype=torch.bfloat16),
        tokens,
        recipe.Float8CurrentScaling(),
        is_first_microbatch=False,
    )
    if not is_stubbed and quiet_import():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        for kind in ("tensorwise", "rowwise"):
            model = torch.nn.Sequential(torch.nn.Linear(features, features, **options))
            config = Float8LinearConfig.from_recipe_name(kind)
            made[f"torchao {kind}"] = Step(convert_to_float8_training(model, config=config), tokens)
    return made


class Step:
    """A `Step` runs forward and backward of one candidate."""

    def __init__(self, module: torch.nn.Module, tokens: int, chosen: Any = None, **kwargs: Any) -> None:
        parameter = next(module.parameters())
        options: dict[str, Any] = {"device": parameter.device, "dtype": torch.bfloat16}
        self.x = torch.randn(tokens, parameter.shape[1], **options, requires_grad=True)
        self.gradient = torch.randn(tokens, parameter.shape[0], **options)
        self.module, self.recipe, self.kwargs = module, chosen, kwargs

    def forward(self) -> torch.Tensor:
        if self.recipe is None:
            return self.module(self.x)
        with mz.autocast(recipe=self.recipe):
            return self.module(self.x, **self.kwargs)

    def __call__(self) -> None:
        self.forward().backward(self.gradient)

    def floor(self) -> Replay:
        """Return the calls of this step alone, as a step of their own. The step must have run before."""
        return Replay(self.forward, [self.x, *self.module.parameters()], self.gradient)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(device: str, features: int, tokens: int, repeat: int, is_stubbed: bool = False) -> dict[str, Any]:
    """Return the rows: name, us, ops, launch, python, launches; or an error for a candidate that does not run here."""
    steps = candidates(device, features, tokens, is_stubbed)
    floors: dict[str, Replay] = {}
    errors: dict[str, str] = {}
    for name, step in list(steps.items()):
        try:
            for _ in range(5):
                step()
            if name.startswith("mezzotint"):
                floors[name] = step.floor()
                floors[name]()
            _synchronize(device)
        except Exception as error:  # a peer may not run on this machine
            errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            del steps[name]
    timed: list[tuple[list[float], Callable[[], None]]] = [([], each) for each in (*steps.values(), *floors.values())]
    with Progress(transient=True, disable=not Console().is_terminal) as progress:
        for _ in progress.track(range(max(repeat // BLOCK, 3)), description="steps"):
            for times, each in timed:
                _synchronize(device)
                start = time.perf_counter()
                for _ in range(BLOCK):
                    each()
                _synchronize(device)
                times.append((time.perf_counter() - start) / BLOCK * 1e6)
    medians = [statistics.median(times) for times, _ in timed]
    least = dict(zip(floors, medians[len(steps) :], strict=True))
    rows = []
    for (name, step), us in zip(steps.items(), medians[: len(steps)], strict=True):
        floor = {"floor": least[name], "calls": floors[name].count()} if name in floors else {}
        rows.append({"name": name, "us": us, **floor, **_split(step, us, device)})
    rows += [{"name": name, "error": error} for name, error in errors.items()]
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    return {"device": where, "torch": torch.__version__, "features": features, "tokens": tokens, "rows": rows}


def _split(step: Callable[[], None], us: float, device: str) -> dict[str, float]:
    """Return how the unprofiled time divides, by the shares of a profile."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        start = time.perf_counter()
        for _ in range(BLOCK):
            step()
        _synchronize(device)
        total = (time.perf_counter() - start) * 1e6
    events = profile.events() or []
    launches = [e for e in events if e.name.startswith(("cudaLaunch", "cuLaunch"))]
    # Only the outermost of nested operators count; those that autograd's thread runs count like the others.
    roots = [e for e in events if e.name.startswith(OPERATORS) and _is_root(e)]
    in_ops = sum(e.cpu_time_total for e in roots)
    in_launches = sum(e.cpu_time_total for e in launches)
    return {
        "ops": us * min(in_ops / total, 1.0),
        "launch": us * min(in_launches / total, 1.0),
        "python": us * max(1 - in_ops / total, 0.0),
        "launches": len(launches) / BLOCK,
        "operators": len(roots) / BLOCK,
    }


def _is_root(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(OPERATORS):
            return False
        parent = parent.cpu_parent
    return True


def show(report: dict[str, Any]) -> None:
    """Print the report as one table."""
    title = f"Linear {report['features']}x{report['features']}, {report['tokens']} tokens, forward + backward, eager"
    title += ", one thread" if report["one_thread"] else ""
    title += ", kernels stubbed" if report["stub"] else ""
    table = Table(title=f"{title}: {report['device']}, torch {report['torch']}", title_justify="left")
    base = report["rows"][0]
    parts = ("ops us", "launch us", "python us", "operators", "launches")
    for name in ("", "us", f"of {base['name']}", "floor us", "of it", "calls", *parts):
        table.add_column(name, justify="left" if not name else "right")
    for row in report["rows"]:
        if "error" in row:
            table.add_row(row["name"], row["error"])
            continue
        floor = [f"{row['floor']:.0f}", f"{row['floor'] / base['us']:.2f}", f"{row['calls']}"] if "floor" in row else []
        table.add_row(
            row["name"],
            f"{row['us']:.0f}",
            f"{row['us'] / base['us']:.2f}",
            *(floor or [""] * 3),
            *(f"{row[key]:.0f}" for key in ("ops", "launch", "python", "operators", "launches")),
        )
    Console(width=150 if not Console().is_terminal else None).print(table)
