"""Every basic operation against its formula: FP64 of plain PyTorch, or its own roundings where they can be repeated.

Operations compute in FP32 and round their result once to the dtype of activations. `near` allows for that: half a unit
in the last place, and 2e-6 of the largest value for the FP32 before it.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from mezzotint.ops import basic
from mezzotint.ops.basic.glu import deinterleave_glu_tensor, interleave_glu_tensor
from tests.formats import HIGH
from tests.ops.chains import OPTIONS, OneByOne, linear, only, plain, spread, step
from tests.recipes import RECIPES, VARIANTS, assert_equal
from tests.values import as_view

N = 32
SHAPES = ((40, N), (2, 5, N), (1, N), (0, N), (N,))
Formula = Callable[..., torch.Tensor]

over_dtypes = pytest.mark.parametrize("dtype", HIGH, ids=str)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)
over_quantized = pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """No value is 0."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
    return torch.where(x.abs() < 0.01, 0.01, x).to(dtype)


def near(got: torch.Tensor | None, want: torch.Tensor | None, dtype: torch.dtype) -> None:
    """See above; `want` is FP64."""
    assert got is not None
    assert want is not None
    assert (got.dtype, got.shape) == (dtype, want.shape)
    if not want.numel():
        return
    info = torch.finfo(dtype)
    bound = info.eps / 2 * want.abs() + 2e-6 * want.abs().max() + info.smallest_normal * info.eps
    excess = (got.double() - want).abs() - bound
    assert excess.max() <= 0, f"{excess.max()} over the bound, of {want.abs().max()}"


