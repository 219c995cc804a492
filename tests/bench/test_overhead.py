"""`bench overhead`, small: every candidate is there, and where its time goes adds up."""

import json
from pathlib import Path

import pytest
import torch

import mezzotint as mz
from bench import overhead
from bench._stubs import stubbed_kernels
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer
from mezzotint.tensor.quantize import quantize_scaled

CURRENT = Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3)


def test_every_candidate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bool] = set()
    timed = overhead._step

    def watched(*args: object, **kwargs: object) -> object:
        seen.add(torch._C._is_multithreading_enabled())
        return timed(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(overhead, "_step", watched)
    monkeypatch.setattr(overhead, "BLOCK", 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--features", "32", "--tokens", "32", "--repeat", "1", "--one-thread"]
    assert overhead.main([*arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    alone = {"nn.Linear bf16", "autograd.Function alone", "current scaling alone", "torchao tensorwise"}
    assert alone | overhead.RECIPES.keys() <= rows.keys()
    for name, row in rows.items():
        assert "error" not in row, name
        assert row["ops"] + row["python"] == pytest.approx(row["us"])
    assert "one thread" in capsys.readouterr().out
    assert seen == {False}
    assert torch._C._is_multithreading_enabled()


def test_stubbed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "BLOCK", 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "out.json"
    arguments = ["--stub", "--features", "32", "--tokens", "32", "--repeat", "1", "--json", str(path)]
    assert overhead.main(arguments) == 0
    names = [row["name"] for row in json.loads(path.read_text())["rows"]]
    assert names == ["autograd.Function alone", *overhead.RECIPES, "mezzotint current, kept weight"]
    assert "of autograd.Function alone" in " ".join(capsys.readouterr().out.split())


def test_current_scaling_alone_computes_what_the_module_computes() -> None:
    alone = overhead._BareFloat8Module(32, 32, dtype=torch.bfloat16)
    module = mz.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        for mine, other in zip(alone.parameters(), module.parameters(), strict=True):
            mine.copy_(other)
    found = []
    for linear in (alone, module):
        x = torch.linspace(-2.0, 3.0, 32 * 32).view(32, 32).bfloat16().requires_grad_()
        with mz.autocast("current"):
            y = linear(x)
        y.backward(torch.linspace(1.0, -4.0, 32 * 32).view(32, 32).bfloat16())
        found.append([y, x.grad, *[parameter.grad for parameter in linear.parameters()]])
    torch.testing.assert_close(*found)


def test_kernels_that_compute_nothing() -> None:
    linear = mz.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)

    def step() -> torch.Tensor:
        with mz.autocast("current"):
            y = linear(x)
        y.backward(torch.ones_like(y))
        return y

    expected = step()
    with stubbed_kernels():
        step()
        with torch.no_grad():  # as the autograd function calls it
            first, second = (quantize_scaled(x * factor, CURRENT, None)[0] for factor in (1.0, 3.0))
        assert first._data is second._data
    assert torch.equal(step(), expected)
