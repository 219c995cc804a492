"""Modules with a configuration: the base class here keeps what a module was made with as one value, so that a graph
guards on all of it at once."""

from dataclasses import fields
from typing import Any, ClassVar

from torch import nn

from mezzotint.tensor.graph_constant import GraphConstant


class Configured(nn.Module):
    """A `Configured` module has `_config`, a value that is renewed whenever an attribute that it is made of is
    assigned."""

    _CONFIG: ClassVar[Any]  # a frozen dataclass whose fields are attributes of the module
    _CONFIGURED: ClassVar[frozenset[str]] = frozenset()  # attributes that the value is made of
    _config: Any

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
        self.__dict__["_config"] = self._make_config()

    def __setattr__(self, name: str, value: Any) -> None:
        is_configured = name in self._CONFIGURED  # asked first, because `__class__` may be assigned a class without it
        super().__setattr__(name, value)
        if is_configured and "_config" in self.__dict__:
            self._configure()
