"""Fusible operations: this module defines what a pipeline is made of.

A `BasicOperation` is one step; a `FusedOperation` does the work of several basic ones at once. Forward is written in
one of two forms. It puts all that backward reads into the context, also attributes of the operation, because they may
change before backward.

The whole form works in eager code:

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, **kwargs): ...

The split form compiles without a graph break, because what computes and what writes the context are told apart:

    def op_forward_compute(self, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, **kwargs):
        return output, tensors_to_save      # pure
    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, ..., **kwargs):
        ctx.save_for_backward(*tensors_to_save)

Operations with extra inputs or outputs, and fused ones, write `fuser_forward`, or `fuser_forward_compute` and
`fuser_forward_save_ctx`, instead.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from mezzotint.layer.base import Layer
from mezzotint.layer.bind import of_module, recipe_for
from mezzotint.layer.configured import config_of
from mezzotint.layer.delayed_run import delayed_of, start_delayed
from mezzotint.layer.parameters import resolve_device
from mezzotint.layer.plan import LayerConfig, delayed_request
from mezzotint.layer.run import RunSettings
from mezzotint.layer.scaling_state import grow_history, note_recipe
from mezzotint.ops.config import OperationConfig
from mezzotint.ops.context import OperationContext
from mezzotint.ops.forms import CALLED, EXAMPLE, computes_anew, hide_other_forms, own_names, written_form
from mezzotint.ops.run import Run, Start
from mezzotint.recipe import DelayedScalingRequest, QuantizerRequest, QuantizerRole, Recipe
from mezzotint.region import current_state, recipe_in_force
from mezzotint.tracing import call_untraced, memoized

__all__ = ["BasicOperation", "FusibleOperation"]


class FusibleOperation(nn.Module):
    """A `FusibleOperation` is an operation that `ops.Sequential` may fuse with its neighbours.

    This is the base class of `BasicOperation`, which is one step, and of `FusedOperation`, which is several at once.

    Example:
        >>> from mezzotint import ops
        >>> issubclass(ops.ReLU, ops.FusibleOperation), ops.ReLU().is_fused_op
        (True, False)
    """

    is_split: ClassVar[bool] = False  # forward is written in split form
    _family: ClassVar[str] = "fuser"  # which of `FORMS` it is written in
    _is_base: ClassVar[bool] = True  # subclasses replace its forwards
    _computes_as: ClassVar[Any] = None  # the class, this one or a parent, whose methods compute
    _writes: ClassVar[tuple[str, ...]] = ()  # which of "forward" and "backward" it writes
    _has_stand_in: ClassVar[bool] = False  # a class of this package, of which a graph makes stand-ins (`stand_in.py`)
    _is_module: ClassVar[bool] = False  # a subclass has its own `forward`, which is called like any module's
    _keywords: ClassVar[tuple[str, ...] | None] = None  # keyword arguments of a run; None: whatever its forward takes
    _untraced: ClassVar[Any] = None  # runs a function outside of the graph; set with the first whole form
    _fuser_class: ClassVar[Any] = None  # OperationFuser, whose file imports this one and sets it

    def __init_subclass__(cls, *, is_base: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._is_base = is_base
        if is_base:
            return
        own = own_names(cls, FusibleOperation)
        form = written_form(cls, own)
        if computes_anew(cls, FusibleOperation, own):
            cls._computes_as = cls
        if "forward" in own or "__call__" in own:
            cls._is_module = True
        if form is not None:
            cls._family, cls.is_split = form
            cls._keywords = vars(cls).get("_keywords")
            hide_other_forms(cls, own, *form)
            if not cls.is_split and FusibleOperation._untraced is None:
                # This is done here and not at import, because it imports the compiler.
                FusibleOperation._untraced = staticmethod(torch.compiler.disable(_run_untraced, reason=_WHY_UNTRACED))
        if "op_backward" in own and "fuser_backward" not in own and issubclass(cls, BasicOperation):
            cls.fuser_backward = BasicOperation.fuser_backward  # type: ignore[method-assign]
        written = [("forward", form), ("backward", "fuser_backward" in own or None)]
        cls._writes = (*cls._writes, *[name for name, value in written if value is not None])
        is_known = issubclass(cls, BasicOperation) or not cls._writes  # a fusion that writes no pass is only its parts
        cls._has_stand_in = cls.__module__.startswith(__package__) and is_known

    @property
    def is_fused_op(self) -> bool:
        """Return whether it does the work of several basic operations."""
        raise NotImplementedError

    def pre_first_fuser_forward(self) -> None:
        """Prepare for the first run of a fuser, which calls this before it."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Prepare for a run; this is called before each, outside of autograd. `requires_grad` says that backward will
        reach this operation."""

    def get_input_quantizer(self) -> Any:
        """Return the quantizer with which the operation before may quantize its output, or None for high precision."""
        return None

    def get_grad_output_quantizer(self) -> Any:
        """Return the quantizer with which the operation behind may quantize its gradient, or None for high
        precision."""
        return None

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Any, **given: Any
    ) -> tuple[Any, Iterable[Iterable[Any]]]:
        """Return the output, and the extra outputs of each basic operation. A split form runs both halves."""
        output, extra_outputs, tensors_to_save = self.fuser_forward_compute(input_, **given)
        self.fuser_forward_save_ctx(basic_op_ctxs, input_, tensors_to_save, **given)
        return output, extra_outputs

    def fuser_forward_compute(self, *args: Any, **given: Any) -> Any:
        """Return the output, the extra outputs of each basic operation, and the tensors to save. This must be pure."""
        raise NotImplementedError(f"{type(self).__name__} has no forward. Write\n{EXAMPLE['fuser']}")

    def fuser_forward_save_ctx(self, *args: Any, **given: Any) -> None:
        """Write the contexts. This may depend only on its arguments and on plain values of the operation."""
        raise NotImplementedError(f"{type(self).__name__} has no forward. Write\n{EXAMPLE['fuser']}")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Any,
        *,
        basic_op_grad_extra_outputs: list[tuple[Any, ...]],
    ) -> tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]:
        """Return the gradients of the input, of each basic operation's parameters, and of each one's extra inputs.

        The gradient of an extra output is None if it went into a channel that nobody read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no backward: write fuser_backward, or op_backward")


