"""BasicLinear, GroupedLinear and Quantize against their formulas."""

import copy

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from tests.formats import HIGH
from tests.ops.chains import OPTIONS, linear, spread, step
from tests.ops.formulas import draw, near, run
from tests.recipes import RECIPES, VARIANTS, assert_equal

N = 32

over_dtypes = pytest.mark.parametrize("dtype", HIGH, ids=str)
over_quantized = pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])


# Linears


def product_near(got: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    """a · bᵀ, whose FP32 sums may be in any order: each of C additions is off by half a unit of the sum of moduli."""
    assert got is not None
    a, b = a.double(), b.double()
    want, moduli = a @ b.t(), a.abs() @ b.abs().t()
    assert (got.dtype, got.shape) == (dtype, want.shape)
    bound = torch.finfo(dtype).eps / 2 * want.abs() + a.shape[1] * 2**-24 * moduli
    assert ((got.double() - want).abs() <= bound).all()


@over_dtypes
@pytest.mark.parametrize("leading", [(40,), (2, 5), (1,), (0,), (2, 0), ()], ids=str)
def test_basic_linear(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    for params_dtype in (torch.float32, dtype):
        op = spread(ops.BasicLinear(26, 20, device="cpu", dtype=params_dtype))
        x = draw((*leading, 26), dtype)
        y, dy, (dx, dw) = run(op, x)
        assert y.shape == (*leading, 20)
        assert dx is not None
        assert dx.shape == x.shape
        weight = op.weight.detach().to(dtype)  # the product is in the dtype of activations
        x_2d, dy_2d = x.reshape(-1, 26), dy.reshape(-1, 20)
        product_near(y.reshape(-1, 20), x_2d, weight, dtype)
        product_near(dx.reshape(-1, 26), dy_2d, weight.t(), dtype)
        product_near(dw, dy_2d.t(), x_2d.t(), params_dtype)


@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "mxfp8"])
def test_basic_linear_multiplies_what_its_quantizers_make(recipe: str) -> None:
    op = spread(ops.BasicLinear(64, 48, **OPTIONS))
    x = draw((40, 64))
    with mz.autocast(recipe=RECIPES[recipe]):
        y, dy, (dx, dw) = run(op, x)
        quantizers = {
            "x": op.get_quantizer("forward", 0),
            "w": op.get_quantizer("forward", 1),
            "dy": op.get_quantizer("backward", 0),
        }

    def made(name: str, value: torch.Tensor, columnwise: bool) -> torch.Tensor:
        quantizer = quantizers[name].with_usage(rowwise=not columnwise, columnwise=columnwise)
        return quantizer.quantize(value.detach()).dequantize(dtype=torch.float32)

    product_near(y, made("x", x, False), made("w", op.weight, False), torch.bfloat16)
    product_near(dx, made("dy", dy, False), made("w", op.weight, True).t(), torch.bfloat16)
    product_near(dw, made("dy", dy, True).t(), made("x", x, True).t(), torch.bfloat16)


@over_dtypes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_grouped_linear(bias: bool, dtype: torch.dtype) -> None:
    op = spread(ops.GroupedLinear(3, 26, 20, bias=bias, device="cpu", dtype=dtype))
    parameters = dict(op.named_parameters())
    for leading, splits in (((40,), [13, 0, 27]), ((4, 5), [1, 2, 17]), ((0,), [0, 0, 0]), ((1,), [0, 0, 1])):
        x = draw((*leading, 26), dtype)
        y, dy, (dx, *grads) = run(op, x, splits)
        assert y.shape == (*leading, 20)
        assert dx is not None
        assert dx.shape == x.shape
        by_name = dict(zip(parameters, grads, strict=True))
        parts = (x.reshape(-1, 26), y.reshape(-1, 20), dy.reshape(-1, 20), dx.reshape(-1, 26))
        for i, (xs, ys, dys, dxs) in enumerate(zip(*(part.split(splits) for part in parts), strict=True)):
            weight = parameters[f"weight{i}"].detach()
            product_near(dxs, dys, weight.t(), dtype)
            product_near(by_name[f"weight{i}"], dys.t(), xs.t(), dtype)
            if not bias:
                product_near(ys, xs, weight, dtype)
                continue
            added = parameters[f"bias{i}"].detach()
            ones = xs.new_ones(xs.shape[0], 1)
            product_near(ys, torch.cat((xs, ones), 1), torch.cat((weight, added[:, None]), 1), dtype)
            near(by_name[f"bias{i}"], dys.double().sum(0), dtype)


def test_splits_may_be_a_tensor() -> None:
    op = spread(ops.GroupedLinear(3, 26, 20, **OPTIONS))
    x = draw((40, 26))
    assert torch.equal(op(x, torch.tensor([13, 0, 27])), op(x, [13, 0, 27]))


