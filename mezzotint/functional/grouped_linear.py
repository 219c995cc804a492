"""One linear for each group of rows (expert): this module runs the linear's functions over the grouped GEMM.

The rows of x are split by `splits`. Each group is quantized on its own, padded inside, and multiplied by its own
weight. A group may be empty: its weight gradient is zero. Autograd sees parameters: one for each group, or one (G, …)
that holds those of all groups. The computation is on groups (`group_tensors`), and only gradients are put together
again.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.functional.autograd import Core, GradState, Saved
from mezzotint.functional.gemm import is_made_by_custom, multiply, operand
from mezzotint.functional.linear import (
    LinearQuantizers,
    Needs,
    Numerics,
    WeightGrad,
    amaxes_of,
    as_multiplied,
    compute_weight_gradient,
    in_high_precision,
    kept,
    needs_original,
    stand_in,
)
from mezzotint.functional.observation import Probes, observe_groups, watch_gradient
from mezzotint.functional.weight import as_storage
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.activation import column_sum
from mezzotint.kernels.grouped_gemm import grouped_gemm, grouped_gemm_packed
from mezzotint.tensor.grouped import GroupedTensorStorage
from mezzotint.tensor.quantize import quantize_groups
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import left_to_backward

GroupScales = tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class GroupedLinearFwdArgs:
    """The arguments of a grouped linear's forward: `x` (M, K), G weights (N, K), and `weights_q`, the weights as the
    GEMMs take them. M is the sum of `splits`."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]  # parameters: G, or one (G, N, K)
    biases: tuple[torch.Tensor, ...]  # G, or one (G, N); or none
    weights_q: tuple[Any, ...]
    splits: tuple[int, ...]
    needs: Needs
    quantizers: tuple[LinearQuantizers, ...]
    numerics: Numerics
    wgrads: tuple[WeightGrad, ...]
    input_scales: GroupScales
    grad_scales: GroupScales
    saves_original_input: bool
    grad_state: GradState | None
    weights_again: tuple[Quantizer, ...] = ()  # backward quantizes the weights with these; (): it reads `weights_q`
    weight_scales: GroupScales = ()  # those of `weights_again`
    xs_q: tuple[Any, ...] | None = None  # the groups of x, if a producer has quantized them
    probes: tuple[Probes, ...] | None = None  # one for each group, if an inspector wants statistics


@dataclass(slots=True)
class GroupedLinearBwdArgs(Saved):
    xs: Any  # one for each group; the whole x if it is kept in high precision
    weights: Any
    grad_scales: GroupScales
    input_scales: GroupScales
    weight_scales: GroupScales
    splits: tuple[int, ...]
    needs: Needs
    quantizers: tuple[LinearQuantizers, ...]
    weights_again: tuple[Quantizer, ...]
    numerics: Numerics
    wgrads: tuple[WeightGrad, ...]
    bias_dtypes: tuple[torch.dtype, ...]
    stacks_bias: bool  # one parameter holds all biases
    saves_original_input: bool
    probes: tuple[Probes | None, ...] | None = None

    SAVED = ("xs", "weights", "grad_scales", "input_scales", "weight_scales")


@dataclass(slots=True)
class GroupedLinearMade:
    xs_q: tuple[Any, ...]
    amaxes: tuple[torch.Tensor | None, ...]


def is_stack(parameters: tuple[Any, ...], dims: int) -> bool:
    """Return whether one parameter holds all groups' tensors, each of which has `dims` dimensions."""
    return len(parameters) == 1 and len(parameters[0].shape) > dims


def group_tensors(parameters: tuple[Any, ...], dims: int) -> tuple[Any, ...]:
    """Return a tensor of `dims` dimensions for each group, or a storage if it is quantized: the parameters themselves,
    or slices of the one that holds all, which are outside of autograd."""
    if not is_stack(parameters, dims):
        return parameters
    whole = as_storage(parameters[0])
    return tuple(whole.split_into_storages() if isinstance(whole, GroupedTensorStorage) else whole.detach().unbind())


def as_parameters(gradients: tuple[Any, ...], stacks: bool) -> tuple[Any, ...]:
    """Return the gradients of the parameters from those of the groups: stacked if `stacks`, or None if the groups have
    none."""
    if not stacks or not gradients:
        return gradients
    return (None if gradients[0] is None else torch.stack(gradients),)


