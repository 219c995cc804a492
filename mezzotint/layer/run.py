"""The runs of modules: this module makes the weights and arguments of each GEMM, and delayed scaling's state, from a
plan and tensors.

A module gathers the tensors of a run and hands them, with the plan, to its function (`below_dynamo`). All that computes
is in there, the same for eager code and for graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mezzotint.comm.groups import group_by_name
from mezzotint.functional.autograd import GradState
from mezzotint.functional.grouped_linear import GroupedLinearFwdArgs, is_stack
from mezzotint.functional.linear import LinearFwdArgs, MainGrad, WeightGrad
from mezzotint.functional.observation import Probes
from mezzotint.functional.weight import quantize_weight, quantize_weights
from mezzotint.kernels._lib import write_op
from mezzotint.kernels.delayed import delayed_saw_, delayed_snapshot_
from mezzotint.layer.plan import Plan
from mezzotint.layer.scaling_state import first_rows
from mezzotint.quantization import update_rule
from mezzotint.recipe import DelayedScalingRequest, slot
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.scale_slot import DelayedScale, scale_alone, scale_slot
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import below_dynamo, read_live, traced_as


@dataclass(slots=True)
class RunSettings:
    """A `RunSettings` holds the plan of one run, and the parts of the module's state that it uses."""

    plan: Plan
    scales: torch.Tensor | None = None  # forward, FP32 [3 per GEMM]
    weight_scales: torch.Tensor | None = None  # the scales that kept weights were quantized with
    grad_scales: torch.Tensor | None = None  # FP32 [2 per GEMM]; None without a backward
    copies_scales: bool = False  # of forward, because backward reads them, too
    records: bool = False  # amaxes enter the history
    calibrates: bool = False  # computes in high precision, but enters amaxes of inputs and weights
    caches: bool = False
    reuses: bool = False
    groups: tuple[Any, ...] = ()  # groups of ranks over which amaxes are reduced
    is_first: bool = False  # the first run since the last update of scales: its backward comes last
    skips: torch.Tensor | None = None  # FP32 [1]: kept weights are updated unless it is 1
    probes: tuple[Probes, ...] | None = None  # one for each GEMM, if the module is inspected


class Delayed(NamedTuple):
    """A `Delayed` holds delayed scaling's tensors and constants for one run."""

    scales: torch.Tensor  # forward, FP32 [3 per GEMM]
    weight_scales: torch.Tensor | None  # those that kept weights were quantized with; None if they are `scales`
    grad_scales: torch.Tensor | None  # FP32 [2 per GEMM]; None without a backward
    history: torch.Tensor  # forward's, FP32 (L, 3 per GEMM)
    scale_bwd: torch.Tensor  # a live buffer, like history_bwd
    history_bwd: torch.Tensor
    number: torch.Tensor | None  # the module's, and `ORDER_TOKEN`: only if ranks reduce their amaxes
    order: torch.Tensor | None
    records: bool  # amaxes enter the history
    copies_scales: bool  # of forward, because backward reads them, too
    groups: tuple[str, ...]  # names of the groups over which amaxes are reduced
    is_first: bool  # the first run since the last update: its backward comes last
    clears: bool  # see `backward_clears`

    def entered_history(self) -> torch.Tensor | None:
        """Return the history that forward's amaxes enter, or None if they enter none."""
        return self.history if self.records else None


class KeptWeights(NamedTuple):
    """A `KeptWeights` holds weights that were quantized before the run, because they are kept for other runs, and their
    amaxes."""

    weights_q: tuple[Any, ...]
    amaxes: Sequence[torch.Tensor | None]


def with_copies(delayed: Delayed | None) -> Delayed | None:
    """Return what the functions of a run read, with copies of the scales for backward, because the scales are written
    before that. The copies are made in forward, which writes the history."""
    if delayed is None:
        return None
    scales, weight_scales, grad_scales, history = delayed[:4]
    if delayed.copies_scales:
        scales, copy = snapshot(history, scales, grad_scales)
        grad_scales = None if grad_scales is None else copy
    elif grad_scales is not None:
        grad_scales = snapshot(history, grad_scales, None)[0]
    weight_scales = scales if weight_scales is None else weight_scales
    return delayed._replace(scales=scales, weight_scales=weight_scales, grad_scales=grad_scales)


