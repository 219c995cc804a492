"""Norms, pointwise operations and dropout against their formulas, and what basic operations refuse."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from tests.formats import HIGH
from tests.ops.chains import OPTIONS, spread, step
from tests.ops.formulas import Formula, check_formula, draw, near, run
from tests.recipes import RECIPES, assert_equal
from tests.values import as_view

N = 32
SHAPES = ((40, N), (2, 5, N), (1, N), (0, N), (N,))

over_dtypes = pytest.mark.parametrize("dtype", HIGH, ids=str)


# Norms


def norm_formula(shape: tuple[int, ...], rms: bool, zero_centered: bool, eps: float) -> Formula:
    def formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = weight + 1 if zero_centered else weight
        if rms:
            return torch.nn.functional.rms_norm(x, shape, weight, eps)
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    return formula


@over_dtypes
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])
def test_norm(rms: bool, zero_centered_gamma: bool, dtype: torch.dtype) -> None:
    cls = ops.RMSNorm if rms else ops.LayerNorm
    for shape in (*SHAPES, (3, 4, 1, N), (9, 17)):
        for params_dtype in (torch.float32, dtype):
            op = cls(shape[-1], eps=1e-3, zero_centered_gamma=zero_centered_gamma, device="cpu", dtype=params_dtype)
            spread(op)
            check_formula(op, norm_formula(shape[-1:], rms, zero_centered_gamma, 1e-3), draw(shape, dtype))


@pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])
def test_norm_over_several_dimensions(rms: bool) -> None:
    op = spread((ops.RMSNorm if rms else ops.LayerNorm)((3, 1, 8), device="cpu"))
    for shape in ((3, 1, 8), (5, 3, 1, 8), (2, 5, 3, 1, 8), (0, 3, 1, 8)):
        check_formula(op, norm_formula((3, 1, 8), rms, False, 1e-5), draw(shape, torch.float32))
    for shape in ((3, 8), (8,), (3, 8, 1)):
        with pytest.raises(ValueError, match=r"its last dimensions must be \(3, 1, 8\)"):
            op(draw(shape))


def test_norms_of_one_element() -> None:
    """It is 0, or 1 but for its sign, whatever x: there is no gradient but what rounding leaves."""
    for op, y in (
        (spread(ops.LayerNorm(1, device="cpu")), lambda x, op: op.bias.expand(x.shape)),
        (spread(ops.RMSNorm(1, eps=0.0, device="cpu")), lambda x, op: op.weight * x.sign()),
        (ops.L2Normalization(eps=0.0), lambda x, op: x.sign()),
    ):
        x = draw((6, 1), torch.float32)
        got, _, (dx, *_) = run(op, x)
        torch.testing.assert_close(got, y(x, op).detach(), rtol=1e-6, atol=0)
        assert dx is not None
        assert (dx.abs() <= 1e-6 / x.abs()).all()


def test_initial_values() -> None:
    for zero_centered, value in ((False, 1.0), (True, 0.0)):
        norm = ops.LayerNorm(N, zero_centered_gamma=zero_centered, device="cpu")
        assert norm.bias is not None
        assert torch.equal(norm.weight, torch.full((N,), value))
        assert not norm.bias.any()
    assert ops.RMSNorm(N, device="cpu").bias is None
    assert not ops.Bias(N, device="cpu").bias.any()


@over_dtypes
def test_l2_normalization(dtype: torch.dtype) -> None:
    def formula(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 1e-3).sqrt()

    for shape in (*SHAPES, (9, 17)):
        check_formula(ops.L2Normalization(eps=1e-3), formula, draw(shape, dtype))


# Pointwise


@over_dtypes
def test_bias(dtype: torch.dtype) -> None:
    """x + b, rounded once; its gradient is the sum of rows."""
    for shape, params_dtype in ((shape, params_dtype) for shape in SHAPES for params_dtype in (torch.float32, dtype)):
        op = spread(ops.Bias(N, device="cpu", dtype=params_dtype))
        x = draw(shape, dtype)
        y, dy, (dx, db) = run(op, x)
        assert torch.equal(y, (x.float() + op.bias.float()).to(dtype))
        assert torch.equal(dx, dy)
        near(db, dy.double().reshape(-1, N).sum(0), params_dtype)


@over_dtypes
def test_constant_scale(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = draw(shape, dtype)
        y, dy, (dx,) = run(ops.ConstantScale(0.3), x)
        assert torch.equal(y, (x.float() * 0.3).to(dtype))
        assert torch.equal(dx, (dy.float() * 0.3).to(dtype))


def test_identity_and_reshape() -> None:
    for op, shape, made in (
        (ops.Identity(), (2, 3, 8), (2, 3, 8)),
        (ops.Reshape((-1, 8)), (2, 3, 8), (6, 8)),
        (ops.Reshape([4, -1, 2]), (2, 3, 8), (4, 6, 2)),
        (ops.Reshape((-1, 8)), (0, 3, 8), (0, 8)),
        (ops.Reshape((48,)), (2, 3, 8), (48,)),
    ):
        for x in (draw(shape), as_view(draw(shape), "transposed")):
            y, dy, (dx,) = run(op, x)
            assert torch.equal(y, x.reshape(made))
            assert torch.equal(dx, dy.reshape(shape))
    with pytest.raises(RuntimeError, match=r"shape '\[-1, 7\]' is invalid"):
        ops.Reshape((-1, 7))(draw((2, 8)))


@over_dtypes
def test_add_extra_input(dtype: torch.dtype) -> None:
    """The sum in the dtype of the input; gradients in the dtype of what they are of."""
    for shape, other in ((shape, other) for shape in SHAPES for other in (torch.float32, dtype)):
        for in_place in (False, True):
            x, extra = draw(shape, dtype), draw(shape, other, 1)
            want = (x.float() + extra.float()).to(dtype)
            y, dy, (dx, d_extra) = run(ops.AddExtraInput(in_place=in_place), x, extra)
            assert torch.equal(y, want)
            assert torch.equal(dx, dy)
            assert torch.equal(d_extra, dy.to(other))
            assert d_extra is not None
            assert d_extra.dtype == other


def test_in_place_sum_is_in_the_memory_of_the_extra_input() -> None:
    x, extra = draw((4, 8)), draw((4, 8), seed=1)
    want, before = x + extra, extra.clone()
    assert ops.AddExtraInput()(x, extra).data_ptr() != extra.data_ptr()
    assert torch.equal(extra, before)
    y = ops.AddExtraInput(in_place=True)(x, extra)
    assert y.data_ptr() == extra.data_ptr()
    assert torch.equal(extra, want)


def test_in_place_sum_of_an_extra_input_that_backward_needs_is_refused() -> None:
    x, leaf = draw((4, 8)).requires_grad_(), draw((4, 8), seed=1).requires_grad_()
    extra = leaf.sigmoid()  # whose backward reads its result
    y = ops.AddExtraInput(in_place=True)(x, extra)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_place_sum_in_a_checkpoint(use_reentrant: bool) -> None:
    """Which runs again, with what was there at first."""
    chain = spread(ops.Sequential(ops.AddExtraInput(in_place=True), ops.RMSNorm(N, **OPTIONS)))
    x, extra = draw((8, N)), (draw((8, N), seed=1),)
    want = step(copy.deepcopy(chain), x, extra)
    assert_equal(step(chain, x, extra, None, lambda *xs: mz.checkpoint(chain, *xs, use_reentrant=use_reentrant)), want)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_sum_with_an_expanded_tensor(in_place: bool) -> None:
    """Its elements share memory: nothing can be written there."""
    x, row = draw((4, 8)), draw((8,), seed=1)
    assert torch.equal(ops.AddExtraInput(in_place=in_place)(x, row.expand(4, 8)), x + row)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_sum_with_a_quantized_tensor(in_place: bool) -> None:
    """It counts as what it stands for, and the sum is not quantized."""
    x, extra = draw((4, N)), mz.MXFP8Quantizer(mz.DType.kFloat8E4M3).quantize(draw((4, N), seed=1))
    want = x + extra.dequantize()
    y = ops.AddExtraInput(in_place=in_place)(x, extra)
    assert type(y) is torch.Tensor
    assert torch.equal(y, want)


@pytest.mark.parametrize("in_place", [False, True])
def test_make_extra_output(in_place: bool) -> None:
    op = ops.MakeExtraOutput(in_place=in_place)
    for shape in SHAPES:
        x = draw(shape).requires_grad_()
        y, extra = op(x)
        assert torch.equal(y, x)
        assert torch.equal(extra, x)
        dy, d_extra = draw(shape, seed=1), draw(shape, seed=2)
        want = dy + d_extra
        assert torch.equal(torch.autograd.grad((y, extra), x, (dy, d_extra))[0], want)
    x = draw((4, 8)).requires_grad_()
    y, extra = op(x)
    assert torch.equal(torch.autograd.grad(y.sum() + extra.sum(), x)[0], torch.full((4, 8), 2.0))  # expanded gradients
    assert torch.equal(torch.autograd.grad((op(x)[1] * 3).sum(), x)[0], torch.full((4, 8), 3.0))
    assert torch.equal(torch.autograd.grad((op(x)[0] * 3).sum(), x)[0], torch.full((4, 8), 3.0))
    y, extra = op(x)
    both = y + extra  # one gradient for both
    assert torch.equal(torch.autograd.grad((both * 3).sum(), x)[0], torch.full((4, 8), 6.0))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_residual_branch_by_a_channel(in_place: bool) -> None:
    """x + f(x), where backward of f reads x: the sum must not be written over it, nor over the caller's input."""
    branch, join = ops.MakeExtraOutput(in_place=in_place), ops.AddExtraInput(in_place=in_place)
    branch.set_extra_output_channel(0, "skip", output_to_caller=False)
    join.set_extra_input_channel(0, "skip")
    norm = spread(ops.RMSNorm(N, **OPTIONS))
    chain = ops.Sequential(branch, norm, join)
    x = draw((8, N))
    got = step(chain, x)
    leaf = x.clone().requires_grad_()
    y = leaf + norm(leaf)
    want = step(lambda_module(lambda value: value + norm(value), norm), x)
    assert torch.equal(got["output 0"], y)
    assert torch.equal(got["input"], want["input"])
    assert torch.equal(got["1.weight"], want["weight"])
    chain(x)
    assert torch.equal(x, draw((8, N)))


