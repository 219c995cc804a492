"""Fixes for how Dynamo traces value-opaque objects: this module closes gaps for quantizers and recipes (seen in torch
2.11 to 2.15).

- `q(x)` dies in an internal assertion, because the variable of an opaque object forgets the source of its class.
- A method of an opaque object that was made inside the graph becomes a graph node instead of being traced, which fails
  for a method that returns a quantized tensor.
- A method that is not to be traced is run while tracing, which fails if it is called with a symbolic size or a tensor.
  In these three cases the method exists in plain Python: Dynamo is made to inline it.
- Dynamo knows nothing of the quantizer of a tensor that was made inside the graph.
- torch 2.11 cannot return an object, like a storage, that holds an opaque one which was made inside the graph.
- The graph holds the very object that it was traced with, and its guard compares with that by identity first: after an
  assignment to the object the graph would run, with the old value or the new one. Both get a snapshot instead.
- An assignment inside the graph is done while tracing, and never again. One to an object from outside is refused.

The functions are put in place when Dynamo's modules are loaded. A Dynamo that has no such functions is left as it is.
"""

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import torch

from mezzotint.late import after_import
from mezzotint.recipe import Recipe
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage

_OBJECTS, _TENSORS, _GUARDS = (
    f"torch._dynamo.{name}" for name in ("variables.script_object", "variables.tensor", "guards")
)
# These are the names in torch 2.15, and the ones before it.
_VARIABLES = ("CustomClassObjectVariable", "TorchScriptObjectVariable")
_GETATTRS = ("tp_getattro_impl", "var_getattr")
_PATCHED = ("call_function", "call_method", "reconstruct", "as_proxy", "as_python_constant")
_PLAIN = (bool, int, float, str, Enum, torch.dtype, type(None))
_ASSIGNMENTS = ("__setattr__", "set_usage")
_OTHERS = {
    "quantizer": "Ask for another one, q.with_usage(columnwise=False) or q.copy()",
    "recipe": "Make the recipe inside of the function",
}


def trace_quantizers(is_traced: Callable[[type, str], bool]) -> None:
    """Have Dynamo trace methods of quantizers wherever the quantizer comes from, and notice assignments to quantizers.

    Methods for which `is_traced` is true are always traced, all others if they are called with something that is no
    constant.
    """

    def close(module: ModuleType) -> None:
        for name in _VARIABLES:
            if hasattr(module, name):
                _close_gaps(getattr(module, name), is_traced)
                break

    after_import(_OBJECTS, close)
    after_import(_TENSORS, _know_quantizers)
    after_import(_GUARDS, _compare_with_snapshots)


def _value_of(variable: Any) -> Any:
    """Return what an opaque object's variable stands for; `as_python_constant()` raises for what is no value."""
    return getattr(variable.value, "real_obj", variable.value)


def _quantizer_of(variable: Any) -> Quantizer | None:
    value = _value_of(variable)
    return value if isinstance(value, Quantizer) else None


def _is_assignable_value(value: Any) -> bool:
    """Return whether the object is compared by its attributes, and these can be assigned."""
    return isinstance(value, Recipe) or (isinstance(value, Quantizer) and value._is_value())


def _kind(value: Any) -> str:
    return "quantizer" if isinstance(value, Quantizer) else "recipe"


