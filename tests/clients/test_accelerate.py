"""Accelerate's backend of Transformer Engine, unchanged: its own conversion of a model, and `mixed_precision="fp8"`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TERecipeKwargs, convert_model, has_transformer_engine_layers
from accelerate.utils.transformer_engine import apply_fp8_autowrap
from torch import nn

import mezzotint as mz

RECIPE = {"fp8_format": "HYBRID", "amax_history_len": 4, "amax_compute_algo": "max"}


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one, whoever has made it
    yield Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**RECIPE)], cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(torch.bfloat16)


def own() -> nn.Module:
    """The model that Accelerate makes of it, made by hand."""
    model = plain()
    for i, module in enumerate(model):
        if isinstance(module, nn.LayerNorm):
            model[i] = mz.LayerNorm(32, params_dtype=torch.bfloat16, device="cpu")
        elif isinstance(module, nn.Linear):
            model[i] = mz.Linear(module.in_features, module.out_features, params_dtype=torch.bfloat16, device="cpu")
    model.load_state_dict(plain().state_dict())
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1)


def train(
    model: nn.Module, optimizer: Any = None, backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
) -> list[float]:
    """Train; return the losses."""
    losses = []
    optimizer = sgd(model) if optimizer is None else optimizer
    for step in range(4):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        loss = (model(x).float() - x.float()).square().mean()
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_region(model: nn.Module, recipe: mz.recipe.Recipe | None = None) -> nn.Module:
    """The model, whose forward is in a region: of delayed scaling with Accelerate's options, unless told."""
    recipe = mz.recipe.DelayedScaling(amax_history_len=4) if recipe is None else recipe
    model.forward = mz.autocast(recipe=recipe)(model.forward)
    return model


def test_convert_model() -> None:
    model = plain()
    with torch.no_grad():
        convert_model(model)
    assert has_transformer_engine_layers(model)
    assert [type(module) for module in model] == [mz.LayerNorm, mz.Linear, nn.GELU, mz.Linear]
    for name, parameter in plain().named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)


def test_fp8_autowrap() -> None:
    """Accelerate runs the model in its region, training and evaluating, and what it learns is what ours does."""
    with torch.no_grad():
        model = plain()
        convert_model(model)
    wrapped = apply_fp8_autowrap(model, TERecipeKwargs(**RECIPE))
    assert train(wrapped) == train(in_region(own()))


def test_mixed_precision(accelerator: Accelerator) -> None:
    """`Accelerator(mixed_precision="fp8")` from the model to the step."""
    assert accelerator.fp8_backend == "TE"
    model = plain()
    model, optimizer = accelerator.prepare(model, sgd(model))
    assert isinstance(model[1], te.Linear)
    assert train(model, optimizer, accelerator.backward) == train(in_region(own()))


def test_gradient_checkpointing() -> None:
    """Backward is outside of Accelerate's region, and what is recomputed there has the recipe of forward. With delayed
    scaling, whose scales are others by then, this is an error that says what to do."""

    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    with torch.no_grad():
        inner = plain()
        convert_model(inner)
    wrapped = apply_fp8_autowrap(Recomputed(inner), TERecipeKwargs(fp8_format="E4M3", use_mxfp8_block_scaling=True))
    assert train(wrapped) == train(in_region(own(), mz.recipe.MXFP8BlockScaling()))
