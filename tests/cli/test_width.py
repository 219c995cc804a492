"""What is printed fits a terminal of 80 columns, and help is sentences with examples that can be typed."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from mezzotint.cli.app import app
from mezzotint.cli.compare import as_table
from mezzotint.cli.doctor import PRODUCTS, Check, _checks_table
from mezzotint.cli.plan import _table as plan_table
from mezzotint.cli.plan import _traffic
from mezzotint.cli.suggest import _table as suggestion_table
from mezzotint.cli.verify import _show as show_verified
from mezzotint.inspect.suggest import LinearChoice, Suggestion
from mezzotint.serving.verify import TensorCheck
from mezzotint.trainer.console import make_console
from mezzotint.trainer.loop import Result
from mezzotint.trainer.memory import StepMemory
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.settings import TrainConfig
from tests.cli.tools import works

Capture = pytest.CaptureFixture[str]
GROUP: Any = typer.main.get_command(app)
COMMANDS = [name for name in GROUP.commands if name != "bench"]  # whose help is that of `python -m bench`


@pytest.fixture(autouse=True)
def _a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def check_width(said: str, *words: str) -> str:
    """Nothing is wider than the terminal or cut off, and these words are whole."""
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    missing = [word for word in words if word not in said]
    assert not missing, said
    return said


def result_of(recipe: str) -> Result:
    numbers: Any = {"losses": [2.5] * 150, "final": 2.4364, "tokens_per_second": 1234567.8, "peak_memory": 139 * 2**30}
    return Result(recipe=recipe, device="NVIDIA H200", graphs=12, compile_seconds=123.4, **numbers)


def test_compare(capsys: Capture) -> None:
    others = [result_of(name) for name in COMMAND_RECIPES if name != "bf16"]
    make_console().print(as_table([result_of("bf16")] * 3, others, TrainConfig(), 0.03))
    check_width(capsys.readouterr().out, "bf16-s2", "tokens/s", "1,234,568", "139.0 GiB", "within chance")


def test_doctor(capsys: Capture) -> None:
    """The formats of this machine, and checks of both modes."""
    errors, bounds = dict.fromkeys(PRODUCTS, 0.1234), dict.fromkeys(PRODUCTS, 0.3536)
    made: dict[str, Any] = {"errors": errors, "bounds": bounds, "problem": None}
    checks = [
        Check(recipe=name, mode=mode, same_bits=True if mode == "compiled" else None, **made)
        for name in COMMAND_RECIPES
        for mode in ("eager", "compiled")
    ]
    make_console().print(_checks_table(checks))
    check_width(capsys.readouterr().out, *COMMAND_RECIPES, "0.1234 (0.3536)", "compiled", "same bits")


def test_plan(capsys: Capture) -> None:
    """Of a process that fills the largest GPUs, and has every kind of collective."""
    sent = dict.fromkeys(("all-gather", "all-reduce", "all-to-all", "reduce-scatter"), 999 * 2**30)
    sizes = dict.fromkeys(("saved", "weights", "gradients", "optimizer"), 100 * 2**30) | {"saved_per_layer": 2**30}
    found = StepMemory(parameters=10**9, peak=280 * 2**30, peak_in="backward of the embedding", sent=sent, **sizes)
    make_console().print(plan_table("a model", ["bf16", "rowwise"], [found] * 2, "80GB", 80 * 10**9))
    make_console().print(_traffic(["bf16", "rowwise"], [found] * 2))
    words = ("saved", "weights", "gradients", "optimizer", "80GB", "embedding", *sent, "999.0 GiB")
    said = check_width(capsys.readouterr().out, *words)
    assert re.search(r"^rowwise +1\.00 +(100\.00 +){4}280\.00 +backward +no *$", said, re.MULTILINE)


def test_suggest(capsys: Capture) -> None:
    names = [f"layers.31.{name}" for name in ("self_attention.layernorm_qkv", "layernorm_mlp.fc1")]
    noise = {"nvfp4": {"grad_output": 0.02, "input": 0.01}, "rowwise": {"grad_output": 0.0, "input": 0.0}}
    linears = tuple(LinearChoice(name, 1.0, noise, "nvfp4") for name in names)
    linears[0].recipe = "rowwise"
    make_console().print(suggestion_table(Suggestion("nvfp4", linears, 0.5)))
    check_width(capsys.readouterr().out, *names, "grad_output", "rowwise", "exact", "17.0", "50.0%")


def test_verify(capsys: Capture) -> None:
    name = "model.layers.31.self_attn.q_proj.weight_scale"
    numbers: Any = {"differing": 1048576, "elements": 16777216, "first": (4095, 127), "largest_error": 0.125}
    check = TensorCheck(name, **numbers)
    show_verified("weights quantized as MXFP8BlockScaling", [check], [check])
    said = check_width(capsys.readouterr().out, "1048576", "16777216", "[4095, 127]", "0.125")
    assert "".join(re.findall(r"^[\w.]+", said.partition("─\n")[2], re.MULTILINE)[:2]).startswith(name)  # folded


def options_of(command: Any) -> Iterator[tuple[str, str, str]]:
    """The options of a command: their longest name, their help and its panel."""
    for parameter in command.params:
        if parameter.opts[-1] != "--help":
            yield parameter.opts[-1], parameter.help, getattr(parameter, "rich_help_panel", None) or ""


@pytest.mark.parametrize("name", COMMANDS)
def test_help(capsys: Capture, name: str) -> None:
    said = check_width(works(capsys, name, "--help"), "Examples:")
    command = GROUP.commands[name]
    for option, text, _ in options_of(command):
        sentence = text.partition(" \\[default")[0]
        assert re.fullmatch(r"[A-Z].*[.)]", sentence), f"{option}: {text!r} is no sentence"
    examples = [line.strip() for line in said.splitlines() if line.startswith(" mezzotint ")]
    assert len(examples) >= 2
    known = {each for parameter in command.params for each in (*parameter.opts, *parameter.secondary_opts)}
    for example in examples:
        assert example.startswith(f"mezzotint {name}")
        assert set(re.findall(r"(?<= )--[a-z-]+", example)) <= known, example


def test_long_help_is_in_panels() -> None:
    for name in ("train", "compare", "plan"):
        panels = [panel for option, _, panel in options_of(GROUP.commands[name]) if option.startswith("--")]
        assert sum(not panel for panel in panels) <= 1, name  # --json
        assert max(map(panels.count, panels)) <= 14, name