def run(op: Any, x: torch.Tensor, *extra: Any) -> tuple[Any, torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Output, the gradient that it got, and the gradients of the input, the extra inputs and the parameters."""
    x = x.detach().requires_grad_()
    extra = tuple([e.detach().requires_grad_() if isinstance(e, torch.Tensor) else e for e in extra])
    y = op(x, *extra)
    dy = draw(tuple(y.shape), plain(y).dtype, 7)
    leaves = [x, *[e for e in extra if isinstance(e, torch.Tensor)], *op.parameters()]
    return y.detach(), dy, torch.autograd.grad(y, leaves, dy, allow_unused=True)


def by_formula(formula: Formula, dy: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In FP64: the result, and the gradients of all that is given."""
    leaves = [value.detach().double().requires_grad_() for value in given]
    y = formula(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


def check_formula(op: Any, formula: Formula, x: torch.Tensor, *extra: torch.Tensor) -> None:
    y, dy, grads = run(op, x, *extra)
    given = (x, *extra, *op.parameters())
    want, *gradients = by_formula(formula, dy, *given)
    near(y, want, x.dtype)
    for value, gradient, wanted in zip(given, grads, gradients, strict=True):
        near(gradient, wanted, value.dtype)


# Activations


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (0.5 + 0.5 * torch.tanh(x * (0.79788456 + 0.03567741 * x * x)))


def qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def gated(activation: Formula) -> Formula:
    def formula(x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, -1)
        return activation(x1) * x2

    return formula


def clamped_swiglu(x: torch.Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    a = x1.clamp(max=limit)
    return a * torch.sigmoid(alpha * a) * (x2.clamp(-limit, limit) + offset)


def situglu(x: torch.Tensor, beta1: float = 4.0, beta2: float = 25.0) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    return beta1 * torch.tanh(x1 / beta1) * torch.sigmoid(x1) * beta2 * torch.tanh(x2 / beta2)


FORMULAS: dict[str, Formula] = {
    "GELU": gelu,
    "QGELU": qgelu,
    "ReLU": torch.relu,
    "SReLU": lambda x: torch.relu(x) ** 2,
    "SiLU": lambda x: x * torch.sigmoid(x),
    "GLU": gated(torch.sigmoid),
    "GEGLU": gated(gelu),
    "QGEGLU": gated(qgelu),
    "ReGLU": gated(torch.relu),
    "SReGLU": gated(lambda x: torch.relu(x) ** 2),
    "SwiGLU": gated(lambda x: x * torch.sigmoid(x)),
    "ClampedSwiGLU": clamped_swiglu,
    "SiTUGLU": situglu,
}
SCALED = {
    "ScaledSwiGLU": "SwiGLU",
    "ScaledSiTUGLU": "SiTUGLU",
    "ScaledClampedQGeGLU": "ClampedSwiGLU",
    "ScaledSReLU": "SReLU",
}
INTERLEAVED = ("SwiGLU", "ClampedSwiGLU", "SiTUGLU", "ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU")


def make(name: str, **options: Any) -> Any:
    return getattr(ops, name)(**options)


@over_dtypes
@pytest.mark.parametrize("name", FORMULAS)
def test_activation(name: str, dtype: torch.dtype) -> None:
    for shape in (*SHAPES, (7, 26), (3, 1, 2)):
        check_formula(make(name), FORMULAS[name], draw(shape, dtype))


@pytest.mark.parametrize("view", ["transposed", "every_second", "offset", "expanded"])
@pytest.mark.parametrize("name", [*FORMULAS, "LayerNorm", "RMSNorm", "L2Normalization", "Bias", "ConstantScale"])
def test_strides_do_not_matter(name: str, view: str) -> None:
    """Of the input, and of the gradient, which reaches operations as autograd has it."""
    arguments = {"LayerNorm": (N,), "RMSNorm": (N,), "Bias": (N,), "ConstantScale": (0.3,)}.get(name, ())
    op = getattr(ops, name)(*arguments, **(OPTIONS if name in ("LayerNorm", "RMSNorm", "Bias") else {}))
    x = as_view(draw((6, 4, N)), view)
    y, y_dense = op(x), op(x.contiguous())
    assert torch.equal(y, y_dense)
    dy = as_view(draw(tuple(y.shape), seed=1), view)
    results = []
    for value, gradient in ((x, dy), (x.contiguous(), dy.contiguous())):
        leaf = value.detach().requires_grad_()
        results.append(torch.autograd.grad(op(leaf), (leaf, *op.parameters()), gradient))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@over_dtypes
@pytest.mark.parametrize("name", SCALED)
def test_scaled_activation(name: str, dtype: torch.dtype) -> None:
    """y = round(round(act(x)) · s), dx = round(round(dy · s) · act'(x)); the scales' gradient in their dtype."""
    inner = make(SCALED[name])
    for shape, scale_dtype in ((shape, scale_dtype) for shape in SHAPES for scale_dtype in (torch.float32, dtype)):
        x, scales = draw(shape, dtype), draw(shape[:-1], scale_dtype, 1).abs()
        y, dy, (dx, ds) = run(make(name), x, scales)
        act, _, _ = run(inner, x)
        assert torch.equal(y, (act.float() * scales.float()[..., None]).to(dtype))
        leaf = x.clone().requires_grad_()
        scaled = (dy.float() * scales.float()[..., None]).to(dtype)
        assert torch.equal(dx, torch.autograd.grad(inner(leaf), leaf, scaled)[0])
        assert ds is not None
        near(ds, (act.double() * dy.double()).sum(-1), scale_dtype)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_halves(name: str) -> None:
    """The halves in turns of 4 columns: of the activation's input and of its gradient."""
    x, scales = draw((5, 6, N)), (draw((5, 6), seed=1).abs(),) if name in SCALED else ()
    y, _, (dx, *ds) = run(make(name, glu_interleave_size=4), interleave_glu_tensor(x, 4), *scales)
    want, _, (dx_want, *ds_want) = run(make(name), x, *scales)
    assert torch.equal(y, want)
    assert dx_want is not None
    assert torch.equal(dx, interleave_glu_tensor(dx_want, 4))
    assert all(torch.equal(a, b) for a, b in zip(ds, ds_want, strict=True))


def test_interleave() -> None:
    x = torch.arange(12).view(1, 12)
    mixed = interleave_glu_tensor(x, 2)
    assert mixed.tolist() == [[0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]]
    for shape, size in (((3, 12), 2), ((3, 12), 6), ((2, 3, 8), 1), ((0, 8), 2)):
        x = draw(shape)
        assert torch.equal(deinterleave_glu_tensor(interleave_glu_tensor(x, size), size), x)
        assert torch.equal(interleave_glu_tensor(deinterleave_glu_tensor(x, size), size), x)
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"interleave_size is {size}"):
            interleave_glu_tensor(x, size)
    with pytest.raises(ValueError, match="interleave_size is 5"):
        ops.SwiGLU(glu_interleave_size=5)(draw((3, 8)))


def test_parameters_of_activations() -> None:
    x = draw((40, N), torch.float32) * 3
    check_formula(
        ops.ClampedSwiGLU(limit=2.0, alpha=1.0, glu_linear_offset=0.5), lambda x: clamped_swiglu(x, 2.0, 1.0, 0.5), x
    )
    check_formula(ops.SiTUGLU(beta1=2.0, beta2=3.0), lambda x: situglu(x, 2.0, 3.0), x)
    scales = torch.ones(40)
    for scaled, inner in (
        (
            ops.ScaledClampedQGeGLU(limit=2.0, alpha=1.0, glu_linear_offset=0.5),
            ops.ClampedSwiGLU(limit=2.0, alpha=1.0, glu_linear_offset=0.5),
        ),
        (ops.ScaledSiTUGLU(beta1=2.0, beta2=3.0), ops.SiTUGLU(beta1=2.0, beta2=3.0)),
    ):
        assert torch.equal(scaled(x, scales), inner(x))


def test_clamped_values_have_no_gradient() -> None:
    x = torch.tensor([[8.0, -8.0, 7.0, 8.0, -8.0, 7.0]])  # x1: over, under, at the limit; x2 likewise
    _, _, (dx,) = run(ops.ClampedSwiGLU(), x)
    assert dx is not None
    assert (dx != 0).tolist() == [[False, True, True, False, False, True]]


@pytest.mark.parametrize("name", FORMULAS)
def test_cached_quantized_input(name: str) -> None:
    """Backward reads x in FP8, and nothing else is kept of it."""
    x, op = draw((8, 2 * N)), make(name, cache_quantized_input=True)
    kept: list[torch.Tensor] = []
    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = op(leaf)
    assert sum(t.numel() * t.element_size() for t in kept) == x.numel() + 4
    assert torch.equal(y, make(name)(x))
    seen = mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3).quantize(x).dequantize()
    dy = draw(tuple(y.shape), seed=1)
    other = seen.requires_grad_()
    expected = torch.autograd.grad(make(name)(other), other, dy)
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], expected[0])


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


