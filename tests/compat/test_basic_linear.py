"""`BasicLinear._functional_forward` and `_functional_backward`: a linear as functions of its tensors."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from tests.recipes import RECIPES, gradient, sample

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
FORWARD, BACKWARD = ops.BasicLinear._functional_forward, ops.BasicLinear._functional_backward
over_recipes = pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block", "mxfp8", "custom"])


def linear() -> ops.BasicLinear:
    torch.manual_seed(0)
    return ops.BasicLinear(64, 32, **OPTIONS)


def quantizers(op: ops.BasicLinear, recipe: str) -> dict[str, Any]:
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        x, w, dy = op.get_quantizer("forward", 0), op.get_quantizer("forward", 1), op.get_quantizer("backward", 0)
    return {"input_quantizer": x, "weight_quantizer": w, "grad_output_quantizer": dy}


@over_recipes
def test_they_compute_as_the_operation(recipe: str) -> None:
    op, leaf = linear(), sample(8).view(2, 4, 64).requires_grad_()
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = op(leaf)
    gradient(y).backward()
    given = quantizers(linear(), recipe)
    dy_quantizer = given.pop("grad_output_quantizer")
    common = {"with_quantized_compute": recipe != "none"}
    got, x, w = FORWARD(leaf.detach(), op.weight.detach(), **given, **common)
    assert torch.equal(got, y)
    leaf_y = y.detach().requires_grad_()
    gradient(leaf_y).backward()
    dx, dw = BACKWARD(leaf_y.grad, x, w, grad_output_quantizer=dy_quantizer, **given, **common)
    assert torch.equal(dx, leaf.grad)
    assert torch.equal(dw, op.weight.grad)


def test_scaled_sums_and_memory_of_the_caller() -> None:
    x, w, dy = sample(8).float(), linear().weight.detach().float(), sample(8, 1, width=32).float()
    bias, out = torch.randn(32), torch.ones(8, 32)
    y, *_ = FORWARD(x, w, alpha=2.0, bias=bias, out=out, beta=0.5, accumulate_into_out=True)
    assert y is out
    torch.testing.assert_close(y, 2 * x @ w.t() + 0.5 + bias)
    grads = torch.ones(8, 64), torch.ones(32, 64)
    dx, dw = BACKWARD(
        dy,
        x,
        w,
        grad_input=grads[0],
        grad_weight=grads[1],
        accumulate_into_grad_weight=True,
        grad_weight_alpha=3.0,
        grad_weight_beta=0.5,
    )
    assert dx is grads[0]
    assert dw is grads[1]
    torch.testing.assert_close(dx, dy @ w)
    torch.testing.assert_close(dw, 3 * dy.t() @ x + 0.5)


def test_what_is_not_asked_for_is_not_there() -> None:
    x, w = sample(8), linear().weight.detach()
    given = quantizers(linear(), "current")
    dy_quantizer = given.pop("grad_output_quantizer")
    common: dict[str, Any] = {**given, "with_quantized_compute": True}
    _, kept_x, kept_w = FORWARD(x, w, input_requires_grad=False, **common)
    assert kept_w is None
    assert kept_x.get_usages() == {"rowwise": False, "columnwise": True}
    dy = sample(8, 1, width=32)
    dx, dw = BACKWARD(dy, kept_x, None, input_requires_grad=False, grad_output_quantizer=dy_quantizer, **common)
    assert dx is None
    assert dw.shape == w.shape
    assert BACKWARD(dy, None, None, input_requires_grad=False, weight_requires_grad=False) == (None, None)
    with pytest.raises(ValueError, match="weight is None"):
        BACKWARD(dy, kept_x, kept_w, grad_output_quantizer=dy_quantizer, **common)
    with pytest.raises(ValueError, match="grad_output_quantizer is None"):
        BACKWARD(dy, kept_x, w, **common)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_what_backward_is_overridden_to_read(override: str) -> None:
    x, w = sample(8), linear().weight.detach()
    given = quantizers(linear(), "current")
    del given["grad_output_quantizer"]
    y, kept_x, kept_w = FORWARD(x, w, with_quantized_compute=True, backward_override=override, **given)
    dx, dw = BACKWARD(sample(8, 1, width=32), kept_x, kept_w)
    if override == "high_precision":
        assert kept_x is x
        assert kept_w is w
    else:
        multiplied = kept_x.dequantize().float() @ kept_w.dequantize().float().t()
        torch.testing.assert_close(y.float(), multiplied, rtol=1e-2, atol=1e-2)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)
    with pytest.raises(ValueError, match="backward_override is 'no'"):
        FORWARD(x, w, backward_override="no")


def test_the_result_can_be_quantized() -> None:
    x, w = sample(8), linear().weight.detach()
    quantizer = quantizers(linear(), "current")["input_quantizer"]
    y, *_ = FORWARD(x, w, output_quantizer=quantizer)
    assert isinstance(y, mz.QuantizedTensor)
    dx, _ = BACKWARD(sample(8, 1, width=32), x, w, grad_input_quantizer=quantizer)
    assert isinstance(dx, mz.QuantizedTensor)


def test_a_part_of_a_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzotint.compat.basic_linear.world_size", lambda group: 2)
    x, w = sample(8), linear().weight.detach()
    with pytest.raises(NotImplementedError, match="tensor_parallel_mode is 'row' in a group of 2"):
        FORWARD(x, w, tensor_parallel_mode="row")
    assert FORWARD(x, w)[0].shape == (8, 32)


@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["none", "current"])
def test_in_a_graph(recipe: str) -> None:
    x, w, dy = sample(8), linear().weight.detach(), sample(8, 1, width=32)
    given = quantizers(linear(), recipe)
    dy_quantizer = given.pop("grad_output_quantizer")
    common = {**given, "with_quantized_compute": recipe != "none"}

    def both(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Any:
        y, x_kept, w_kept = FORWARD(x, w, **common)
        return y, *BACKWARD(dy, x_kept, w_kept, grad_output_quantizer=dy_quantizer, **common)

    got = torch.compile(both, fullgraph=True, backend="aot_eager")(x, w, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, both(x, w, dy), strict=True))
