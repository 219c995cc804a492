"""Factories that mix formats: what each product multiplies, and that modules train with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.custom_recipes import zoo
from mezzotint.recipe import CustomRecipe, DelayedScalingRequest, QuantizerRole

FACTORIES = [getattr(zoo, name) for name in dir(zoo) if name.endswith("_factory") and name.count("_") > 1]


def formats(factory: Callable[..., Any], module: str, tensor: str) -> tuple[str, str]:
    """The formats of a tensor's rows and columns."""
    made = factory(QuantizerRole(module, tensor, ""))
    sides = (made.rowwise_quantizer, made.columnwise_quantizer) if isinstance(made, mz.HybridQuantizer) else (made,) * 2
    return tuple(type(side).__name__.removesuffix("Quantizer") for side in sides)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("factory", "module", "forward", "backward"),
    [
        (zoo.high_precision_fwd_mxfp8_bwd_factory, "linear", "Identity", "MXFP8"),
        (zoo.mxfp8_fwd_nvfp4_bwd_factory, "linear", "MXFP8", "NVFP4"),
        (zoo.mxfp8_fwd_high_precision_bwd_factory, "grouped_linear", "MXFP8", "Identity"),
        (zoo.nvfp4_1d_weight_factory, "linear", "NVFP4", "NVFP4"),
        (zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory, "grouped_linear", "NVFP4", "MXFP8"),
        (zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory, "linear", "MXFP8", "MXFP8"),
        (zoo.nvfp4_row_scaled_fwd_high_precision_bwd_factory, "linear", "NVFP4", "Identity"),
        (zoo.nvfp4_linear_fp8_dpa_factory, "linear", "NVFP4", "NVFP4"),
    ],
)
def test_formats_of_products(factory: Callable[..., Any], module: str, forward: str, backward: str) -> None:
    assert formats(factory, module, "input") == (forward, backward)
    assert formats(factory, module, "weight") == (forward, backward)
    assert formats(factory, module, "grad_output") == (backward, backward)


def test_details() -> None:
    weight = zoo.nvfp4_1d_weight_factory(QuantizerRole("linear", "weight", ""))
    assert weight.columnwise_source == "rowwise_dequantized"
    assert not weight.rowwise_quantizer.with_2d_quantization
    assert zoo.nvfp4_1d_weight_factory(QuantizerRole("linear", "grad_output", "")).stochastic_rounding
    rows = zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory(QuantizerRole("grouped_linear", "input", ""))
    assert rows.rowwise_quantizer.row_scaled_nvfp4
    softmax = zoo.nvfp4_linear_fp8_dpa_factory(QuantizerRole("dpa", "s", ""))
    assert isinstance(softmax, DelayedScalingRequest)
    assert (softmax.amax_history_len, softmax.amax_compute_algo) == (1, "most_recent")
    for role, dtype in (
        (QuantizerRole("dpa", "qkv", ""), mz.DType.kFloat8E4M3),
        (QuantizerRole("dpa", "do", ""), mz.DType.kFloat8E5M2),
        (QuantizerRole("", "", "core.dpa_output"), mz.DType.kFloat8E4M3),
        (QuantizerRole("", "", "core.dpa_grad_input"), mz.DType.kFloat8E5M2),
    ):
        assert zoo.nvfp4_linear_fp8_dpa_factory(role).dtype == dtype
    for factory in FACTORIES:
        assert isinstance(factory(None), mz.Quantizer)


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_modules_train_with_them(factory: Callable[..., Any], kind: str) -> None:
    """Outputs and gradients are those of high precision but for rounding."""
    torch.manual_seed(0)
    made: Any = mz.Linear(64, 64) if kind == "linear" else mz.GroupedLinear(2, 64, 64)
    rest = () if kind == "linear" else ([32, 32],)
    x = torch.randn(64, 64, requires_grad=True)
    found = []
    for enabled in (False, True):
        made.zero_grad()
        x.grad = None
        with mz.autocast(enabled, recipe=CustomRecipe(factory)):
            y = made(x, *rest)
        y.square().mean().backward()
        assert x.grad is not None
        found.append([y.detach(), x.grad.clone(), *[p.grad.clone() for p in made.parameters()]])
    for want, got in zip(*found, strict=True):
        assert (got - want).norm() < 0.25 * want.norm()


def test_backward_is_that_of_the_forward_values() -> None:
    """MXFP8 forward and nothing quantized after it: the gradients of the values that were multiplied."""
    torch.manual_seed(0)
    layer = mz.Linear(64, 32, bias=False)
    x = torch.randn(16, 64, requires_grad=True)
    dy = torch.randn(16, 32)
    with mz.autocast(recipe=CustomRecipe(zoo.mxfp8_fwd_high_precision_bwd_factory)):
        y = layer(x)
    y.backward(dy)
    quantizer = mz.MXFP8Quantizer(mz.DType.kFloat8E4M3)
    x_q, w_q = (quantizer(each.detach()).dequantize() for each in (x, layer.weight))
    torch.testing.assert_close(y, x_q @ w_q.t())
    torch.testing.assert_close(x.grad, dy @ w_q)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ x_q)
