"""Quantized tensors at the boundary of a module: outputs, gradients, inputs."""

import pytest
import torch

import mezzotint as mz
from tests.quantizer_formats import FORMATS, assert_same_bytes
from tests.recipes import (
    IN,
    MODULES,
    OPTIONS,
    OUT,
    RECIPES,
    assert_equal,
    forward_arguments,
    gradient,
    make,
    run,
    sample,
    step,
)

over_modules = pytest.mark.parametrize("name", MODULES)


BOUNDARY = {
    "delayed": mz.Float8Tensor,
    "current": mz.Float8Tensor,
    "rowwise": mz.Float8RowwiseTensor,
    "block": mz.Float8BlockwiseQTensor,
    "mxfp8": mz.MXFP8Tensor,
    "nvfp4": mz.NVFP4Tensor,
    "custom": mz.HybridQuantizedTensor,
}


@pytest.mark.parametrize("recipe", BOUNDARY)
@pytest.mark.parametrize("name", ["linear", "layernorm_linear"])
def test_quantized_output(name: str, recipe: str) -> None:
    """The output, quantized by the output's quantizer; gradients as without."""
    module, plain = make(name), make(name)
    expected = step(plain, sample(), RECIPES[recipe])
    y, leaf = run(module, sample(), RECIPES[recipe], fp8_output=True)
    assert type(y) is BOUNDARY[recipe]
    assert y.dtype == torch.bfloat16
    assert y.get_usages() == {"rowwise": True, "columnwise": False}
    quantizer = plain.quantizers["scaling_fwd"][2].with_usage(rowwise=True, columnwise=False)
    if recipe == "delayed":
        quantizer = mz.Float8Quantizer(torch.ones(1), torch.zeros(1), quantizer.dtype, columnwise=False)
    assert_same_bytes(y.detach(), quantizer.quantize(expected["output"]))
    torch.manual_seed(1)
    gradient(y.dequantize()).backward()
    got = {"input": leaf.grad, **{key: parameter.grad for key, parameter in module.named_parameters()}}
    assert_equal(got, {key: expected[key] for key in got})


@pytest.mark.parametrize("recipe", BOUNDARY)
@pytest.mark.parametrize("name", ["linear", "layernorm_linear"])
def test_quantized_gradient(name: str, recipe: str) -> None:
    module, plain = make(name), make(name)
    expected = step(plain, sample(), RECIPES[recipe])
    y, leaf = run(module, sample(), RECIPES[recipe], fp8_grad=True)
    assert torch.equal(y, expected["output"])
    (dx,) = torch.autograd.grad(gradient(y), leaf)
    gradient_class = mz.MXFP8Tensor if recipe == "custom" else BOUNDARY[recipe]
    assert type(dx) is gradient_class
    quantizer = plain.quantizers["scaling_bwd"][1].with_usage(rowwise=True, columnwise=False)
    if recipe == "delayed":
        quantizer = mz.Float8Quantizer(torch.ones(1), torch.zeros(1), quantizer.dtype, columnwise=False)
    if recipe == "nvfp4":  # rounds stochastically: near
        torch.testing.assert_close(dx.dequantize(), expected["input"], rtol=0.5, atol=0.1)
    else:
        assert_same_bytes(dx, quantizer.quantize(expected["input"]))


def test_delayed_scaling_of_the_boundary() -> None:
    """Output and gradient of the input have slots of their own, which learn."""
    module, plain = make("linear"), make("linear")
    seen: dict[str, list[float]] = {"output": [], "input": []}
    for seed in range(3):
        scale = module.scale_fwd[2].item()
        y, leaf = run(module, sample(seed=seed), RECIPES["delayed"], fp8_output=True, fp8_grad=True)
        (dx,) = torch.autograd.grad(y, leaf, sample(width=OUT))
        expected, leaf = run(plain, sample(seed=seed), RECIPES["delayed"])
        expected.backward(sample(width=OUT))
        for key, tensor in (("output", expected), ("input", leaf.grad)):
            assert tensor is not None
            seen[key].append(tensor.detach().abs().max().item())
        assert y._scale_inv.item() == pytest.approx(1 / scale)
        assert module.amax_history_fwd[:4, 2].tolist() == [0.0] * (3 - seed) + seen["output"]
        assert module.scale_fwd[2].item() == pytest.approx(448 / max(seen["output"]))
        # The gradient of the input is quantized after the update at the end of the backward that made it.
        before = seen["input"][:-1]
        assert module.scale_bwd[1].item() == pytest.approx(57344 / max(before) if before else 1.0)
        assert dx._scale_inv.item() == pytest.approx(1 / module.scale_bwd[1].item())
        assert module.amax_history_bwd[0, 1].item() == seen["input"][-1]


def test_a_quantized_output_is_not_counted_twice() -> None:
    """`checkpoint` runs the module again: the amax of its output has been entered before."""
    module, twin = make("linear"), make("linear")
    for seed in range(3):
        x = sample(seed=seed) * (3 - seed)
        step(twin, x, RECIPES["delayed"], fp8_output=True)
        step(module, x, RECIPES["delayed"], lambda x: mz.checkpoint(module, x, None, True, use_reentrant=True))
        assert torch.equal(module.amax_history_fwd, twin.amax_history_fwd)


@pytest.mark.parametrize("option", ["fp8_output", "fp8_grad"])
@pytest.mark.parametrize("name", ["linear", "layernorm_linear"])
def test_the_boundary_needs_a_recipe(name: str, option: str) -> None:
    module = make(name)
    for region in (mz.autocast(enabled=False), mz.autocast(enabled=False, recipe=RECIPES["mxfp8"])):
        with region, pytest.raises(ValueError, match=r"fp8_output and fp8_grad need a recipe: .*inside autocast"):
            module(sample().requires_grad_(), **{option: True})


@pytest.mark.parametrize("fmt", ["float8_current", "float8_block_1d", "mxfp8", "nvfp4", "hybrid", "identity"])
@over_modules
def test_quantized_input(name: str, fmt: str) -> None:
    """As what it stands for, and its gradient goes to what it was made of."""
    module, twin = make(name), make(name)
    x = sample().requires_grad_()
    quantized = FORMATS[fmt].make().quantize(x)
    assert isinstance(quantized, mz.QuantizedTensor)
    expected = step(twin, quantized.detach().dequantize(), RECIPES["current"])
    with mz.autocast(recipe=RECIPES["current"]):
        y = module(quantized, *forward_arguments(module, x))
    assert torch.equal(y, expected["output"])
    gradient(y).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected["input"])


def test_a_quantized_output_is_an_input() -> None:
    first, second = make("linear"), mz.Linear(OUT, IN, **OPTIONS)
    x = sample().requires_grad_()
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        y = second(first(x, fp8_output=True))
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert first.weight.grad.any()
