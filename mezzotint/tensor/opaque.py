"""The one place that knows PyTorch's opaque-object API, private and still changing.

A value-opaque class may be an argument of a custom op; the compiler bakes an instance in as a constant and guards on
`==`. torch 2.11 wants `OpaqueBaseMeta` as the metaclass and every member that traced code uses listed. Later versions
rename `register_opaque_type` to `register_custom_class` and "value" to "constant". Where the API is missing, eager
value semantics remain and only the compiler's specialisation is lost.
"""

import inspect
from typing import Any

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

_REGISTERED: set[type] = set()

# torch 2.13 takes a subclass of a registered class for registered; 2.11 looks for the class itself.
SUBCLASSES_COUNT = hasattr(_api, "_resolve_opaque_type_info")


def register_value(cls: type, inlined: frozenset[str]) -> bool:
    """Register `cls`; False where this PyTorch cannot. Members in `inlined` are traced, all others are constants."""
    if cls in _REGISTERED:
        return True
    for function, value in (("register_opaque_type", "value"), ("register_custom_class", "constant")):
        register: Any = getattr(_api, function, None)
        members: Any = getattr(_api, "MemberType", None)
        if register is not None and members is not None:
            names = {name for name in dir(cls) if not name.startswith("__")} | set(_instance_names(cls))
            names |= {name for name in inlined if hasattr(cls, name)}
            kinds = {name: members.INLINED if name in inlined else members.USE_REAL for name in names}
            register(cls, typ=value, members=kinds)
            _REGISTERED.add(cls)
            return True
    return False


def _instance_names(cls: type) -> list[str]:
    """Attributes that instances have: the annotations of the class and its bases."""
    return [name for base in cls.__mro__ for name in inspect.get_annotations(base)]