# Every operation under every recipe: with neighbours that want quantized tensors, and with a quantized input

ALL: dict[str, Callable[[], Any]] = {
    **{name: (lambda name=name: make(name)) for name in (*FORMULAS, *SCALED)},
    **{f"{name} cached": (lambda name=name: make(name, cache_quantized_input=True)) for name in ("GELU", "SwiGLU")},
    **{f"{name} interleaved": (lambda name=name: make(name, glu_interleave_size=8)) for name in ("SwiGLU",)},
    "LayerNorm": lambda: ops.LayerNorm(64, **OPTIONS),
    "RMSNorm": lambda: ops.RMSNorm(64, zero_centered_gamma=True, **OPTIONS),
    "LayerNorm of two": lambda: ops.LayerNorm((8, 64), **OPTIONS),
    "L2Normalization": ops.L2Normalization,
    "Bias": lambda: ops.Bias(64, **OPTIONS),
    "ConstantScale": lambda: ops.ConstantScale(0.3),
    "Dropout": lambda: ops.Dropout(0.3),
    "Identity": ops.Identity,
    "Reshape": lambda: ops.Reshape((-1, 32)),
    "AddExtraInput": ops.AddExtraInput,
    "MakeExtraOutput": ops.MakeExtraOutput,
    "Quantize": ops.Quantize,
    "BasicLinear": lambda: ops.BasicLinear(64, 48, **OPTIONS),
    "GroupedLinear": lambda: ops.GroupedLinear(3, 64, 48, **OPTIONS),
    "GroupedLinear scaled": lambda: ops.GroupedLinear(3, 64, 48, scale_bias=True, **OPTIONS),
    "AllGather": ops.AllGather,
    "AllReduce": ops.AllReduce,
    "ReduceScatter": ops.ReduceScatter,
}


