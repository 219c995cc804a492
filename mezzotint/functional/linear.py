"""y = x · Wᵀ + b, and its gradients: this is the one definition that modules and ops share.

    forward    y  (M, N) = x  row-wise · W row-wise       contracted over K
    dgrad      dx (M, K) = dy row-wise · W column-wise    contracted over N
    wgrad      dW (N, K) = dy column-wise · x column-wise  contracted over M, the tokens

Forward keeps the column-wise copies; which copies a quantizer makes was decided with it (`with_usage`). `override`
changes what backward computes on: "high_precision" means the original tensors, "dequantized" means what forward
multiplied, dequantized. `tensor_parallel.py` says which tensor is where when ranks share the weight.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.comm.collectives import wait
from mezzotint.functional.autograd import Core, GradState, Saved
from mezzotint.functional.gemm import multiply
from mezzotint.functional.observation import Probes, observe, watch_gradient
from mezzotint.functional.tensor_parallel import (
    Parallel,
    gather_quantized,
    gathers,
    input_leading,
    needs_others,
    output_leading,
    serves_wgrad,
    shard_quantizer,
    splits_of,
    start_sum,
)
from mezzotint.kernels._lib import as_matrix, callee, matrix_shape, run_op
from mezzotint.kernels.activation import column_sum
from mezzotint.kernels.pointwise import add
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.partition import gather_rows, quantize_shard
from mezzotint.tensor.quantize import quantize_scaled
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.scale_slot import DelayedScale, without_amax
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import left_to_backward, traced_as


@dataclass(frozen=True)
class LinearQuantizers(GraphConstant):
    """A `LinearQuantizers` holds one quantizer for each tensor, with the usages that this call needs; None leaves a
    tensor in high precision."""

    input: Quantizer | None
    weight: Quantizer | None
    grad_output: Quantizer | None


@dataclass(frozen=True)
class Numerics(GraphConstant):
    """A `Numerics` holds the dtype of activations, which GEMMs may accumulate fast, and what backward computes on."""

    dtype: torch.dtype
    fast_fprop: bool
    fast_dgrad: bool
    fast_wgrad: bool
    override: str | None
    keeps_wgrad: bool  # the weight gradient is computed on unquantized tensors


@dataclass(frozen=True)
class Needs(GraphConstant):
    """A `Needs` says which gradients are asked for; the module determines it once for each call."""

    input: bool
    weight: bool
    bias: bool


_NEEDS = {flags: Needs(*flags) for flags in itertools.product((False, True), repeat=3)}


@traced_as(lambda x, weight, bias: Needs(x, weight, bias))
def needs_of(x: bool, weight: bool, bias: bool) -> Needs:
    """Return the `Needs` with these fields. Eager code gets the same object each time, which is fast to compare."""
    return _NEEDS[x, weight, bias]


@dataclass(slots=True)
class MainGrad:
    """A `MainGrad` describes one part of a weight: its number of rows, and the tensor that their gradient is added to,
    or written to."""

    rows: int
    main_grad: torch.Tensor | None  # None: this part needs no gradient
    overwrites: bool


@dataclass(slots=True)
class WeightGrad:
    """A `WeightGrad` says where the gradient of a weight goes."""

    dtype: torch.dtype
    main_grad: torch.Tensor | None = None  # the gradient is added to it, in its dtype, and not returned
    overwrites: bool = False  # main_grad is written, not added to
    store: Any = None  # keeps the operands, so that the gradient can be computed later
    parts: tuple[MainGrad, ...] = ()  # instead of main_grad: the weight has parts, one below the other
    is_slice: bool = False  # the weight is one group's slice of a parameter, which has one gradient
    is_told: bool = False  # autograd gets zeros in spite of main_grad, so that the parameter's hooks run

    def fields(self) -> tuple[Any, ...]:
        """Return all fields as a tuple, with each part as a tuple in it, which is what a function of `below_dynamo`
        takes."""
        parts = tuple([(part.rows, part.main_grad, part.overwrites) for part in self.parts])
        return self.dtype, self.main_grad, self.overwrites, self.store, parts, self.is_slice, self.is_told


@dataclass(slots=True)
class LinearFwdArgs(Saved):
    """The arguments of a linear's forward: `x` (…, K), or `x_q` if a producer has quantized it; `weight` (N, K), and
    `weight_q`, the weight as the GEMMs take it."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    x_q: Any
    weight_q: Any
    needs: Needs
    quantizers: LinearQuantizers
    numerics: Numerics
    wgrad: WeightGrad
    input_scale: DelayedScale  # delayed scaling, FP32 [1]
    grad_scale: DelayedScale  # a copy: it is written before a second backward reads it
    saves_original_input: bool
    grad_state: GradState | None
    parallel: Parallel | None = None  # None: the whole weight is here
    weight_again: Quantizer | None = None  # backward quantizes the weight with it; None: it reads `weight_q`
    weight_scale: DelayedScale = None  # delayed scaling, FP32 [1]
    input_again: Quantizer | None = None  # x's producer quantizes it with this again in backward; None: it does not
    probes: Probes | None = None  # where an inspector wants statistics to be added
    x_columns: Any = None  # the column-wise copy of x, if another linear that reads x has made it

    SAVED = ("x", "weight", "bias", "x_q", "weight_q", "input_scale", "grad_scale", "weight_scale", "x_columns")


