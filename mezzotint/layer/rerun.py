"""Runs from a record: which calls a module's run makes on tensors of one form is worked out once.

The plan of a run and the form of its tensors decide which kernels and products it takes, in which order, and what is
saved for backward. So eager code records the calls (`kernels/_recorder.py`) the second time that it sees a plan with
tensors of a form, and from then on makes them again, with nothing in between. Forward is one such function, backward
another one.

What might make other calls runs as it is: a plan says whether its runs repeat (`Plan.repeats`), and runs in graphs, in
modes of PyTorch's, under `torch.autocast`, with a profiler's hooks or with tensors of other classes are not recorded.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from mezzotint.functional.autograd import KeptForBackward, core_backward, record
from mezzotint.functional.delayed import update_waiting
from mezzotint.kernels._lib import is_bare
from mezzotint.kernels._recorder import Recorder
from mezzotint.kernels._relaunch import TENSOR_CLASSES, Taker, form_of, has_hooks, taker
from mezzotint.layer.plan import LayerConfig, Plan
from mezzotint.layer.run import Delayed, KeptWeights, grad_state
from mezzotint.layer.shared_input import held_columns, leave_word, sharing_stream
from mezzotint.tensor.fsdp_directions import saving_hooks
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.storage import QuantizedTensorStorage

_F = TypeVar("_F", bound=Callable[..., Any])

MOST_RUNS = 1024  # of a program; one with more of them begins anew
MOST_TRIES = 4  # to record a run: a checkpoint stops its second run as soon as it has what backward reads
_TENSORS_OF_DELAYED = 6  # its first fields, which a run without other ranks reads


class RecordedRun:
    """A `RecordedRun` makes the calls of a module's run again, for tensors of the form that it was recorded with."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan  # It is kept because runs are found by its id.
        self.tries = 0  # to record forward
        self.forward: Callable[..., tuple[Any, tuple[torch.Tensor, ...]]] | None = None  # returns what it saves, too
        self.kept: KeptForBackward | None = None  # without its tensors; None if there is no backward
        self.diff: list[int | None] = []  # the tensors that get gradients
        self.live: list[int] = []  # those that backward reads and writes as they are then
        self.backwards: dict[Any, Callable[..., tuple[Any, ...]] | None] = {}  # by the form of its tensors
        self.runtime: Any = None  # Triton's settings, which hold a profiler's hooks

    def __call__(self, tensors: tuple[torch.Tensor, ...], delayed: Delayed | None) -> Any:
        """Return what forward returns."""
        assert self.forward is not None
        if self.kept is None:
            with torch.no_grad():
                return self.forward(*tensors)[0]
        return _apply(self, delayed, tensors, *[None if i is None else tensors[i] for i in self.diff])

    def record(self, run: Callable[..., Any], args: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> Any:
        """Record a run as it is, and return its result."""
        places = {id(tensor): i for i, tensor in enumerate(tensors)}
        self.tries += 1
        with Recorder(tensors) as recorder:
            result = run(self.plan, *args)
        self.tries = MOST_TRIES
        kept: KeptForBackward | None = recorder.kept
        forward = recorder.function((result, () if kept is None else kept.saved))
        if kept is not None:
            self.diff = [None if x is None else places.get(id(x), -1) for x in kept.diff]
            self.live = [places.get(id(x), -1) for x in kept.live]
            self.kept = kept._replace(saved=(), live=(), diff=())
        if -1 not in self.diff and -1 not in self.live:
            self.forward, self.runtime = forward, recorder.runtime
        return result

    def backward(self, ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients as autograd takes them from `_Again`, and enter amaxes. `ctx` has what forward saved."""
        assert self.kept is not None
        delayed, saved = ctx.delayed, ctx.saved_tensors
        grads = grads[: self.kept.num_outputs]
        tensors, is_first = (*saved, *ctx.live, *grads), False
        if delayed is not None:
            update_waiting(delayed.scale_bwd)
            tensors, is_first = (*tensors, delayed.scale_bwd, delayed.history_bwd), delayed.is_first
        # What was saved has the form that forward gave it, but for what hooks on saved tensors made of it.
        asked = grads if ctx.is_saved_as_is else tensors
        form = form_of_plain(asked) if {*map(type, asked)} <= {*TENSOR_CLASSES} and not self.has_hooks() else None
        key = is_first, ctx.is_saved_as_is, form
        again = self.backwards.get(key)
        if again is not None:
            return again(*tensors)
        if form is None or key in self.backwards:
            return self._backward(delayed, saved, ctx.live, grads)
        with Recorder(tensors) as recorder:
            gradients = self._backward(delayed, saved, ctx.live, grads)
        self.backwards[key] = recorder.function(gradients)
        self.runtime = self.runtime or recorder.runtime
        return gradients

    def _backward(
        self, delayed: Delayed | None, saved: Sequence[torch.Tensor], live: Sequence[torch.Tensor], grads: Sequence[Any]
    ) -> tuple[Any, ...]:
        assert self.kept is not None
        gradients, amaxes = core_backward(self.kept.core, self.kept.spec, saved, live, grads)
        state = grad_state(self.plan, delayed)
        if state is not None:
            record(state, amaxes)
        return None, None, None, *gradients

    def has_hooks(self) -> bool:
        """Return whether a profiler wants to see each launch."""
        return self.runtime is not None and has_hooks(self.runtime)


class _Again(torch.autograd.Function):
    """This is `functional/autograd.py`'s function for a run that was recorded."""

    @staticmethod
    def forward(
        ctx: Any, run: RecordedRun, delayed: Delayed | None, tensors: tuple[torch.Tensor, ...], *diff: Any
    ) -> Any:
        assert run.forward is not None
        outputs, saved = run.forward(*tensors)
        ctx.run, ctx.delayed, ctx.live = run, delayed, [tensors[i] for i in run.live]
        ctx.is_saved_as_is = saving_hooks() is None
        if run.plan.shared_input is not None and run.kept is not None:
            ctx.first_saved = tuple(map(ref, saved[: run.kept.first]))
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # As in `functional/autograd.py`: kernels have no second derivative.
        return _backward_once(ctx, *grads) if torch.is_grad_enabled() else ctx.run.backward(ctx, grads)


_backward_once = once_differentiable(lambda ctx, *grads: ctx.run.backward(ctx, grads))
_apply: Callable[..., Any] = super(torch.autograd.Function, _Again).apply  # see `functional/autograd.py`

RECORDED_RUNS: dict[Any, RecordedRun] = {}  # by the plan's id, the function, its constants and the form of its tensors


def rerun(*, shares_input: bool = False) -> Callable[[_F], _F]:
    """Decorate a function that runs a module on a plan and tensors, so that eager code makes recorded calls. Its last
    arguments are `delayed`, `kept`, `wgrads` and `probes`. A function that shares its input takes it first, and then
    the column-wise buffers that another run holds of it: eager code gives them in the place of None
    (`shared_input.py`)."""

    def decorate(run: _F) -> _F:
        @wraps(run)
        def rerunning(plan: Plan, *args: Any) -> Any:
            stream = sharing_stream(args[0]) if shares_input and plan.shared_input is not None else None
            if stream is not None:
                args = (args[0], held_columns(plan, args[0], stream), *args[2:])
            record, tensors = _find_record(run, plan, args)
            if record is None:
                y = run(plan, *args)
            elif record.tries < MOST_TRIES:
                y = record.record(run, args, tensors)
            else:
                y = record(tensors, args[-4])
            if stream is not None and args[1] is None:
                leave_word(plan, args[0], stream, y)
            return y

        return rerunning  # type: ignore[return-value]

    return decorate


def _find_record(
    run: Callable[..., Any], plan: Plan, args: Sequence[Any]
) -> tuple[RecordedRun | None, tuple[torch.Tensor, ...]]:
    """Return the record of a run with these arguments, or one that is to be made, and the tensors among them. Return
    None for a run that is made as it is."""
    nothing = None, ()
    *inputs, delayed, kept, wgrads, probes = args
    if not plan.repeats or wgrads is not None or probes is not None:
        return nothing
    records = True  # the second run of a checkpoint enters no amaxes
    flat: list[Any] = []
    for arg in inputs:
        flat += arg if type(arg) is tuple else (arg,)
    if kept is not None:
        flat += _tensors_in(kept)
    if delayed is not None:
        if delayed.groups or delayed.clears:  # ranks reduce amaxes
            return nothing
        flat += delayed[:_TENSORS_OF_DELAYED]
        records = delayed.records
    types = tuple(map(type, flat))
    places = _places(types)
    if places is None:
        return nothing
    tensors = places.tensors_of(flat)
    form = form_of_plain(tensors)
    if form is None:
        return nothing
    key = id(plan), run, kept is None, records, types, places.constants_of(flat), form
    record = RECORDED_RUNS.get(key)
    if record is None:
        if len(RECORDED_RUNS) >= MOST_RUNS:
            RECORDED_RUNS.clear()
        RECORDED_RUNS[key] = RecordedRun(plan)
        return nothing
    is_made = record.tries >= MOST_TRIES
    return nothing if is_made and (record.forward is None or record.has_hooks()) else (record, tensors)


def _tensors_in(kept: KeptWeights) -> list[Any]:
    """Return the buffers of weights that are kept quantized, and their amaxes. The plan says what the buffers mean."""
    flat = [*kept.amaxes]
    for weight_q in kept.weights_q:
        if isinstance(weight_q, QuantizedTensorStorage) and not isinstance(weight_q, torch.Tensor):
            flat += [getattr(weight_q, name) for name, _ in weight_q._FLATTEN_TENSOR_BUFFERS]
        else:
            flat.append(weight_q)
    return flat


class _Places(NamedTuple):
    """A `_Places` finds the tensors among the arguments of a run, and what else a record depends on."""

    tensors_of: Taker
    constants_of: Taker


@lru_cache(maxsize=1024)
def _places(types: tuple[type, ...]) -> _Places | None:
    """Return the places of arguments of these types, or None if a run with such is not recorded."""
    tensors = tuple([i for i, kind in enumerate(types) if kind in TENSOR_CLASSES])
    constants = tuple([i for i, kind in enumerate(types) if issubclass(kind, GraphConstant)])
    nothing = types.count(type(None))
    if not tensors or len(tensors) + len(constants) + nothing < len(types):
        return None
    # The configuration of a module has led to its plan.
    return _Places(taker(tensors), taker(tuple([i for i in constants if types[i] is not LayerConfig])))


_count_function_modes, _is_neg = torch._C._len_torch_function_stack, torch.Tensor.is_neg


def form_of_plain(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
    """Return the form of tensors of PyTorch's own classes, and which of them are one. Return None if something stands
    between a call on them and PyTorch, or if they are not on the current device."""
    first = tensors[0]
    if not is_bare(first) or _count_function_modes() or forward_ad._current_level >= 0:
        return None
    if first.is_cuda:
        if torch.is_autocast_enabled("cuda") or first.get_device() != torch.cuda.current_device():
            return None
    elif torch.is_autocast_enabled("cpu"):
        return None
    if any(map(_is_neg, tensors)):  # only PyTorch's dispatcher resolves that
        return None
    form = form_of(tensors)
    if len(tensors) > 1 and len({*map(id, tensors)}) < len(tensors):
        ids = [*map(id, tensors)]
        form.append(tuple([ids.index(each) for each in ids]))
    return tuple(form)