class lambda_module:
    """A function, with the parameters of a module that it calls."""

    def __init__(self, function: Callable[..., Any], module: torch.nn.Module) -> None:
        self.function, self.module = function, module
        self.named_parameters, self.named_buffers = module.named_parameters, module.named_buffers

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


# Dropout


@over_dtypes
def test_dropout(dtype: torch.dtype) -> None:
    x, p = draw((40, N), dtype), 0.25
    op = ops.Dropout(p)
    torch.manual_seed(3)
    y, dy, (dx,) = run(op, x)
    kept = y != 0
    assert abs(kept.float().mean() - (1 - p)) < 0.05
    assert torch.equal(y, torch.where(kept, (x.float() * (1 / (1 - p))).to(dtype), 0))
    assert torch.equal(dx, torch.where(kept, (dy.float() * (1 / (1 - p))).to(dtype), 0))
    torch.manual_seed(3)
    assert torch.equal(op(x), y)
    assert not torch.equal(op(x), y)


def test_dropout_that_does_nothing_or_all() -> None:
    x = draw((4, 8))
    for op in (ops.Dropout(0.0), ops.Dropout(0.5).eval()):
        state = torch.get_rng_state()
        y, dy, (dx,) = run(op, x)
        assert torch.equal(y, x)
        assert torch.equal(dx, dy)
        assert torch.equal(torch.get_rng_state(), state)
    y, _, (dx,) = run(ops.Dropout(1.0), x)
    assert dx is not None
    assert not y.any()
    assert not dx.any()
    assert ops.Dropout(0.5)(draw((0, 8))).shape == (0, 8)
    for p in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="give a probability"):
            ops.Dropout(p)