@dataclass(slots=True)
class LinearBwdArgs(Saved):
    x: Any  # what wgrad contracts with dy
    weight: Any  # what dgrad contracts with dy
    grad_scale: DelayedScale
    input_scale: DelayedScale
    needs: Needs
    quantizers: LinearQuantizers
    numerics: Numerics
    wgrad: WeightGrad
    bias_dtype: torch.dtype | None
    saves_original_input: bool
    parallel: Parallel | None
    weight_again: Quantizer | None
    weight_scale: DelayedScale
    input_again: Quantizer | None
    probes: Probes | None = None

    SAVED = ("x", "weight", "grad_scale", "input_scale", "weight_scale")


@dataclass(slots=True)
class LinearMade:
    x_q: Any  # for the tokens of this rank
    amax: torch.Tensor | None


def linear_forward(a: LinearFwdArgs) -> tuple[torch.Tensor, LinearMade]:
    """Return y (M, N) in the dtype of activations, and what was made on the way."""
    x_q, amax, parallel = a.x_q, None, a.parallel
    if x_q is None:
        assert a.x is not None, "neither x nor x_q"
        x_q = as_matrix(a.x)
        quantizer = a.quantizers.input if parallel is None else input_quantizer(a, x_q.shape[0])
        if quantizer is not None and a.x_columns is not None:
            quantizer = quantizer.with_usage(rowwise=True, columnwise=False)
        if quantizer is not None and parallel is None:
            x_q, amax = quantize_scaled(x_q, quantizer, a.input_scale)
        elif quantizer is not None:
            x_q, amax = quantize_shard(x_q, quantizer, splits_of(parallel, "input"), a.input_scale)
    x, bias = x_q, a.bias
    if parallel is not None:
        x = _whole_input(a, x_q)
        bias = a.bias if parallel.mode == "column" else None
    if a.probes is not None:
        shown = x_q if isinstance(x_q, QuantizedTensorStorage) else x
        observe(a.probes.input, _tokens_of(a.x, shown, parallel), shown)
        observe(a.probes.weight, a.weight, a.weight_q)
    weight = in_high_precision(a.weight_q, a.numerics)
    y = multiply(x, weight, out_dtype=a.numerics.dtype, bias=bias, fast=a.numerics.fast_fprop)
    if parallel is not None and parallel.mode == "row":
        y = wait(start_sum(y, parallel))
        y = y if a.bias is None else run_op(add, y, a.bias)
    return y, LinearMade(x_q, amax)


def _tokens_of(x: torch.Tensor | None, x_q: Any, parallel: Parallel | None) -> torch.Tensor | None:
    """Return x for the same tokens as its quantized copy `x_q`: those of all ranks if they were gathered."""
    if x is None or parallel is None or matrix_shape(x.shape)[0] == x_q.shape[0]:
        return x
    return gather_rows(as_matrix(x), parallel.group)


