"""The one autograd function of the project: it runs a core, saves what the core's setup keeps, and hands that to the
core's backward.

    core.forward(args)             -> (y, made)                  pure, but for amaxes (`ScaleSlot`)
    core.outputs(args, y, made)    -> (outputs, extras)
    core.setup(args, made)         -> backward arguments         decides what is saved
    core.backward(bwd, *grads)     -> (gradients, amaxes)        pure as well

`outputs` are differentiable. `extras` are tensors that the module keeps (amaxes). Gradients come in the order of
`core.diff`, which names fields of `args`; the gradient of a field that holds a tuple (`core.tuples`) is a tuple.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from torch.autograd.function import once_differentiable

from mezzotint.functional.delayed import (
    SCALE_UPDATES,
    ScaleState,
    hand_over,
    update_scale_state,
    update_states,
    update_waiting,
)
from mezzotint.kernels._lib import run_op
from mezzotint.kernels._recorder import recording
from mezzotint.kernels.delayed import delayed_saw_
from mezzotint.tensor.scale_slot import ScaleSlot
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import differentiates_forward, eager_only, read_live


@dataclass(frozen=True)
class Core:
    """A `Core` holds the functions of an operation, in `diff` the names of the arguments that get gradients, and in
    `tuples` which of these hold a tuple of tensors."""

    forward: Callable[[Any], tuple[Any, Any]]
    outputs: Callable[[Any, Any, Any], tuple[tuple[Any, ...], tuple[Any, ...]]]
    setup: Callable[[Any, Any], Any]
    backward: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
    diff: tuple[str, ...]
    tuples: tuple[str, ...] = ()


@dataclass(slots=True)
class GradState(ScaleState):
    """The state of delayed scaling for gradients: it holds live buffers that backward writes. It is never saved, and no
    core reads it."""

    is_first: bool = False  # the module's first run since the last update: its backward comes last


class Saved:
    """The base of backward arguments, dataclasses with slots: `SAVED` names the fields whose tensors are saved. Such a
    field holds a tensor, a storage, a `ScaleSlot`, another `Saved`, or a tuple of these."""

    __slots__ = ()
    SAVED: ClassVar[tuple[str, ...]] = ()
    UNSAVED: ClassVar[tuple[str, ...]] = ()  # all other fields

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        slots: tuple[str, ...] = cls.__slots__
        cls.UNSAVED = tuple([name for name in slots if name not in cls.SAVED])


def flatten(value: Any, flat: list[torch.Tensor], live: list[torch.Tensor]) -> Any:
    """Move the tensors of `value` to `flat`, and return a spec from which `unflatten` puts the value together again.
    Histories go to `live`: they are not saved, because backward writes them as they are then."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        flat.append(value)
        return _TENSOR
    if isinstance(value, tuple):
        return tuple([flatten(item, flat, live) for item in value])
    if isinstance(value, ScaleSlot):
        flat.append(value.scales)
        if value.history is not None:
            live.append(value.history)
        return _Slot(value.slot, value.history is not None)
    if isinstance(value, QuantizedTensorStorage):
        if not value._FLATTEN_TENSOR_BUFFERS:
            return _flatten_own(value, flat)
        names = []
        for attribute, kwarg in value._FLATTEN_TENSOR_BUFFERS:
            buffer = getattr(value, attribute)
            if buffer is not None:
                flat.append(buffer)
                names.append(kwarg)
        return _Storage(
            cls=type(value), shape=value.shape, dtype=value._dtype, names=names, values=value._plain_values()
        )
    parts: list[Any] = []
    for name in value.SAVED:
        part = getattr(value, name)
        parts.append(None if part is None else flatten(part, flat, live))
    return _Fields(value, parts)


def unflatten(spec: Any, tensors: list[torch.Tensor], live: list[torch.Tensor]) -> Any:
    """Put together what `flatten` took apart. The result is a new object each time, so that a second backward finds
    what the first one found."""
    if spec is None:
        return None
    if isinstance(spec, str):
        return tensors.pop(0)
    if isinstance(spec, tuple):
        return tuple([unflatten(item, tensors, live) for item in spec])
    if isinstance(spec, _Storage):
        fields = dict(spec.values)
        for name in spec.names:
            fields[name] = tensors.pop(0)
        return spec.cls._build(spec.shape, spec.dtype, fields)
    if isinstance(spec, _Slot):
        return ScaleSlot(tensors.pop(0), spec.slot, live.pop(0) if spec.has_history else None)
    if isinstance(spec, _OwnStorage):
        storage = _copy_of(spec.holder)
        storage.restore_from_saved([tensors.pop(0) if is_held else None for is_held in spec.holds])
        return storage
    like = spec.like
    made = object.__new__(type(like))
    for name in like.UNSAVED:
        setattr(made, name, getattr(like, name))
    for name, part in zip(like.SAVED, spec.parts, strict=True):
        setattr(made, name, None if part is None else unflatten(part, tensors, live))
    return made


