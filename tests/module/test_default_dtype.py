"""torch's default dtype decides the dtype of parameters, and nothing else: state and constants are FP32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import ops
from mezzotint.transformer import DropPath
from tests.recipes import (
    IN,
    MODULES,
    OPTIONS,
    OUT,
    RECIPES,
    STATE,
    VARIANTS,
    assert_equal,
    forward_arguments,
    make,
    sample,
)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


INPUTS = [sample(seed=0), sample(seed=1)]
VALUES = {name: make(name).state_dict() for name in MODULES}
GRADIENTS = {width: sample(seed=2, width=width) for width in (IN, OUT)}


def train(name: str, recipe: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Made and trained for two steps under a default dtype."""
    found: dict[str, Any] = {}
    with default_dtype(dtype):
        module = MODULES[name]()
        module.load_state_dict(VALUES[name])
        torch.manual_seed(1)
        for step, values in enumerate(INPUTS):
            x = values.clone().requires_grad_()
            with mz.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(x, *forward_arguments(module, x))
            y.backward(GRADIENTS[y.shape[-1]])
            found.update({f"output {step}": y.detach(), f"input {step}": x.grad})
    found.update({key: parameter.grad for key, parameter in module.named_parameters()})
    found.update({key: getattr(module, key) for key in STATE})
    return found


@pytest.mark.parametrize("recipe", ["none", "delayed", "nvfp4", "nvfp4-4over6", "custom"])
@pytest.mark.parametrize("name", ["layernorm_mlp", "grouped_linear"])
def test_trains_alike(name: str, recipe: str) -> None:
    chosen = {**RECIPES, **VARIANTS}[recipe]
    expected = train(name, chosen, torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        assert_equal(train(name, chosen, dtype), expected)


def test_state_is_fp32() -> None:
    with default_dtype(torch.bfloat16):
        made: list[nn.Module] = [MODULES[name]() for name in MODULES]
        made += [ops.BasicLinear(IN, IN, device="cpu"), mz.convert(nn.Linear(IN, IN), filter=lambda *_: True)]
        state = mz.RecipeState.create(RECIPES["delayed"], mode="forward", num_quantizers=3, device="cpu")
    for module in made:
        assert {getattr(module, key).dtype for key in STATE} == {torch.float32}
    assert state.scale.dtype == state.amax_history.dtype == torch.float32


def test_paths_are_dropped_alike() -> None:
    path, x = DropPath(0.3), torch.ones(64, 2)
    torch.manual_seed(0)
    expected = path(x)
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        assert torch.equal(path(x), expected)


def test_rotary_frequencies_stay_fp32() -> None:
    """Rounded to BF16, an angle at position 2047 is off by almost 1."""
    with default_dtype(torch.bfloat16):
        rope = mz.RotaryPositionEmbedding(64)
    expected = rope(2048)
    model = nn.ModuleList([rope, mz.Linear(IN, IN, **OPTIONS)])
    for cast in (model.bfloat16, model.half, model.double):
        cast()
        assert rope.inv_freq.dtype == torch.float32
        assert torch.equal(rope(2048), expected)
    assert model.to("meta").to_empty(device="cpu")[0].inv_freq.dtype == torch.float32