@below_dynamo
def snapshot(
    anchor: torch.Tensor, scale: torch.Tensor, other: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of one or two scales, in one launch."""
    return write_op(delayed_snapshot_, anchor, scale, other)


def scale_of(scales: Any, gemm: int, tensor_type: str) -> Any:
    """Return the scale [1] of a GEMM's tensor out of those of its direction [n], or None if there are no scales."""
    if scales is None:
        return None
    i = slot(gemm, tensor_type)
    return scales[i : i + 1]


def quantized_weights(
    plan: Plan, weights: Sequence[Any], run: Delayed | RunSettings | None
) -> tuple[tuple[Any, ...], Sequence[torch.Tensor | None]]:
    """Return the weights as the GEMMs take them, and their amaxes if delayed scaling (`run`) needs them."""
    if len(weights) == 1:
        scale = None if run is None else _weight_scale(plan, 0, run)
        weight_q, _, amax = quantize_weight(
            weights[0], plan.quantizers[0].weight, scale=scale, parallel=plan.parallels[0]
        )
        return (weight_q,), (amax,)
    gemms = range(len(weights))
    quantizers = [plan.quantizers[gemm].weight for gemm in gemms]
    scales = [None if run is None else _weight_scale(plan, gemm, run) for gemm in gemms]
    if not any(plan.parallels):
        together = quantize_weights(weights, quantizers, [scale_alone(scale) for scale in scales])
        if together is not None:
            return together
    made = [
        quantize_weight(weight, quantizer, scale=scale, parallel=parallel)
        for weight, quantizer, scale, parallel in zip(weights, quantizers, scales, plan.parallels, strict=True)
    ]
    return tuple([weight_q for weight_q, _, _ in made]), [amax for _, _, amax in made]


def group_weights_again(plan: Plan, weights: Sequence[Any]) -> tuple[Quantizer, ...]:
    """Return the quantizers with which backward quantizes the weights of all groups again, or () if it reads those of
    forward. The plan has them for all groups or for none."""
    if isinstance(weights[0], QuantizedTensorStorage):
        return ()
    return tuple([quantizer for quantizer in plan.weights_again if quantizer is not None])


def _weight_scale(plan: Plan, gemm: int, run: Delayed | RunSettings) -> DelayedScale:
    """Return the scale of a weight; in the run of a module it says where the amax is entered, but for a shard's."""
    if isinstance(run, RunSettings) or plan.parallels[gemm] is not None:
        return scale_of(run.weight_scales, gemm, "weight")
    assert run.weight_scales is not None  # `with_copies` has filled it in
    return scale_slot(run.weight_scales, slot(gemm, "weight"), run.entered_history())


def linear_args(
    plan: Plan,
    gemm: int,
    weight: Any,
    bias: torch.Tensor | None,
    weight_q: Any,
    delayed: Delayed | None,
    wgrad: WeightGrad | None,
    probes: tuple[Probes, ...] | None = None,
) -> LinearFwdArgs:
    """Return the arguments of one GEMM's linear, without x."""
    input_scale, grad_scale, weight_scale = (None, None, None) if delayed is None else _scales(plan, gemm, delayed)
    return LinearFwdArgs(
        x=None,
        weight=weight,
        bias=bias,
        x_q=None,
        weight_q=weight_q,
        needs=plan.needs[gemm],
        quantizers=plan.quantizers[gemm],
        numerics=plan.numerics[gemm],
        wgrad=WeightGrad(weight.dtype) if wgrad is None else wgrad,
        input_scale=input_scale,
        grad_scale=grad_scale,
        saves_original_input=plan.saves_original_input,
        weight_again=None if isinstance(weight, QuantizedTensorStorage) else plan.weights_again[gemm],
        weight_scale=weight_scale,
        grad_state=None,
        parallel=plan.parallels[gemm],
        input_again=plan.inputs_again[gemm],
        probes=None if probes is None else probes[gemm],
    )


def grouped_linear_args(
    plan: Plan,
    x: torch.Tensor,
    weights: tuple[Any, ...],
    biases: tuple[Any, ...],
    weights_q: tuple[Any, ...],
    splits: tuple[int, ...],
    delayed: Delayed | None,
    wgrads: tuple[tuple[Any, ...], ...] | None,
    probes: tuple[Probes, ...] | None,
) -> GroupedLinearFwdArgs:
    """Return the arguments of a grouped linear, for x (M, K) whose groups have `splits` rows. `weights` and `biases`
    are as in `GroupedLinearFwdArgs`, and `wgrads` are fields of `WeightGrad`."""
    gemms, stacks = range(len(plan.quantizers)), is_stack(weights, 2)
    dtypes = [weights[0 if stacks else gemm].dtype for gemm in gemms]
    scales, grad_scales = (None, None) if delayed is None else (delayed.scales, delayed.grad_scales)
    weight_scales = None if delayed is None else delayed.weight_scales
    return GroupedLinearFwdArgs(
        x=x,
        weights=weights,
        biases=biases,
        weights_q=weights_q,
        splits=splits,
        needs=plan.needs[0],
        quantizers=plan.quantizers,
        numerics=plan.numerics[0],
        wgrads=tuple([live_gradient(wgrads, gemm) or WeightGrad(dtypes[gemm], is_slice=stacks) for gemm in gemms]),
        input_scales=tuple([scale_of(scales, gemm, "input") for gemm in gemms]),
        grad_scales=tuple([scale_of(grad_scales, gemm, "grad_output") for gemm in gemms]),
        saves_original_input=plan.saves_original_input or all(plan.inputs_again),
        weights_again=group_weights_again(plan, weights),
        weight_scales=tuple([scale_of(weight_scales, gemm, "weight") for gemm in gemms]),
        grad_state=None,
        probes=probes,
    )


def _scales(plan: Plan, gemm: int, run: Delayed) -> tuple[DelayedScale, DelayedScale, DelayedScale]:
    """Return the scales of one GEMM's input, of its output gradient, and of the weight that backward quantizes again.

    They say where amaxes are entered. Not so those of the shards of a tensor, and of gradients whose amaxes are handed
    over, or which a user's own rule reads.
    """
    if plan.parallels[gemm] is not None:
        x, dy = scale_of(run.scales, gemm, "input"), scale_of(run.grad_scales, gemm, "grad_output")
        return x, dy, scale_of(run.weight_scales, gemm, "weight")
    assert plan.request is not None
    assert run.weight_scales is not None
    x = scale_slot(run.scales, slot(gemm, "input"), run.entered_history())
    weight = scale_slot(run.weight_scales, slot(gemm, "weight"), None)
    is_handed_over = run.clears and bool(run.groups)
    if run.grad_scales is None or is_handed_over or plan.request.has_own_rule():
        return x, scale_of(run.grad_scales, gemm, "grad_output"), weight
    return x, scale_slot(run.grad_scales, slot(gemm, "grad_output"), run.history_bwd), weight


def live_gradient(wgrads: tuple[tuple[Any, ...], ...] | None, gemm: int) -> WeightGrad | None:
    """Return where the gradient of a GEMM's weight goes, from the fields that the module gave (`WeightGrad.fields`), or
    None if it goes to autograd. The compiler is told that other backwards add to the same tensors."""
    if wgrads is None:
        return None
    made = WeightGrad(*wgrads[gemm])
    parts: tuple[Any, ...] = made.parts
    made.parts = tuple([MainGrad(*part) for part in parts])
    read_live(made.main_grad, *[part.main_grad for part in made.parts])
    return made


def grad_state(plan: Plan, delayed: Delayed | None) -> GradState | None:
    """Return the live state of gradients into which the backward of a run enters its amaxes."""
    if delayed is None or delayed.grad_scales is None:
        return None
    assert plan.request is not None
    groups = tuple([group_by_name(name) for name in delayed.groups])
    live = delayed.scale_bwd, delayed.history_bwd, delayed.number
    state = live_grad_state(plan.request, *live, groups, delayed.is_first, delayed.clears)
    state.order = delayed.order
    return state


def live_grad_state(
    request: DelayedScalingRequest,
    scale: torch.Tensor,
    buffer: torch.Tensor,
    number: torch.Tensor | None,
    groups: tuple[Any, ...],
    is_first: bool,
    clears: bool,
) -> GradState:
    """Return the live state of gradients made of these tensors; for `clears` see `backward_clears`."""
    length = request.amax_history_len
    history = buffer if clears else first_rows(buffer, length)
    rule = update_rule(request, forward=False)
    rows = length if clears else None
    return GradState(scale, history, *rule, groups, rows=rows, number=number, is_first=is_first)


@traced_as(lambda request: not request.has_own_rule())
def backward_clears(request: DelayedScalingRequest) -> bool:
    """Return whether the update of the gradients' history clears its unused rows. It does so in a graph, whose forward
    must not write what the backward of another run reads. A user's own rule knows only the used rows."""
    return False


def record_amaxes(
    plan: Plan,
    delayed: Delayed | None,
    amaxes: Sequence[torch.Tensor | None],
    weight_amaxes: Sequence[torch.Tensor | None],
) -> None:
    """Enter the amaxes of a run into the current row of the history: those that a core returned, one for each GEMM
    whose input has delayed scaling, and those of the weights. None stands for one that was entered already."""
    if delayed is None or not delayed.records:
        return
    seen: list[torch.Tensor] = []
    slots: list[int] = []
    rest = list(amaxes)
    for gemm, weight_amax in enumerate(weight_amaxes):
        quantizer = plan.quantizers[gemm].input
        amax = rest.pop(0) if quantizer is not None and quantizer.takes_scale() else None
        if amax is not None:
            seen.append(amax)
            slots.append(slot(gemm, "input"))
        if weight_amax is not None:
            seen.append(weight_amax)
            slots.append(slot(gemm, "weight"))
    if slots:
        write_op(delayed_saw_, delayed.history, seen, slots)
