"""Modules whose weights are kept quantized: what they compute outside of a region, and what they hold for inference."""

import pytest
import torch

import mezzotint as mz
from tests.recipes import MODULES, RECIPES, make, run, sample, step


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "block", "current"])
def test_in_high_precision(name: str, recipe: str) -> None:
    """Forward and backward multiply the same values, those that the weight dequantizes to."""
    with mz.quantized_model_init(recipe=RECIPES[recipe]):
        module = make(name)
    other = make(name)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), module.parameters(), strict=True):
            mine.copy_(its.dequantize() if isinstance(its, mz.QuantizedTensor) else its)
    got, expected = step(module, sample(), None), step(other, sample(), None)
    assert torch.equal(got["output"], expected["output"])
    assert torch.equal(got["input"], expected["input"])


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "block", "current", "delayed"])
def test_made_without_gradients(name: str, recipe: str) -> None:
    """No backward will read the column-wise copies: there are none."""
    with mz.quantized_model_init(recipe=RECIPES[recipe]):
        trained = make(name)
        with torch.no_grad():
            module = make(name)
    for mine, its in zip(module.parameters(), trained.parameters(), strict=True):
        if isinstance(mine, mz.QuantizedTensor):
            assert isinstance(its, mz.QuantizedTensor)
            assert mine.get_usages() == {"rowwise": True, "columnwise": False}
            assert its.get_usages() == {"rowwise": True, "columnwise": True}
            assert torch.equal(mine.dequantize(), its.dequantize())
    with torch.no_grad():
        assert torch.equal(run(module, sample(), RECIPES[recipe])[0], run(trained, sample(), RECIPES[recipe])[0])