def _quantized(
    x: torch.Tensor, splits: tuple[int, ...], quantizers: list[Quantizer | None], scales: GroupScales
) -> tuple[tuple[Any, ...], tuple[torch.Tensor | None, ...]]:
    """Quantize each group of rows on its own, and return the groups and their amaxes."""
    return quantize_groups(x.split(list(splits)), quantizers, scales)


def grouped_linear_forward(a: GroupedLinearFwdArgs) -> tuple[torch.Tensor, GroupedLinearMade]:
    """Return y (M, N) and what was made on the way."""
    xs_q: tuple[Any, ...]
    amaxes: tuple[torch.Tensor | None, ...] = ()
    if a.xs_q is None:
        xs_q, amaxes = _quantized(a.x, a.splits, [q.input for q in a.quantizers], a.input_scales)
    else:
        xs_q = a.xs_q
    if a.probes is not None and a.xs_q is None:
        observe_groups([probes.input for probes in a.probes], a.x.split(list(a.splits)), xs_q)
    if a.probes is not None:
        observe_groups([probes.weight for probes in a.probes], group_tensors(a.weights, 2), a.weights_q)
    weights = [in_high_precision(w, a.numerics) for w in a.weights_q]
    y = _products(list(xs_q), weights, False, a.numerics.dtype, group_tensors(a.biases, 1), a.numerics.fast_fprop)
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
            weights = a.weights_q if isinstance(a.weights[0], QuantizedTensorStorage) else a.weights
        elif a.weights_again:
            weights = a.weights
        else:
            weights = tuple([kept(w, columnwise=override is None) for w in a.weights_q])
    return GroupedLinearBwdArgs(
        xs=xs,
        weights=weights,
        grad_scales=a.grad_scales,
        input_scales=a.input_scales if a.saves_original_input else (),
        weight_scales=a.weight_scales if a.weights_again else (),
        splits=a.splits,
        needs=a.needs,
        quantizers=a.quantizers,
        weights_again=a.weights_again,
        numerics=a.numerics,
        wgrads=a.wgrads,
        bias_dtypes=tuple([bias.dtype for bias in group_tensors(a.biases, 1)]),
        stacks_bias=is_stack(a.biases, 1),
        saves_original_input=a.saves_original_input,
        probes=None if a.probes is None else tuple([watch_gradient(probes) for probes in a.probes]),
    )


def _saved_inputs(b: GroupedLinearBwdArgs) -> list[Any]:
    if isinstance(b.xs, tuple):
        return [as_multiplied(x, b.numerics) for x in b.xs]
    quantizers = [q.input for q in b.quantizers]
    if not b.saves_original_input or b.numerics.override is not None or b.numerics.keeps_wgrad:
        return list(b.xs.split(list(b.splits)))
    again = [None if q is None else q.with_usage(rowwise=False, columnwise=True) for q in quantizers]
    return list(_quantized(b.xs, b.splits, again, b.input_scales)[0])


def _saved_weights(b: GroupedLinearBwdArgs) -> list[Any]:
    """Return the weights of all groups as the input gradient multiplies them."""
    weights = group_tensors(b.weights, 2)
    if b.weights_again:
        with left_to_backward():
            return list(quantize_groups([weight.detach() for weight in weights], b.weights_again, b.weight_scales)[0])
    return [in_high_precision(as_multiplied(weight, b.numerics), b.numerics) for weight in weights]


def grouped_linear_backward(
    b: GroupedLinearBwdArgs, dy: Any, dys_q: tuple[Any, ...] | None = None, dbs: tuple[Any, ...] | None = None
) -> tuple[Any, ...]:
    """Return dx (M, K) and the gradients of the weights and biases, one for each parameter; then the amaxes of dy,
    group by group.

    `dys_q` and `dbs` are the groups of dy and the gradients of their biases, if a producer has made them.
    """
    if isinstance(dy, QuantizedTensorStorage):
        dy = dy.dequantize()
    parts: Any = ()
    gs: Any = dys_q
    amaxes: tuple[Any, ...] = (None,) * len(b.splits)
    if dys_q is None:
        parts = dy.split(list(b.splits))
        gs, amaxes = _quantized(dy, b.splits, [q.grad_output for q in b.quantizers], b.grad_scales)
        if b.probes is not None:
            observe_groups([None if probes is None else probes.grad_output for probes in b.probes], parts, gs)
    if dbs is None:
        dbs = (None,) * len(b.bias_dtypes)
    if b.needs.bias and dys_q is None:
        dbs = tuple([run_op(column_sum, part, dtype) for part, dtype in zip(parts, b.bias_dtypes, strict=True)])
    dx = None
    if b.needs.input:
        dx = _products(list(gs), _saved_weights(b), True, b.numerics.dtype, (), b.numerics.fast_dgrad)
    dws = as_parameters((None,) * len(b.wgrads), b.wgrads[0].is_slice)
    if b.needs.weight:
        source = list(parts) if b.numerics.keeps_wgrad else list(gs)
        dws = grouped_weight_gradients(b.wgrads, source, _saved_inputs(b), b.numerics.fast_wgrad)
    per_slot = [item for amax in amaxes for item in (amax, None)]
    return (dx, dws, as_parameters(dbs, b.stacks_bias)), tuple(per_slot)