_WHY_UNTRACED = (
    "an operation of this pipeline has its forward in whole form (op_forward or fuser_forward), which writes its "
    "context while it computes and so cannot be traced. Split it into op_forward_compute and op_forward_save_ctx "
    "(fuser_forward_compute and fuser_forward_save_ctx): see mezzotint.ops.op"
)


def _run_untraced(function: Any, *args: Any) -> Any:
    return function(*args)


class BasicOperation(FusibleOperation, Layer, is_base=True):
    """A `BasicOperation` is one step of a pipeline. Derive from it to write an operation of your own.

    Write `op_forward_compute`, which returns the output and the tensors to save and must be pure;
    `op_forward_save_ctx`, which writes them to the context; and `op_backward`, which returns the gradient of the input
    and a tuple of those of the parameters, in the order of `parameters()`.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> class Double(ops.BasicOperation):
        ...     def op_forward_compute(self, input_, **given):
        ...         return 2 * input_, ()
        ...     def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **given):
        ...         pass
        ...     def op_backward(self, ctx, grad_output):
        ...         return 2 * grad_output, ()
        >>> pipeline = ops.Sequential(Double(), ops.ReLU())
        >>> torch.equal(pipeline(torch.ones(4)), torch.full((4,), 2.0))
        True
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    _is_operation = True

    def __init__(self) -> None:
        super().__init__()
        self._extra_input_channels: dict[int, str] = {}
        self._extra_output_channels: dict[int, tuple[str, bool]] = {}
        self._has_fuser = False

    @property
    def is_fused_op(self) -> bool:
        return False

    # Extra inputs and outputs

    def set_extra_input_channel(self, index: int, channel: str | None) -> None:
        """Take the extra input from the channel that an earlier operation of the same pipeline writes; None takes it
        from the caller."""
        self._check_channel("extra input", index, self.num_extra_inputs, channel)
        if channel is None:
            self._extra_input_channels.pop(index, None)
        else:
            self._extra_input_channels[index] = channel
        self._channels_changed()

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> None:
        """Give the extra output to later operations that read the channel and, if `output_to_caller`, to the caller as
        well."""
        self._check_channel("extra output", index, self.num_extra_outputs, channel)
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller must be a bool: it is {output_to_caller!r}")
        if channel is None:
            self._extra_output_channels.pop(index, None)
        else:
            self._extra_output_channels[index] = (channel, output_to_caller)
        self._channels_changed()

    def _channels_changed(self) -> None:
        if "_config" in self.__dict__:
            self._configure()

    def _check_channel(self, what: str, index: int, count: int, channel: Any) -> None:
        if self._has_fuser:
            raise RuntimeError(
                f"{type(self).__name__} is in a pipeline already: set channels before it runs or enters a Sequential"
            )
        if not 0 <= index < count:
            raise IndexError(f"index is {index}, out of range: {type(self).__name__} has {count} {what}s")
        if channel is not None and not (isinstance(channel, str) and channel):
            raise ValueError(f"channel is {channel!r}: give a non-empty string, or None for no channel")

    def _read_extra_input(self, index: int, value: Any) -> Any:
        """Return an extra input of the caller as both halves of forward get it, so that a tensor's values are read only
        once."""
        return value

    # A configuration

    _READS: ClassVar[tuple[str, ...]] = ()  # attributes, besides parameters, that a run of an operation of ours reads

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._CONFIGURED |= frozenset(cls._READS)

    def _make_config(self) -> OperationConfig:
        fields, is_ours = self._config_fields(), self._has_stand_in
        values = [(name, _constant(getattr(self, name))) for name in self._READS] if is_ours else []
        return OperationConfig(
            **fields,
            operation=type(self) if is_ours else None,
            values=tuple([(name, value, repr(value)) for name, value in values]),
            tensors=self._tensor_names() if is_ours else (),
            has_quantizers=self._has_quantizers(),
            input_channels=tuple(sorted(self._extra_input_channels.items())),
            output_channels=tuple(sorted(self._extra_output_channels.items())),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in CALLED:  # a method of this one operation, of which a stand-in would not have it
            self.__dict__["_has_stand_in"] = False

    def _end_init(self) -> None:
        """Make the configuration, at the end of a constructor of this package; a class of a user's may not be ready to
        be asked, and has it made when it enters a pipeline. What is made later makes a graph anew."""
        if self._has_stand_in:
            self._configure()

    def _tensor_names(self) -> tuple[str, ...]:
        """Return the names of the parameters that it has."""
        return tuple([name for name in self._parameter_names if getattr(self, name, None) is not None])

    _parameter_names: ClassVar[tuple[str, ...]] = ()  # in order: parameters that may be computed from others

    def _trained(self) -> list[torch.Tensor]:
        """Return the tensors that it gives gradients of: parameters, or what takes their place if they are parametrized
        or pruned."""
        for name in self._parameter_names:
            if name not in self._parameters:
                values = [getattr(self, name, None) for name in self._parameter_names]
                return [value for value in values if value is not None]
        if "parametrizations" in self._modules:
            raise ValueError(
                f"{type(self).__name__} is parametrized: it gives gradients of its parameters as they are. Parametrize "
                "a module of mezzotint instead, such as mezzotint.GroupedLinear"
            )
        return list(self.parameters())

    # Quantizers

    def num_quantizers(self, mode: str) -> int:
        """Return how many quantizers it has in mode "forward" or "backward"."""
        return 0

    def _has_quantizers(self) -> bool:
        return self.num_quantizers("forward") > 0 or self.num_quantizers("backward") > 0

    def _tensor(self, mode: str, index: int) -> tuple[int, str]:
        """Return the quantizer's tensor: the number of its GEMM, and its type as a role has it."""
        return index, "input" if mode == "forward" else "grad_output"

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        """Return what each quantizer of that mode is for."""
        return [self._role(*self._tensor(mode, index)) for index in range(self.num_quantizers(mode))]

    def get_quantizer(self, mode: str, index: int) -> Any:
        """Return a quantizer of the recipe in force, or None if there is none. Outside of a region that is the last
        recipe with which eager code ran this operation. A quantizer of delayed scaling reads and writes the state of
        this operation."""
        if mode not in ("forward", "backward"):
            raise ValueError(f"mode is {mode!r}: give 'forward' or 'backward'")
        count = self.num_quantizers(mode)
        if not 0 <= index < count:
            raise ValueError(f"index is {index}: {type(self).__name__} has {count} quantizers in mode {mode!r}")
        recipe = self._recipe if recipe_in_force() is None else recipe_for(self)
        return None if recipe is None else self._live_quantizer(recipe, *self._tensor(mode, index))

    @property
    def _fp8_metas(self) -> dict[str, dict[str, Any]]:
        """Return delayed scaling's live state, by upstream's name."""
        return {"forward": self.fp8_meta, "backward": self.fp8_meta}

    def get_input_quantizer(self) -> Any:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") > 0 else None

    def get_grad_output_quantizer(self) -> Any:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") > 0 else None

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """Forget what delayed scaling has learnt, and make room for the history of `recipe`."""
        self._reset_state()
        if self._has_state():
            request = None if recipe is None else self._delayed_request(recipe)
            if request is not None:
                grow_history(self, request.amax_history_len)

    def _reset_state(self) -> None:
        if self._has_state():  # an operation without quantizers has none
            super()._reset_state()

    def _delayed_request(self, recipe: Recipe) -> DelayedScalingRequest | None:
        own = of_module(self, recipe)
        for mode in ("forward", "backward") if own is not None else ():
            for index, role in enumerate(self.get_quantizer_roles(mode)):
                part = None if own is None else own.of(*self._tensor(mode, index))
                made = None if part is None else part.quantizer(role)
                if isinstance(made, QuantizerRequest):
                    return delayed_request(made)
        return None

    def _linear_names(self) -> tuple[str, ...]:
        """Return the names of its weights' linears, or as many empty ones as it has quantized tensors."""
        count = max(self.num_quantizers("forward"), self.num_quantizers("backward"))
        return super()._linear_names() if self._weights else ("",) * count

    def _is_kept(self, mode: str) -> bool:
        """Return whether nothing is quantized: outside of a region, and where rules keep high precision."""
        recipe = recipe_in_force()
        return recipe is None or (self.num_quantizers(mode) > 0 and of_module(self, recipe) is None)

    # One run

    _takes_run: ClassVar[bool] = False  # its forward gets what `_begin` returned as the keyword argument `run`

    def _check_others(self, input_: torch.Tensor) -> None:
        """Check with other ranks, before the pipeline begins, whether those that share a weight agree. `input_` is the
        pipeline's input."""

    def _start(self, *, requires_grad: bool, input_requires_grad: bool, **kwargs: Any) -> Start | None:
        """Read the state of the region once, before autograd begins, and return what `_begin` takes, or None if no
        state is needed."""
        self._check_keywords(kwargs)
        recipe = recipe_for(self) if self._has_quantizers() else None
        if recipe is None:
            return None
        note_recipe(self, recipe)
        request = self._delayed_request(recipe)
        if request is None:
            return None
        call = start_delayed(self, config_of(self), _call_of(request), current_state())
        return Start(call.plan, delayed_of(self, call))

    def _begin(self, start: Start) -> Run:
        """Return the run that begins with what `_start` found. This reads no state."""
        return Run(start)

    def _with_run(self, ctx: OperationContext, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a forward with `run`, which a whole form, or a caller of this operation's
        forward, does not pass on. It is that of the pipeline, or one that begins here, whose backward reaches the
        input."""
        if not self._takes_run or "run" in kwargs:
            return kwargs
        run = ctx._run
        if run is None:
            call_untraced(init_own_state, self)
            own = {name: value for name, value in kwargs.items() if name not in _HANDED_OVER}
            self.pre_fuser_forward(requires_grad=ctx.requires_grad)
            needs = {"requires_grad": ctx.requires_grad, "input_requires_grad": ctx.requires_grad}
            started = self._start(**needs, **own)
            run = None if started is None else self._begin(started)
        return {**kwargs, "run": run}

    def _check_keywords(self, kwargs: dict[str, Any]) -> None:
        unknown = [] if self._keywords is None else [name for name in kwargs if name not in self._keywords]
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got the keyword arguments {unknown}: it takes {list(self._keywords or ())}"
            )

    def _input_quantizer(self, run: Any) -> Any:
        """Return the quantizer with which the operation before this one may quantize its output; None outside of a
        region."""
        return None if self._is_kept("forward") else self.get_input_quantizer()

    def _grad_output_quantizer(self, run: Any) -> Any:
        return None if self._is_kept("backward") else self.get_grad_output_quantizer()

    # Forward and backward

    def op_forward(self, ctx: OperationContext, input_: Any, **given: Any) -> Any:
        """Return the output. A split form runs both halves, one after the other."""
        given = self._with_run(ctx, given)
        output, tensors_to_save = self.op_forward_compute(input_, **given)
        self.op_forward_save_ctx(ctx, input_, tensors_to_save, **given)
        return output

    def op_forward_compute(self, *args: Any, **given: Any) -> Any:
        """Return the output and the tensors to save. This must be pure."""
        raise NotImplementedError(f"{type(self).__name__} has no forward. Write\n{EXAMPLE['op']}")

    def op_forward_save_ctx(self, *args: Any, **given: Any) -> None:
        """Write the context. This may depend only on its arguments and on plain values of the operation."""
        raise NotImplementedError(f"{type(self).__name__} has no forward. Write\n{EXAMPLE['op']}")

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        """Return the gradients of the input and of each parameter."""
        raise NotImplementedError(f"{type(self).__name__} has no backward: write op_backward(self, ctx, grad_output)")

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Any, **given: Any
    ) -> tuple[Any, Iterable[Iterable[Any]]]:
        if self._family == "fuser":
            given["basic_op_kwargs"] = [self._with_run(basic_op_ctxs[0], given["basic_op_kwargs"][0])]
            return super().fuser_forward(basic_op_ctxs, input_, **given)
        return self.op_forward(basic_op_ctxs[0], input_, **_of_one(given)), [()]

    def fuser_forward_compute(self, *args: Any, **given: Any) -> Any:
        output, tensors_to_save = self.op_forward_compute(*args, **_of_one(given))
        return output, [()], tensors_to_save

    def fuser_forward_save_ctx(self, *args: Any, **given: Any) -> None:
        basic_op_ctxs, *rest = args
        self.op_forward_save_ctx(basic_op_ctxs[0], *rest, **_of_one(given))

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Any,
        *,
        basic_op_grad_extra_outputs: list[tuple[Any, ...]],
    ) -> tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]:
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grad_params], [()]

    def forward(self, input: torch.Tensor, *extra_inputs: Any, **kwargs: Any) -> torch.Tensor | Any:
        """Run this operation alone, and return the output, or (output, *extra outputs)."""
        return run_alone(self)(input, *extra_inputs, basic_op_kwargs=[kwargs])

    if TYPE_CHECKING:
        __call__ = forward


_NO_GEMMS = LayerConfig("", (), False, ())


def enter_pipeline(op: BasicOperation) -> None:
    """Have an operation belong to a pipeline. It is called outside of a graph, like `init_own_state`: for an assignment
    to a module, too, Dynamo takes hold of its buffers."""
    op._has_fuser = True
    init_own_state(op)


def init_own_state(op: BasicOperation) -> None:
    """Make the buffers of delayed scaling for an operation that has quantizers and did not make them itself. It is
    called outside of a graph, which could otherwise not replace them later by a longer history."""
    count = max(op.num_quantizers("forward"), op.num_quantizers("backward"))
    if count > 0 and not op._has_state():
        devices = [param.device for param in op.parameters()]
        device = devices[0] if devices else resolve_device(None)
        if device.type != "meta":  # else they are made before the first run
            op._init_state(count, device)
    if "_config" not in op.__dict__:
        op._configure()


def _constant(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _call_of(request: DelayedScalingRequest) -> RunSettings:
    """Return the settings of a run for an operation that decides on its quantizers itself: they hold only delayed
    scaling's state."""
    return RunSettings(_NO_GEMMS.state_plan(request))


_HANDED_OVER = ("prev_op_grad_output_quantizer", "next_op_input_quantizer")


def _of_one(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a single operation's forward, given those of a fuser's."""
    if any(given["basic_op_extra_inputs"]):
        raise TypeError(
            "an operation with extra inputs has its forward in op_forward or op_forward_compute, which gets none: "
            "write fuser_forward, or fuser_forward_compute and fuser_forward_save_ctx"
        )
    return {**{name: given[name] for name in _HANDED_OVER}, **given["basic_op_kwargs"][0]}


def run_alone(op: FusibleOperation) -> Any:
    """Return a fuser of this operation alone. Eager code keeps it; a graph makes one as it is traced."""
    return memoized(op, "_own_fuser", None, lambda: op._fuser_class([op]))
