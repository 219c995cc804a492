"""The run of a pipeline: it runs operations one after the other, in groups that fusions have made, in one autograd
function.

    forward    for each forward group:  x, extra outputs = group(x, extra inputs), with what its neighbours hand over
    backward   for each backward group, from the end:  dx, gradients of parameters and extra inputs

Forward and backward groups are independent fusions of the same basic operations (`fusion.py`). Backward ends at the
first operation that needs a gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mezzotint.functional.autograd import flatten, unflatten
from mezzotint.ops.context import OperationContext, restored
from mezzotint.ops.fusion import PlacedOperation
from mezzotint.ops.op import BasicOperation, FusibleOperation
from mezzotint.ops.quantizing import as_tensor, plain
from mezzotint.ops.run import Start
from mezzotint.ops.wiring import Wiring
from mezzotint.tracing import differentiates_forward, read_live, traced_as, write_count


class Pipeline:
    """A `Pipeline` describes one run: everything that forward and backward need to know, decided before autograd
    begins."""

    __slots__ = (
        "backward",
        "basic_ops",
        "first",
        "forward",
        "grad_quantizers",
        "input_quantizers",
        "kwargs",
        "kwargs_given",
        "needs_input_grad",
        "num_params",
        "runs",
        "wiring",
    )

    def __init__(
        self,
        basic_ops: list[BasicOperation],
        forward: list[PlacedOperation],
        backward: list[PlacedOperation],
        wiring: Wiring,
        kwargs: list[dict[str, Any]],
        starts: Sequence[Start | None],
        num_params: list[int],
        first: int,
        needs_input_grad: bool,
    ) -> None:
        self.basic_ops, self.forward, self.backward, self.wiring = basic_ops, forward, backward, wiring
        self.num_params, self.first, self.needs_input_grad = num_params, first, needs_input_grad
        # A run begins once, here; both halves of its operation's forward get it.
        self.runs = [None if start is None else op._begin(start) for op, start in zip(basic_ops, starts, strict=True)]
        self.kwargs_given = kwargs
        self.kwargs = [
            {**given, "run": run} if op._takes_run else given
            for op, given, run in zip(basic_ops, kwargs, self.runs, strict=True)
        ]
        self.input_quantizers = [op._input_quantizer(run) for op, run in zip(basic_ops, self.runs, strict=True)]
        self.grad_quantizers = [
            op._grad_output_quantizer(run) if place >= first else None
            for place, (op, run) in enumerate(zip(basic_ops, self.runs, strict=True))
        ]

    def input_quantizer(self, place: int) -> Any:
        """Return the input quantizer of the operation at this place, or None past the end."""
        return self.input_quantizers[place] if place < len(self.basic_ops) else None

    def grad_quantizer(self, place: int) -> Any:
        """Return the gradient quantizer of the operation at this place, or None before the beginning."""
        return self.grad_quantizers[place] if place >= 0 else None

    def contexts(self) -> list[OperationContext]:
        return [
            OperationContext(place >= self.first, self.grad_quantizer(place - 1))
            for place in range(len(self.basic_ops))
        ]


def _run_forward(
    pipeline: Pipeline, input_: Any, extra_inputs: Sequence[Any], ctxs: list[OperationContext]
) -> tuple[Any, list[Any]]:
    """Run the forward groups, and return the output and the extra outputs for the caller."""
    x, channels = input_, {}  # type: ignore[var-annotated]
    extra_outputs: list[Any] = []
    for op, places in pipeline.forward:
        given: dict[str, Any] = {
            "basic_op_extra_inputs": [pipeline.wiring.inputs_of(i, extra_inputs, channels) for i in places],
            "prev_op_grad_output_quantizer": pipeline.grad_quantizer(places[0] - 1),
            "next_op_input_quantizer": pipeline.input_quantizer(places[-1] + 1),
            "basic_op_kwargs": [pipeline.kwargs[i] for i in places],
        }
        own = [ctxs[i] for i in places]
        if op.is_split:
            y, extra, tensors_to_save = op.fuser_forward_compute(x, **given)
            if places[-1] >= pipeline.first:
                op.fuser_forward_save_ctx(own, x, tensors_to_save, **given)
        else:
            y, extra = _run_whole(pipeline, op, places, own, as_tensor(x), given)
            if places[-1] >= pipeline.first:
                extra = [tuple(map(_needing_grad, outputs)) for outputs in extra]
        x, extra = y, list(extra)
        if len(extra) != len(places):
            raise RuntimeError(
                f"{type(op).__name__} gave extra outputs of {len(extra)} operations: it stands for {len(places)}"
            )
        for place, outputs in zip(places, extra, strict=True):
            extra_outputs.extend(pipeline.wiring.give_outputs(place, op, tuple(outputs), channels))
    return x, extra_outputs


def _needing_grad(value: Any) -> Any:
    """Return an extra output that says that it needs a gradient. What was computed here has no autograd history, and an
    operation in whole form that reads it from a channel goes by `requires_grad`."""
    is_new = isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad
    return value.detach().requires_grad_() if is_new else value


def _run_whole(
    pipeline: Pipeline,
    op: FusibleOperation,
    places: tuple[int, ...],
    ctxs: list[OperationContext],
    x: Any,
    given: dict[str, Any],
) -> Any:
    """Run a forward in whole form, as users write it; what built-in operations need besides its arguments is put into
    the contexts."""
    if not op.is_fused_op:
        given["basic_op_kwargs"] = [pipeline.kwargs_given[places[0]]]
    for ctx, place in zip(ctxs, places, strict=True):
        object.__setattr__(ctx, "_run", pipeline.runs[place])
    made = op.fuser_forward(ctxs, x, **given)
    for ctx in ctxs:
        object.__setattr__(ctx, "_run", None)  # backward needs none of the run's tensors
    return made


class _Function(torch.autograd.Function):
    """This autograd function runs the pipeline. Its `forward` is called directly if gradients are off: then nothing
    here owns its outputs."""

    @staticmethod
    def forward(
        func_ctx: Any, input_: Any, pipeline: Pipeline, set_output_requires_grad: bool, *params_and_extra_inputs: Any
    ) -> Any:
        extra_inputs = params_and_extra_inputs[sum(pipeline.num_params) :]
        ctxs = pipeline.contexts()
        version = write_count(input_) if set_output_requires_grad else 0
        output, extra_outputs = _run_forward(pipeline, input_, extra_inputs, ctxs)
        outputs = [as_tensor(output), *extra_outputs]
        if not isinstance(outputs[0], torch.Tensor):
            raise TypeError(
                f"the pipeline ends with {type(outputs[0]).__name__}, which is no tensor, as a quantizer with "
                "custom=True makes it: put an operation that computes with it behind"
            )
        if set_output_requires_grad:
            if version != write_count(input_):  # autograd would not see it, because tensors are saved only from here on
                raise RuntimeError(
                    "an operation wrote over the input, which backward may need: AddExtraInput(in_place=True) got its "
                    "memory as the extra input. Give a copy, or make it with in_place=False"
                )
            flat: list[torch.Tensor] = []
            func_ctx.live = []
            func_ctx.specs = [flatten(ctx.to_save, flat, func_ctx.live) for ctx in ctxs]
            for ctx in ctxs:
                ctx.to_save = ()
            func_ctx.save_for_backward(*flat)
            func_ctx.ctxs, func_ctx.pipeline = ctxs, pipeline
            for run in pipeline.runs:
                if run is not None and run.grad_state is not None:
                    state = run.grad_state
                    read_live(state.scale, state.history, state.number, state.order)
            # Autograd owns what is returned here, so it gets a tensor of its own for each output.
            seen = [input_, *extra_inputs]
            for i, made in enumerate(outputs):
                if isinstance(made, torch.Tensor) and any(made is other for other in seen):
                    outputs[i] = made.view_as(made)
                seen.append(made)
            needs_grad = pipeline.wiring.outputs_that_need_grad(pipeline.first)
            func_ctx.mark_non_differentiable(
                *[made for made, needed in zip(outputs[1:], needs_grad, strict=True) if not needed]
            )
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # as in `functional/autograd.py`
    def backward(func_ctx: Any, grad_output: Any, *grad_extra_outputs: Any) -> Any:
        pipeline: Pipeline = func_ctx.pipeline
        wiring, count = pipeline.wiring, len(pipeline.basic_ops)
        tensors, live = list(func_ctx.saved_tensors), list(func_ctx.live)
        ctxs = [
            restored(ctx, unflatten(spec, tensors, live))
            for ctx, spec in zip(func_ctx.ctxs, func_ctx.specs, strict=True)
        ]
        grad_params: list[Any] = [(None,) * n for n in pipeline.num_params]
        grad_extra_inputs: list[Any] = [()] * count
        channel_grads: dict[str, Any] = {}
        for run in pipeline.runs:
            if run is not None:
                run.begin_backward()
        dy = grad_output
        for op, places in pipeline.backward:
            if places[-1] < pipeline.first:
                break
            own = [ctxs[i] for i in places]
            grads = [wiring.grads_of_outputs(i, grad_extra_outputs, channel_grads) for i in places]
            dy = dy if op.is_split or op.is_fused_op else as_tensor(dy)  # a user's operation takes tensors
            dy, params, extra = op.fuser_backward(own, dy, basic_op_grad_extra_outputs=grads)
            for place, param_grads, extra_grads in zip(places, params, extra, strict=True):
                grad_params[place] = _counted(tuple(param_grads), pipeline.num_params[place], op, "parameters")
                wanted = len(wiring.inputs[place])
                grad_extra_inputs[place] = _counted(tuple(extra_grads), wanted, op, "extra inputs")
                wiring.take_input_grads(place, grad_extra_inputs[place], channel_grads)
            for place in reversed(places):
                run = pipeline.runs[place]
                if run is not None:
                    run.end_backward()
        flat: list[Any] = [gradient for grads in grad_params for gradient in grads]
        flat.extend(wiring.caller_input_grads(grad_extra_inputs))
        return (plain(dy) if pipeline.needs_input_grad else None, None, None, *flat)


def _with_views(args: list[Any]) -> list[Any]:
    seen: list[Any] = []
    for arg in args:
        is_twice = isinstance(arg, torch.Tensor) and any(arg is other for other in seen)
        seen.append(arg.view_as(arg) if is_twice else arg)
    return seen


@traced_as(_with_views)
def _distinct(args: list[Any]) -> list[Any]:
    """Return the arguments of an autograd function. In a graph such a function takes each tensor once, so there a
    tensor that comes twice, like the weight of an operation that is used twice, is a view the second time."""
    return args


def _counted(grads: tuple[Any, ...], count: int, op: Any, what: str) -> tuple[Any, ...]:
    if len(grads) != count:
        raise RuntimeError(f"{type(op).__name__} gave gradients of {len(grads)} {what}: it has {count}")
    return grads


def run_pipeline(
    pipeline: Pipeline, input_: Any, params: Sequence[Any], extra_inputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Run the pipeline, and return the output and the extra outputs. `params` holds those of all operations."""
    if pipeline.first < len(pipeline.basic_ops) or differentiates_forward():
        return _Function.apply(*_distinct([input_, pipeline, True, *params, *extra_inputs]))
    with torch.no_grad():
        return _Function.forward(None, input_, pipeline, False, *params, *extra_inputs)


def first_that_needs_grad(
    input_: torch.Tensor,
    params: Sequence[Sequence[Any]],
    extra_inputs: Sequence[Any],
    sources: Sequence[tuple[int | str, ...]],
) -> int:
    """Return the place where backward ends, or the number of operations if there is no backward. `params` holds the
    parameters of each operation, `sources` is as in `Wiring.inputs`."""
    if not torch.is_grad_enabled():
        return len(params)
    if input_.requires_grad:
        return 0
    for place, own in enumerate(params):
        if any(param.requires_grad for param in own):
            return place
        given = [extra_inputs[source] for source in sources[place] if isinstance(source, int)]
        if any(isinstance(extra, torch.Tensor) and extra.requires_grad for extra in given):
            return place
    return len(params)
