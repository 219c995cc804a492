"""Delayed weight gradients: copies of a module, pickles of it, several that wait, gradients of parts."""

import copy
import io
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from tests.recipes import IN, MODULES, OPTIONS, OUT, RECIPES, assert_equal, gradient, make, run, sample, step

over_modules = pytest.mark.parametrize("name", MODULES)
PARTS = {"query": 16, "key": 8, "value": 24}


def weight_gradients(module: Any) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters() if p.dim() == 2}


def delayed_step(module: Any, seed: int = 0) -> dict[str, torch.Tensor | None]:
    y, _ = run(module, sample(seed=seed), RECIPES["mxfp8"])
    gradient(y).backward()
    module.backward_dw()
    return weight_gradients(module)


@over_modules
def test_a_copy_has_gradients_of_its_own(name: str) -> None:
    module = make(name, delay_wgrad_compute=True)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    plain = copy.deepcopy(make(name))
    plain.load_state_dict(twin.state_dict())
    expected = step(plain, sample(), RECIPES["mxfp8"])
    got = delayed_step(twin)
    assert_equal(got, {key: expected[key] for key in got})
    assert all(value is None for value in weight_gradients(module).values())


@over_modules
def test_a_copy_does_not_take_over_what_waits(name: str) -> None:
    module = make(name, delay_wgrad_compute=True)
    gradient(run(module, sample(), RECIPES["mxfp8"])[0]).backward()
    twin = copy.deepcopy(module)
    with pytest.raises(RuntimeError, match="no weight gradient waits"):
        twin.backward_dw()
    module.backward_dw()
    assert any(value is not None for value in weight_gradients(module).values())
    assert all(value is None for value in weight_gradients(twin).values())


@over_modules
def test_pickle(name: str) -> None:
    module = make(name, delay_wgrad_compute=True)
    gradient(run(module, sample(), RECIPES["mxfp8"])[0]).backward()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    module.backward_dw()
    assert_equal(delayed_step(loaded), weight_gradients(module))


@over_modules
def test_the_oldest_comes_first(name: str) -> None:
    """A pipeline runs several backwards before their weight gradients: each `backward_dw` adds those of the oldest."""
    expected = [step(make(name), sample(seed=seed), RECIPES["mxfp8"]) for seed in range(3)]
    module = make(name, delay_wgrad_compute=True)
    for seed in range(3):
        gradient(run(module, sample(seed=seed), RECIPES["mxfp8"])[0]).backward()
    total: dict[str, torch.Tensor] = {}
    for each in expected:
        module.backward_dw()
        for key, value in weight_gradients(module).items():
            total[key] = total[key] + each[key] if key in total else each[key]
            assert torch.equal(value, total[key]), key


# A weight in parts, each with a `main_grad` of its own


def parts_with_main_grad(cls: Any, dtype: torch.dtype = torch.float32, value: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(0)
    module = cls(IN, OUT, parameters_split=PARTS, fuse_wgrad_accumulation=True, **OPTIONS, **options)
    for part in PARTS:
        weight = getattr(module, f"{part}_weight")
        weight.main_grad = torch.full(weight.shape, value, dtype=dtype)
    return module


@pytest.mark.cover(1)
@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("cls", [mz.Linear, mz.LayerNormLinear])
@pytest.mark.parametrize("how", ["eager", "compiled", "delayed"])
def test_parts_add_to_their_own_main_grad(cls: Any, recipe: str, how: str) -> None:
    """Three micro-batches: the sum of the gradients that one weight would have, in FP32."""
    module = parts_with_main_grad(cls, delay_wgrad_compute=how == "delayed")
    torch.manual_seed(0)
    whole = cls(IN, OUT, fuse_wgrad_accumulation=True, **OPTIONS)
    whole.weight.main_grad = torch.zeros(OUT, IN)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(module, fullgraph=True, backend=counter) if how == "compiled" else module
    with torch.no_grad():
        whole.weight.copy_(torch.cat([getattr(module, f"{part}_weight") for part in PARTS]))
    for seed in range(3):
        x = sample(seed=seed)
        got, expected = step(module, x, RECIPES[recipe], call), step(whole, x, RECIPES[recipe])
        if how == "delayed":
            module.backward_dw()
        assert torch.equal(got["output"], expected["output"])
        assert all(got[f"{part}_weight"] is None for part in PARTS)
    assert counter.frame_count == (1 if how == "compiled" else 0)
    made = torch.cat([getattr(module, f"{part}_weight").main_grad for part in PARTS])
    assert made.any()
    torch.testing.assert_close(made, whole.weight.main_grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_parts_sum_to_gradients_that_are_not_fused(recipe: str) -> None:
    module = parts_with_main_grad(mz.Linear)
    torch.manual_seed(0)
    plain = mz.Linear(IN, OUT, parameters_split=PARTS, **{**OPTIONS, "params_dtype": torch.float32})
    plain.load_state_dict(module.state_dict())
    summed = {part: torch.zeros(size, IN) for part, size in PARTS.items()}
    for seed in range(3):
        step(module, sample(seed=seed), RECIPES[recipe])
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = run(plain, sample(seed=seed), RECIPES[recipe])
        gradient(y).backward()
        for part, into in summed.items():
            weight = getattr(plain, f"{part}_weight")
            into.add_(weight.grad)
            weight.grad = None
    for part, expected in summed.items():
        torch.testing.assert_close(getattr(module, f"{part}_weight").main_grad, expected, rtol=1e-6, atol=1e-5)


def test_a_part_may_be_written_to_frozen_or_of_another_dtype() -> None:
    module, expected = parts_with_main_grad(mz.Linear, value=7.0), parts_with_main_grad(mz.Linear)
    module.query_weight.overwrite_main_grad = True
    module.key_weight.requires_grad_(False)
    module.value_weight.main_grad = module.value_weight.main_grad.to(torch.bfloat16)
    for each in (module, expected):
        step(each, sample(), RECIPES["mxfp8"])
    assert torch.equal(module.query_weight.main_grad, expected.query_weight.main_grad)
    assert (module.key_weight.main_grad == 7.0).all()
    wanted = (expected.value_weight.main_grad + 7.0).to(torch.bfloat16)
    assert torch.equal(module.value_weight.main_grad, wanted)


def test_a_part_without_main_grad_is_named() -> None:
    module = parts_with_main_grad(mz.Linear)
    del module.key_weight.main_grad
    with pytest.raises(ValueError, match=r"needs key_weight\.main_grad, a tensor to add into: set it first"):
        run(module, sample(), None)


def test_a_frozen_weight_gets_no_delayed_gradient() -> None:
    module = mz.Linear(IN, OUT, parameters_split=PARTS, delay_wgrad_compute=True, **OPTIONS)
    module.key_weight.requires_grad_(False)
    gradients = delayed_step(module)
    assert gradients["key_weight"] is None
    assert gradients["query_weight"] is not None
