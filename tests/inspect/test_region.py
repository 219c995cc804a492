"""The region: what it sees, that numbers stay as they are, one second graph, and nothing more when it is off."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import recipe
from mezzotint.inspect.store import read_details, read_records
from mezzotint.tensor.quantizer import Quantizer

MODULES: dict[str, Any] = {
    "linear": lambda: mz.Linear(32, 48),
    "layernorm_linear": lambda: mz.LayerNormLinear(32, 48),
    "layernorm_mlp": lambda: mz.LayerNormMLP(32, 64),
    "layernorm_mlp_again": lambda: mz.LayerNormMLP(32, 64, checkpoint=True),
    "grouped_linear": lambda: mz.GroupedLinear(2, 32, 48),
    "ops": lambda: mz.ops.Sequential(mz.ops.LayerNorm(32), mz.ops.Linear(32, 48), mz.ops.GELU(), mz.ops.Linear(48, 32)),
}
CHOSEN = {"mxfp8": recipe.MXFP8BlockScaling(), "delayed": recipe.DelayedScaling(), "nvfp4": recipe.NVFP4BlockScaling()}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().bfloat16()


def run(module: nn.Module, name: str, chosen: recipe.Recipe, called: Any = None) -> list[torch.Tensor]:
    """Two micro-batches; the last output and all gradients."""
    torch.manual_seed(1)
    splits = ([20, 12],) if name == "grouped_linear" else ()
    for _ in range(2):
        x = torch.randn(32, 32).bfloat16().requires_grad_()
        with mz.autocast(recipe=chosen):
            y = (module if called is None else called)(x, *splits)
        y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *[each.grad for each in module.parameters() if each.grad is not None]]


def read_figures(folder: Path) -> dict[int, dict[str, Any]]:
    """Step → tensor → record; of two of one step and tensor, the last."""
    found: dict[int, dict[str, Any]] = {}
    for record in read_records(folder):
        found.setdefault(record["step"], {})[record["tensor"]] = record
    return found


@pytest.mark.cover(1)
@pytest.mark.compile
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("name", MODULES)
def test_numbers_stay_and_graphs_see_the_same(name: str, chosen: str) -> None:
    """Not inspected, inspected, and inspected in a graph: the same outputs and gradients, the same tables."""
    module = make(name)
    want = run(module, name, CHOSEN[chosen])
    tables = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        module = make(name)
        called = torch.compile(module, fullgraph=True, backend="aot_eager") if is_compiled else module
        inspector = mz.inspect(module)
        with inspector:
            made = run(module, name, CHOSEN[chosen], called)
        assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))
        tables.append({each.name: each.table for each in inspector.last})
    assert tables[0].keys() == tables[1].keys()
    assert all(torch.equal(tables[0][key], tables[1][key]) for key in tables[0])


def test_what_is_seen_is_what_was_quantized() -> None:
    """The figures of a linear are those of its tensors by hand; both micro-batches count."""
    module, x = make("linear"), torch.randn(64, 32).bfloat16()
    x[3, 3] = 700.0
    inspector = mz.inspect(module)
    with inspector:
        for part in x.split(32):
            with mz.autocast("mxfp8"):
                module(part).float().sum().backward()
    seen = {each.name: each.figures for each in inspector.last}
    assert seen.keys() == {"input", "weight", "grad_output"}
    want = mz.quantization_error(x, "mxfp8").figures
    assert (seen["input"].count, seen["input"].amax) == (want.count, want.amax)
    assert seen["input"].snr_db == pytest.approx(want.snr_db, rel=1e-13)
    assert seen["weight"].mse == mz.quantization_error(module.weight, "mxfp8").mse  # type: ignore[arg-type]
    assert seen["grad_output"].snr_db == math.inf  # all ones
    assert seen["grad_output"].count == 64 * 48


@pytest.mark.parametrize("checkpoint", [mz.checkpoint, torch.utils.checkpoint.checkpoint], ids=["ours", "torch"])
def test_what_is_computed_again_is_not_counted_again(checkpoint: Any) -> None:
    module, inspector = make("layernorm_linear"), None
    inspector = mz.inspect(module)
    x = torch.randn(32, 32).bfloat16().requires_grad_()
    options = {} if checkpoint is mz.checkpoint else {"use_reentrant": False}
    with inspector, mz.autocast("mxfp8"):
        checkpoint(module, x, **options).float().square().sum().backward()
    assert {each.name: each.figures.count for each in inspector.last} == {
        "input": 32 * 32,
        "weight": 48 * 32,
        "grad_output": 32 * 48,
    }


@pytest.mark.parametrize("memory", ["lean", "compressed"])
@pytest.mark.parametrize("name", ["linear", "layernorm_linear", "layernorm_mlp"])
def test_what_backward_makes_again(name: str, memory: str) -> None:
    """A memory mode under which backward quantizes inputs again: the same gradients, and each input counted once."""
    found = []
    for is_inspected in (False, True):
        module = make(name)
        inspector = mz.inspect(module)
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with inspector if is_inspected else nullcontext():
            with mz.autocast("mxfp8", memory=memory):
                y = module(x)
            y.float().square().sum().backward()
        found.append([y, x.grad, *[each.grad for each in module.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert inspector.last[0].figures.count == 32 * 32


def count_guards_and_operators(model: nn.Module, x: torch.Tensor) -> tuple[int, list[str]]:
    guards: list[int] = []
    operators: list[str] = []

    def count(found: Any) -> list[bool]:
        guards.append(len(found))
        return [True] * len(found)

    def backend(graph: Any, inputs: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    with mz.autocast("mxfp8"):
        torch.compile(model, fullgraph=True, backend=backend, options={"guard_filter_fn": count})(x)
    assert len(guards) == 1
    return guards[0], operators


@pytest.mark.compile
def test_off_there_is_nothing_more() -> None:
    """A step that is not inspected has the guards and operators of a model without an inspector."""
    model, x = nn.Sequential(mz.LayerNormMLP(32, 64), mz.Linear(32, 32)), torch.randn(16, 32, requires_grad=True)
    want = count_guards_and_operators(model, x)
    inspector = mz.inspect(model, every=2)
    with inspector:
        inspected = count_guards_and_operators(model, x)
    with inspector:
        assert not inspector.is_inspected
        assert count_guards_and_operators(model, x) == want
    assert count_guards_and_operators(model, x) == want
    assert inspected[0] > want[0]


@pytest.mark.compile
def test_one_second_graph() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(make("layernorm_mlp"), mz.Linear(32, 32, params_dtype=torch.bfloat16))
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def loss(x: torch.Tensor) -> torch.Tensor:
        with mz.autocast("mxfp8"):
            return model(x).float().square().mean()

    inspector, graphs = mz.inspect(model, every=3), []
    for _ in range(8):
        with inspector:
            loss(torch.randn(16, 32).bfloat16()).backward()
        graphs.append(counter.frame_count)
    assert graphs == [1, 2, 2, 2, 2, 2, 2, 2]
    assert len(inspector.last) == 9


def test_files(tmp_path: Path) -> None:
    """Lines of every inspected step; a line that was cut off, and one that was written again, do no harm."""
    module = make("layernorm_mlp")
    inspector = mz.inspect(module, every=2, out=tmp_path, tensors=("fc1.*", "*.weight"), stats=("snr_db", "map"))
    for _ in range(4):
        with inspector, mz.autocast("mxfp8"):
            module(torch.randn(16, 32).bfloat16()).float().sum().backward()
    found = read_figures(tmp_path)
    assert list(found) == [0, 2]
    assert list(found[2]) == ["fc1.input", "fc1.weight", "fc1.grad_output", "fc2.weight"]
    assert found[2]["fc2.weight"].keys() == {"step", "tensor", "module", "role", "snr_db"}
    details = read_details(tmp_path)
    assert details["step"] == 2
    assert len(details["tensors"]["fc1.input"]["map"]["snr_db"]) == 256
    assert "exponents" not in details["tensors"]["fc1.input"]
    path = tmp_path / "figures.jsonl"
    again = {**found[2]["fc2.weight"], "snr_db": 7.0}
    path.write_text(path.read_text() + json.dumps(again) + '\n{"step": 3, "ten')
    assert read_figures(tmp_path)[2]["fc2.weight"]["snr_db"] == 7.0


@pytest.mark.parametrize("chosen", ["mxfp8", "nvfp4"])
def test_what_if(chosen: str) -> None:
    """Every recipe but delayed scaling; its own among them has its own figures. No random number is drawn for it."""
    module = make("linear")
    inspector, x = mz.inspect(module, what_if=True), torch.randn(32, 32).bfloat16()
    with inspector:
        want = run(module, "linear", CHOSEN[chosen])
    assert all(torch.equal(a, b) for a, b in zip(run(make("linear"), "linear", CHOSEN[chosen]), want, strict=True))
    for seen in inspector.last:
        assert seen.what_if.keys() == recipe.RECIPES.keys() - {"delayed"}
        made = recipe.RECIPES[chosen]().quantizer(mz.QuantizerRole("linear", seen.role))
        assert isinstance(made, Quantizer)
        if not getattr(made, "stochastic_rounding", False):
            assert seen.what_if[chosen].snr_db == pytest.approx(seen.figures.snr_db, rel=1e-12)
    inspector = mz.inspect(module, what_if=True)
    with inspector, mz.autocast(recipe=CHOSEN[chosen]):
        module(x)
    (seen,) = [each for each in inspector.last if each.role == "input"]
    for name, figures in seen.what_if.items():
        assert figures == mz.quantization_error(x, name).figures or figures.mse == pytest.approx(
            mz.quantization_error(x, name).mse, rel=1e-12
        )


def test_values_that_are_not_finite() -> None:
    module = make("layernorm_mlp")
    x = torch.randn(16, 32).bfloat16()
    inspector = mz.inspect(module, every=1, check_finite=True)
    with inspector, mz.autocast("current"):
        module(x)
    x[2, 2] = math.inf
    with (
        pytest.raises(FloatingPointError, match=r"step 1 has .* not finite: input of fc1 \(\d+ nan"),
        inspector,
        mz.autocast("current"),
    ):
        module(x)
    with inspector, mz.autocast("current"):  # it goes on
        module(torch.randn(16, 32).bfloat16())


def test_an_error_inside_leaves_no_trace() -> None:
    module = make("linear")
    inspector = mz.inspect(module)
    with pytest.raises(ZeroDivisionError), inspector:
        _ = 1 // 0
    assert module._probes is None
    assert (inspector.step, inspector.last) == (0, [])


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        ({"every": 0}, ValueError, r"inspect\(every=0\): give a number of steps"),
        ({"tensors": "fc9.*"}, ValueError, r"tensors='fc9.\*'\) matches no tensor of the model; .* input, weight"),
        ({"stats": "snr"}, ValueError, r"inspect\(stats\) got \['snr'\]: there are count, amax"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        mz.inspect(make("linear"), **arguments)


def test_a_model_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"inspect\(model\) got str"):
        mz.inspect("model")  # type: ignore[arg-type]
