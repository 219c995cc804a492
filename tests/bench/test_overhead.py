"""`bench overhead`, small: every candidate is there, and where its time goes adds up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import mezzotint as mz
from bench import overhead
from bench._replay import _Replay
from bench._stubs import stubbed_kernels
from mezzotint.recipe import RECIPES
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer
from mezzotint.tensor.quantize import quantize_scaled

CURRENT = Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3)


def test_every_candidate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bool] = set()
    timed = overhead.Step

    def watched(*args: object, **kwargs: object) -> object:
        seen.add(torch._C._is_multithreading_enabled())
        return timed(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(overhead, "Step", watched)
    monkeypatch.setattr(overhead, "BLOCK", 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--features", "32", "--tokens", "32", "--repeat", "1", "--one-thread"]
    assert overhead.main([*arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    alone = {"nn.Linear bf16", "autograd.Function alone", "torchao tensorwise"}
    assert alone | overhead.RECIPES.keys() <= rows.keys()
    for name, row in rows.items():
        assert "error" not in row, name
        assert row["ops"] + row["python"] == pytest.approx(row["us"])
        assert ("floor" in row) == name.startswith("mezzotint")
    shown = capsys.readouterr().out
    assert "one thread" in shown
    assert "floor us" in shown
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


def test_the_floor_makes_the_calls_of_the_step() -> None:
    step = overhead.Step(mz.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu"), 32, RECIPES["current"]())
    step()
    leaves = [step.x, *step.module.parameters()]
    expected = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    floor = step.floor()
    calls = [[call.func.__name__ for call in calls] for calls in (floor.forward, floor.backward)]  # type: ignore[attr-defined]
    assert [names.count("mm") for names in calls] == [1, 2]
    assert floor.count() == sum(map(len, calls))
    products: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.extend([func.__name__] * (func.__name__ == "mm"))
            return func(*args, **(kwargs or {}))

    with Watch():
        _Replay.apply(floor, *leaves)
    assert len(products) == 1
    floor()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)


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
