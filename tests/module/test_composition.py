"""Modules are what they are made of, bit for bit."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.functional.activation import ACTIVATION_CORE, ActivationFwdArgs
from mezzotint.functional.autograd import run_core
from tests.recipes import (
    GROUPS,
    IN,
    MODULES,
    OPTIONS,
    OUT,
    RECIPES,
    assert_equal,
    gradient,
    make,
    run,
    sample,
    splits,
    step,
)

over_recipes = pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "nvfp4"])
# Stochastic rounding draws in order of the calls: a composition that calls in the same order draws the same.
over_all_recipes = pytest.mark.parametrize("recipe", RECIPES)


def take(module: Any, source: Any, names: dict[str, str]) -> Any:
    """The module with copies of another's parameters."""
    with torch.no_grad():
        for own, other in names.items():
            if getattr(source, other) is not None:
                getattr(module, own).copy_(getattr(source, other))
    return module


def together(call: Any, modules: dict[str, Any], x: torch.Tensor, recipe: Any) -> dict[str, Any]:
    """A step through several modules."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x)
    gradient(y).backward()
    result = {"output": y.detach(), "input": x.grad}
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            result[f"{name}{key}"] = parameter.grad.clone()
            parameter.grad = None
    return result


@over_all_recipes
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_layernorm_linear(recipe: str, normalization: str, zero_centered_gamma: bool) -> None:
    whole = make("layernorm_linear", normalization=normalization, zero_centered_gamma=zero_centered_gamma)
    norm_class = mz.LayerNorm if normalization == "LayerNorm" else mz.RMSNorm
    norm = norm_class(IN, zero_centered_gamma=zero_centered_gamma, **OPTIONS)
    take(norm, whole, {"weight": "layer_norm_weight", **({"bias": "layer_norm_bias"} if norm.bias is not None else {})})
    linear = take(make("linear"), whole, {"weight": "weight", "bias": "bias"})
    for seed in range(2):
        x = sample(seed=seed)
        got = step(whole, x, RECIPES[recipe])
        expected = together(lambda x: linear(norm(x)), {"layer_norm_": norm, "": linear}, x, RECIPES[recipe])
        assert_equal({key: got[key] for key in expected}, expected)


@over_recipes
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "srelu", "clamped_swiglu"])
def test_layernorm_mlp(recipe: str, activation: str) -> None:
    whole = make("layernorm_mlp", activation=activation)
    width = whole.fc1_weight.shape[0]
    fc1 = mz.LayerNormLinear(IN, width, normalization="RMSNorm", **OPTIONS)
    take(fc1, whole, {"layer_norm_weight": "layer_norm_weight", "weight": "fc1_weight", "bias": "fc1_bias"})
    fc2 = take(mz.Linear(OUT, IN, **OPTIONS), whole, {"weight": "fc2_weight", "bias": "fc2_bias"})
    name, params = whole._activation, whole._activation_params

    def chain(x: torch.Tensor) -> torch.Tensor:
        (hidden,) = run_core(ACTIVATION_CORE, ActivationFwdArgs(fc1(x), name, params), True)
        return fc2(hidden)

    for seed in range(2):
        x = sample(seed=seed)
        got = step(whole, x, RECIPES[recipe])
        expected = together(chain, {"fc1_": fc1, "fc2_": fc2}, x, RECIPES[recipe])
        expected["layer_norm_weight"] = expected.pop("fc1_layer_norm_weight")
        assert_equal({key: got[key] for key in expected}, expected)


@over_recipes
def test_grouped_linear(recipe: str) -> None:
    whole = make("grouped_linear")
    linears = [take(make("linear"), whole, {"weight": f"weight{i}", "bias": f"bias{i}"}) for i in range(GROUPS)]
    for seed in range(2):
        x = sample(seed=seed)
        got = step(whole, x, RECIPES[recipe])
        expected = together(
            lambda x: torch.cat([linear(part) for linear, part in zip(linears, x.split(splits(40)), strict=True)]),
            {f"{i}.": linear for i, linear in enumerate(linears)},
            x,
            RECIPES[recipe],
        )
        for i in range(GROUPS):
            for key in ("weight", "bias"):
                expected[f"{key}{i}"] = expected.pop(f"{i}.{key}")
        assert_equal({key: got[key] for key in expected}, expected)


@over_recipes
def test_one_group(recipe: str) -> None:
    """Its rows are not dense in memory: what holds of many groups must not be left out for one."""
    whole = mz.GroupedLinear(1, IN, OUT, **OPTIONS)
    linear = take(make("linear"), whole, {"weight": "weight0", "bias": "bias0"})

    def by_columns(x: torch.Tensor, module: Any, *rows: Any) -> Any:
        return module(x.t().contiguous().t(), *rows)

    got = step(whole, sample(), RECIPES[recipe], lambda x, *_: by_columns(x, whole, [40]))
    expected = step(linear, sample(), RECIPES[recipe], lambda x: by_columns(x, linear))
    for key in ("weight", "bias"):
        expected[f"{key}0"] = expected.pop(key)
    assert_equal(got, expected)


def warm_up(*modules: Any, recipe: Any) -> None:
    """Delayed scaling learns a weight's scale in the first step; a kept weight has the scale that it was kept with."""
    for module in modules:
        for parameter in module.parameters():
            if module.fuse_wgrad_accumulation and parameter.dim() == 2:
                parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
        step(module, sample(), recipe)


