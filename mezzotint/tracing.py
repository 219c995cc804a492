"""Differences between eager code and a traced graph: each function says what a graph cannot do, or must do otherwise,
and why."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from inspect import unwrap
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy

from mezzotint.late import after_import

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Any)


def below_dynamo(function: _F) -> _F:
    """Decorate a function that Dynamo does not trace through: it puts one call of it into its graph.

    AOTAutograd traces the function later, on fake tensors, as the plain eager code that it is. Its arguments are
    tensors, tuples of them, and constants (`GraphConstant`); it returns tensors, and writes to tensors alone.
    """
    after_import("torch._dynamo", lambda dynamo: dynamo.allow_in_graph(function))
    return function


def inlined(function: _F) -> _F:
    """Return a `below_dynamo` function for arguments that are no constants: Dynamo traces through a copy of it."""
    plain = unwrap(function)
    copied: Any = FunctionType(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    copied.__kwdefaults__ = plain.__kwdefaults__

    @traced_as(copied)
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def traced_as(instead: Callable[..., Any]) -> Callable[[_F], _F]:
    """Decorate a function of eager code in whose place Dynamo traces through `instead`, with the same arguments.

    Below Dynamo it is run as it is, on fake tensors. It cannot decorate a method, because Dynamo goes by the object
    that it meets.
    """

    def decorate(function: _F) -> _F:
        def tell(dynamo: Any) -> None:
            dynamo.decorators.substitute_in_graph(function, skip_signature_check=True)(instead)

        after_import("torch._dynamo", tell)
        return function

    return decorate


def eager_only(in_graph: Any = None) -> Callable[[_F], _F]:
    """Decorate a function that Dynamo does not trace through, and whose result in a graph is `in_graph`.

    Such a function asks for what only eager code has (a version counter, the number of a backward), or checks or notes
    something of one run, on which a graph that serves many would have to guard. Each says why.
    """

    def answer(*args: Any) -> Any:
        return in_graph

    return traced_as(answer)


def _runs_below_dynamo() -> bool:
    """Return whether AOTAutograd runs this code on fake tensors, in a `below_dynamo` function. In torch 2.11 it does
    not say that it compiles; the context of a compilation exists in every version."""
    return not torch.compiler.is_dynamo_compiling() and torch._guards.TracingContext.try_get() is not None


def read_live(*tensors: torch.Tensor | None) -> None:
    """Tell the compiler that a backward reads these tensors, and writes them, as they are when it runs.

    Another backward that comes between forward and that one may write them. This is what eager code does with tensors
    that it keeps on `ctx` without saving them.
    """
    if _runs_below_dynamo():  # for an autograd function, Dynamo knows it by itself
        find_proxies = torch.fx.experimental.proxy_tensor._get_proxies  # loaded when a graph is traced
        for tensor in tensors:
            for proxy in [] if tensor is None else find_proxies(tensor):
                proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def left_to_backward() -> AbstractContextManager[None]:
    """Return a context that has the compiler leave to backward what is computed inside.

    All that it reads exists in forward, so it would be computed there, and held.
    """
    return _tagged_for_backward() if _runs_below_dynamo() else nullcontext()


@contextmanager
def _tagged_for_backward() -> Iterator[None]:
    """Mark what is traced inside as backward's. (The partitioner of AOTAutograd goes by this tag, a private name in
    torch 2.11 and 2.13.)"""
    meta = torch.fx.traceback.current_meta
    before = meta.get("partitioner_tag")
    meta["partitioner_tag"] = "must_be_in_backward"
    try:
        yield
    finally:
        meta["partitioner_tag"] = before


def make_again(x: torch.Tensor) -> None:
    """Have the compiler compute `x` again in backward instead of holding it, if an elementwise operation made it.

    It would otherwise hold whatever a kernel of this package reads. (The tag is the one that selective checkpoints
    leave for the partitioner of AOTAutograd.)
    """
    if not _runs_below_dynamo():
        return
    for proxy in torch.fx.experimental.proxy_tensor._get_proxies(x):
        node: Any = proxy.node
        while node.op == "call_function" and _is_view(node.target):
            node = node.args[0]
        if node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _is_view(target: Any) -> bool:
    return target is torch.ops.aten._unsafe_view.default or getattr(target, "is_view", False)


@eager_only(in_graph=-1)
def backward_task() -> int:
    """Return the number of the backward that autograd runs in this thread, or -1 outside of one.

    It is also -1 in a graph, whose forward is never run again in a backward, and whose backward AOTAutograd only traces
    in one.
    """
    task = torch._C._current_graph_task_id()
    return -1 if task != -1 and _runs_below_dynamo() else task


@eager_only(in_graph=0)
def write_count(x: torch.Tensor) -> int:
    """Return how often `x` was written to. In a graph it is 0, because a graph has no such count, and no operation of
    this package writes in place there. Tensors of inference mode have no count either."""
    return 0 if x.is_inference() else x._version


@eager_only()
def count_write(written: Any) -> None:
    """Tell autograd that the buffers of a quantized tensor were written, so that no backward continues with a tensor
    that was saved before. For what a graph writes, the compiler tells it."""
    if isinstance(written, torch.Tensor) and not written.is_inference():
        torch.autograd.graph.increment_version(written)


@eager_only(in_graph=False)
def has_values_at_hand(x: Any) -> bool:
    """Return whether the host may look at the values of `x` without waiting for a device: it is a tensor on the CPU. A
    graph has no values while it is traced."""
    return type(x) is torch.Tensor and x.is_cpu


@eager_only(in_graph=False)
def is_planned(x: torch.Tensor) -> bool:
    """Return whether `x` is a fake tensor that no compiler traces: it stands for one whose memory is only counted. What
    a graph traces, it also runs."""
    return isinstance(x, FakeTensor) and not _runs_below_dynamo()


@eager_only(in_graph=False)
def in_inference_mode() -> bool:
    """Return whether tensors that are made here are of inference mode. A graph does not know the mode it runs in."""
    return torch.is_inference_mode_enabled()


@eager_only(in_graph=False)
def differentiates_forward() -> bool:
    """Return whether `torch.autograd.forward_ad` or `torch.func.jvp` is in use.

    Kernels have no derivative of that kind, and would drop it silently, so an autograd function refuses it, also if no
    gradient is asked for. For a graph the compiler refuses it.
    """
    return forward_ad._current_level >= 0


def lasting() -> AbstractContextManager[Any]:
    """Return a context for making a tensor that is kept: one of inference mode could not be written to, or saved for
    backward, in training."""
    return torch.inference_mode(False) if in_inference_mode() else nullcontext()


def require(holds: Any, in_graph: Callable[[], str], message: Callable[[], str]) -> None:
    """Raise ValueError with `message()` unless a condition on sizes holds.

    A graph that reads sizes out of a tensor knows them when it runs: there an operator checks them, and raises
    RuntimeError with the text that `in_graph` returns, which must refer to nothing (torch 2.11).
    """
    if torch.compiler.is_compiling() or isinstance(holds, torch.SymBool):
        torch._check(holds, in_graph)
    elif not holds:
        raise ValueError(message())


@traced_as(lambda owner, name, key, make: make())
def memoized(owner: Any, name: str, key: Any, make: Callable[[], _T]) -> _T:
    """Return `make()`, kept in the attribute `name` of `owner` for calls with an equal key. A graph keeps nothing,
    because it would have to guard on what is kept."""
    memo = owner.__dict__.get(name)
    if memo is None or memo[0] != key:
        memo = owner.__dict__[name] = (key, make())
    return memo[1]


def _call_while_tracing(function: Callable[..., Any], *args: Any) -> Any:
    """Do what `call_untraced` says, for a graph."""
    result = None
    torch._dynamo.comptime.comptime(_call)  # this writes `result`
    return result


@traced_as(_call_while_tracing)
def call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, for a plain function. For a graph it is called once, while Dynamo traces this line: to
    warn, to prepare buffers, to compare with other ranks. The graph has no node for it, and no guard on what it reads.

    The function then gets objects from outside of the graph as they are, frozen dataclasses that the graph makes as
    copies, and for a dynamic size that of the call which is traced; it gets no tensors that the graph computes. Its
    result, None or a bool, a number or a text, is a constant of the graph.
    """
    return function(*args)


