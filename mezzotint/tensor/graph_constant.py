"""GraphConstant: a value that a graph bakes in and guards on by `==`, such as a recipe or the plan of a module's run.

PyTorch knows such classes as opaque values (`opaque.py`). A method that is called with constants alone is run while the
graph is traced, and its result is a constant as well: the compiler does not look into the method.
"""

import itertools
from typing import Any, Self
from weakref import WeakKeyDictionary

from mezzotint.tensor.opaque import OpaqueMeta, register_value

_NUMBERS = itertools.count()
_NAMES: "WeakKeyDictionary[GraphConstant, str]" = WeakKeyDictionary()  # equal values share a name


class GraphConstant(metaclass=OpaqueMeta):
    """This is the base class of values that are constants of a graph: two are equal if their class and fields are.

    Annotate every field in the class, and never assign to one after construction.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register_value(cls, _is_traced)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def _key(self) -> Any:
        """Return what equality goes by."""
        return tuple(vars(self).items())

    def _snapshot(self) -> Self:
        """Return an equal value that nobody assigns to: a graph bakes it in, and its guards compare with it."""
        return self

    def __copy__(self) -> "GraphConstant":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphConstant":
        return self

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """Return a name for this object in the text of a graph, and a dict from the name to the object."""
        if self not in _NAMES:
            _NAMES[self] = f"mezzotint_{type(self).__name__}_{next(_NUMBERS)}"
        return _NAMES[self], {_NAMES[self]: self}


def _is_traced(cls: type, name: str) -> bool:
    return False