@over_recipes
@pytest.mark.parametrize("name", MODULES)
def test_cached_weights(name: str, recipe: str) -> None:
    """Three micro-batches with a kept weight = three that quantize it each time, but for the weight's own amax."""
    cached, plain = make(name), make(name)
    warm_up(cached, plain, recipe=RECIPES[recipe])
    for seed, first in enumerate((True, False, False, True)):
        x = sample(seed=seed)
        got = step(cached, x, RECIPES[recipe], is_first_microbatch=first)
        assert_equal(got, step(plain, x, RECIPES[recipe]), but=("amax_history_fwd", "scale_fwd"))
    assert (cached._workspaces is None) == (recipe == "none")


@over_recipes
def test_recomputed_mlp(recipe: str) -> None:
    kept, recomputed = make("layernorm_mlp"), make("layernorm_mlp", checkpoint=True)
    for seed in range(3):
        x = sample(seed=seed)
        assert_equal(step(recomputed, x, RECIPES[recipe]), step(kept, x, RECIPES[recipe]))


@over_recipes
@pytest.mark.parametrize("name", MODULES)
def test_main_grad(name: str, recipe: str) -> None:
    """Added up over three micro-batches in `main_grad` = the sum of the gradients."""
    fused, plain = make(name, fuse_wgrad_accumulation=True), make(name)
    warm_up(fused, plain, recipe=RECIPES[recipe])
    totals: dict[str, torch.Tensor] = {}
    for key, parameter in fused.named_parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
            totals[key] = torch.zeros(parameter.shape, dtype=torch.float32)
    for seed, first in enumerate((True, False, False)):
        x = sample(seed=seed)
        got = step(fused, x, RECIPES[recipe], is_first_microbatch=first)
        single = make(name, fuse_wgrad_accumulation=True)
        single.load_state_dict(plain.state_dict())
        for key, parameter in single.named_parameters():
            if key in totals:
                parameter.main_grad = torch.zeros_like(totals[key])
        step(single, x, RECIPES[recipe])
        step(plain, x, RECIPES[recipe])
        for key, parameter in single.named_parameters():
            if key in totals:
                totals[key] += parameter.main_grad
                assert got[key] is None
    for key, parameter in fused.named_parameters():
        if key in totals:
            assert totals[key].any() or key == "weight1", key  # the empty group
            assert torch.equal(parameter.main_grad, totals[key]), key


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_main_grad_with_hooks_that_wait(name: str, is_compiled: bool) -> None:
    """As Megatron's data parallelism has it: marked parameters are told, and their hooks run, on zeros."""
    module, plain = make(name, fuse_wgrad_accumulation=True), make(name, fuse_wgrad_accumulation=True)
    ran: list[str] = []
    for twin in (module, plain):
        for key, parameter in twin.named_parameters():
            if parameter.dim() == 2:
                parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
                if twin is module:
                    parameter.grad_added_to_main_grad = False
                    parameter.register_post_accumulate_grad_hook(lambda _, key=key: ran.append(key))
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if is_compiled else module
    with torch.no_grad():
        run(module, sample(), None)
    weights = [key for key, parameter in module.named_parameters() if parameter.dim() == 2]
    assert not any(module.get_parameter(key).grad_added_to_main_grad for key in weights)
    got = step(module, sample(), RECIPES["current"], call)
    expected = step(plain, sample(), RECIPES["current"])
    assert sorted(ran) == sorted(weights)
    for key in weights:
        parameter = module.get_parameter(key)
        assert parameter.grad_added_to_main_grad
        assert got[key].dtype == parameter.dtype
        assert not got[key].any()
        assert expected[key] is None
        assert torch.equal(parameter.main_grad, plain.get_parameter(key).main_grad)


@over_recipes
@pytest.mark.parametrize("name", MODULES)
def test_delayed_weight_gradients(name: str, recipe: str) -> None:
    delayed, immediate = make(name, delay_wgrad_compute=True), make(name)
    x = sample()
    expected = step(immediate, x, RECIPES[recipe])
    got = step(delayed, x, RECIPES[recipe])
    weights = [key for key, parameter in delayed.named_parameters() if parameter.dim() == 2]
    assert all(got[key] is None for key in weights)
    assert delayed.need_backward_dw()
    called: list[int] = []
    delayed.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    delayed.backward_dw()
    assert called == [1]
    for key, parameter in delayed.named_parameters():
        if key in weights:
            got[key] = parameter.grad
    assert_equal(got, expected)
    with pytest.raises(RuntimeError, match="no weight gradient waits"):
        delayed.backward_dw()
    immediate.backward_dw()  # nothing to do