def _call(context: Any) -> None:
    """Call the function of `_call_while_tracing`, whose locals Dynamo gives to be read and written. Its variables are
    private (seen in torch 2.11 and 2.13); nothing here imports Dynamo, which has been imported if it traces."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    function, args = [_read(translator.symbolic_locals[name], translator) for name in ("function", "args")]
    made = function(*args)
    translator.symbolic_locals["result"] = torch._dynamo.variables.ConstantVariable.create(made)


def _read(variable: Any, translator: Any) -> Any:
    """Return what a variable of Dynamo's stands for, or a text if that cannot be known."""
    variable, kinds = variable.realize(), torch._dynamo.variables
    if isinstance(variable, kinds.UserFunctionVariable):
        return variable.fn
    if isinstance(variable, kinds.BaseListVariable):
        return tuple([_read(item, translator) for item in variable.items])
    if isinstance(variable, kinds.SymNodeVariable):
        return variable.sym_num.node.hint
    if variable.source is None and dataclasses.is_dataclass(variable.python_type()):
        # If the graph makes the object, Dynamo knows its fields, and has an object without them.
        made: Any = object.__new__(variable.python_type())
        for field in dataclasses.fields(made):
            object.__setattr__(made, field.name, _read(_attribute(variable, field.name, translator), translator))
        return made
    if hasattr(variable, "value"):
        return variable.value
    return variable.as_python_constant() if variable.is_python_constant() else repr(variable)


def _attribute(variable: Any, name: str, translator: Any) -> Any:
    build = torch._dynamo.variables.VariableTracker.build
    return build(translator, getattr).call_function(translator, [variable, build(translator, name)], {})
