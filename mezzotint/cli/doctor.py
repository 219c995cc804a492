"""`mezzotint doctor` says what this machine runs and how, and checks that what it computes is right.

Each recipe runs one Linear forward and backward, eager and compiled, and the result is compared with FP32. Rounding to
m bits of mantissa changes an element by at most 2^-(m+1) of itself. Over the many terms of a product such errors add up
as the steps of a random walk do, so the bound of a product is √(a² + b²), where a and b are those of its two operands.
"""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mezzotint import hw
from mezzotint.constants import mantissa_bits
from mezzotint.formats import FORMATS
from mezzotint.module.linear import Linear
from mezzotint.quantization import autocast
from mezzotint.recipe import FORWARD_TENSORS, DelayedScalingRequest, QuantizerRole, Recipe
from mezzotint.tensor.opaque import why_unregistered
from mezzotint.trainer.console import CommandError, make_console, make_table
from mezzotint.trainer.machine import check_compiler, find_device, has_nvidia_driver, versions
from mezzotint.trainer.progress import progress_bar
from mezzotint.trainer.recipes import COMMAND_RECIPES

SIZE = 256
PRODUCTS = ("fprop", "dgrad", "wgrad")
ROLES = ("input", "weight", "grad_output")
BF16_MANTISSA = 7


