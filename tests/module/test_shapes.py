"""Any number of tokens, features that no format likes, empty inputs and experts, poisoned allocations."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mezzotint as mz
from tests.recipes import MODULES, RECIPES, VARIANTS, assert_equal, gradient, make, sample, step

over_modules = pytest.mark.parametrize("name", MODULES)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every allocation starts as NaN, or as the largest integer."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.cover(2)
@over_recipes
@over_modules
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_tokens(name: str, recipe: str, rows: int) -> None:
    """A row's output does not depend on how many there are, where its scales are its own."""
    x = sample(40)
    module = make(name)
    got = step(module, x[:rows], RECIPES[recipe])
    assert got["output"].shape[0] == rows
    assert all(value is None or value.isfinite().all() for value in got.values())
    if recipe in ("none", "rowwise", "mxfp8") and name != "grouped_linear":
        whole = step(make(name), x, RECIPES[recipe])
        torch.testing.assert_close(got["output"], whole["output"][:rows], rtol=0.02, atol=0.02)


@over_recipes
@pytest.mark.parametrize(("width", "out"), [(17, 33), (100, 5), (1, 1)])
def test_features(recipe: str, width: int, out: int) -> None:
    for cls in (mz.Linear, mz.LayerNormLinear, mz.LayerNormMLP):
        torch.manual_seed(0)
        module = cls(width, out, params_dtype=torch.bfloat16, device="cpu")
        got = step(module, sample(10, width=width), RECIPES[recipe])
        assert got["output"].shape == (10, width if cls is mz.LayerNormMLP else out)
        for key, parameter in module.named_parameters():
            assert got[key].shape == parameter.shape
            assert got[key].isfinite().all()


@over_recipes
@over_modules
def test_no_tokens(name: str, recipe: str) -> None:
    module = make(name)
    got = step(module, sample(0), RECIPES[recipe])
    assert got["input"].shape == (0, 64)
    for key, parameter in module.named_parameters():
        assert got[key].shape == parameter.shape
        assert not got[key].any()


@pytest.mark.cover(2)
@over_recipes
@pytest.mark.parametrize("sizes", [[0, 0, 40], [40, 0, 0], [0, 40, 0], [1, 38, 1], [13, 14, 13]])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_experts(recipe: str, sizes: list[int], as_tensor: bool) -> None:
    module = make("grouped_linear")
    x = sample().requires_grad_()
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = module(x, torch.tensor(sizes) if as_tensor else sizes)
    gradient(y).backward()
    for i, size in enumerate(sizes):
        weight = getattr(module, f"weight{i}")
        assert weight.grad.shape == weight.shape
        assert weight.grad.any() == (size > 0)


@over_recipes
@over_modules
def test_poisoned_allocations(name: str, recipe: str, poisoned: None) -> None:
    """Nothing is read that was not written. The second step would multiply what the first one left."""
    module, twin = make(name), make(name)
    torch.utils.deterministic.fill_uninitialized_memory = False
    expected = [step(twin, sample(33, seed), RECIPES[recipe]) for seed in range(2)]
    torch.utils.deterministic.fill_uninitialized_memory = True
    for seed, wanted in enumerate(expected):
        assert_equal(step(module, sample(33, seed), RECIPES[recipe]), wanted)


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", [name for name in MODULES if name != "grouped_linear"])
def test_leading_dimensions_and_strides(name: str, recipe: str) -> None:
    x = sample(40)
    flat = step(make(name), x, RECIPES[recipe])
    shaped = step(make(name), x.view(2, 4, 5, 64), RECIPES[recipe])
    assert shaped["output"].shape[:3] == (2, 4, 5)
    for key in ("output", "input"):
        shaped[key] = shaped[key].reshape(flat[key].shape)
    assert_equal(shaped, flat)
    strided = torch.cat((x, x), 1)[:, :64]
    assert_equal(step(make(name), strided, RECIPES[recipe]), flat)


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@over_recipes
@over_modules
def test_dtypes(name: str, recipe: str, dtype: torch.dtype) -> None:
    module = make(name, params_dtype=dtype)
    x = sample(dtype=dtype)
    got = step(module, x, RECIPES[recipe])
    assert got["output"].dtype == got["input"].dtype == dtype
    assert all(got[key].dtype == dtype for key, _ in module.named_parameters())


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
@over_modules
def test_torch_autocast(name: str, recipe: str) -> None:
    """FP32 in and out of a BF16 computation."""
    module = make(name, params_dtype=torch.float32)
    x = sample(dtype=torch.float32)

    def call(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module(*args)

    got = step(module, x, RECIPES[recipe], call)
    assert got["output"].dtype == torch.bfloat16
    assert got["input"].dtype == torch.float32
    assert all(got[key].dtype == torch.float32 for key, _ in module.named_parameters())


@pytest.mark.parametrize("variant", VARIANTS)
@over_modules
def test_variants(name: str, variant: str) -> None:
    for seed in range(2):
        got = step(make(name), sample(33, seed), VARIANTS[variant])
        assert all(value is None or value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("recipe", ["none", "delayed", "nvfp4"])
def test_meta_device(recipe: str) -> None:
    """Shapes and dtypes alone, forward and backward."""
    layer = mz.TransformerLayer(32, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, device="meta")
    x = torch.empty(5, 2, 32, device="meta", requires_grad=True)
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = layer(x)
    y.sum().backward()
    assert (y.device.type, y.shape) == ("meta", x.shape)
    assert all(parameter.grad is not None for parameter in layer.parameters())
