"""One linear for each group of rows (expert): the linear's functions over the grouped GEMM.

Rows of x are split by `splits`; each group is quantized on its own, padded inside, and multiplied by its own weight. A
group may be empty: its weight gradient is zero.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.functional.autograd import Core, GradState, Saved
from mezzotint.functional.gemm import operand
from mezzotint.functional.linear import (
    LinearQuantizers,
    Needs,
    Numerics,
    WeightGrad,
    as_multiplied,
    in_high_precision,
    kept,
    needs_original,
    present,
)
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.activation import column_sum
from mezzotint.kernels.grouped_gemm import grouped_gemm, grouped_gemm_packed
from mezzotint.tensor.quantize import quantize_scaled
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage

Scales = tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class GroupedLinearFwdArgs:
    """`x` (M, K); G weights (N, K), with `weights_q` as the GEMMs take them; M = Σ splits."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor, ...]
    weights_q: tuple[Any, ...]
    splits: tuple[int, ...]
    needs: Needs
    quantizers: tuple[LinearQuantizers, ...]
    numerics: Numerics
    wgrads: tuple[WeightGrad, ...]
    input_scales: Scales
    grad_scales: Scales
    saves_original_input: bool
    grad_state: GradState | None


@dataclass(slots=True)
class GroupedLinearBwdArgs(Saved):
    xs: Any  # of each group; the whole x where it is kept in high precision
    weights: Any
    grad_scales: Scales
    input_scales: Scales
    splits: tuple[int, ...]
    needs: Needs
    quantizers: tuple[LinearQuantizers, ...]
    numerics: Numerics
    wgrads: tuple[WeightGrad, ...]
    bias_dtypes: tuple[torch.dtype, ...]
    saves_original_input: bool

    SAVED = ("xs", "weights", "grad_scales", "input_scales")


@dataclass(slots=True)
class GroupedLinearMade:
    xs_q: tuple[Any, ...]
    amaxes: tuple[torch.Tensor | None, ...]


def _quantized(
    x: torch.Tensor, splits: tuple[int, ...], quantizers: list[Quantizer | None], scales: Scales
) -> tuple[tuple[Any, ...], tuple[torch.Tensor | None, ...]]:
    """Each group of rows on its own."""
    made, amaxes = [], []
    for part, quantizer, scale in zip(x.split(list(splits)), quantizers, scales, strict=True):
        part_q, amax = (part, None) if quantizer is None else quantize_scaled(part, quantizer, scale)
        made.append(part_q)
        amaxes.append(amax)
    return tuple(made), tuple(amaxes)


def grouped_linear_forward(a: GroupedLinearFwdArgs) -> tuple[torch.Tensor, GroupedLinearMade]:
    """y (M, N)."""
    xs_q, amaxes = _quantized(a.x, a.splits, [q.input for q in a.quantizers], a.input_scales)
    y = grouped_gemm_packed(
        [operand(x, False) for x in xs_q],
        [operand(in_high_precision(w, a.numerics), False) for w in a.weights_q],
        out_dtype=a.numerics.dtype,
        bias=list(a.biases) or None,
        fast_accum=a.numerics.fast_fprop,
    )
    return y, GroupedLinearMade(xs_q, amaxes)


def grouped_linear_setup(a: GroupedLinearFwdArgs, made: GroupedLinearMade) -> GroupedLinearBwdArgs:
    override = a.numerics.override
    xs: Any = None
    weights: Any = None
    if a.needs.weight:
        is_whole = needs_original(a.quantizers[0], a.numerics, a.saves_original_input)
        xs = a.x if is_whole else tuple([kept(x, columnwise=override is None) for x in made.xs_q])
    if a.needs.input:
        if override == "high_precision":
            pairs = zip(a.weights, a.weights_q, strict=True)
            weights = tuple([w_q if isinstance(w, QuantizedTensorStorage) else w for w, w_q in pairs])
        else:
            weights = tuple([kept(w, columnwise=override is None) for w in a.weights_q])
    return GroupedLinearBwdArgs(
        xs,
        weights,
        a.grad_scales,
        a.input_scales if a.saves_original_input else (),
        a.splits,
        a.needs,
        a.quantizers,
        a.numerics,
        a.wgrads,
        tuple([bias.dtype for bias in a.biases]),
        a.saves_original_input,
    )