# Every operation under every recipe: with neighbours that want quantized tensors, and with a quantized input


def op_of(op: Any) -> Any:
    return op.basic_ops[0] if isinstance(op, ops.FusedOperation) else op


# What does not fit is refused by name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.BasicLinear(8, 4, **OPTIONS)(draw((2, 7))), r"input has shape \(2, 7\): .* must be 8"),
        (lambda: ops.Linear(8, 4, **OPTIONS)(draw((2, 7))), r"input has shape \(2, 7\): .* must be 8"),
        (lambda: ops.Bias(8, **OPTIONS)(draw((2, 7))), r"input has shape \(2, 7\): .* must be 8"),
        (lambda: ops.LayerNorm(8, **OPTIONS)(draw((2, 7))), r"input has shape \(2, 7\): .* must be \(8,\)"),
        (lambda: ops.RMSNorm(8, **OPTIONS)(draw(())), r"input has shape \(\): .* must be \(8,\)"),
        (lambda: ops.SwiGLU()(draw((2, 7))), r"input has shape \(2, 7\): .* must be even"),
        (lambda: ops.ScaledSwiGLU()(draw((2, 8)), draw((3,))), r"the scales have shape \(3,\): .* \(2,\)"),
        (lambda: ops.ScaledSwiGLU()(draw((2, 8)), draw((2, 1))), r"the scales have shape \(2, 1\): .* \(2,\)"),
        (lambda: ops.AddExtraInput()(draw((2, 8)), draw((8,))), r"the extra input has shape \(8,\), .* \(2, 8\)"),
        (lambda: ops.GroupedLinear(2, 8, 4, **OPTIONS)(draw((2, 7)), [1, 1]), r"input has shape \(2, 7\): .* be 8"),
        (lambda: ops.GroupedLinear(2, 8, 4, **OPTIONS)(draw((2, 8)), [1, 2]), r"adds up to 3, .* 2 rows"),
        (lambda: ops.GroupedLinear(2, 8, 4, **OPTIONS)(draw((2, 8)), [1, 1, 0]), r"3 entries: .* 2 groups"),
        (lambda: ops.GroupedLinear(2, 8, 4, **OPTIONS)(draw((2, 8)), [3, -1]), "-1: give the number of rows"),
        (lambda: ops.BasicLinear(0, 4), "in_features is 0: give a positive int"),
        (lambda: ops.Linear(4, -1), "out_features is -1: give a positive int"),
        (lambda: ops.GroupedLinear(0, 8, 4), "num_groups is 0: give a positive int"),
        (lambda: ops.Bias(0), "size is 0: give a positive int"),
        (lambda: ops.LayerNorm((4, 0)), r"normalized_shape\[1\] is 0: give a positive int"),
        (lambda: ops.RMSNorm(()), r"normalized_shape is \(\)"),
    ],
)
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_what_does_not_fit(call: Callable[[], Any], message: str, recipe: str) -> None:
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]), pytest.raises(ValueError, match=message):
        call()


