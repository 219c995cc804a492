"""The linear core, where modules do not show what it does."""

import pytest
import torch

from mezzotint.functional.linear import MainGrad, WeightGrad, compute_weight_gradient


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_what_stands_for_a_gradient_that_was_added_has_the_dtype_of_the_weight(is_in_parts: bool) -> None:
    """Zeros of `main_grad`'s would be twice as large, and autograd would cast them."""
    dy, x = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(16, 64, dtype=torch.bfloat16)
    into = torch.zeros(32, 64)
    wgrad = WeightGrad(torch.bfloat16, None if is_in_parts else into, is_told=True)
    if is_in_parts:
        wgrad.parts = (MainGrad(8, into[:8], False), MainGrad(24, into[8:], False))
    made = compute_weight_gradient(wgrad, dy, x, False)
    assert made is not None
    assert made.dtype == torch.bfloat16
    assert made.shape == (32, 64)
    assert not made.any()
    assert into.eq(16).all()
    wgrad.is_told = False
    assert compute_weight_gradient(wgrad, dy, x, False) is None


@pytest.mark.parametrize("is_in_parts", [False, True])
@pytest.mark.parametrize("overwrites", [False, True])
def test_a_gradient_is_added_to_what_main_grad_holds(is_in_parts: bool, overwrites: bool) -> None:
    """Each micro-batch adds; with `overwrites` each replaces."""
    dy, x = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(16, 64, dtype=torch.bfloat16)
    into = torch.full((32, 64), 100.0)
    wgrad = WeightGrad(torch.bfloat16, None if is_in_parts else into, overwrites)
    if is_in_parts:
        wgrad.parts = (MainGrad(8, into[:8], overwrites), MainGrad(24, into[8:], overwrites))
    for expected in (116, 132):
        compute_weight_gradient(wgrad, dy, x, False)
        assert into.eq(16 if overwrites else expected).all()