def _close_gaps(variable: Any, is_traced: Callable[[type, str], bool]) -> None:
    getattr_name = next((name for name in _GETATTRS if hasattr(variable, name)), None)
    if getattr_name is None or not all(hasattr(variable, name) for name in _PATCHED):
        return
    call_function, call_method, reconstruct = variable.call_function, variable.call_method, variable.reconstruct
    as_proxy, var_getattr = variable.as_proxy, getattr(variable, getattr_name)

    def inline(self: Any, name: str, tx: Any, args: Any, kwargs: Any) -> Any:
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.functions import UserFunctionVariable

        cls = type(self.as_python_constant())
        method = inspect.getattr_static(cls, name)
        if isinstance(method, FunctionType):
            args = [self, *args]
        elif isinstance(method, classmethod):
            args = [VariableTracker.build(tx, cls), *args]
        return UserFunctionVariable(getattr(method, "__func__", method)).call_function(tx, list(args), kwargs)

    def traced_call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if _quantizer_of(self) is not None:
            return inline(self, "__call__", tx, args, kwargs)
        return call_function(self, tx, args, kwargs)

    def traced_getattr(self: Any, tx: Any, name: str) -> Any:
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.misc import LambdaVariable

        quantizer = _quantizer_of(self)
        if quantizer is None:
            return var_getattr(self, tx, name)
        cls = type(quantizer)
        if isinstance(inspect.getattr_static(cls, name, None), FunctionType | classmethod | staticmethod):
            if is_traced(cls, name):
                if self.source is not None:
                    return var_getattr(self, tx, name)
                return LambdaVariable(lambda *args, **kwargs: inline(self, name, tx, args, kwargs))
            return LambdaVariable(lambda *args, **kwargs: ask(self, name, tx, args, kwargs))
        if quantizer._is_value() and isinstance(getattr(quantizer, name, object), _PLAIN):
            return VariableTracker.build(tx, getattr(quantizer, name))  # the guard is on the whole quantizer
        return var_getattr(self, tx, name)

    def ask(self: Any, name: str, tx: Any, args: Any, kwargs: Any) -> Any:
        quantizer = _quantizer_of(self)
        is_value = quantizer is not None and quantizer._is_value()  # otherwise its answers may hold tensors
        if is_value and all(arg.is_python_constant() for arg in (*args, *kwargs.values())):
            return self.call_method(tx, name, args, kwargs)
        return inline(self, name, tx, args, kwargs)

    def traced_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        from torch._dynamo.exc import unimplemented
        from torch._dynamo.variables.constant import ConstantVariable

        value = _value_of(self)
        if not isinstance(value, Quantizer | Recipe) or name not in _ASSIGNMENTS:
            return call_method(self, tx, name, args, kwargs)
        if self.source is not None:
            unimplemented(
                gb_type=f"assignment to a {_kind(value)}",
                context=f"{type(value).__name__}.{name}",
                explanation=f"A {_kind(value)} that comes into a compiled function is a constant there: an assignment "
                "to it would be done once, while tracing.",
                hints=[f"{_OTHERS[_kind(value)]}, or assign before the call."],
            )
        constants = [arg.as_python_constant() for arg in args], {k: v.as_python_constant() for k, v in kwargs.items()}
        getattr(value, name)(*constants[0], **constants[1])
        return ConstantVariable.create(None)

    def snapshot_proxy(self: Any) -> Any:
        value, proxy = _value_of(self), as_proxy(self)
        if not isinstance(proxy, Quantizer | GraphConstant) or not _is_assignable_value(value):
            return proxy
        return value._snapshot()  # assignments are done to this object, in torch 2.11 not to the proxy's

    def traced_reconstruct(self: Any, codegen: Any) -> None:
        try:
            reconstruct(self, codegen)
        except NotImplementedError:  # torch 2.11
            value = getattr(self.value, "real_obj", self.value)
            if not isinstance(value, Quantizer | GraphConstant):
                raise
            name = codegen.tx.output.install_global_by_id("__mezzotint_constant", value)
            codegen.append_output(codegen.create_load_global(name, add=True))

    variable.call_function, variable.call_method = traced_call, traced_method
    variable.reconstruct, variable.as_proxy = traced_reconstruct, snapshot_proxy
    setattr(variable, getattr_name, traced_getattr)


def _know_quantizers(module: ModuleType) -> None:
    """Have a tensor that is made inside the graph know its quantizer. Dynamo asks a tensor's variable for
    `method_attr_<name>` (torch 2.11, 2.13)."""

    def method_attr__quantizer(self: Any, tx: Any) -> Any:
        from torch._dynamo.variables.base import VariableTracker

        example = self.proxy.node.meta.get("example_value")
        quantizer = getattr(example, "_quantizer", None) if isinstance(example, QuantizedTensorStorage) else None
        is_known = quantizer is not None and self.source is None and quantizer._is_constant()
        return VariableTracker.build(tx, quantizer) if is_known else None

    if hasattr(module, "TensorVariable"):
        module.TensorVariable.method_attr__quantizer = method_attr__quantizer


def _compare_with_snapshots(module: ModuleType) -> None:
    """Have guards on quantizers and recipes compare with a snapshot, as for lists and sets (torch 2.11, 2.13)."""
    builder: Any = getattr(module, "GuardBuilder", None)
    equals_match = getattr(builder, "EQUALS_MATCH", None)
    if equals_match is None or not hasattr(builder, "get"):
        return

    @functools.wraps(equals_match)
    def match_snapshot(self: Any, guard: Any, *args: Any, **kwargs: Any) -> Any:
        value = self.get(guard)
        if not _is_assignable_value(value):
            return equals_match(self, guard, *args, **kwargs)
        get = self.get  # the original asks for the guard's value, and for what it is in
        self.get = lambda asked, *rest: value._snapshot() if asked is guard else get(asked, *rest)
        try:
            return equals_match(self, guard, *args, **kwargs)
        finally:
            del self.get

    builder.EQUALS_MATCH = match_snapshot
