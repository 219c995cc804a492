"""Weights that are kept over micro-batches, and weight gradients that are added to main_grad."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from tests.module.cases import with_main_grad
from tests.recipes import GROUPS, MODULES, RECIPES, forward_arguments, make, run, sample, step

over_modules = pytest.mark.parametrize("name", MODULES)
QUANTIZED = [name for name in RECIPES if name != "none"]


# Weights kept over micro-batches


def kept(module: Any) -> tuple[Any, ...]:
    assert module._workspaces is not None
    return module._workspaces


@over_modules
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_is_first_microbatch(name: str, recipe: str) -> None:
    module, x = make(name), sample()
    arguments = forward_arguments(module, x)
    with mz.autocast(recipe=RECIPES[recipe]):
        module(x, *arguments)
        assert module._workspaces is None  # None keeps nothing
        module(x, *arguments, is_first_microbatch=True)
        first = kept(module)
        assert len(first) == module.num_gemms
        before = module(x, *arguments, is_first_microbatch=False)
        assert all(a is b for a, b in zip(kept(module), first, strict=True))
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(3)
        assert torch.equal(module(x, *arguments, is_first_microbatch=False), before)  # what was kept
        fresh = module(x, *arguments)
        assert not torch.equal(fresh, before)
        assert all(a is b for a, b in zip(kept(module), first, strict=True))  # None leaves it alone
        assert torch.equal(module(x, *arguments, is_first_microbatch=False), before)
        again = module(x, *arguments, is_first_microbatch=True)
        assert torch.equal(again, fresh)
        assert not any(a is b for a, b in zip(kept(module), first, strict=True))
        assert all(not isinstance(w, torch.Tensor) for w in kept(module))  # plain holders, outside of autograd


@over_modules
def test_a_workspace_that_does_not_do_is_made_anew(name: str) -> None:
    """False without one; with one of another recipe; with one that lacks a direction. Each is a miss, which is kept."""
    module, x = make(name), sample()
    arguments = forward_arguments(module, x)

    def call(recipe: str, grad: bool = True) -> torch.Tensor:
        leaf = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad), mz.autocast(recipe=RECIPES[recipe]):
            return module(leaf, *arguments, is_first_microbatch=False)

    seen = []
    for recipe, grad in (("mxfp8", False), ("mxfp8", True), ("current", True), ("nvfp4", True), ("mxfp8", True)):
        fresh = run(make(name), x, RECIPES[recipe])[0]
        assert torch.equal(call(recipe, grad), fresh)
        seen.append(kept(module))
        assert torch.equal(call(recipe, grad), fresh)
        assert all(a is b for a, b in zip(kept(module), seen[-1], strict=True))
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert not any(a is b for a, b in zip(one, other, strict=True))
    # One with both directions serves a call without gradients.
    call("mxfp8", False)
    assert all(a is b for a, b in zip(kept(module), seen[-1], strict=True))


def test_a_kept_weight_has_the_scale_that_it_was_kept_with() -> None:
    """Delayed scaling updates in between; a miss with False, too, quantizes as True did."""
    recipe, module = RECIPES["delayed"], make("linear")
    step(module, sample(), recipe)
    scale = module.scale_fwd[1].item()
    step(module, sample(), recipe, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.mul_(5)
    step(module, sample(), recipe)  # the scale of the weight follows it
    assert module.scale_fwd[1].item() != scale
    step(module, sample(), recipe, is_first_microbatch=False)
    assert kept(module)[0]._scale_inv.item() == pytest.approx(1 / scale)
    module._workspaces = None
    step(module, sample(), recipe, is_first_microbatch=False)
    assert kept(module)[0]._scale_inv.item() == pytest.approx(1 / scale)


@pytest.mark.parametrize("forget", ["load_state_dict", "reset_fp8_meta_tensors"])
def test_what_drops_kept_weights_drops_their_scale(forget: str) -> None:
    recipe, module = RECIPES["delayed"], make("linear")
    for first in (None, True, None):
        step(module, sample(), recipe, is_first_microbatch=first)
    state = make("linear").state_dict() | {"_extra_state": torch.full((5, 5), 7.0)}
    module.load_state_dict(state) if forget == "load_state_dict" else module.reset_fp8_meta_tensors()
    expected = module.scale_fwd[1].item()
    step(module, sample(), recipe, is_first_microbatch=False)
    assert kept(module)[0]._scale_inv.item() == pytest.approx(1 / expected)


def test_quantized_weights_need_no_workspace() -> None:
    with mz.quantized_model_init(recipe=RECIPES["mxfp8"]):
        module = MODULES["linear"]()
    step(module, sample(), RECIPES["mxfp8"], is_first_microbatch=True)
    assert module._workspaces in (None, (None,))


# Gradients into main_grad


@over_modules
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
@pytest.mark.parametrize("delays", [False, True])
def test_overwrite_main_grad(name: str, recipe: str, delays: bool) -> None:
    """Written, not added to, where the weight says so; NaN that was there goes."""
    added = with_main_grad(name, delay_wgrad_compute=delays)
    step(added, sample(), RECIPES[recipe])
    module = with_main_grad(name, float("nan"), delay_wgrad_compute=delays)
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    for weight in weights:
        weight.overwrite_main_grad = True
    for _ in range(2):
        step(module, sample(), RECIPES[recipe])
    if delays:
        added.backward_dw()
        module.backward_dw()
        module.backward_dw()
    for weight, other in zip(weights, (p for p in added.parameters() if p.dim() == 2), strict=True):
        assert torch.equal(weight.main_grad, other.main_grad)
        assert weight.grad is None


@pytest.mark.parametrize("which", [0, 1])
def test_overwrite_one_of_the_groups(which: int) -> None:
    expected, module = with_main_grad("grouped_linear"), with_main_grad("grouped_linear", 100.0)
    getattr(module, f"weight{which}").overwrite_main_grad = True
    sizes = [10, 10, 20]
    for each in (expected, module):
        each(sample(), sizes).sum().backward()
    for i in range(GROUPS):
        wanted = getattr(expected, f"weight{i}").main_grad + (0.0 if i == which else 100.0)
        torch.testing.assert_close(getattr(module, f"weight{i}").main_grad, wanted)


def test_main_grad_with_a_frozen_group() -> None:
    module, expected = with_main_grad("grouped_linear"), with_main_grad("grouped_linear")
    module.weight1.requires_grad_(False)
    for each in (expected, module):
        each(sample(), [10, 10, 20]).sum().backward()
    assert not module.weight1.main_grad.any()
    for i in (0, 2):
        assert torch.equal(getattr(module, f"weight{i}").main_grad, getattr(expected, f"weight{i}").main_grad)


@over_modules
def test_missing_main_grad(name: str) -> None:
    module = make(name, fuse_wgrad_accumulation=True)
    message = r"fuse_wgrad_accumulation needs \w*weight0?.main_grad, a tensor to add into: set it first"
    with pytest.raises(ValueError, match=message):
        run(module, sample(), None)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    run(module, sample(), None)  # nobody asks for it