def test_linears_take_their_own_keyword_arguments() -> None:
    for op, extra in ((ops.BasicLinear(8, 4, **OPTIONS), ()), (ops.GroupedLinear(2, 8, 4, **OPTIONS), ([1, 1],))):
        assert op(draw((2, 8)), *extra, is_first_microbatch=True).shape == (2, 4)
        with pytest.raises(TypeError, match=r"\['wrong'\]: it takes .*is_first_microbatch"):
            op(draw((2, 8)), *extra, wrong=1)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="parallel_mode is 'diagonal'"):
        ops.Linear(8, 4, tensor_parallel_mode="diagonal")


# Parameters on the meta device have no values until the first run


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize(
    "make_op",
    [
        lambda **kw: ops.BasicLinear(16, 8, **kw),
        lambda **kw: ops.Linear(16, 8, **kw),
        lambda **kw: ops.Bias(16, **kw),
        lambda **kw: ops.LayerNorm(16, zero_centered_gamma=True, **kw),
        lambda **kw: ops.RMSNorm((1, 16), **kw),
        lambda **kw: ops.GroupedLinear(2, 16, 8, **kw),
    ],
    ids=["BasicLinear", "Linear", "Bias", "LayerNorm", "RMSNorm", "GroupedLinear"],
)
def test_meta_device(make_op: Any, recipe: str) -> None:
    x = draw((6, 1, 16))
    extra = ([2, 4],) if isinstance(make_op(device="cpu"), ops.GroupedLinear) else ()
    results = []
    for device in ("meta", "cpu"):
        torch.manual_seed(0)
        op = make_op(device=device, dtype=torch.bfloat16)
        if device == "meta":
            assert all(parameter.is_meta for parameter in op.parameters())
            chain = ops.Sequential(op)
            with torch.device("cpu"):
                chain(x, *extra)
            assert not any(value.is_meta for value in (*op.parameters(), *op.buffers()))
            torch.manual_seed(0)
            op_of(op).reset_parameters()
        results.append(step(op, x, extra, RECIPES[recipe]))
    assert_equal(*results)


def test_what_is_no_tensor() -> None:
    x = draw((4, N))
    for value in ("x", None, [1.0]):
        with pytest.raises(TypeError, match="input is"):
            ops.Sequential(ops.Identity(), ops.GELU())(value)
        with pytest.raises(TypeError, match="the extra input is"):
            ops.AddExtraInput()(x, value)
        with pytest.raises(TypeError, match="the scales are"):
            ops.ScaledSwiGLU()(x, value)
    for op in (ops.GELU(), ops.SwiGLU()):
        with pytest.raises(ValueError, match=r"input has shape \(\): give at least one dimension"):
            op(torch.tensor(1.0))
