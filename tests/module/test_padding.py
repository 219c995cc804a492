"""Padding and unpadding the groups of a grouped linear."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from tests.recipes import IN, RECIPES, sample


@pytest.mark.parametrize("align", [1, 8, 16, 32])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_padding_round_trip(align: int, as_tensor: bool) -> None:
    sizes = [3, 0, 16, 21]
    x = sample(40).requires_grad_()
    given: Any = torch.tensor(sizes) if as_tensor else sizes
    padded, padded_sizes = mz.Fp8Padding(4, align)(x, given)
    assert padded_sizes == [-(-size // align) * align for size in sizes]
    assert padded.shape == (sum(padded_sizes), IN)
    for part, whole, size in zip(padded.split(padded_sizes), x.split(sizes), sizes, strict=True):
        assert torch.equal(part[:size], whole)
        assert not part[size:].any()
    back = mz.Fp8Unpadding(4, align)(padded, given)
    assert torch.equal(back, x)
    (back * torch.arange(40)[:, None]).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(40)[:, None].expand(40, IN).to(x.dtype))


@pytest.mark.parametrize(
    ("recipe", "size"),
    [("delayed", 16), ("current", 16), ("rowwise", 16), ("block", 16), ("mxfp8", 32), ("nvfp4", 128), ("custom", 128)],
)
def test_padding_as_the_recipe_asks(recipe: str, size: int) -> None:
    padding, unpadding = mz.Fp8Padding(2), mz.Fp8Unpadding(2)
    x = sample(40)
    with mz.autocast(recipe=RECIPES[recipe]):
        padded, sizes = padding(x, [1, 39])
        assert sizes == [size, -(-39 // size) * size]
        assert torch.equal(unpadding(padded, [1, 39]), x)
    with mz.autocast(recipe=RECIPES["mxfp8"]):  # the one in force, at each call
        assert padding(x, [8, 32])[1] == [32, 32]


def test_nothing_to_pad() -> None:
    x = sample(48)
    padded, sizes = mz.Fp8Padding(2, 16)(x, [16, 32])
    assert padded is x
    assert sizes == [16, 32]
    assert mz.Fp8Unpadding(2, 16)(x, [16, 32]) is x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mz.Fp8Padding(2, 16)(sample(40), [40]), r"m_splits has 1 entries: this module has 2 groups"),
        (lambda: mz.Fp8Padding(2, 16)(sample(40), [20, 10]), r"inp has 40 rows, the groups 30: they must be equal"),
        (lambda: mz.Fp8Unpadding(2, 16)(sample(40), [20, 20]), r"inp has 40 rows, the groups 64: they must be equal"),
        (lambda: mz.Fp8Unpadding(3, 16)(sample(40), [20, 20]), r"m_splits has 2 entries: this module has 3 groups"),
        (lambda: mz.Fp8Padding(0), r"num_gemms is 0: give a positive int"),
        (lambda: mz.Fp8Unpadding(2, 0), r"align_size is 0: give a positive int"),
    ],
)
def test_wrong_padding(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
