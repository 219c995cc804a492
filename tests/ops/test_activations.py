"""Activations as operations against their formulas."""

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from mezzotint.ops.basic.glu import deinterleave_columns, interleave_columns
from tests.formats import HIGH
from tests.ops.chains import OPTIONS
from tests.ops.formulas import FORMULAS, SCALED, check_formula, clamped_swiglu, draw, make, near, run, situglu
from tests.values import as_view

N = 32
SHAPES = ((40, N), (2, 5, N), (1, N), (0, N), (N,))

over_dtypes = pytest.mark.parametrize("dtype", HIGH, ids=str)
INTERLEAVED = ("SwiGLU", "ClampedSwiGLU", "SiTUGLU", "ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU")


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
    y, _, (dx, *ds) = run(make(name, glu_interleave_size=4), interleave_columns(x, 4), *scales)
    want, _, (dx_want, *ds_want) = run(make(name), x, *scales)
    assert torch.equal(y, want)
    assert dx_want is not None
    assert torch.equal(dx, interleave_columns(dx_want, 4))
    assert all(torch.equal(a, b) for a, b in zip(ds, ds_want, strict=True))


def test_interleave() -> None:
    x = torch.arange(12).view(1, 12)
    mixed = interleave_columns(x, 2)
    assert mixed.tolist() == [[0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]]
    for shape, size in (((3, 12), 2), ((3, 12), 6), ((2, 3, 8), 1), ((0, 8), 2)):
        x = draw(shape)
        assert torch.equal(deinterleave_columns(interleave_columns(x, size), size), x)
        assert torch.equal(interleave_columns(deinterleave_columns(x, size), size), x)
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"interleave_size is {size}"):
            interleave_columns(x, size)
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


def test_options_that_are_refused() -> None:
    for name in ("ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"):
        assert getattr(ops, name)().activation_recompute_in_mlp is False
        with pytest.raises(ValueError, match=f"{name} does not support activation recomputation"):
            getattr(ops, name)(activation_recompute_in_mlp=True)
    assert ops.ScaledSReLU(activation_recompute_in_mlp=True).activation_recompute_in_mlp
    for given in ({"beta1": 0.0}, {"beta2": float("inf")}, {"beta1": float("nan")}):
        for kind in (ops.SiTUGLU, ops.ScaledSiTUGLU):
            with pytest.raises(ValueError, match=f"{next(iter(given))} is .*: give a finite number above 0"):
                kind(**given)
