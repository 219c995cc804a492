"""PyTorch's opaque-object API: this is the one module that knows it, because it is private and still changing.

A value-opaque class may be an argument of a custom op; the compiler bakes an instance in as a constant and guards on
`==`. torch 2.11 needs `OpaqueBaseMeta` as the metaclass, and a list of every member that traced code uses. Later
versions rename `register_opaque_type` to `register_custom_class` and "value" to "constant". If the API, or a part of
it, is missing, values still work in eager code and only the compiler's specialisation is lost; `why_unregistered` says
why.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

OpaqueMeta: Any
try:
    from torch._opaque_base import OpaqueBaseMeta

    OpaqueMeta = OpaqueBaseMeta
except ImportError:
    OpaqueMeta = type

_api: Any
try:
    from torch._library import opaque_object

    _api = opaque_object
except ImportError:
    _api = None

# This maps a class to why this PyTorch does not take it, or to None if it does.
_REGISTERED: dict[type, str | None] = {}

# This maps a name in the text of a graph to the class that it stands for.
_NAMED: WeakValueDictionary[str, type] = WeakValueDictionary()

# torch 2.13 takes a subclass of a registered class for registered; 2.11 looks for the class itself.
SUBCLASSES_COUNT = hasattr(_api, "_resolve_opaque_type_info")


def register_value(cls: type, is_traced: Callable[[type, str], bool]) -> bool:
    """Register `cls`, and return whether this PyTorch could. Members that `is_traced` are inlined, others constants."""
    if cls not in _REGISTERED:
        if cls.__hash__ is None:
            raise TypeError(f"cls is {cls.__name__}, which has __eq__ without __hash__: define both, or neither")
        _REGISTERED[cls] = _try_to_register(cls, is_traced)
    return _REGISTERED[cls] is None


def why_unregistered() -> str | None:
    """Return why quantizers are no constants of graphs here, or None if they are."""
    return next((reason for reason in _REGISTERED.values() if reason is not None), None)


def _try_to_register(cls: type, is_traced: Callable[[type, str], bool]) -> str | None:
    for function, value in (("register_opaque_type", "value"), ("register_custom_class", "constant")):
        register: Any = getattr(_api, function, None)
        members: Any = getattr(_api, "MemberType", None)
        if register is None or members is None:
            continue
        names = {name for name in dir(cls) if not name.startswith("__") or is_traced(cls, name)}
        names |= set(_instance_names(cls))
        kinds = {name: members.INLINED if is_traced(cls, name) else members.USE_REAL for name in names}
        try:
            register(cls, typ=value, members=kinds)
        except (RuntimeError, TypeError) as error:  # a build without the API, or with another signature
            return f"torch {torch.__version__}: {function}: {type(error).__name__}: {error}"
        return None
    return f"torch {torch.__version__} has no API for opaque values that knows members"


def _instance_names(cls: type) -> list[str]:
    """Return the attributes that instances have: the annotations of the class and its bases."""
    return [name for base in cls.__mro__ for name in inspect.get_annotations(base)]


def graph_name(cls: type) -> str:
    """Return an identifier for `cls` in the text of a graph, which no other class has.

    It is the qualified name, with a number if another class has taken that (a function may define a class at each
    call). It is the same in each run of a program, because the compiler's caches on disk go by the text.
    """
    name = base = re.sub(r"\W", "_", f"{cls.__module__}_{cls.__qualname__}")
    number = 1
    while _NAMED.setdefault(name, cls) is not cls:
        number += 1
        name = f"{base}_v{number}"
    return name