def extra_of(op: Any) -> tuple[Any, ...]:
    """Extra inputs for an input (3, 8, 64)."""
    scales = draw((3, 8), torch.float32, 5).abs()
    if isinstance(op, ops.GroupedLinear):
        return ([7, 0, 17], scales)[: op.num_extra_inputs]
    if isinstance(op, ops.AddExtraInput):
        return (draw((3, 8, 64), seed=5),)
    return (scales,) if op.num_extra_inputs else ()


def steps(chosen: Any) -> range:
    """Delayed scaling has learnt something in the second one."""
    return range(2 if isinstance(chosen, mz.recipe.DelayedScaling | mz.recipe.CustomRecipe) else 1)


def test_every_basic_operation_is_here() -> None:
    assert {type(make_op()).__name__ for make_op in ALL.values()} == set(basic.__all__)


def op_of(op: Any) -> Any:
    return op.basic_ops[0] if isinstance(op, ops.FusedOperation) else op


@over_recipes
@pytest.mark.parametrize("name", [name for name in ALL if name != "Quantize"])
def test_between_linears(name: str, recipe: str) -> None:
    """What it hands over, forward and backward, is what its neighbours would have made of it: bit for bit."""
    op = spread(ALL[name]())
    x = draw((3, 8, 64))
    width = op(x, *extra_of(op))
    width = (width[0] if isinstance(width, tuple) else width).shape[-1]
    chain = OneByOne([linear(64, 64, bias=False), op, linear(width, 32, bias=False)])
    pipeline = ops.Sequential(*copy.deepcopy(chain))
    for seed in steps(RECIPES[recipe]):
        x = draw((3, 8, 64), seed=seed)
        with only():
            got = step(pipeline, x, extra_of(op), RECIPES[recipe])
        assert_equal(got, step(chain, x, extra_of(op), RECIPES[recipe]))


@over_quantized
@pytest.mark.parametrize("name", [name for name in ALL if name != "Quantize"])
def test_with_a_quantized_input(name: str, recipe: str) -> None:
    """As with what it stands for."""
    op = spread(ALL[name]())
    alone, quantize = copy.deepcopy(op), ops.Quantize()
    x, chosen = draw((3, 8, 64)), RECIPES[recipe]
    with mz.autocast(recipe=chosen):
        seen = plain(copy.deepcopy(quantize)(x))
    got = step(ops.Sequential(quantize, op), x, extra_of(op), chosen)
    if isinstance(op, ops.BasicLinear):  # it multiplies the quantized input as it is
        want = step(alone, x, (), chosen)
        if recipe == "delayed":  # the maximum of the input is the affair of who quantized it
            got["1.amax_history_fwd"], want["amax_history_fwd"] = got["1.scale_fwd"], got["1.scale_fwd"]
            want["scale_fwd"] = got["1.scale_fwd"]
    else:
        want = step(alone, seen, extra_of(op), chosen)
    own = {key.removeprefix("1."): value for key, value in got.items() if not key.startswith("0.")}
    assert_equal(own, want)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["GELU", "ScaledSwiGLU", "RMSNorm", "Bias", "BasicLinear"])
def test_variants_between_linears(name: str, variant: str) -> None:
    op = spread(ALL[name]())
    width = op(draw((3, 8, 64)), *extra_of(op)).shape[-1]
    chain = OneByOne([linear(64, 64, bias=False), op, linear(width, 32, bias=False)])
    pipeline = ops.Sequential(*copy.deepcopy(chain))
    for seed in steps(VARIANTS[variant]):
        x = draw((3, 8, 64), seed=seed)
        with only():
            got = step(pipeline, x, extra_of(op), VARIANTS[variant])
        assert_equal(got, step(chain, x, extra_of(op), VARIANTS[variant]))


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
