"""GroupedLinear(scale_bias=True): the bias of each row counts as much as the row's scale says."""

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from mezzotint.kernels.grouped_bias import scaled_bias, scaled_bias_backward
from tests.recipes import RECIPES, gradient

SPLITS = [5, 0, 11]


def make(**options: bool) -> ops.GroupedLinear:
    torch.manual_seed(0)
    op = ops.GroupedLinear(3, 32, 48, device="cpu", dtype=torch.bfloat16, **options)
    with torch.no_grad():
        for name, param in op.named_parameters():
            if "bias" in name:
                param.normal_()
    return op


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", RECIPES)
def test_against_its_formula(recipe: str) -> None:
    """The same linears without bias, and the bias by hand; eager and compiled."""
    scaled, plain = make(scale_bias=True), make(bias=False)
    plain.load_state_dict({key: value for key, value in scaled.state_dict().items() if "weight" in key})
    x = torch.randn(16, 32).bfloat16()
    scales = torch.rand(16)
    weights = torch.randn(16, 48, generator=torch.Generator().manual_seed(2))
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]), torch.no_grad():
        product = plain(x, SPLITS)
    biases = [scaled.get_parameter(f"bias{group}").detach().float() for group in range(3)]
    rows = torch.cat([bias.expand(size, -1) for bias, size in zip(biases, SPLITS, strict=True)])
    expected = (product.float() + scales[:, None] * rows).bfloat16()
    dy = weights.bfloat16().float()
    results = []
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    for call in (scaled, compiled):
        leaf, given = x.clone().requires_grad_(), scales.clone().requires_grad_()
        for buffer in scaled.buffers():  # delayed scaling starts anew
            buffer.fill_(1.0) if buffer.dim() == 1 else buffer.zero_()
        torch.manual_seed(1)
        with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            y = call(leaf, SPLITS, given)
        gradient(y).backward()
        assert torch.equal(y.detach(), expected)
        assert leaf.grad is not None
        assert given.grad is not None
        torch.testing.assert_close(given.grad, (dy * rows).sum(1), rtol=1e-5, atol=1e-5)
        for group, (part, s) in enumerate(zip(dy.split(SPLITS), scales.split(SPLITS), strict=True)):
            bias = scaled.get_parameter(f"bias{group}")
            assert bias.grad is not None
            want = (part * s[:, None]).sum(0)
            torch.testing.assert_close(bias.grad.float(), want, rtol=1e-2, atol=1e-2)
        results.append([y.detach(), leaf.grad, given.grad, *[p.grad.clone() for p in scaled.parameters()]])  # type: ignore[union-attr]
        scaled.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_leaf_ops() -> None:
    y, scales = torch.randn(16, 48).bfloat16(), torch.rand(16)
    biases = [torch.randn(48), torch.randn(48).bfloat16(), torch.randn(48)]
    for op in (scaled_bias, scaled_bias_backward):
        torch.library.opcheck(op, (y, scales, biases, SPLITS))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="scale_bias=True with bias=False"):
        make(scale_bias=True, bias=False)
    with pytest.raises(ValueError, match=r"scales have shape \(3,\)"):
        make(scale_bias=True)(torch.randn(16, 32).bfloat16(), SPLITS, torch.rand(3))
