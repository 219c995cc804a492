"""This program checks that the API reference has every public name.

    python -m dev.reference          each public name that is on no page of docs/api, or has no docstring

The public names are those of `mezzotint` and of its public packages, as their `__all__` lists them. A page shows a name
by a line `::: mezzotint.Linear`. A name that is also a name of `mezzotint` itself needs one such line, under either.
"""

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PAGES = Path(__file__).resolve().parents[1] / "docs" / "api"
PACKAGES = ("recipe", "ops", "optimizers", "distributed", "custom_recipes", "dynamo", "moe", "cpp_extensions")
SHOWN = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def public_names() -> dict[str, Any]:
    """Return every public object by its full name; modules are left out, because their contents are listed."""
    top = import_module("mezzotint")
    found = {f"mezzotint.{name}": getattr(top, name) for name in top.__all__}
    for package in PACKAGES:
        module = getattr(top, package, None) or import_module(f"mezzotint.{package}")
        found |= {f"mezzotint.{package}.{name}": getattr(module, name) for name in module.__all__}
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType)}


def find_faults(pages: Path = PAGES) -> list[str]:
    """Return a line for each public name that is not shown or not documented, and for each one that is shown twice."""
    shown = [name for page in sorted(pages.glob("*.md")) for name in SHOWN.findall(page.read_text(encoding="utf-8"))]
    faults = [f"{name}: is shown {shown.count(name)} times" for name in sorted(set(shown)) if shown.count(name) > 1]
    public = public_names()
    objects = {id(find(name)) for name in shown}
    for name, value in public.items():
        if name not in shown and (is_plain(value) or id(value) not in objects):
            faults.append(f"{name}: is on no page of docs/api")
        if not is_plain(value) and not inspect.getdoc(value):
            faults.append(f"{name}: has no docstring")
    return faults


def find(name: str) -> Any:
    """Return the object of a full name."""
    parts = name.split(".")
    value: Any = import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        value = getattr(value, part) if hasattr(value, part) else import_module(".".join(parts[:i]))
    return value


def is_plain(value: Any) -> bool:
    """Return whether a value is a constant, which has no docstring of its own."""
    return not callable(value)


def main() -> None:
    """Print the faults, and exit with 1 if there are some."""
    faults = find_faults()
    print("\n".join([*faults, f"{len(public_names())} public names, {len(faults)} faults"]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
