"""Fewer guards on a compiled call.

Before each call of a compiled function Dynamo looks whether all is as it was when it made the graph: every function of
this package that it traced, every class, every constant. They never change, and there are hundreds of them: 346 guards
for one Linear, 134 without. `skip_own_guards` leaves them out:

    torch.compile(model, fullgraph=True, options={"guard_filter_fn": mezzotint.dynamo.skip_own_guards})

What can change is still looked at: the region of `autocast` and its recipe, modules, tensors, all that is yours. Do not
use it where functions of this package are replaced while a program runs.
"""

import enum
import types
from collections.abc import Sequence
from typing import Any

import torch

_OWN = ("G['__import_mezzotint", "G['__import_torch", "G['__builtins_dict")
_STATE = ".THREAD"  # of autocast: the one thing of ours that changes
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, type, torch._ops.OpOverload)
_PLAIN = (str, int, float, bool, torch.dtype, enum.Enum, type(None))


def skip_own_guards(guards: Sequence[Any]) -> list[bool]:
    """Which guards stay: for `torch.compile(options={"guard_filter_fn": …})`."""
    return [not _is_own(guard) for guard in guards]


def _is_own(guard: Any) -> bool:
    name = guard.name
    return name.startswith(_OWN) and _STATE not in name and guard.has_value and _is_fixed(guard.value)


def _is_fixed(value: Any) -> bool:
    """Whether it is code, or cannot change."""
    if isinstance(value, tuple):
        return all(_is_fixed(part) for part in value)
    return isinstance(value, _CODE + _PLAIN)
