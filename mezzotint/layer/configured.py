"""Modules with a configuration: the base class here keeps what a module was made with as one value, so that a graph
guards on all of it at once.

A graph guards on the configuration's name, a string, and not on the value itself. Comparing two strings takes PyTorch
no call into Python. And torch 2.11 evaluates no guard of a module at all while nothing was assigned to it, but only if
all that it guards on there is of types which it knows to be immutable.
"""

from dataclasses import fields
from itertools import count
from typing import Any, ClassVar

from torch import nn

from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tracing import traced_as

# Equal configurations have the same name. Both tables grow by an entry for each that is different.
_NAMES: dict[GraphConstant, str] = {}
_NAMED: dict[str, GraphConstant] = {}
_COUNT = count()


class Configured(nn.Module):
    """A `Configured` module has `_config`, a value that is renewed whenever an attribute that it is made of is
    assigned."""

    _CONFIG: ClassVar[Any]  # a frozen dataclass whose fields are attributes of the module
    _CONFIGURED: ClassVar[frozenset[str]] = frozenset()  # attributes that the value is made of
    _config: Any
    _config_name: str  # of `_config`, in this process

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_CONFIG" in vars(cls):
            cls._CONFIGURED = frozenset(field.name for field in fields(cls._CONFIG))

    def _make_config(self) -> GraphConstant:
        """Return the configuration from the present values of the attributes."""
        values = {name: getattr(self, name) for name in self._CONFIGURED}
        return self._CONFIG(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )

    def _configure(self) -> None:
        """Update the configuration: at the end of the constructor, and after each assignment."""
        config = self._make_config()
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_config_name", _CONFIGURATIONS.name_of(config))

    def __setattr__(self, name: str, value: Any) -> None:
        is_configured = name in self._CONFIGURED  # asked first, because `__class__` may be assigned a class without it
        super().__setattr__(name, value)
        if is_configured and "_config" in self.__dict__:
            self._configure()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        for made in ("_config", "_config_name"):  # another process has other names
            state.pop(made, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._configure()


class _Configurations(GraphConstant):
    """The one `_Configurations` names configurations and finds them by their names. It is a constant, so that its
    methods are run while a graph is traced: a module may be assigned to in a graph."""

    def name_of(self, config: GraphConstant) -> str:
        name = _NAMES.setdefault(config, f"configuration {next(_COUNT)}")
        _NAMED.setdefault(name, config)
        return name

    def named(self, name: str) -> Any:
        return _NAMED[name]


_CONFIGURATIONS = _Configurations()


@traced_as(lambda module: _CONFIGURATIONS.named(module._config_name))
def config_of(module: Configured) -> Any:
    """Return the configuration of a module. Ask once in a run and hand it on: each time adds a guard to a graph."""
    return module._config
