"""What locals of traced code stand for, read while Dynamo traces it.

    torch._dynamo.comptime.comptime(function)   # in traced code: Dynamo calls function(context), in plain Python
    read_local(context, "self")                 # in there

The graph gets no node of it, and no guard on what is read: layers that share a graph still do. Dynamo's variables are
private (seen in torch 2.11 and 2.13). Nothing here imports Dynamo, which has been imported where anything here runs.
"""

import dataclasses
from typing import Any

import torch


def read_local(context: Any, name: str) -> Any:
    """An object from outside of the graph is itself. A frozen dataclass that the graph makes is made once more: of that
    Dynamo knows the fields, and has an object without them. What cannot be known is a text."""
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    return _read(variable.realize(), context._i_will_not_complain_if_bc_breaks_InstructionTranslator())


def _read(variable: Any, translator: Any) -> Any:
    if variable.source is None and dataclasses.is_dataclass(variable.python_type()):
        made: Any = object.__new__(variable.python_type())
        for field in dataclasses.fields(made):
            object.__setattr__(made, field.name, _read(_attribute(variable, field.name, translator), translator))
        return made
    if hasattr(variable, "value"):
        return variable.value
    return variable.as_python_constant() if variable.is_python_constant() else repr(variable)


def _attribute(variable: Any, name: str, translator: Any) -> Any:
    build = torch._dynamo.variables.VariableTracker.build
    return build(translator, getattr).call_function(translator, [variable, build(translator, name)], {}).realize()


def describe_tensor(context: Any, name: str) -> str:
    """Shape and dtype of a local; of what is no tensor to Dynamo, nothing."""
    local = context.get_local(name)
    if not local.is_proxy():
        return ""
    fake = local.as_fake()
    sizes = [size if isinstance(size, int) else size.node.hint for size in fake.shape]  # to ask for more is a guard
    return f"{tuple(sizes)} of {fake.dtype}"
