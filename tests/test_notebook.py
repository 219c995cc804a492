"""Reports as a notebook shows them."""

from pathlib import Path

import torch

import mezzotint as mz
from mezzotint.inspect.suggest import LinearChoice, Suggestion
from mezzotint.notebook import html_table
from mezzotint.serving.export import ExportReport
from mezzotint.trainer.memory import StepMemory


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