def input_quantizer(a: LinearFwdArgs, rows: int) -> Quantizer | None:
    """Return the quantizer for this rank's tokens, `rows` of them, or None if they are gathered before they are
    quantized, or not quantized at all."""
    quantizer = a.quantizers.input
    return shard_quantizer(quantizer, rows) if quantizer is not None and gathers(a.parallel, "input") else quantizer


def _whole_input(a: LinearFwdArgs, x_q: Any) -> Any:
    """Return the tokens of all ranks as forward multiplies them."""
    if a.parallel is None or not gathers(a.parallel, "input"):
        return x_q
    quantizer = a.quantizers.input
    if quantizer is None:
        return gather_rows(x_q, a.parallel.group)
    wanted = quantizer.with_usage(rowwise=True, columnwise=False)
    x_q = kept(x_q, columnwise=False)
    return gather_quantized(x_q, wanted, a.input_scale, a.parallel, "input")[0]


def in_high_precision(weight: Any, numerics: Numerics) -> Any:
    """Return an unquantized weight in the dtype of activations, and a quantized one as it is."""
    is_ready = isinstance(weight, QuantizedTensorStorage) or weight.dtype == numerics.dtype
    return weight if is_ready else weight.to(numerics.dtype)


def linear_setup(a: LinearFwdArgs, made: LinearMade) -> LinearBwdArgs:
    """Return what backward needs, and nothing else."""
    override = a.numerics.override
    x: Any = None
    weight: Any = None
    if a.needs.weight and a.input_again is None:
        source = made.x_q if a.x is None else a.x
        rows = 0 if a.parallel is None else matrix_shape(source.shape)[0]  # they matter where tokens are gathered
        if keeps_input(a, rows):
            x = source  # itself, because what is saved may be an input, but no view of one
        elif a.x_columns is not None:
            x = a.x_columns
        else:
            is_row = gathers(a.parallel, "input") and not made.x_q.get_usages()["columnwise"]
            x = kept(made.x_q, columnwise=override is None and not is_row)
    if a.needs.input:
        if override == "high_precision":
            weight = a.weight_q if isinstance(a.weight, QuantizedTensorStorage) else a.weight
        elif a.weight_again is not None:
            weight = a.weight
        else:
            weight = kept(a.weight_q, columnwise=override is None)
    return LinearBwdArgs(
        x=x,
        weight=weight,
        grad_scale=a.grad_scale,
        input_scale=without_amax(a.input_scale) if a.saves_original_input or a.input_again is not None else None,
        needs=a.needs,
        quantizers=a.quantizers,
        numerics=a.numerics,
        wgrad=a.wgrad,
        bias_dtype=None if a.bias is None else a.bias.dtype,
        saves_original_input=a.saves_original_input,
        parallel=a.parallel,
        weight_again=a.weight_again,
        weight_scale=None if a.weight_again is None else a.weight_scale,
        input_again=a.input_again,
        probes=None if a.probes is None else watch_gradient(a.probes),
    )


def needs_original(quantizers: LinearQuantizers, numerics: Numerics, saves_original_input: bool) -> bool:
    """Return whether backward reads the unquantized input."""
    return (
        quantizers.input is None
        or numerics.override == "high_precision"
        or numerics.keeps_wgrad
        or (saves_original_input and numerics.override is None)
    )


def keeps_input(a: LinearFwdArgs, rows: int) -> bool:
    """Return whether the unquantized input, which has `rows` rows, must be there to be saved."""
    quantizer = a.quantizers.input
    if not a.needs.weight or quantizer is None or needs_original(a.quantizers, a.numerics, a.saves_original_input):
        return a.needs.weight
    if not gathers(a.parallel, "input"):
        return False
    is_first = shard_quantizer(quantizer, rows) is None
    return is_first or (quantizer.columnwise_usage and not serves_wgrad(quantizer, rows))


def takes_quantized(a: LinearFwdArgs, rows: int) -> bool:
    """Return whether a producer may quantize x itself: nobody reads the unquantized x, and no other rank is needed for
    it."""
    quantizer = input_quantizer(a, rows)
    if a.probes is not None:  # the unquantized x is compared with its copy
        return False
    return quantizer is not None and not keeps_input(a, rows) and not needs_others(a.parallel, "input", quantizer)