def _saved_inputs(b: GroupedLinearBwdArgs) -> list[Any]:
    if isinstance(b.xs, tuple):
        return [as_multiplied(x, b.numerics) for x in b.xs]
    quantizers = [q.input for q in b.quantizers]
    if not b.saves_original_input or b.numerics.override is not None or b.numerics.keeps_wgrad:
        return list(b.xs.split(list(b.splits)))
    again = [None if q is None else q.with_usage(rowwise=False, columnwise=True) for q in quantizers]
    return list(_quantized(b.xs, b.splits, again, b.input_scales)[0])


def grouped_linear_backward(b: GroupedLinearBwdArgs, dy: Any) -> tuple[Any, ...]:
    """dx (M, K), dW_i (N, K) each, db_i [N] each; the amaxes of dy, group by group."""
    if isinstance(dy, QuantizedTensorStorage):
        dy = dy.dequantize()
    parts = dy.split(list(b.splits))
    gs, amaxes = _quantized(dy, b.splits, [q.grad_output for q in b.quantizers], b.grad_scales)
    dbs: tuple[Any, ...] = (None,) * len(b.bias_dtypes)
    if b.needs.bias:
        dbs = tuple([run_op(column_sum, part, dtype) for part, dtype in zip(parts, b.bias_dtypes, strict=True)])
    dx = None
    if b.needs.input:
        weights = [in_high_precision(as_multiplied(w, b.numerics), b.numerics) for w in b.weights]
        dx = grouped_gemm_packed(
            [operand(g, False) for g in gs],
            [operand(w, True) for w in weights],
            out_dtype=b.numerics.dtype,
            fast_accum=b.numerics.fast_dgrad,
        )
    dws: tuple[Any, ...] = (None,) * len(b.wgrads)
    if b.needs.weight:
        source = list(parts) if b.numerics.keeps_wgrad else list(gs)
        dws = grouped_weight_gradients(b.wgrads, source, _saved_inputs(b), b.numerics.fast_wgrad)
    per_slot = [item for amax in amaxes for item in (amax, None)]
    return (dx, dws, dbs), tuple(per_slot)


def grouped_weight_gradients(
    wgrads: tuple[WeightGrad, ...], dys: list[Any], xs: list[Any], fast: bool
) -> tuple[torch.Tensor | None, ...]:
    """dW of each group, or None where it went elsewhere."""
    if wgrads[0].store is not None:
        wgrads[0].store.put(wgrads, dys, xs, fast)
        return (None,) * len(wgrads)
    return compute_grouped_weight_gradients(wgrads, dys, xs, fast)


def compute_grouped_weight_gradients(
    wgrads: tuple[WeightGrad, ...], dys: list[Any], xs: list[Any], fast: bool
) -> tuple[torch.Tensor | None, ...]:
    a, b = [operand(dy, True) for dy in dys], [operand(x, True) for x in xs]
    into = [wgrad.main_grad for wgrad in wgrads if wgrad.main_grad is not None]
    if not into:
        return tuple(grouped_gemm(a, b, out_dtype=wgrads[0].dtype, fast_accum=fast))
    if wgrads[0].overwrites:
        for main_grad in into:
            main_grad.zero_()
    grouped_gemm(a, b, out_dtype=into[0].dtype, accumulate=into, fast_accum=fast)
    return (None,) * len(wgrads)


def _forward(a: GroupedLinearFwdArgs) -> tuple[Any, ...]:
    y, made = grouped_linear_forward(a)
    return (y,), present(*made.amaxes), made


GROUPED_LINEAR = Core(_forward, grouped_linear_setup, grouped_linear_backward, ("x", "weights", "biases"))
