"""A gradient of a gradient, and a derivative taken forward, are refused: kernels have none, and zeros in their place
would train on in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import mezzotint as mz
from mezzotint import ops
from mezzotint.attention.rope import apply_fused_qkv_rotary_pos_emb

WIDTH = 32
QUIET: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def split_and_turned(x: torch.Tensor) -> torch.Tensor:
    angles = mz.RotaryPositionEmbedding(8)(x.shape[0])
    q, k, v = apply_fused_qkv_rotary_pos_emb(x.view(*x.shape[:2], 1, WIDTH)[..., :24], angles, angles, [8, 8, 8])
    return q * k * v


def turned(x: torch.Tensor) -> torch.Tensor:
    return mz.apply_rotary_pos_emb(x.view(*x.shape[:2], 4, 8), mz.RotaryPositionEmbedding(8)(x.shape[0]))


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return mz.parallel_cross_entropy(x, torch.zeros(x.shape[:2], dtype=torch.int64))


FUNCTIONS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "linear": lambda: mz.Linear(WIDTH, WIDTH),
    "layernorm_linear": lambda: mz.LayerNormLinear(WIDTH, WIDTH),
    "layernorm_mlp": lambda: mz.LayerNormMLP(WIDTH, WIDTH),
    "grouped_linear": lambda: lambda x: mz.GroupedLinear(2, WIDTH, WIDTH)(x.flatten(0, 1), [3, 5]),
    "norm": lambda: mz.RMSNorm(WIDTH),
    "operations": lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU()),
    "layer": lambda: mz.TransformerLayer(WIDTH, WIDTH, 4, **QUIET),
    "rotary": lambda: turned,
    "rotary_split": lambda: split_and_turned,
    "cross_entropy": lambda: loss_of,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("recipe", [None, mz.recipe.Float8CurrentScaling()], ids=["none", "current"])
def test_a_second_derivative_is_refused(name: str, recipe: Any) -> None:
    x = torch.randn(4, 2, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        y = FUNCTIONS[name]()(x)
    (dx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)  # by itself it may be asked for
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.pow(2).sum().backward()


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("recipe", [None, mz.recipe.Float8CurrentScaling()], ids=["none", "current"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when it first makes a dual
def test_a_derivative_taken_forward_is_refused(name: str, recipe: Any) -> None:
    """Also where no parameter asks for a gradient, and gradients are off."""
    x, tangent = torch.randn(2, 4, 2, WIDTH, generator=torch.Generator().manual_seed(0))
    function = FUNCTIONS[name]()
    if isinstance(function, torch.nn.Module):
        function.requires_grad_(False)
    refused = pytest.raises(NotImplementedError, match="must implement the jvp function")
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        with forward_ad.dual_level(), refused:
            function(forward_ad.make_dual(x, tangent))
        with torch.no_grad(), forward_ad.dual_level(), refused:
            function(forward_ad.make_dual(x, tangent))
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.jvp(function, (x,), (tangent,))
        torch.manual_seed(0)
        with forward_ad.dual_level():  # of others
            y = function(x)
        torch.manual_seed(0)
        assert torch.equal(y, function(x))
