"""autocast(check_finite=True): what is not finite is found where it is quantized, and nothing else changes."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import recipe
from mezzotint.kernels.statistics import nonfinite_add_
from tests.inspect.test_region import MODULES
from tests.inspect.test_region import make as make_module

CHOSEN = {"mxfp8": recipe.MXFP8BlockScaling(), "delayed": recipe.DelayedScaling(), "nvfp4": recipe.NVFP4BlockScaling()}
BAD = (math.nan, math.inf, math.inf, -math.inf)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*[mz.Linear(32, 32, bias=False) for _ in range(3)]).bfloat16()
    return mz.name_modules(made, "net")  # type: ignore[return-value]


def run(module: nn.Module, call: Any, check: bool | None, x: torch.Tensor, *more: Any) -> list[Any]:
    """Forward and backward inside of the region; the output and all gradients."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    with mz.autocast(recipe=recipe.MXFP8BlockScaling(), check_finite=check):
        y = call(x, *more)
        y.float().square().sum().backward()
    made = [y.detach(), x.grad, *[each.grad for each in module.parameters() if each.grad is not None]]
    module.zero_grad()
    return made


def test_a_count_is_exact() -> None:
    x = torch.tensor([[1.0, math.nan, math.inf], [-math.inf, math.inf, 0.0]])
    counts = torch.tensor([5, 0, 1])
    nonfinite_add_(counts, x)
    assert counts.tolist() == [6, 2, 2]


@pytest.mark.cover(1)
@pytest.mark.compile
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("name", MODULES)
def test_numbers_stay_and_graphs_find_the_same(name: str, chosen: str) -> None:
    """Finite inputs: the same bits with and without, eager and compiled. Then an infinity in a gradient is found."""
    splits = ([20, 12],) if name == "grouped_linear" else ()
    want = None
    for check, is_compiled in ((None, False), (True, False), (True, True)):
        torch._dynamo.reset()
        module = mz.name_modules(make_module(name), "net")
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if is_compiled else module
        torch.manual_seed(1)
        x = torch.randn(32, 32).bfloat16().requires_grad_()
        with mz.autocast(recipe=CHOSEN[chosen], check_finite=check):
            y = call(x, *splits)
            y.float().square().sum().backward()
        leaves = [x, *module.parameters()]
        made = [y.detach(), *[each.grad.clone() for each in leaves if each.grad is not None]]
        want = want or made
        assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))
        gradient = torch.ones_like(y)
        gradient[3, 3] = math.inf
        region = mz.autocast(recipe=CHOSEN[chosen], check_finite=True)
        with pytest.raises(FloatingPointError, match=r"grad_output of net\S* \(1 posinf\)"), region:
            call(x, *splits).backward(gradient)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_first_tensor_is_named(is_compiled: bool) -> None:
    """Where an input has them, a weight, and a gradient alone; the next region starts from nothing."""
    net, x = model(), torch.randn(16, 32).bfloat16()
    call = torch.compile(net, fullgraph=True, backend="aot_eager") if is_compiled else net
    run(net, call, True, x)
    for column, value in enumerate(BAD):
        x[2, column] = value
    with pytest.raises(FloatingPointError, match=r"input of net\.0 \(1 nan, 2 posinf, 1 neginf\)"):
        run(net, call, True, x)
    run(net, call, True, torch.ones_like(x))
    with torch.no_grad():
        net[1].weight[0, 0] = math.nan  # type: ignore[index,operator]
    with pytest.raises(FloatingPointError, match=r"weight of net\.1 \(1 nan\), and \d more"):
        run(net, call, True, torch.ones_like(x))


def test_a_backward_outside_of_the_region() -> None:
    """What it finds is raised by the next region."""
    net, x = model(), torch.randn(16, 32).bfloat16()
    region = mz.autocast("mxfp8", check_finite=True)
    with region:
        y = net(x)
    gradient = torch.zeros_like(y)
    gradient[0, 0] = math.inf
    y.backward(gradient)
    with pytest.raises(FloatingPointError, match=r"step \d+ \(or the backward of the step before it"), region:
        net(x)
    with region:
        net(x)


def test_an_error_of_the_model_is_not_covered() -> None:
    """One that leaves the region is raised as it is, and what was counted before it is forgotten."""
    net, x = model(), torch.full((16, 32), math.nan).bfloat16()

    def fail() -> None:
        net(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), mz.autocast("mxfp8", check_finite=True):
        fail()
    with mz.autocast("mxfp8", check_finite=True):
        net(torch.ones_like(x))


def test_regions_inside_check_too_and_rules_and_an_inspector() -> None:
    net, x = model(), torch.full((16, 32), math.inf).bfloat16()
    rules = recipe.Rules([("1", None), ("*", "current")])
    mz.bind_rules(net, rules)
    inspector = mz.inspect(net, every=1)
    with (
        pytest.raises(FloatingPointError, match=r"input of net\.0 \(512 posinf\)"),
        inspector,
        mz.autocast("mxfp8", check_finite=True),
        mz.autocast(rules),
    ):
        net(x)


@pytest.mark.compile
def test_off_adds_nothing() -> None:
    """A region that checks has a graph of its own; that of others has no counters in it."""
    net, x = model(), torch.randn(16, 32).bfloat16()
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    call = torch.compile(net, fullgraph=True, backend=backend)
    for check in (None, False, True, None):
        run(net, call, check, x)
    assert backend.frame_count == 2
    plain, checked = [[str(node.target) for node in graph.graph.nodes] for graph in backend.graphs]
    assert len(checked) > len(plain)
    assert not any("counter" in name for name in plain)


def test_wrong_uses() -> None:
    with pytest.raises(TypeError, match="check_finite='yes'"):
        mz.autocast("mxfp8", check_finite="yes")  # type: ignore[arg-type]

    @torch.compile(fullgraph=True, backend="eager")
    def inside(x: torch.Tensor) -> torch.Tensor:
        with mz.autocast("mxfp8", check_finite=True):
            return x + 1

    with pytest.raises(Exception, match=r"Enter it outside of torch\.compile"):
        inside(torch.ones(3))
