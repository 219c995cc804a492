"""Norm, linear, activation, linear: each hands its output over quantized, and its gradient back quantized.

With `recomputes`, backward runs the norm, the first linear and the activation again, so forward keeps only what they
read. The scales of delayed scaling are kept too, so that the second run gives the same bytes as the first; its amaxes
are not used.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from mezzotint.functional.activation import (
    ActivationBwdArgs,
    ActivationFwdArgs,
    activate,
    activation_gradient,
    activation_gradient_quantized,
    activation_quantized,
    activation_quantized_again,
    activation_setup,
    compress,
    decompress,
)
from mezzotint.functional.autograd import Core, GradState, Saved
from mezzotint.functional.layernorm_linear import (
    LayerNormLinearBwdArgs,
    LayerNormLinearFwdArgs,
    LayerNormLinearMade,
    further_outputs,
    layernorm_linear_backward,
    layernorm_linear_forward,
    layernorm_linear_setup,
)
from mezzotint.functional.linear import (
    LinearBwdArgs,
    LinearFwdArgs,
    LinearMade,
    amaxes_of,
    keeps_input,
    linear_backward,
    linear_forward,
    linear_setup,
    shaped,
    takes_quantized,
    takes_quantized_grad,
)
from mezzotint.functional.norm import NormOptions, Residual
from mezzotint.functional.observation import watch_gradient
from mezzotint.functional.tensor_parallel import splits_of
from mezzotint.kernels._lib import as_matrix
from mezzotint.tensor.partition import quantize_shard
from mezzotint.tensor.scale_slot import without_amax


@dataclass(slots=True)
class LayerNormMLPFwdArgs(Saved):
    """The arguments of a norm and an MLP: `fc1` and `fc2` come without their x. The others mean the same as in
    `LayerNormLinearFwdArgs`."""

    x: torch.Tensor
    branch: torch.Tensor | None
    branch_bias: torch.Tensor | None
    gamma: torch.Tensor
    beta: torch.Tensor | None
    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor | None
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor | None
    norm: NormOptions
    fc1: LinearFwdArgs
    fc2: LinearFwdArgs
    activation: str
    params: tuple[float, ...]
    recomputes: bool
    compresses: bool  # the activation's input is held in FP8 blocks
    returns_norm: bool
    gathers_norm: bool
    residual: Residual | None
    grad_state: GradState | None

    # If backward recomputes, these arguments are saved themselves.
    SAVED = ("x", "gamma", "beta", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "fc1", "fc2")


@dataclass(slots=True)
class LayerNormMLPBwdArgs(Saved):
    norm_fc1: LayerNormLinearBwdArgs
    activation: ActivationBwdArgs
    fc2: LinearBwdArgs

    SAVED = ("norm_fc1", "activation", "fc2")


@dataclass(slots=True)
class LayerNormMLPMade:
    norm_fc1: LayerNormLinearMade
    hidden: torch.Tensor
    fc2: LinearMade
    amax: torch.Tensor | None


def _norm_fc1(a: LayerNormMLPFwdArgs) -> LayerNormLinearFwdArgs:
    """Return the arguments of the norm and the first linear."""
    first = (a.x, a.branch, a.branch_bias, a.gamma, a.beta, a.fc1_weight, a.fc1_bias)
    return LayerNormLinearFwdArgs(*first, a.norm, a.fc1, a.returns_norm, a.gathers_norm, a.residual, None)


def _first_half(a: LayerNormMLPFwdArgs) -> tuple[LayerNormLinearMade, torch.Tensor, torch.Tensor | None]:
    """Run the norm, the first linear and the activation, and put the result into `a.fc2`. Return what the first two
    made, the activation's input, and the amax of fc2's x if the activation quantized it."""
    hidden, made = layernorm_linear_forward(_norm_fc1(a))
    fc2, amax = a.fc2, None
    act = ActivationFwdArgs(hidden, a.activation, a.params)
    quantizer = fc2.quantizers.input
    if quantizer is None or not takes_quantized(fc2, hidden.shape[0]):
        fc2.x, fc2.x_q = activate(act), None
    else:
        fc2.x = None
        fc2.x_q, amax = activation_quantized(act, quantizer, fc2.input_scale)
    return made, hidden, amax


def layernorm_mlp_forward(a: LayerNormMLPFwdArgs) -> tuple[torch.Tensor, LayerNormMLPMade]:
    """Return y (M, hidden) and what was made on the way."""
    made, hidden, amax = _first_half(a)
    a.fc2.weight, a.fc2.bias = a.fc2_weight, a.fc2_bias
    y, fc2 = linear_forward(a.fc2)
    return y, LayerNormMLPMade(made, hidden, fc2, fc2.amax if amax is None else amax)


def layernorm_mlp_setup(a: LayerNormMLPFwdArgs, made: LayerNormMLPMade) -> LayerNormMLPBwdArgs | LayerNormMLPFwdArgs:
    if not a.recomputes:
        return _setup(a, made.norm_fc1, made.hidden, made.fc2)
    a.x, a.branch, a.branch_bias = made.norm_fc1.norm.x, None, None  # `norm.x` is their sum
    a.grad_state = None  # it holds live buffers, and no core reads it
    for fc in (a.fc1, a.fc2):
        # These are made again, or this object holds them already.
        fc.x = fc.x_q = fc.weight = fc.bias = None
        fc.input_scale = without_amax(fc.input_scale)
        fc.probes = watch_gradient(fc.probes)  # forward's probes have seen the rest already
    return a


def _setup(
    a: LayerNormMLPFwdArgs, norm_fc1: LayerNormLinearMade, hidden: torch.Tensor, fc2: LinearMade
) -> LayerNormMLPBwdArgs:
    act = ActivationFwdArgs(hidden, a.activation, a.params)
    held = activation_setup(act, None)
    if a.compresses:
        held.x = compress(hidden)
    return LayerNormMLPBwdArgs(layernorm_linear_setup(_norm_fc1(a), norm_fc1), held, linear_setup(a.fc2, fc2))


def _recompute(a: LayerNormMLPFwdArgs) -> LayerNormMLPBwdArgs:
    """Run the first half again and return what backward needs."""
    made, hidden, _ = _first_half(a)
    fc2 = a.fc2
    fc2.weight, fc2.bias = a.fc2_weight, a.fc2_bias
    x_q = fc2.x if fc2.x_q is None else fc2.x_q
    if fc2.x is not None and fc2.quantizers.input is not None and not keeps_input(fc2, hidden.shape[0]):
        # It is a shard, which its producer could not quantize without the other ranks.
        x_q = quantize_shard(fc2.x, fc2.quantizers.input, splits_of(fc2.parallel, "input"), fc2.input_scale)[0]
    return _setup(a, made, hidden, LinearMade(x_q, None))


def layernorm_mlp_backward(
    b: LayerNormMLPBwdArgs | LayerNormMLPFwdArgs, dy: torch.Tensor, *further: torch.Tensor
) -> tuple[Any, ...]:
    """Return dx, the gradients of the branch and of its bias, dgamma, dbeta, dW1, db1, dW2, db2; then the amaxes of
    both output gradients. `further` holds the gradients of the `further_outputs`."""
    if isinstance(b, LayerNormMLPFwdArgs):
        b = _recompute(b)
    fc1, fc2, act = b.norm_fc1.linear, b.fc2, decompress(b.activation)
    if fc2.input_again is not None:
        fc2 = replace(fc2, x=activation_quantized_again(act, fc2.input_again, fc2.input_scale))
    da, dw2, db2, amax2 = linear_backward(fc2, dy)
    dh_q, db1, amax1, dh = None, None, None, None
    if da is not None:
        da = as_matrix(da)  # a matrix, like the activation's input
        quantizer = fc1.quantizers.grad_output
        if quantizer is None or not takes_quantized_grad(fc1):
            dh = activation_gradient(act, da)
        else:
            sums = fc1.bias_dtype if fc1.needs.bias else None
            dh_q, amax1, db1 = activation_gradient_quantized(act, da, quantizer, fc1.grad_scale, sums)
    *first, own_amax = layernorm_linear_backward(b.norm_fc1, dh, further, dh_q, db1)
    return (*first, dw2, db2), (own_amax if amax1 is None else amax1, None, amax2, None)


def _outputs(a: LayerNormMLPFwdArgs, y: torch.Tensor, made: LayerNormMLPMade) -> tuple[Any, ...]:
    y = shaped(y, a.x)  # the tokens that fc1 gathered, fc2 has scattered
    amaxes = amaxes_of((a.fc1.quantizers.input, made.norm_fc1.amax), (a.fc2.quantizers.input, made.amax))
    return (y, *further_outputs(_norm_fc1(a), made.norm_fc1)), amaxes


LAYERNORM_MLP = Core(
    layernorm_mlp_forward,
    _outputs,
    layernorm_mlp_setup,
    layernorm_mlp_backward,
    ("x", "branch", "branch_bias", "gamma", "beta", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
)