def _flatten_own(value: QuantizedTensorStorage, flat: list[torch.Tensor]) -> "_OwnStorage":
    """Flatten a user's storage that declares no buffers, by its own `prepare_for_saving`. A copy of it is asked,
    because that call may empty it while `value` is still in use."""
    tensors, holder = _copy_of(value).prepare_for_saving()
    flat.extend([tensor for tensor in tensors if tensor is not None])
    return _OwnStorage(holder, [tensor is not None for tensor in tensors])


def _copy_of(storage: QuantizedTensorStorage) -> QuantizedTensorStorage:
    made = object.__new__(type(storage))
    made.__dict__.update(storage.__dict__)
    return made


_TENSOR = "tensor"


@dataclass(slots=True)
class _Storage:
    cls: Any
    shape: Any
    dtype: torch.dtype
    names: list[str]
    values: dict[str, Any]


@dataclass(slots=True)
class _Slot:
    """A `_Slot` keeps a `ScaleSlot` without its tensors."""

    slot: int
    has_history: bool


@dataclass(slots=True)
class _OwnStorage:
    """An `_OwnStorage` keeps a user's storage without its tensors, and which of them it held."""

    holder: Any
    holds: list[bool]


class _Fields:
    """A `_Fields` holds a `Saved` whose saved fields were taken out of it, and the specs of those fields."""

    __slots__ = ("like", "parts")

    def __init__(self, like: Any, parts: list[Any]) -> None:
        for name in like.SAVED:
            setattr(like, name, None)
        self.like, self.parts = like, parts


def _first_of(spec: Any) -> int:
    """Return how many of the tensors that a run saves are buffers of the first value, or 0 if that is no storage."""
    first = spec.parts[0]
    return len(first.names) if isinstance(first, _Storage) else 0


class KeptForBackward(NamedTuple):
    """A `KeptForBackward` is what an autograd function keeps for backward, and the tensors that get gradients. Whoever
    records the run asks for it (`layer/rerun.py`)."""

    core: Core
    spec: Any
    num_outputs: int
    saved: tuple[torch.Tensor, ...]
    live: tuple[torch.Tensor, ...]
    diff: tuple[Any, ...]
    first: int  # how many of the saved tensors are buffers of the first value, which others may read while it is held


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, core: Core, args: Any, kept: list[Any] | None, *tensors: Any) -> Any:
        for name, value in zip(core.diff, _grouped(core, args, tensors) if core.tuples else tensors, strict=True):
            setattr(args, name, value)
        y, made = core.forward(args)
        outputs, extras = core.outputs(args, y, made)
        state: GradState | None = args.grad_state
        flat: list[torch.Tensor] = []
        live: list[torch.Tensor] = []
        ctx.spec, ctx.live = flatten(core.setup(args, made), flat, live), live
        ctx.core, ctx.grad_state, ctx.num_outputs = core, state, len(outputs)
        ctx.save_for_backward(*flat)
        if state is not None:
            read_live(state.scale, state.history, state.number, state.order)
        if kept is not None:
            first = _first_of(ctx.spec)
            ctx.first_saved = tuple(map(ref, flat[:first]))
            recorder = recording()
            if recorder is not None:
                recorder.kept = KeptForBackward(core, ctx.spec, len(outputs), tuple(flat), tuple(live), tensors, first)
            kept.extend(extras)
            return outputs
        ctx.mark_non_differentiable(*extras)
        return (*outputs, *extras)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Kernels have no gradient: a second derivative would silently be zero. Autograd asks for one by leaving
        # gradients enabled here.
        return (_backward_once if torch.is_grad_enabled() else _backward)(ctx, *grads)


def _backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    state: GradState | None = ctx.grad_state
    if state is not None:
        begin_backward(state)
    result, amaxes = core_backward(ctx.core, ctx.spec, ctx.saved_tensors, ctx.live, grads[: ctx.num_outputs])
    if state is not None:
        record(state, amaxes)
    return (None, None, None, *result)