def takes_quantized_grad(b: LinearBwdArgs) -> bool:
    """Return whether a producer may quantize dy itself: nobody reads the unquantized dy, and no other rank is needed
    for it."""
    quantizer = b.quantizers.grad_output
    if quantizer is None or b.numerics.keeps_wgrad or b.probes is not None or not (b.needs.input or b.needs.weight):
        return False
    return not gathers(b.parallel, "grad_output") and not needs_others(b.parallel, "grad_output", quantizer)


def kept(x: Any, columnwise: bool) -> Any:
    """Return one direction of a storage, and any other tensor as it is."""
    return x.keep(rowwise=not columnwise, columnwise=columnwise) if isinstance(x, QuantizedTensorStorage) else x


def linear_backward(
    b: LinearBwdArgs, dy: Any, dy_q: Any = None, db: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dx (…, K), dW (N, K), db [N] and the amax of dy. `dy_q` and `db` are given if a producer has made them
    from dy."""
    if isinstance(dy, QuantizedTensorStorage):
        dy = dy.dequantize()
    amax, parallel = None, b.parallel
    g, leading = dy_q, (dy_q if dy is None else dy).shape[:-1]
    source = dy
    if g is None:
        g = source = as_matrix(dy)
        quantizer = b.quantizers.grad_output if b.needs.input or b.needs.weight else None
        if parallel is not None and gathers(parallel, "grad_output"):
            if b.numerics.keeps_wgrad and b.needs.weight:
                g = source = gather_rows(source, parallel.group)
                g, amax = (g, None) if quantizer is None else quantize_scaled(g, quantizer, b.grad_scale)
            elif b.needs.input or b.needs.weight:
                g, amax = gather_quantized(g, quantizer, b.grad_scale, parallel, "grad_output")
        elif quantizer is not None and parallel is None:
            g, amax = quantize_scaled(g, quantizer, b.grad_scale)
        elif quantizer is not None:
            g, amax = quantize_shard(g, quantizer, splits_of(parallel, "grad_output"), b.grad_scale)
        if b.probes is not None:
            observe(b.probes.grad_output, _tokens_of(dy, g, parallel), g)
    if b.needs.bias and db is None:
        assert b.bias_dtype is not None
        db = callee(column_sum, dy)(dy, b.bias_dtype)
    dx = None
    if b.needs.input:
        weight = _saved_weight(b)
        dx = multiply(g, weight, b_columnwise=True, out_dtype=b.numerics.dtype, fast=b.numerics.fast_dgrad)
        if parallel is not None and parallel.mode == "column":
            dx = start_sum(dx, parallel)
    dw = None
    if b.needs.weight:
        dw = weight_gradient(b.wgrad, source if b.numerics.keeps_wgrad else g, _saved_input(b), b.numerics.fast_wgrad)
    if dx is not None:
        dx = dx if parallel is None or parallel.mode == "row" else wait(dx)  # the sum overlaps with dW
        dx = dx if len(leading) == 1 else dx.view(*input_leading(leading, parallel), dx.shape[1])
    return dx, dw, db, amax


def as_multiplied(x: Any, numerics: Numerics) -> Any:
    """Return a quantized x dequantized if `override` asks backward not to compute on quantized tensors, and any other
    as it is."""
    is_quantized = isinstance(x, QuantizedTensorStorage)
    return x.dequantize(dtype=numerics.dtype) if is_quantized and numerics.override is not None else x


def _saved_weight(b: LinearBwdArgs) -> Any:
    """Return the weight as the input gradient multiplies it."""
    if b.weight_again is not None:
        with left_to_backward():
            return quantize_scaled(b.weight.detach(), b.weight_again, b.weight_scale)[0]
    return in_high_precision(as_multiplied(b.weight, b.numerics), b.numerics)


def _saved_input(b: LinearBwdArgs) -> Any:
    x, quantizer, parallel = b.x, b.quantizers.input, b.parallel
    if parallel is not None and gathers(parallel, "input"):
        override = b.numerics.override
        x = x if isinstance(x, QuantizedTensorStorage) else as_matrix(x)
        if quantizer is None or override == "high_precision" or b.numerics.keeps_wgrad:
            return gather_rows(x, parallel.group)
        wanted = quantizer.with_usage(rowwise=override is not None, columnwise=override is None)
        return as_multiplied(gather_quantized(x, wanted, b.input_scale, parallel, "input")[0], b.numerics)
    if not b.saves_original_input or quantizer is None or b.numerics.override is not None or b.numerics.keeps_wgrad:
        return as_multiplied(x, b.numerics)
    quantizer = quantizer.with_usage(rowwise=False, columnwise=True)
    with left_to_backward():
        return quantize_shard(as_matrix(x), quantizer, splits_of(parallel, "input"), b.input_scale)[0]


def weight_gradient(wgrad: WeightGrad, dy: Any, x: Any, fast: bool) -> torch.Tensor | None:
    """Return dW. If it went elsewhere, return None, or zeros for autograd; a store keeps the operands for later."""
    if wgrad.store is not None:
        wgrad.store.put(wgrad, dy, x, fast)
        return None
    return compute_weight_gradient(wgrad, dy, x, fast)


def compute_weight_gradient(wgrad: WeightGrad, dy: Any, x: Any, fast: bool) -> torch.Tensor | None:
    into = wgrad.main_grad
    if wgrad.parts:
        into = _add_to_parts(wgrad.parts, dy, x, fast)
    elif into is None:
        return multiply(dy, x, a_columnwise=True, b_columnwise=True, out_dtype=wgrad.dtype, fast=fast)
    elif wgrad.overwrites:
        into.copy_(multiply(dy, x, a_columnwise=True, b_columnwise=True, out_dtype=into.dtype, fast=fast))
    else:
        multiply(dy, x, a_columnwise=True, b_columnwise=True, out_dtype=into.dtype, accumulate=into, fast=fast)
    return stand_in(wgrad, into)


def stand_in(wgrad: WeightGrad, added: torch.Tensor) -> torch.Tensor | None:
    """Return what autograd gets for a gradient that was added elsewhere: zeros if `is_told`, else None."""
    return torch.zeros_like(added, dtype=wgrad.dtype) if wgrad.is_told else None


def _add_to_parts(parts: tuple[MainGrad, ...], dy: Any, x: Any, fast: bool) -> torch.Tensor:
    """Compute one product, in FP32 because each part may have a dtype of its own, and add or write its rows to the
    parts. Return the product."""
    whole = multiply(dy, x, a_columnwise=True, b_columnwise=True, out_dtype=torch.float32, fast=fast)
    for part, rows in zip(parts, whole.split([part.rows for part in parts]), strict=True):
        if part.main_grad is not None and part.overwrites:
            part.main_grad.copy_(rows)
        elif part.main_grad is not None:
            part.main_grad.add_(rows)
    return whole


def shaped(y: torch.Tensor, x: Any, parallel: Parallel | None = None) -> torch.Tensor:
    """Return the matrix y (M, N) with the leading dimensions of x (…, K); the number of tokens differs if they are
    gathered or scattered. It must be the last use of y, which is not valid afterwards.

    To autograd the result is not a view: FSDP2 puts a hook on what a module returns, which a write into a view would
    lose.
    """
    if len(x.shape) == 2:
        return y
    return torch.ops.aten._unsafe_view.default(y, (*output_leading(x.shape[:-1], parallel), y.shape[1]))


def amaxes_of(*inputs: tuple[Quantizer | None, torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return the amaxes of inputs whose quantizer has delayed scaling, for the module to enter into its history. None
    stands for one that was entered on the way."""
    return tuple([amax for quantizer, amax in inputs if quantizer is not None and quantizer.takes_scale()])


def _outputs(a: LinearFwdArgs, y: torch.Tensor, made: LinearMade) -> tuple[Any, ...]:
    assert a.x is not None
    return (shaped(y, a.x, a.parallel),), amaxes_of((a.quantizers.input, made.amax))


def _backward(b: LinearBwdArgs, dy: torch.Tensor) -> tuple[Any, ...]:
    dx, dw, db, amax = linear_backward(b, dy)
    return (dx, dw, db), (amax,)


LINEAR = Core(linear_forward, _outputs, linear_setup, _backward, ("x", "weight", "bias"))
