"""y = x · Wᵀ + b, and its gradients: the one definition that modules and ops share.

    forward    y  (M, N) = x  row-wise · W row-wise       contracted over K
    dgrad      dx (M, K) = dy row-wise · W column-wise    contracted over N
    wgrad      dW (N, K) = dy column-wise · x column-wise  contracted over M, the tokens

Forward keeps the column-wise copies; what each quantizer makes was decided with it (`with_usage`). `override` changes
what backward computes on: "high_precision" the original tensors, "dequantized" what forward multiplied.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.functional.autograd import Core, GradState, Saved
from mezzotint.functional.gemm import multiply
from mezzotint.kernels._lib import as_matrix, run_op
from mezzotint.kernels.activation import column_sum
from mezzotint.tensor.quantize import quantize_scaled
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


@dataclass(frozen=True)
class LinearQuantizers:
    """One for each tensor, with the usages that this call needs; None leaves a tensor in high precision."""

    input: Quantizer | None
    weight: Quantizer | None
    grad_output: Quantizer | None


@dataclass(frozen=True)
class Numerics:
    """Dtype of activations, which GEMMs may accumulate fast, and what backward computes on."""

    dtype: torch.dtype
    fast_fprop: bool
    fast_dgrad: bool
    fast_wgrad: bool
    override: str | None
    keeps_wgrad: bool  # the weight gradient on unquantized tensors


@dataclass(frozen=True)
class Parallel:
    """How the weight is split over processes: None, "column" (N) or "row" (K)."""

    mode: str | None
    group: Any
    size: int
    sequence_parallel: bool


@dataclass(slots=True)
class Needs:
    """Which gradients are asked for: taken once, in the module."""

    input: bool
    weight: bool
    bias: bool


@dataclass(slots=True)
class MainGrad:
    """One part of a weight: its rows, and the tensor that their gradient is added to, or written to."""

    rows: int
    main_grad: torch.Tensor | None  # None: this part needs no gradient
    overwrites: bool


@dataclass(slots=True)
class WeightGrad:
    """Where the weight's gradient goes."""

    dtype: torch.dtype
    main_grad: torch.Tensor | None = None  # added into, in its dtype, and not returned
    overwrites: bool = False  # main_grad is written, not added to
    store: Any = None  # takes the operands, for later
    parts: tuple[MainGrad, ...] = ()  # in the place of main_grad: the weight is in parts, one below the other


@dataclass(slots=True)
class LinearFwdArgs(Saved):
    """`x` (…, K), or `x_q` where a producer has quantized it; `weight` (N, K) with `weight_q`, as the GEMMs take it."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    x_q: Any
    weight_q: Any
    needs: Needs
    quantizers: LinearQuantizers
    numerics: Numerics
    wgrad: WeightGrad
    input_scale: torch.Tensor | None  # delayed scaling, FP32 [1]
    grad_scale: torch.Tensor | None  # a copy: it is written before a second backward reads it
    saves_original_input: bool
    grad_state: GradState | None
    parallel: Parallel | None = None  # None: the whole weight is here

    SAVED = ("x", "weight", "bias", "x_q", "weight_q", "input_scale", "grad_scale")


@dataclass(slots=True)
class LinearBwdArgs(Saved):
    x: Any  # what wgrad contracts with dy
    weight: Any  # what dgrad contracts with dy
    grad_scale: torch.Tensor | None
    input_scale: torch.Tensor | None
    needs: Needs
    quantizers: LinearQuantizers
    numerics: Numerics
    wgrad: WeightGrad
    bias_dtype: torch.dtype | None
    saves_original_input: bool

    SAVED = ("x", "weight", "grad_scale", "input_scale")


@dataclass(slots=True)
class LinearMade:
    x_q: Any
    amax: torch.Tensor | None


def linear_forward(a: LinearFwdArgs) -> tuple[torch.Tensor, LinearMade]:
    """y (M, N) in the dtype of activations."""
    x_q, amax = a.x_q, None
    if x_q is None:
        assert a.x is not None, "neither x nor x_q"
        x_q = as_matrix(a.x)
        if a.quantizers.input is not None:
            x_q, amax = quantize_scaled(x_q, a.quantizers.input, a.input_scale)
    y = multiply(
        x_q,
        in_high_precision(a.weight_q, a.numerics),
        out_dtype=a.numerics.dtype,
        bias=a.bias,
        fast=a.numerics.fast_fprop,
    )
    return y, LinearMade(x_q, amax)


def in_high_precision(weight: Any, numerics: Numerics) -> Any:
    """An unquantized weight in the dtype of activations; a quantized one as it is."""
    return weight if isinstance(weight, QuantizedTensorStorage) else weight.to(numerics.dtype)


def linear_setup(a: LinearFwdArgs, made: LinearMade) -> LinearBwdArgs:
    """What backward needs, and nothing else."""
    override = a.numerics.override
    x: Any = None
    weight: Any = None
    if a.needs.weight:
        if keeps_input(a):
            x = made.x_q if a.x is None else a.x  # itself: what is saved may be an input, but no view of one
        elif override == "dequantized":
            x = kept(made.x_q, columnwise=False)
        else:
            x = kept(made.x_q, columnwise=True)
    if a.needs.input:
        if override == "high_precision":
            weight = a.weight_q if isinstance(a.weight, QuantizedTensorStorage) else a.weight
        else:
            weight = kept(a.weight_q, columnwise=override is None)
    return LinearBwdArgs(
        x,
        weight,
        a.grad_scale,
        a.input_scale if a.saves_original_input else None,
        a.needs,
        a.quantizers,
        a.numerics,
        a.wgrad,
        None if a.bias is None else a.bias.dtype,
        a.saves_original_input,
    )


def needs_original(quantizers: LinearQuantizers, numerics: Numerics, saves_original_input: bool) -> bool:
    """Whether backward reads the unquantized input."""
    return (
        quantizers.input is None
        or numerics.override == "high_precision"
        or numerics.keeps_wgrad
        or (saves_original_input and numerics.override is None)
    )


def keeps_input(a: LinearFwdArgs) -> bool:
    """Whether the unquantized input must be there to be saved."""
    return a.needs.weight and needs_original(a.quantizers, a.numerics, a.saves_original_input)


def kept(x: Any, columnwise: bool) -> Any:
    """One direction of a storage."""
    return x.keep(rowwise=not columnwise, columnwise=columnwise) if isinstance(x, QuantizedTensorStorage) else x


def linear_backward(
    b: LinearBwdArgs, dy: Any, dy_q: Any = None, db: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dx (…, K), dW (N, K), db [N] and the amax of dy; `dy_q`, `db` where a producer has made them from dy."""
    if isinstance(dy, QuantizedTensorStorage):
        dy = dy.dequantize()
    amax = None
    g, leading = dy_q, (dy_q if dy is None else dy).shape[:-1]
    if g is None:
        g = as_matrix(dy)
        if b.quantizers.grad_output is not None and (b.needs.input or b.needs.weight):
            g, amax = quantize_scaled(g, b.quantizers.grad_output, b.grad_scale)
    if b.needs.bias and db is None:
        assert b.bias_dtype is not None
        db = run_op(column_sum, dy, b.bias_dtype)
    dx = None
    if b.needs.input:
        weight = in_high_precision(as_multiplied(b.weight, b.numerics), b.numerics)
        dx = multiply(g, weight, b_columnwise=True, out_dtype=b.numerics.dtype, fast=b.numerics.fast_dgrad)
        dx = dx.view(*leading, dx.shape[1])
    dw = None
    if b.needs.weight:
        dw = weight_gradient(b.wgrad, dy if b.numerics.keeps_wgrad else g, _saved_input(b), b.numerics.fast_wgrad)
    return dx, dw, db, amax


