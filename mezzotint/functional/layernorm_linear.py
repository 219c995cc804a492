"""A norm and the linear behind it: the norm hands its output over quantized."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from mezzotint.comm.collectives import reduce_scatter
from mezzotint.functional.autograd import Core, GradState, Saved
from mezzotint.functional.linear import (
    LinearBwdArgs,
    LinearFwdArgs,
    LinearMade,
    amaxes_of,
    input_quantizer,
    linear_backward,
    linear_forward,
    linear_setup,
    shaped,
    takes_quantized,
)
from mezzotint.functional.norm import (
    NormBwdArgs,
    NormFwdArgs,
    NormMade,
    NormOptions,
    Residual,
    branch_gradients,
    norm_forward,
    norm_forward_quantized,
    norm_gradients,
    norm_quantized_again,
    norm_setup,
)
from mezzotint.functional.tensor_parallel import gathers
from mezzotint.kernels._lib import matrix_shape
from mezzotint.tensor.partition import gather_rows


@dataclass(slots=True)
class LayerNormLinearFwdArgs:
    """The arguments of a norm and its linear: `linear` comes without its x, which the norm makes. `branch` and
    `branch_bias` mean the same as in `NormFwdArgs`."""

    x: torch.Tensor
    branch: torch.Tensor | None
    branch_bias: torch.Tensor | None
    gamma: torch.Tensor
    beta: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm: NormOptions
    linear: LinearFwdArgs
    returns_norm: bool  # the norm's output is an output too
    gathers_norm: bool  # it is returned for the tokens of all ranks
    residual: Residual | None  # x, or x + branch, is the last output
    grad_state: GradState | None


@dataclass(slots=True)
class LayerNormLinearBwdArgs(Saved):
    norm: NormBwdArgs
    linear: LinearBwdArgs
    gathers_norm: bool
    residual: Residual | None

    SAVED = ("norm", "linear")


@dataclass(slots=True)
class LayerNormLinearMade:
    norm: NormMade
    linear: LinearMade
    norm_out: torch.Tensor | None
    amax: torch.Tensor | None


def _norm(a: LayerNormLinearFwdArgs) -> NormFwdArgs:
    return NormFwdArgs(
        x=a.x, gamma=a.gamma, beta=a.beta, options=a.norm, grad_state=None, branch=a.branch, branch_bias=a.branch_bias
    )


def layernorm_linear_forward(a: LayerNormLinearFwdArgs) -> tuple[torch.Tensor, LayerNormLinearMade]:
    """Return y (M, N) and what was made on the way."""
    norm, linear = _norm(a), a.linear
    linear.weight, linear.bias = a.weight, a.bias
    norm_out, amax = None, None
    rows = matrix_shape(a.x.shape)[0]
    quantizer = input_quantizer(linear, rows)
    if quantizer is None or a.returns_norm or not takes_quantized(linear, rows):
        norm_out, norm_made = norm_forward(norm)
        linear.x = norm_out
    else:
        linear.x_q, amax, norm_made = norm_forward_quantized(norm, quantizer, linear.input_scale)
    y, made = linear_forward(linear)
    return y, LayerNormLinearMade(norm_made, made, norm_out, made.amax if amax is None else amax)


def layernorm_linear_setup(a: LayerNormLinearFwdArgs, made: LayerNormLinearMade) -> LayerNormLinearBwdArgs:
    norm = norm_setup(_norm(a), made.norm, is_applied_again=a.linear.input_again is not None)
    return LayerNormLinearBwdArgs(norm, linear_setup(a.linear, made.linear), gathers_norm(a), a.residual)


def gathers_norm(a: LayerNormLinearFwdArgs) -> bool:
    """Return whether the norm's output is returned for the tokens of all ranks."""
    return a.returns_norm and a.gathers_norm and gathers(a.linear.parallel, "input")


def norm_output(a: LayerNormLinearFwdArgs, made: LayerNormLinearMade) -> Any:
    """Return the norm's output as the module returns it: gathered over ranks if that was asked for."""
    if made.norm_out is None or a.linear.parallel is None or not gathers_norm(a):
        return made.norm_out
    return gather_rows(made.norm_out, a.linear.parallel.group)


def further_outputs(a: LayerNormLinearFwdArgs, made: LayerNormLinearMade) -> tuple[Any, ...]:
    """Return the outputs that follow y: the norm's output and the residual stream, each if it was asked for."""
    norm_out = (norm_output(a, made),) if a.returns_norm else ()
    return (*norm_out, made.norm.x) if a.residual is not None else norm_out


def layernorm_linear_backward(
    b: LayerNormLinearBwdArgs, dy: Any, further: tuple[Any, ...], dy_q: Any = None, db: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """Return dx, the gradients of the branch and of its bias, dgamma, dbeta, dW, db, and the amax of dy. `further`
    holds the gradients of the `further_outputs`; `dy_q` and `db` are given if a producer has made them from dy."""
    d_residual = None if b.residual is None else further[-1]
    outside = further if b.residual is None else further[:-1]
    d_norm_out = outside[0] if outside else None
    linear = b.linear
    if linear.input_again is not None:
        linear = replace(linear, x=norm_quantized_again(b.norm, linear.input_again, linear.input_scale))
    dh, dw, db, amax = linear_backward(linear, dy, dy_q, db)
    if d_norm_out is not None and b.gathers_norm:
        assert b.linear.parallel is not None
        d_norm_out = reduce_scatter(d_norm_out, b.linear.parallel.group)
    if dh is None:
        dh = d_norm_out
    else:
        dh = dh.view(b.norm.x.shape)
        if d_norm_out is not None:
            dh = dh + d_norm_out
    if dh is None:
        return None, None, None, None, None, dw, db, amax
    dx, dgamma, dbeta = norm_gradients(b.norm, dh, d_residual)
    return dx, *branch_gradients(b.residual, dx), dgamma, dbeta, dw, db, amax


def _outputs(a: LayerNormLinearFwdArgs, y: torch.Tensor, made: LayerNormLinearMade) -> tuple[Any, ...]:
    y = shaped(y, a.x, a.linear.parallel)
    return (y, *further_outputs(a, made)), amaxes_of((a.linear.quantizers.input, made.amax))


def _backward(b: LayerNormLinearBwdArgs, dy: torch.Tensor, *further: torch.Tensor) -> tuple[Any, ...]:
    *gradients, amax = layernorm_linear_backward(b, dy, further)
    return tuple(gradients), (amax,)


LAYERNORM_LINEAR = Core(
    layernorm_linear_forward,
    _outputs,
    layernorm_linear_setup,
    _backward,
    ("x", "branch", "branch_bias", "gamma", "beta", "weight", "bias"),
)
