"""Tensors that are the negative of what their memory holds (`z.conj().imag`): no kernel reads that memory as it is.

PyTorch makes them plain on the way to an op; in eager code ours are called without that way.
"""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.activation import activation_backward, activation_forward
from mezzotint.kernels.norm import norm_apply
from tests.quantizer_formats import Format, assert_same_bytes, over_formats, sample
from tests.recipes import MODULES, RECIPES, assert_equal, forward_arguments, make
from tests.values import VIEWS, as_view, negated


@pytest.mark.cover(1)
@over_formats()
@pytest.mark.parametrize("view", ["negative", *VIEWS])
def test_quantize_reads_values_whatever_the_memory(fmt: Format, view: str) -> None:
    x = sample((40, 48))
    given = negated(x) if view == "negative" else as_view(x, view)
    plain = given.resolve_neg().contiguous().clone()
    with torch.no_grad():
        assert_same_bytes(fmt.quantize(given), fmt.quantize(plain))
        assert_same_bytes(fmt.quantize(given, internal=True), fmt.quantize(plain, internal=True))
        into = fmt.quantize(torch.zeros(40, 48))
        torch.manual_seed(0)
        assert_same_bytes(into.quantize_(given), fmt.quantize(plain))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_modules(name: str, recipe: str) -> None:
    """Input, and gradient of the output."""

    def step(x: torch.Tensor, dy: torch.Tensor) -> dict[str, Any]:
        module = make(name)
        torch.manual_seed(0)
        leaf = x.detach().requires_grad_()
        with mz.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            y = module(leaf, *forward_arguments(module, leaf))
        y.backward(dy)
        return {"y": y.detach(), "x": leaf.grad, **{key: p.grad for key, p in module.named_parameters()}}

    x, dy = sample((40, 64), torch.bfloat16), sample((40, 48 if name != "layernorm_mlp" else 64), torch.bfloat16, 1)
    assert_equal(step(negated(x), negated(dy)), step(x, dy))


def test_every_argument_counts() -> None:
    """Not the first alone, and in a list as well."""
    x, dy, gamma = sample((8, 16)), sample((8, 16), seed=1), sample((16,), seed=2)
    mu, rs = x.mean(-1), x.var(-1, correction=0).add(1e-5).rsqrt()
    with torch.no_grad():
        for op, args, place in (
            (activation_forward, (x, gamma, "gelu", [], None), 1),
            (activation_backward, (dy, x, None, "gelu", [], None), 1),
            (norm_apply, (x, mu, rs, gamma, None, False, False), 3),
        ):
            other = tuple(negated(arg) if i == place else arg for i, arg in enumerate(args))
            assert torch.equal(run_op(op, *other), run_op(op, *args)), op.name()