def as_multiplied(x: Any, numerics: Numerics) -> Any:
    """What forward made, dequantized, where backward is overridden to compute on that."""
    is_quantized = isinstance(x, QuantizedTensorStorage)
    return x.dequantize(dtype=numerics.dtype) if is_quantized and numerics.override is not None else x


def _saved_input(b: LinearBwdArgs) -> Any:
    x, quantizer = b.x, b.quantizers.input
    if not b.saves_original_input or quantizer is None or b.numerics.override is not None or b.numerics.keeps_wgrad:
        return as_multiplied(x, b.numerics)
    return quantize_scaled(as_matrix(x), quantizer.with_usage(rowwise=False, columnwise=True), b.input_scale)[0]


def weight_gradient(wgrad: WeightGrad, dy: Any, x: Any, fast: bool) -> torch.Tensor | None:
    """dW, or None where it went elsewhere."""
    if wgrad.store is not None:
        wgrad.store.put(wgrad, dy, x, fast)
        return None
    return compute_weight_gradient(wgrad, dy, x, fast)


def compute_weight_gradient(wgrad: WeightGrad, dy: Any, x: Any, fast: bool) -> torch.Tensor | None:
    into = wgrad.main_grad
    if wgrad.parts:
        _add_to_parts(wgrad.parts, dy, x, fast)
        return None
    if into is None:
        return multiply(dy, x, a_columnwise=True, b_columnwise=True, out_dtype=wgrad.dtype, fast=fast)
    if wgrad.overwrites:
        into.copy_(multiply(dy, x, a_columnwise=True, b_columnwise=True, out_dtype=into.dtype, fast=fast))
    else:
        multiply(dy, x, a_columnwise=True, b_columnwise=True, out_dtype=into.dtype, accumulate=into, fast=fast)
    return None


def _add_to_parts(parts: tuple[MainGrad, ...], dy: Any, x: Any, fast: bool) -> None:
    """One product, in FP32 as each part may have a dtype of its own; its rows go where they belong."""
    whole = multiply(dy, x, a_columnwise=True, b_columnwise=True, out_dtype=torch.float32, fast=fast)
    for part, rows in zip(parts, whole.split([part.rows for part in parts]), strict=True):
        if part.main_grad is not None and part.overwrites:
            part.main_grad.copy_(rows)
        elif part.main_grad is not None:
            part.main_grad.add_(rows)


def shaped(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The matrix y (M, N) with the leading dimensions of x (…, K). Last of all: y itself is no more.

    No view to autograd: FSDP2 puts a hook on what a module gives out, which a write into a view would lose.
    """
    return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[1]))


def present(*amaxes: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Those that there are, for the module to enter into its history."""
    return tuple([amax for amax in amaxes if amax is not None])


def _forward(a: LinearFwdArgs) -> tuple[Any, ...]:
    y, made = linear_forward(a)
    assert a.x is not None
    return (shaped(y, a.x),), present(made.amax), made


def _backward(b: LinearBwdArgs, dy: torch.Tensor) -> tuple[Any, ...]:
    dx, dw, db, amax = linear_backward(b, dy)
    return (dx, dw, db), (amax,)


LINEAR = Core(_forward, linear_setup, _backward, ("x", "weight", "bias"))