def untried() -> str:
    """Return a sentence on what no test has run on the hardware that it is for."""
    native = {made.title: [row.why for row in made.backends] for made in FORMATS.values() if made.backends}
    titles = [title for title, reasons in native.items() if all(hw.UNTRIED in why for why in reasons)]
    return (
        "Not run on hardware so far: the paths of Blackwell GPUs (compute capability 10.0 and 12.0), the native "
        f"{' and '.join(titles)} products among them, and of Ada (8.9)."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A `Check` is the result of one recipe, eager or compiled."""

    recipe: str
    mode: str  # "eager" | "compiled"
    errors: dict[str, float]  # of each product, relative to the product's norm
    bounds: dict[str, float]
    same_bits: bool | None  # whether compiled code gave the bits of eager code; None if that was not compared
    problem: str | None

    @property
    def is_good(self) -> bool:
        # Compiled code promises the bits of eager code. With `<=`, NaN is not good.
        near = all(self.errors[name] <= bound for name, bound in self.bounds.items()) if self.errors else False
        return self.problem is None and near and self.same_bits is not False


def run_doctor(device: str = "auto", compiled: bool = True, as_json: bool = False) -> int:
    """Run the command that `app.py` describes, and return its exit status."""
    where = find_device(device)
    rows = hw.report(None if where.type == "cpu" else "current")
    checks: list[Check] = []
    # Compiling takes most of the time, so the bar moves by recipes.
    with warnings.catch_warnings(), progress_bar("checking recipes", len(COMMAND_RECIPES)) as progress:
        warnings.simplefilter("ignore", hw.EmulationWarning)  # the table says it instead
        for number, name in enumerate(COMMAND_RECIPES, 1):
            checks += run_checks(name, where, compiled)
            progress(number, len(COMMAND_RECIPES))
    is_good = all(check.is_good for check in checks)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    if as_json:
        report = {
            "device": name,
            "versions": versions(),
            "formats": [asdict(row) for row in rows],
            "checks": [{**asdict(check), "is_good": check.is_good} for check in checks],
            "why_quantizers_are_no_constants": why_unregistered(),
            "untried": untried(),
            "next": next_steps(where, rows, checks),
            "is_good": is_good,
        }
        print(json.dumps(report, indent=1))
    else:
        _show(make_console(), name, rows, checks, next_steps(where, rows, checks))
    return 0 if is_good else 1


def bounds_of(recipe: Recipe | None) -> dict[str, float]:
    x, w, grad = (2.0 ** -(mantissa_of(recipe, role) + 1) for role in ROLES)
    return {"fprop": math.hypot(x, w), "dgrad": math.hypot(grad, w), "wgrad": math.hypot(grad, x)}


def mantissa_of(recipe: Recipe | None, tensor_type: str) -> int:
    """Return the bits of mantissa that a tensor has under a recipe."""
    if recipe is None:
        return BF16_MANTISSA
    asked: Any = recipe.quantizer(QuantizerRole("linear", tensor_type))
    if isinstance(asked, DelayedScalingRequest):
        asked = asked.scaled_quantizer(tensor_type in FORWARD_TENSORS)
    return mantissa_bits(asked.dtype)


def run_checks(name: str, device: torch.device, compiled: bool) -> list[Check]:
    """Check a recipe in eager mode, then compiled."""
    checks, eager, recipe = [], None, COMMAND_RECIPES[name]
    for mode in ("eager", "compiled") if compiled else ("eager",):
        errors: dict[str, float] = {}
        same_bits, problem = None, None
        try:
            if mode == "compiled":
                check_compiler(device)
            made, wanted = _run(recipe, device, mode)
            errors = {key: _error(value, wanted[key]) for key, value in made.items()}
            if eager is not None:
                same_bits = all(torch.equal(value, eager[key]) for key, value in made.items())
            eager = made
        except CommandError as error:
            problem = str(error)
        except Exception as error:  # any error is what the user wants to see
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        checks.append(
            Check(
                recipe=name,
                mode=mode,
                errors=errors,
                bounds=bounds_of(recipe),
                same_bits=same_bits,
                problem=problem,
            )
        )
    return checks


def _run(
    recipe: Recipe | None, device: torch.device, mode: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run forward and backward of a new Linear, and return its products and the same ones in FP32."""
    torch.manual_seed(0)
    x, grad = (torch.randn(SIZE, SIZE).to(device, torch.bfloat16) for _ in range(2))
    linear = Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cpu").to(device)
    call: Callable[..., Any] = linear
    if mode == "compiled":
        torch.compiler.reset()
        call = torch.compile(linear, fullgraph=True)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = call(leaf)
    # Backward runs in this thread: that of autograd has no CUDA context yet, and cuBLAS warns of it.
    with torch.autograd.set_multithreading_enabled(False):
        y.backward(grad)
    weight: Any = linear.weight
    w32, x32, grad32 = weight.detach().float(), x.float(), grad.float()
    wanted = {"fprop": x32 @ w32.T, "dgrad": grad32 @ w32, "wgrad": grad32.T @ x32}
    return {"fprop": y.detach(), "dgrad": leaf.grad, "wgrad": weight.grad}, wanted


def _error(value: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((value.float() - wanted).norm() / wanted.norm()).item()


def next_steps(device: torch.device, rows: list[hw.Row], checks: list[Check]) -> list[str]:
    """Return what the user should do after this report, in sentences."""
    problems = sorted({check.problem for check in checks if check.problem is not None})
    wrong = sorted({check.recipe for check in checks if not check.is_good and check.problem is None})
    if problems or wrong:
        found = [f"Mend this first: {problem}." for problem in problems]
        found += [f"Do not train in {', '.join(wrong)} here: the numbers are wrong."] if wrong else []
        return [*found, "If the cause is not in your machine, report it with the output of `mezzotint doctor --json`."]
    if device.type == "cuda":
        products = [row for row in rows if row.operation == "fprop" and row.format != "high_precision"]
        native = ", ".join(row.format for row in products if row.how == "native")
        advice = f"Native here: {native}. Recipes of these formats can be faster than BF16."
        none = "No format is native here: recipes have the numbers of low precision, and not its speed."
        measure = "In a clone, `mezzotint bench peers` measures them."
        return [advice if native else none, measure, "`mezzotint train --recipe current` trains a small model."]
    found = ["All recipes are right here. A CPU has the bits of a GPU and not its speed."]
    if has_nvidia_driver() and torch.version.cuda is None:
        found.append("There is an NVIDIA driver, but this PyTorch is its CPU build: install the one for CUDA.")
    return [*found, "`mezzotint compare` trains a small model in BF16 and four recipes, in minutes."]


def _show(console: Console, device: str, rows: list[hw.Row], checks: list[Check], advice: list[str]) -> None:
    console.print(f"device: {device}", highlight=False)
    for package, number in versions().items():
        console.print(f"{package}: {number or 'none'}", highlight=False)
    formats = make_table("\nhow each format runs here", dict.fromkeys(("format", "operation", "how", "why"), "left"))
    for row in _merged(rows):
        formats.add_row(*row)
    console.print(formats)
    console.print(_checks_table(checks))
    for check in checks:
        if not check.is_good:
            console.print(_complaint(check), highlight=False, markup=False)
    reason = why_unregistered()
    if reason is not None:
        console.print(f"quantizers are no constants in graphs here, nor arguments of custom ops: {reason}")
    console.print(f"\n{untried()}\n", highlight=False)
    for line in advice:
        console.print(line, highlight=False, markup=False)


def _checks_table(checks: list[Check]) -> Table:
    """Return a row for each recipe: the errors of its eager products, and whether both modes are good."""
    modes = list(dict.fromkeys(check.mode for check in checks))
    title = f"\none Linear, {SIZE} × {SIZE}, against FP32: relative error (bound)"
    table = make_table(title, {"recipe": "left", **dict.fromkeys((*PRODUCTS, *modes), "left")})
    for name in dict.fromkeys(check.recipe for check in checks):
        own = [check for check in checks if check.recipe == name]
        first = own[0]
        errors = [f"{first.errors[key]:.4f} ({first.bounds[key]:.4f})" if first.errors else "" for key in PRODUCTS]
        table.add_row(name, *errors, *map(_verdict, own))
    return table


def _verdict(check: Check) -> str:
    if check.problem is not None:
        return "fails"
    return ("same bits" if check.same_bits else "good") if check.is_good else "WRONG"


def _complaint(check: Check) -> str:
    """Return what is wrong with a recipe, in one line."""
    found = [check.problem] if check.problem is not None else []
    found += ["the bits of compiled code are not those of eager code"] if check.same_bits is False else []
    for name, error in check.errors.items():
        if not error <= check.bounds[name]:
            found.append(f"{name} is off by {error:.4f}, the bound is {check.bounds[name]:.4f}")
    return f"{check.recipe}, {check.mode}: {'; '.join(found)}"


def _merged(rows: list[hw.Row]) -> list[tuple[str, str, str, str]]:
    """Return the rows, with the operations of a format that run alike joined into one."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        found.setdefault((row.format, row.how, row.why), []).append(row.operation)
    return [(name, ", ".join(operations), how, why) for (name, how, why), operations in found.items()]
