"""Reports and bars as a notebook shows them."""

import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.inspect.suggest import LinearChoice, Suggestion
from mezzotint.notebook import html_table
from mezzotint.serving.export import ExportReport
from mezzotint.trainer import progress
from mezzotint.trainer.console import make_console
from mezzotint.trainer.memory import StepMemory
from mezzotint.trainer.progress import Reporter, progress_bar


def test_a_table() -> None:
    made = html_table([("<a>", "1")], ("name", "n & m"), "x < y")
    head, body = "<tr><th>name</th><th>n &amp; m</th></tr>", "<tr><td>&lt;a&gt;</td><td>1</td></tr>"
    assert made == f"<table><thead>{head}</thead><tbody>{body}</tbody></table><p>x &lt; y</p>"
    assert html_table([("a",)]) == "<table><tbody><tr><td>a</td></tr></tbody></table>"


def test_a_quantization_error() -> None:
    """The same figures as in print; those of exact numbers are known."""
    error = mz.quantization_error(torch.ones(32, 32), "mxfp8")
    page = error._repr_html_()
    for name, value in (("signal to noise", "inf dB"), ("became zero", "0 %"), ("amax", "1"), ("not finite", "none")):
        assert f"<td>{name}</td><td>{value}</td>" in page
        assert f"\n  {name:17} {value}" in repr(error)
    assert page.endswith("<p>QuantizationError of (32, 32) by mxfp8</p>")


def test_a_plan() -> None:
    sizes = {"saved_per_layer": 2**10, "saved": 2**20, "weights": 2**30, "gradients": 5, "optimizer": 6}
    found = StepMemory(parameters=1, **sizes, peak=3 * 2**30, peak_in="head and loss", sent={"all-gather": 1536})
    page = found._repr_html_()
    for cells in (
        ("saved per layer", "1.0 KiB"),
        ("weights", "1.0 GiB"),
        ("peak", "3.0 GiB"),
        ("peak in", "head and loss"),
    ):
        assert "<td>{}</td><td>{}</td>".format(*cells) in page
    assert "<td>sent by all-gather</td><td>1.5 KiB</td>" in page


def test_a_suggestion() -> None:
    noise = {"nvfp4": {"input": 0.01}, "none": {"input": 0.0}}
    linears = tuple(LinearChoice(name, 1.0, noise, "nvfp4", "because") for name in ("a.<b>", "c"))
    linears[1].recipe = "none"
    page = Suggestion("nvfp4", linears, 0.5)._repr_html_()
    assert "<td>a.&lt;b&gt;</td><td>nvfp4</td><td>input</td><td>20.0</td><td>20.0</td><td>because</td>" in page
    assert "<td>c</td><td>none</td><td>input</td><td>20.0</td><td>inf</td><td>because</td>" in page
    assert "50.00% more time in products than in nvfp4" in page


def test_an_export() -> None:
    report = ExportReport(Path("served"), "hf-fp8", ("a", "b"), ("c",), (), ("b",))
    page = report._repr_html_()
    for name, count in (("quantized", 2), ("not quantized", 1), ("of these, in other blocks than were trained", 1)):
        assert f"<td>{name}</td><td>{count}</td>" in page
    assert page.endswith("<p>served: hf-fp8</p>")


class Kernel:
    """An IPython whose shell has a kernel, as in a notebook, or none, as in a terminal; it keeps what is displayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has_kernel: bool = True) -> None:
        self.shown: list[str] = []
        module: Any = ModuleType("IPython")
        module.get_ipython = lambda: SimpleNamespace(kernel=1) if has_kernel else SimpleNamespace()
        module.display = SimpleNamespace(display=self.display)
        monkeypatch.setitem(sys.modules, "IPython", module)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(progress, "SECONDS", 0.0)

    def display(self, shown: Any, *, display_id: bool) -> "Kernel":
        assert display_id
        self.update(shown)
        return self

    def update(self, shown: Any) -> None:
        page = shown._repr_html_()
        assert page.startswith("<pre")
        assert "\x1b" not in page
        self.shown.append(repr(shown))


def test_a_run_in_a_notebook_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of the cell is replaced at every step, and the last one stays; no lines are printed beside it."""
    kernel = Kernel(monkeypatch)
    with Reporter(make_console(), "mxfp8", 3, 1) as reporter:
        for step in (2, 3):
            reporter.advance()
            reporter.show(step, 2.5, 1234.5)
    found = [(shown.split()[0], next(word for word in shown.split() if "/" in word)) for shown in kernel.shown]
    assert found == [("mxfp8", f"{step}/3") for step in (1, 2, 2, 3, 3, 3)]
    assert "loss 2.5000  1,234 tokens/s" in kernel.shown[-1]
    assert sys.stdout.getvalue() == ""  # type: ignore[attr-defined]


def test_what_a_step_waits_for_is_shown_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    with Reporter(make_console(), "mxfp8", 3, 0) as reporter:
        reporter.say("compiling")
        assert "compiling" in kernel.shown[-1]
        reporter.advance()
        assert "compiling" not in kernel.shown[-1]
        reporter.show(1, 2.5, None)
        reporter.advance()
        assert "loss 2.5000" in kernel.shown[-1]


def test_a_bar_of_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    monkeypatch.setattr(progress, "SECONDS", 1e9)  # after the first, the bar is drawn at the end alone
    with progress_bar("writing") as show:
        for done in range(1, 6):
            show(done, 5)
    assert ["5/5" in shown for shown in kernel.shown] == [False, True]


def test_who_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither IPython without a kernel, where the output is a file, nor a rank that does not speak."""
    kernel = Kernel(monkeypatch, has_kernel=False)
    with Reporter(make_console(), "bf16", 2, 0) as reporter:
        reporter.show(1, 2.5, None)
    assert sys.stdout.getvalue() == "bf16  step 1/2  loss 2.5000\n"  # type: ignore[attr-defined]
    kernel = Kernel(monkeypatch)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with Reporter(make_console(), "bf16", 2, 0) as reporter:
        reporter.show(1, 2.5, None)
    assert kernel.shown == []
