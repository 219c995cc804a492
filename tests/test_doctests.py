"""The public names are documented: every argument is explained, and the examples run.

The examples are doctests. They run on the CPU, all in this process, each in a namespace of its own.
"""

import doctest
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

MODULES = ("api", "recipe", "ops", "optimizers", "distributed", "custom_recipes", "moe")

# Names that have no example, and why.
NO_EXAMPLE = {
    "initialize_ub": "It only raises an error.",
}
# Names whose parameters are not explained one by one, and why.
NO_ARGUMENTS = {
    "ops.FusibleOperation": "It is a base class that nobody makes, with the constructor of nn.Module.",
}


def find_public() -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each public class and function; one that has several names, by its first."""
    seen: set[int] = set()
    for package in MODULES:
        module = importlib.import_module(f"mezzotint.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, type | types.FunctionType) or id(value) in seen:
                continue  # a package, a constant, or an alias
            seen.add(id(value))
            yield (name if package == "api" else f"{package}.{name}"), value


PUBLIC = dict(find_public())
over_names = pytest.mark.parametrize("name", PUBLIC)


def doc_of(name: str) -> str:
    """Its own docstring, not that of a base class."""
    return inspect.cleandoc(PUBLIC[name].__doc__ or "")


def examples_of(name: str) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(doc_of(name), {"__name__": "__main__"}, name, name, 0)


def parameters_of(value: Any) -> list[str]:
    """What the user of a class or function may give, with the stars of `*args` and `**kwargs`."""
    if isinstance(value, type) and issubclass(value, Enum | Warning):
        return []
    return [str(each).split(":")[0].split("=")[0].strip() for each in inspect.signature(value).parameters.values()]


def explained_in(doc: str) -> list[str]:
    """The names of the section "Args:"."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    return [] if section is None else re.findall(r"^    (\*{0,2}\w+): ", section[1], re.MULTILINE)


@over_names
def test_it_is_documented(name: str) -> None:
    """Every argument of the signature is explained, in order, and none that is not there."""
    doc = doc_of(name)
    assert doc
    if name not in NO_ARGUMENTS:
        wanted = [each for each in parameters_of(PUBLIC[name]) if not each.startswith("_")]
        assert explained_in(doc) == wanted


@over_names
def test_it_has_an_example(name: str) -> None:
    assert bool(examples_of(name).examples) != (name in NO_EXAMPLE)


@pytest.mark.parametrize("name", [name for name in PUBLIC if examples_of(name).examples])
def test_its_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write files
    said: list[str] = []
    doctest.DocTestRunner().run(examples_of(name), out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("listed", [NO_EXAMPLE, NO_ARGUMENTS], ids=["no example", "no arguments"])
def test_what_is_left_out_is_there(listed: dict[str, str]) -> None:
    assert listed.keys() <= PUBLIC.keys()
    assert all(reason.endswith(".") for reason in listed.values())
