"""Norms as modules of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz

# Norms on their own


@pytest.mark.parametrize("shape", [(8,), (4, 8), (2, 3, 4)])
@pytest.mark.parametrize("rms", [False, True])
def test_norms_over_several_dimensions(shape: tuple[int, ...], rms: bool) -> None:
    """Parameters of that shape, as torch has them."""
    module = (mz.RMSNorm if rms else mz.LayerNorm)(shape, device="cpu")
    other = (nn.RMSNorm if rms else nn.LayerNorm)(shape, eps=1e-5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    module.load_state_dict(other.state_dict(), strict=True)
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for norm in (module, other):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        (y * weights).sum().backward()
        results.append((y.detach(), leaf.grad, *(parameter.grad for parameter in norm.parameters())))
    for got, expected in zip(*results, strict=True):
        assert got is not None
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make_call", "error", "message"),
    [
        (lambda: mz.LayerNorm(), ValueError, r"normalized_shape is None: give the size of the last dimension"),
        (lambda: mz.LayerNorm(()), ValueError, r"normalized_shape is \(\): give the size"),
        (lambda: mz.RMSNorm((4, 0)), ValueError, r"normalized_shape\[1\] is 0: give a positive int"),
        (lambda: mz.LayerNorm(8, elementwise_affine=False), TypeError, r"LayerNorm got \['elementwise_affine'\]"),
        (lambda: mz.LayerNorm(8, device="cpu")([1.0]), TypeError, r"inp is list: give a torch.Tensor"),
        (lambda: mz.LayerNorm(8, device="cpu")(torch.ones(3, 4)), ValueError, r"shape \(3, 4\): its last .* must be 8"),
        (
            lambda: mz.RMSNorm((4, 8), device="cpu")(torch.ones(8, 4, 2, 8)),
            ValueError,
            r"inp has shape \(8, 4, 2, 8\): its last dimensions must be \(4, 8\)",
        ),
        (
            lambda: mz.RMSNorm((4, 8), device="cpu")(torch.ones(8)),
            ValueError,
            r"inp has shape \(8,\): its last dimensions must be \(4, 8\)",
        ),
        (
            lambda: mz.LayerNorm(8, device="cpu")(torch.ones(3, 8, dtype=torch.int32)),
            TypeError,
            r"inp has dtype torch.int32: modules take float32, float16 or bfloat16",
        ),
    ],
)
def test_refused_by_norms(make_call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_call()


def test_norms_take_upstreams_names() -> None:
    assert mz.LayerNorm(hidden_size=8, device="cpu").weight.shape == (8,)
    assert mz.LayerNorm(8, dtype=torch.float16, device="cpu").weight.dtype == torch.float16
    assert mz.LayerNorm(8, params_dtype=torch.bfloat16, device="cpu", sm_margin=3).weight.dtype == torch.bfloat16
    assert mz.LayerNorm(8, device="cpu", sm_margin=3).bwd_ln_sm_margin == 3
    norm = mz.RMSNorm(8, device="cpu", sm_margin={"forward": 1, "backward": 2})
    assert (norm.fwd_rmsnorm_sm_margin, norm.bwd_rmsnorm_sm_margin, norm.inf_rmsnorm_sm_margin) == (1, 2, 0)


# A user's own quantizer and product


NORMS: dict[str, Callable[..., Any]] = {
    "layernorm": partial(mz.LayerNorm, 32),
    "rmsnorm": partial(mz.RMSNorm, 32),
    "layernorm_linear": partial(mz.LayerNormLinear, 32, 32),
    "layernorm_mlp": partial(mz.LayerNormMLP, 32, 64),
    "ops_layernorm": partial(mz.ops.LayerNorm, 32),
    "ops_rmsnorm": partial(mz.ops.RMSNorm, 32),
    "ops_l2": mz.ops.L2Normalization,
}


@pytest.mark.parametrize("eps", ["x", float("nan"), -1.0, True, None], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_an_epsilon_that_is_no_number(name: str, eps: Any) -> None:
    with pytest.raises(ValueError, match=r"eps is .*: give 0 or a positive number"):
        NORMS[name](eps=eps)
