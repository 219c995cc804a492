"""Placeholders for names that Transformer Engine has and Mezzotint lacks: they can be imported, and not used."""

import tomllib
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

REASONS = Path(__file__).with_name("absent.toml")


class AbsentError(NotImplementedError, AttributeError):
    """This error says that a name of Transformer Engine was used that Mezzotint lacks. It is an AttributeError as well,
    so that `hasattr` is False."""


class Absent(type):
    """This is the type of placeholders. They are classes: `isinstance(x, placeholder)` is False, annotations work."""

    _sentence: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise AbsentError(cls._sentence)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):  # Python and tools look these up on any object
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise AbsentError(f"{cls._sentence} ({name!r} of it was asked for)")

    def __getitem__(cls, key: Any) -> NoReturn:
        raise AbsentError(cls._sentence)

    def __iter__(cls) -> NoReturn:
        raise AbsentError(cls._sentence)


def placeholder(path: str) -> Absent:
    """Return the placeholder of a name, given with its module."""
    module, _, name = path.rpartition(".")
    sentence = f"{path}: Mezzotint has no counterpart of this name. {reason(path)}"
    return Absent(name, (), {"_sentence": sentence, "__module__": module, "__doc__": sentence})


@cache
def reasons() -> dict[str, str]:
    """Return the reasons by pattern, in the order in which they are tried."""
    return tomllib.loads(REASONS.read_text(encoding="utf-8"))["absent"]


def reason(path: str) -> str:
    """Return why a name is absent, and what to use instead."""
    for pattern, text in reasons().items():
        if fnmatchcase(path, pattern):
            return text
    return "No program is known to need it: say so in an issue if yours does."
