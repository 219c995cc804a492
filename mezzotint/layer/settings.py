"""Settings: what a module without GEMMs of its own was made with, as one value that a graph guards on at once."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from mezzotint.tensor.graph_constant import GraphConstant


@dataclass(frozen=True)
class Settings(GraphConstant):
    """Base of a module's settings: its fields are attributes of the module."""

    def read(self) -> Any:
        """Return these settings. In a graph: without a guard on each of their fields, beside that on the whole."""
        return self


class Configured(nn.Module):
    """A module that keeps its `Settings` as `_settings`, renewed whenever one of the attributes is assigned."""

    _SETTINGS: ClassVar[type[Settings]]
    _SETTING_NAMES: ClassVar[frozenset[str]] = frozenset()
    _settings: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_SETTINGS" in vars(cls):
            cls._SETTING_NAMES = frozenset(field.name for field in fields(cls._SETTINGS))

    def _configure(self) -> None:
        """Note the settings: once at the end of the constructor, and after each assignment to one of them."""
        values = {name: getattr(self, name) for name in self._SETTING_NAMES}
        made = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        self.__dict__["_settings"] = self._SETTINGS(**made)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "_settings" in self.__dict__ and name in self._SETTING_NAMES:
            self._configure()