def grouped_weight_gradients(
    wgrads: tuple[WeightGrad, ...], dys: list[Any], xs: list[Any], fast: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return dW of each parameter, or None where a store keeps the operands for later."""
    if wgrads[0].store is not None:
        wgrads[0].store.put(wgrads, dys, xs, fast)
        return as_parameters((None,) * len(wgrads), wgrads[0].is_slice)
    return compute_grouped_weight_gradients(wgrads, dys, xs, fast)


def compute_grouped_weight_gradients(
    wgrads: tuple[WeightGrad, ...], dys: list[Any], xs: list[Any], fast: bool
) -> tuple[torch.Tensor | None, ...]:
    """Compute the weight gradients: those of groups with a `main_grad` are added into it, the others are returned, one
    for each parameter."""
    stacks = wgrads[0].is_slice
    if is_made_by_custom(dys[0]) or any(wgrad.overwrites for wgrad in wgrads):
        groups = zip(wgrads, dys, xs, strict=True)
        return as_parameters(tuple([compute_weight_gradient(wgrad, dy, x, fast) for wgrad, dy, x in groups]), stacks)
    made: list[torch.Tensor | None] = [None] * len(wgrads)
    a, b = [operand(dy, True) for dy in dys], [operand(x, True) for x in xs]
    added = [i for i, wgrad in enumerate(wgrads) if wgrad.main_grad is not None]
    if added:
        into: list[Any] = [wgrads[i].main_grad for i in added]
        pair = [a[i] for i in added], [b[i] for i in added]
        grouped_gemm(*pair, out_dtype=into[0].dtype, accumulate=into, fast_accum=fast)
        for i, main_grad in zip(added, into, strict=True):
            made[i] = stand_in(wgrads[i], main_grad)
    rest = [i for i, wgrad in enumerate(wgrads) if wgrad.main_grad is None]
    if rest:
        pair = [a[i] for i in rest], [b[i] for i in rest]
        packed = grouped_gemm_packed(*pair, out_dtype=wgrads[rest[0]].dtype, fast_accum=fast)
        parts = packed.view(len(rest), -1, packed.shape[1])
        if stacks:
            return (parts,)  # the products lie like that already
        for i, part in zip(rest, parts.unbind(), strict=True):
            made[i] = part
    return as_parameters(tuple(made), stacks)


def _products(
    a: list[Any],
    b: list[Any],
    b_columnwise: bool,
    out_dtype: torch.dtype,
    biases: tuple[torch.Tensor, ...],
    fast: bool,
) -> torch.Tensor:
    """Return the products of all groups, one below the other, as one tensor (M, …)."""
    if is_made_by_custom(a[0]):
        each = biases or (None,) * len(a)
        return torch.cat(
            [
                multiply(x, w, b_columnwise=b_columnwise, out_dtype=out_dtype, bias=bias, fast=fast)
                for x, w, bias in zip(a, b, each, strict=True)
            ]
        )
    return grouped_gemm_packed(
        [operand(x, False) for x in a],
        [operand(w, b_columnwise) for w in b],
        out_dtype=out_dtype,
        bias=list(biases) or None,
        fast_accum=fast,
    )


def _outputs(a: GroupedLinearFwdArgs, y: torch.Tensor, made: Any) -> tuple[Any, ...]:
    return (y,), amaxes_of(*zip([quantizers.input for quantizers in a.quantizers], made.amaxes, strict=True))


GROUPED_LINEAR = Core(
    grouped_linear_forward,
    _outputs,
    grouped_linear_setup,
    grouped_linear_backward,
    ("x", "weights", "biases"),
    tuples=("weights", "biases"),
)
