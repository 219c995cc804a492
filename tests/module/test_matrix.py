"""Every module in every recipe, with and without bias: eager = compiled, bit for bit, and near an FP32 reference."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from mezzotint.kernels.activation import activation_forward_reference
from tests.recipes import (
    BOUNDS,
    EVERY_RECIPE,
    GROUPS,
    MODULES,
    RECIPES,
    VARIANTS,
    assert_equal,
    gradient,
    make,
    sample,
    splits,
    step,
    twins,
)

over_modules = pytest.mark.parametrize("name", MODULES)
over_recipes = pytest.mark.parametrize("recipe", EVERY_RECIPE)
over_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])


def check_compiled(name: str, recipe: Any, backend: str, **options: Any) -> None:
    eager, compiled = twins(name, **options)
    counter = CompileCounterWithBackend(backend)
    call = torch.compile(compiled, fullgraph=True, backend=counter)
    counters.clear()
    for i in range(3):
        x = sample(seed=i) * (i + 1)
        assert_equal(step(compiled, x, recipe, call), step(eager, x, recipe))
    assert counter.frame_count == 1
    assert not counters["graph_break"]


@pytest.mark.cover(1)
@pytest.mark.compile
@over_bias
@over_recipes
@over_modules
def test_aot_eager(name: str, recipe: str, bias: bool) -> None:
    check_compiled(name, EVERY_RECIPE[recipe], "aot_eager", bias=bias)


@pytest.mark.cover(1, 2)
@pytest.mark.compile
@over_bias
@pytest.mark.parametrize("recipe", RECIPES)
@over_modules
def test_inductor(name: str, recipe: str, bias: bool) -> None:
    check_compiled(name, RECIPES[recipe], "inductor", bias=bias)


@pytest.mark.cover(1)
@pytest.mark.compile
@pytest.mark.parametrize("variant", VARIANTS)
@over_modules
def test_variants(name: str, variant: str) -> None:
    check_compiled(name, VARIANTS[variant], "aot_eager")


@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["none", "delayed", "nvfp4"])
def test_recomputing_mlp(recipe: str) -> None:
    check_compiled("layernorm_mlp", RECIPES[recipe], "inductor", checkpoint=True)


def reference(module: Any, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same step in FP32, from plain PyTorch."""
    module = module.float()
    p = dict(module.named_parameters())
    x = x.float().requires_grad_()
    if name == "linear":
        y = torch.nn.functional.linear(x, p["weight"], p.get("bias"))
    elif name == "layernorm_linear":
        h = torch.nn.functional.layer_norm(x, x.shape[-1:], p["layer_norm_weight"], p["layer_norm_bias"])
        y = torch.nn.functional.linear(h, p["weight"], p.get("bias"))
    elif name == "layernorm_mlp":
        h = torch.nn.functional.rms_norm(x, x.shape[-1:], p["layer_norm_weight"], 1e-5)
        h = torch.nn.functional.linear(h, p["fc1_weight"], p.get("fc1_bias"))
        a, gate = h.chunk(2, -1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(a) * gate, p["fc2_weight"], p.get("fc2_bias"))
        torch.testing.assert_close(
            activation_forward_reference(h.detach(), None, "swiglu", ()),
            (torch.nn.functional.silu(a) * gate).detach(),
            rtol=1e-5,
            atol=1e-6,
        )
    else:
        parts = x.split(splits(x.shape[0]))
        y = torch.cat([torch.nn.functional.linear(parts[i], p[f"weight{i}"], p.get(f"bias{i}")) for i in range(GROUPS)])
    gradient(y).backward()
    assert x.grad is not None
    zero = {key: torch.zeros_like(value) if value.grad is None else value.grad for key, value in p.items()}
    return {"output": y.detach(), "input": x.grad, **zero}


@pytest.mark.cover(2)
@over_bias
@over_recipes
@over_modules
def test_near_fp32(name: str, recipe: str, bias: bool) -> None:
    module, twin = twins(name, bias=bias)
    x = sample()
    for _ in range(2):  # delayed scaling knows its scales from the second step on
        got = step(module, x, EVERY_RECIPE[recipe])
    expected = reference(twin, name, x)
    for key, value in expected.items():
        error = (got[key].float() - value).norm()
        assert error <= BOUNDS[recipe] * value.norm(), f"{key}: {error / value.norm()}"


def test_parameters_get_gradients_in_their_dtype() -> None:
    module = make("layernorm_mlp", params_dtype=torch.float32)
    got = step(module, sample(), RECIPES["mxfp8"])
    assert got["output"].dtype == torch.bfloat16
    assert all(got[name].dtype == torch.float32 for name, _ in module.named_parameters())