def core_backward(
    core: Core, spec: Any, saved: Sequence[torch.Tensor], live: Sequence[torch.Tensor], grads: Sequence[Any]
) -> tuple[Sequence[Any], tuple[Any, ...]]:
    """Run the backward of a core on what its forward saved, and return the gradients, one tensor after the other, and
    the amaxes."""
    result, amaxes = core.backward(unflatten(spec, list(saved), list(live)), *grads)
    return (_ungrouped(core, result) if core.tuples else result), amaxes


def _grouped(core: Core, args: Any, tensors: Sequence[Any]) -> list[Any]:
    """Return the values of the fields of `core.diff`, of which there are tuples, out of all their tensors."""
    values, rest = [], list(tensors)
    for name in core.diff:
        count = len(getattr(args, name)) if name in core.tuples else 1
        values.append(tuple(rest[:count]) if name in core.tuples else rest[0])
        rest = rest[count:]
    return values


def _ungrouped(core: Core, values: Sequence[Any]) -> list[Any]:
    """Return what the fields of `core.diff` hold, or their gradients, one tensor after the other."""
    flat: list[Any] = []
    for name, value in zip(core.diff, values, strict=True):
        if name in core.tuples:
            flat.extend(value)
        else:
            flat.append(value)
    return flat


_backward_once = once_differentiable(_backward)

# `Function.apply` in Python looks for a `setup_context` and for transforms of `torch.func` before it calls this one,
# which takes twice the time of the call itself.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Apply).apply
_unwrap: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead


def record(state: GradState, amaxes: tuple[Any, ...]) -> None:
    """Enter the amaxes that backward saw, and update the scales after the last backward of the iteration."""
    slots = [slot for slot, amax in enumerate(amaxes) if amax is not None]
    seen = [amax for amax in amaxes if amax is not None]
    if state.is_first and state.is_alone():
        update_scale_state(state, seen, slots)
    elif state.is_handed_over():
        hand_over(state, seen, slots, state.is_first)
    else:
        if seen:
            run_op(delayed_saw_, state.history, seen, slots)
        end_backward(state)


def enter_amaxes(state: GradState | None, history: torch.Tensor, amaxes: list[torch.Tensor], slots: list[int]) -> None:
    """Enter some amaxes into `history`. `state` is given where backward saw them; `end_backward` comes after it."""
    if state is not None and state.is_handed_over():
        hand_over(state, amaxes, slots, False)
    else:
        run_op(delayed_saw_, history, amaxes, slots)


def begin_backward(state: GradState | None) -> None:
    """Update the scales that still wait for an update, because backward is going to enter new amaxes."""
    if state is not None:
        update_waiting(state.scale)


def end_backward(state: GradState) -> None:
    """Update the scales if this was the last backward of the iteration; all amaxes that it saw are entered. If amaxes
    are reduced over ranks, the update waits for the end of the backward of all modules."""
    if not state.is_first:
        return
    if state.is_handed_over():
        hand_over(state, [], [], True)
    elif state.groups:
        SCALE_UPDATES.add(state)
    else:
        update_states([state])


def run_core(core: Core, args: Any, needs_grad: bool) -> tuple[Any, ...]:
    """Run the core and return (*outputs, *extras). `needs_grad` says whether any of its tensors needs a gradient."""
    if not (needs_grad and torch.is_grad_enabled()) and not differentiates_forward():
        outputs, extras = core.outputs(args, *core.forward(args))
        return (*outputs, *extras)
    tensors = [getattr(args, name) for name in core.diff]
    if core.tuples:
        tensors = _ungrouped(core, tensors)
    kept = _place_for_extras()
    if kept is None:
        return _Apply.apply(core, args, None, *tensors)
    if torch._C._are_functorch_transforms_active():
        outputs = _Apply.apply(core, args, kept, *tensors)  # it says why this cannot be
    else:
        # A transform of `torch.func` that is over may have left a tensor behind in a wrapper.
        tensors = [_unwrap(x) if isinstance(x, torch.Tensor) else x for x in tensors]
        outputs = _apply(core, args, kept, *tensors)
    return (*outputs, *kept)


@eager_only()
def _place_for_extras() -> list[Any]:
    """Return a list in which a core's forward leaves its extras. If they were outputs, autograd would launch zeros as
    the gradient of each. They are outputs only where Dynamo traces the autograd function, because it sees nothing else
    that forward returns."""
    return []
