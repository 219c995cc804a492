"""`make_graphed_callables`: the module's own numbers, under its recipe; on a GPU from graphs."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import graph
from mezzotint.graph import make_graphed_callables
from tests.recipes import RECIPES, assert_equal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer(device: str, seed: int = 0) -> mz.LayerNormMLP:
    torch.manual_seed(seed)
    return mz.LayerNormMLP(64, 128, activation="swiglu", params_dtype=torch.bfloat16, device=device)


def draw(device: str, seed: int) -> torch.Tensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)
    return x.requires_grad_()


def step(module: Any, device: str, seed: int, recipe: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Output, gradients and state of one step; in a region of its own where the module brings none."""
    module.zero_grad(set_to_none=True)
    x = draw(device, seed)
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **kwargs)
    y.float().square().sum().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    return {"output": y.detach().clone(), "dx": x.grad.clone(), **grads, **buffers}  # type: ignore[union-attr]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "nvfp4"])
def test_same_bits(recipe: str, device: str) -> None:
    chosen = RECIPES[recipe]
    own, other = layer(device), layer(device)
    graphed = make_graphed_callables(other, (draw(device, 9),), enabled=chosen is not None, recipe=chosen)
    assert graphed is other
    for seed in range(3):
        assert_equal(step(graphed, device, seed), step(own, device, seed, chosen))


@pytest.mark.parametrize("device", DEVICES)
def test_kept_weights(device: str) -> None:
    """One graph for every micro-batch: the flag says whether weights are quantized again."""
    chosen = RECIPES["current"]
    own, other = layer(device), layer(device)
    graphed = make_graphed_callables(
        other, (draw(device, 9),), enabled=True, recipe=chosen, cache_quantized_params=True
    )
    for seed, first in enumerate((True, False, False, True, False)):
        if seed in (1, 3):
            with torch.no_grad():
                for p, q in zip(own.parameters(), other.parameters(), strict=True):
                    p.mul_(1.5)
                    q.mul_(1.5)
        got = step(graphed, device, seed, is_first_microbatch=first)
        assert_equal(got, step(own, device, seed, chosen, is_first_microbatch=first))


@pytest.mark.parametrize("device", DEVICES)
def test_several_modules_and_evaluation(device: str) -> None:
    chosen = RECIPES["current"]
    owns, others = (tuple(layer(device, seed) for seed in (0, 1)) for _ in range(2))
    called: list[str] = []
    made = make_graphed_callables(
        others,
        ((draw(device, 8),), (draw(device, 9),)),
        fp8_enabled=True,
        fp8_recipe=chosen,
        pre_warmup_hook=lambda: called.append("before"),
        post_warmup_hook=lambda: called.append("after"),
    )
    assert called == ["before", "after"]
    x = draw(device, 3)
    with mz.autocast(recipe=chosen):
        want = owns[1](owns[0](x))
    assert torch.equal(made[1](made[0](x)), want)
    made[0].eval()
    with torch.no_grad(), mz.autocast(recipe=chosen):
        assert torch.equal(made[0](x[:7]), owns[0](x[:7]))


def test_bad_input() -> None:
    module, x = layer("cpu"), draw("cpu", 0)
    with pytest.raises(NotImplementedError, match="_order"):
        make_graphed_callables(module, (x,), _order=[1, -1])
    with pytest.raises(NotImplementedError, match="clone_param_grads_on_return=False"):
        make_graphed_callables(module, (x,), clone_param_grads_on_return=False)
    with pytest.raises(ValueError, match="enabled is given by its older name too"):
        make_graphed_callables(module, (x,), enabled=True, fp8_enabled=True)
    with pytest.raises(TypeError, match="modules holds function"):
        make_graphed_callables(lambda x: x, (x,))
    with pytest.raises(TypeError, match="sample_args holds bool"):
        make_graphed_callables(module, (x, True))
    with pytest.raises(ValueError, match="sample_args has 1 entries for 2 modules"):
        make_graphed_callables((module, layer("cpu")), ((x,),))
    graphed = make_graphed_callables(module, (x,))
    with pytest.raises(TypeError, match=r"keyword arguments are .*is_first_microbatch.*captured with"):
        graphed(x, is_first_microbatch=True)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_added_up(device: str) -> None:
    """Over microbatches, and read after the graph of another module was replayed."""
    chosen, owns, others = RECIPES["current"], [layer(device), layer(device, 1)], [layer(device), layer(device, 1)]
    sample = (draw(device, 9),)
    make_graphed_callables(tuple(others), (sample, sample), enabled=True, recipe=chosen)
    for seed in range(3):
        with mz.autocast(recipe=chosen):
            run_through(owns, draw(device, seed))
        run_through(others, draw(device, seed))
    for own, other in zip(owns, others, strict=True):
        assert_equal({n: p.grad for n, p in other.named_parameters()}, {n: p.grad for n, p in own.named_parameters()})


def run_through(modules: list[Any], x: torch.Tensor) -> None:
    """Run forward and backward of modules one after the other."""
    first, second = modules
    second(first(x)).float().square().sum().backward()


def test_gradients_are_not_in_the_memory_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own code with graphs that compute nothing when they are replayed: what was captured stays there, and
    nothing may write into it. (It runs the way to and from a graph without a GPU.)"""
    names = {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda *args, **kwargs: nullcontext(),
        "stream": nullcontext,
        "Stream": lambda: None,
        "synchronize": lambda: None,
        "graphs.graph_pool_handle": lambda: None,
    }
    for name, instead in names.items():
        monkeypatch.setattr(f"torch.cuda.{name}", instead)
    monkeypatch.setattr(graph, "_are_on_gpu", lambda inputs: True)
    own, other, x = layer("cpu"), layer("cpu"), draw("cpu", 0)
    other.layer_norm_weight.requires_grad_(False)
    with monkeypatch.context() as capture:
        capture.setattr(torch, "empty_like", torch.ones_like)  # of the output's gradient
        make_graphed_callables(other, (x,), enabled=True, recipe=RECIPES["current"])
    with mz.autocast(recipe=RECIPES["current"]):
        y = own(x)
        for _ in range(3):
            y.sum().backward(retain_graph=True)
    for _ in range(3):
        replayed = other(x)
        assert torch.equal(replayed, y)
        replayed.sum().backward()
    wanted = {n: p.grad for n, p in own.named_parameters() if n != "layer_norm_weight"}
    assert_equal({n: p.grad for n, p in other.named_parameters() if p.grad is not None}, wanted)
