"""What locals of traced code stand for, read, and written, while Dynamo traces it.

    torch._dynamo.comptime.comptime(function)   # in traced code: Dynamo calls function(context), in plain Python
    read_local(context, "self")                 # in there
    set_local(context, "name", "a text")        # to the traced code it is a constant

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


def read_written(context: Any, name: str, attribute: str) -> Any:
    """What the graph has set this attribute of a local to so far, made of constants; None: it has not."""
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    effects = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.side_effects
    if not effects.has_pending_mutation_of_attr(variable, attribute):
        return None
    return effects.load_attr(variable, attribute).as_python_constant()


def set_local(context: Any, name: str, value: Any) -> None:
    """From here on the local is this constant."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    translator.symbolic_locals[name] = torch._dynamo.variables.ConstantVariable.create(value)


def next_number(context: Any) -> int:
    """Another one at each call in a graph: calls of an operator with the same arguments are one to a compiler."""
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    output._mezzotint_number = getattr(output, "_mezzotint_number", 0) + 1
    return output._mezzotint_number
