"""The one place that knows PyTorch's opaque-object API, private and still changing.

A value-opaque class may be an argument of a custom op; the compiler bakes an instance in as a constant and guards on
`==`. torch 2.11 wants `OpaqueBaseMeta` as the metaclass and every member that traced code uses listed. Later versions
rename `register_opaque_type` to `register_custom_class` and "value" to "constant". Where the API is missing, or a part
of it, eager value semantics remain and only the compiler's specialisation is lost: `why_unregistered` tells.
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

# Class → why this PyTorch does not take it, None where it does.
_REGISTERED: dict[type, str | None] = {}

# Name in the text of a graph → the class that it stands for.
_NAMED: WeakValueDictionary[str, type] = WeakValueDictionary()

# torch 2.13 takes a subclass of a registered class for registered; 2.11 looks for the class itself.
SUBCLASSES_COUNT = hasattr(_api, "_resolve_opaque_type_info")


def register_value(cls: type, is_traced: Callable[[type, str], bool]) -> bool:
    """Register `cls`; False where this PyTorch cannot. Members that `is_traced` are inlined, all others constants."""
    if cls not in _REGISTERED:
        if cls.__hash__ is None:
            raise TypeError(f"cls is {cls.__name__}, which has __eq__ without __hash__: define both, or neither")
        _REGISTERED[cls] = _try_to_register(cls, is_traced)
    return _REGISTERED[cls] is None


def why_unregistered() -> str | None:
    """Why quantizers are no constants of graphs here; None where they are."""
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
        except (RuntimeError, TypeError) as error:  # a build without it, or another signature
            return f"torch {torch.__version__}: {function}: {type(error).__name__}: {error}"
        return None
    return f"torch {torch.__version__} has no API for opaque values that knows members"


def _instance_names(cls: type) -> list[str]:
    """Attributes that instances have: the annotations of the class and its bases."""
    return [name for base in cls.__mro__ for name in inspect.get_annotations(base)]


def graph_name(cls: type) -> str:
    """An identifier for `cls` in the text of a graph, which no other class has: its qualified name, with a number where
    another one has taken it (a function may define a class at each call). The same in each run of a program: the
    compiler's caches on disk go by the text."""
    name = base = re.sub(r"\W", "_", f"{cls.__module__}_{cls.__qualname__}")
    number = 1
    while _NAMED.setdefault(name, cls) is not cls:
        number += 1
        name = f"{base}_v{number}"
    return name