@pytest.mark.parametrize("recipe", ["none", "current"])
def test_main_grad(recipe: str) -> None:
    """The weight's gradient is added to `main_grad`, and is no gradient of autograd's."""
    for make_op, extra in (
        (lambda **kw: ops.BasicLinear(N, N, **OPTIONS, **kw), ()),
        (lambda **kw: ops.GroupedLinear(2, N, N, bias=False, **OPTIONS, **kw), ([3, 5],)),
    ):
        fused, apart = (spread(make_op(accumulate_into_main_grad=on)) for on in (True, False))
        apart.load_state_dict(fused.state_dict())
        for parameter in fused.parameters():
            parameter.main_grad = torch.full_like(parameter, 0.5, dtype=torch.float32)
        got = step(fused, draw((8, N)), extra, RECIPES[recipe])
        want = step(apart, draw((8, N)), extra, RECIPES[recipe])
        assert torch.equal(got["input"], want["input"])
        for key, parameter in fused.named_parameters():
            assert got[key] is None
            assert torch.equal((parameter.main_grad - 0.5).bfloat16(), want[key])


@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
def test_delayed_weight_gradients(recipe: str) -> None:
    """`backward_dw` gives them later."""
    delayed, apart = (spread(ops.GroupedLinear(2, N, N, delay_wgrad_compute=on, **OPTIONS)) for on in (True, False))
    apart.load_state_dict(delayed.state_dict())
    got = step(delayed, draw((8, N)), ([3, 5],), RECIPES[recipe])
    want = step(apart, draw((8, N)), ([3, 5],), RECIPES[recipe])
    assert got["weight0"] is None
    delayed.backward_dw()
    got |= {key: parameter.grad for key, parameter in delayed.named_parameters() if "weight" in key}
    assert_equal(got, want)


# Quantize


@over_quantized
def test_quantize_forward(recipe: str) -> None:
    """What the recipe's quantizer makes of it, in both directions; the gradient is not touched."""
    op, x = ops.Quantize(), draw((40, 64))
    with mz.autocast(recipe=RECIPES[recipe]):
        torch.manual_seed(0)
        y, dy, (dx,) = run(op, x)
        torch.manual_seed(0)
        want = op.get_quantizer("forward", 0).quantize(x)
    assert isinstance(y, mz.QuantizedTensor)
    assert y.get_usages() == {"rowwise": True, "columnwise": True}
    assert torch.equal(y.dequantize(), want.dequantize())
    assert torch.equal(dx, dy)


@over_quantized
def test_quantize_backward(recipe: str) -> None:
    op, x = ops.Quantize(forward=False, backward=True), draw((40, 64))
    with mz.autocast(recipe=RECIPES[recipe]):
        y = op(x.requires_grad_())
        quantizer = op.get_quantizer("backward", 0)
    dy = draw((40, 64), seed=7)
    torch.manual_seed(0)
    want = quantizer.quantize(dy).dequantize()
    torch.manual_seed(0)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(y, x)
    assert torch.equal(dx, want)
    assert not torch.equal(dx, dy)


@pytest.mark.parametrize("recipe", [*RECIPES, *VARIANTS])
def test_quantize_between_linears(recipe: str) -> None:
    """What it made is multiplied as it is, and that is what the linears would have made themselves.

    But where their backward would have read a tensor that is not quantized: it gets what the quantized one stands for.
    """
    chosen = (RECIPES | VARIANTS)[recipe]
    is_other = chosen is not None and (chosen.keeps_wgrad() or chosen.override() is not None)
    first, second = linear(64, 64, bias=False), linear(64, 32, bias=False)
    quantize = [ops.Quantize(True, True), ops.Quantize(True, True)]  # the second finds it quantized
    apart, chain = ops.Sequential(*copy.deepcopy([first, second])), ops.Sequential(first, *quantize, second)
    x = draw((3, 8, 64))
    got, want = step(chain, x, (), chosen), step(apart, x, (), chosen)
    for key, other in (
        ("output 0", "output 0"),
        ("input", "input"),
        ("0.basic_ops.0.weight", "0.basic_ops.0.weight"),
        ("3.basic_ops.0.weight", "1.basic_ops.0.weight"),
    ):
        assert torch.equal(got[key], want[other]) or (is_other and key != "output 0"), key
        torch.testing.assert_close(got[key], want[other], rtol=0.2, atol=0.2 * want[other].abs().max().item())


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_quantize_without_a_recipe(forward: bool, backward: bool) -> None:
    y, dy, (dx,) = run(ops.Quantize(forward, backward), draw((4, 8)))
    assert torch.equal(y, draw((4, 8)))
    assert torch.equal(dx, dy)


def test_quantize_keeps_delayed_scalings_state() -> None:
    op = ops.Quantize(forward=True, backward=True)
    for seed, factor in enumerate((1.0, 8.0, 1.0)):
        x = draw((8, 16), seed=seed) * factor
        got = step(op, x, (), RECIPES["delayed"])
        if seed == 0:
            assert torch.equal(
                got["output 0"],
                mz.Float8Quantizer(torch.ones(1), torch.zeros(1), mz.DType.kFloat8E4M3).quantize(x).dequantize(),
            )
        # The maximum was entered and the history rolled on: its oldest row is at the end of the recipe's four.
        assert got["amax_history_fwd"][1:4].amax() == max(
            (draw((8, 16), seed=s) * f).abs().max() for s, f in enumerate((1.0, 8.0, 1.0)[: seed + 1])
        )
    assert got["scale_fwd"][0] == torch.tensor(448.0).div(got["amax_history_fwd"][1:4, 0].max())
    assert got["scale_bwd"][0] != 1
