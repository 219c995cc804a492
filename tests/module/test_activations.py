"""The activations of LayerNormMLP against their formulas."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzotint as mz
from tests.recipes import IN, OUT, gradient, sample, step


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _clamped(x: torch.Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> torch.Tensor:
    a, gate = x.chunk(2, -1)
    a = a.clamp(max=limit)
    return a * torch.sigmoid(alpha * a) * (gate.clamp(-limit, limit) + glu_linear_offset)


def _situ(x: torch.Tensor, beta1: float = 4.0, beta2: float = 25.0) -> torch.Tensor:
    a, gate = x.chunk(2, -1)
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(gate / beta2)


def gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation of the first half, times the second."""

    def function(x: torch.Tensor) -> torch.Tensor:
        a, gate = x.chunk(2, -1)
        return activation(a) * gate

    return function


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": _gelu,
    "geglu": gated(_gelu),
    "glu": gated(torch.sigmoid),
    "qgelu": _qgelu,
    "qgeglu": gated(_qgelu),
    "relu": F.relu,
    "reglu": gated(F.relu),
    "srelu": _srelu,
    "sreglu": gated(_srelu),
    "silu": F.silu,
    "swiglu": gated(F.silu),
    "clamped_swiglu": _clamped,
    "situglu": _situ,
}
PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")


def check_activation(name: str, **params: float) -> None:
    torch.manual_seed(0)
    module = mz.LayerNormMLP(
        IN, OUT, activation=name, activation_params=params or None, init_method=nn.init.xavier_normal_, device="cpu"
    )
    assert module.fc1_weight.shape == ((1 if name in PLAIN else 2) * OUT, IN)
    assert module.fc2_weight.shape == (IN, OUT)
    x = sample(dtype=torch.float32) * 3
    got = step(module, x, None)
    leaf = x.clone().requires_grad_()
    p = dict(module.named_parameters())
    hidden = F.layer_norm(leaf, (IN,), p["layer_norm_weight"], p["layer_norm_bias"])
    hidden = ACTIVATIONS[name](F.linear(hidden * 1.0, p["fc1_weight"], p["fc1_bias"]), **params)
    y = F.linear(hidden, p["fc2_weight"], p["fc2_bias"])
    gradient(y).backward()
    expected = {"output": y.detach(), "input": leaf.grad, **{key: value.grad for key, value in p.items()}}
    for key, value in expected.items():
        assert value is not None
        torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()), msg=key)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    check_activation(name)


@pytest.mark.parametrize(
    "params",
    [{"limit": 0.5}, {"alpha": 3.0}, {"glu_linear_offset": 0.0}, {"limit": 1.0, "alpha": 0.5, "glu_linear_offset": -1}],
    ids=str,
)
def test_activation_params(params: dict[str, float]) -> None:
    check_activation("clamped_swiglu", **params)
