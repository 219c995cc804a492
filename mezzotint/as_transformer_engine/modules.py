"""The modules with Transformer Engine's names: they are plain module objects, whose attributes are found when used.

All of them are made at once, which takes no time, and put into `sys.modules`; none imports a counterpart before one of
its names is used.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from mezzotint.as_transformer_engine.absent import placeholder
from mezzotint.as_transformer_engine.metadata import DISTRIBUTION, announce, is_ours
from mezzotint.as_transformer_engine.paths import BEHIND_A_NAME, PATHS, RENAMED, VERSION

MARK = "__provided_by__"  # an attribute of `transformer_engine`: who provides it
FACTS = Path(__file__).with_name("names.json")
_MISSING: Any = object()


@cache
def upstream_names() -> dict[str, dict[str, Any]]:
    """Return the public names of Transformer Engine by module, as `dev/upstream_names.py` wrote them down."""
    return json.loads(FACTS.read_text(encoding="utf-8"))["modules"]


def all_paths() -> list[str]:
    """Return the paths of the table and the packages on the way to them, packages first."""
    found = {".".join(path.split(".")[:length]) for path in PATHS for length in range(1, path.count(".") + 2)}
    return sorted(found)


def find(path: str, name: str) -> Any:
    """Return what a module of Transformer Engine's has under a name: Mezzotint's object, or a placeholder.

    Raise AttributeError if Transformer Engine has no such name either.
    """
    if (found := counterpart(path, name)) is not _MISSING:
        return found
    if not name.startswith("_") and name in upstream_names().get(path, {}):
        return placeholder(f"{path}.{name}")
    raise AttributeError(
        f"module {path!r} has no attribute {name!r}: neither Transformer Engine {VERSION} nor Mezzotint has it"
    )


def counterpart(path: str, name: str) -> Any:
    """Return Mezzotint's object for a name, or `_MISSING`."""
    if (renamed := RENAMED.get(f"{path}.{name}")) is not None:
        return getattr(import_module(renamed[0]), renamed[1])
    for source in PATHS.get(path, ()):
        if name.startswith("__"):
            break
        found = getattr(import_module(source), name, _MISSING)
        if found is not _MISSING and not isinstance(found, ModuleType):
            return found
    return _MISSING


def is_absent(path: str, name: str) -> bool:
    """Return whether Mezzotint has no object under a name of Transformer Engine's."""
    return counterpart(path, name) is _MISSING


def _attributes(module: ModuleType) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module. What was found once is kept in the module."""
    path = module.__name__

    def __getattr__(name: str) -> Any:
        if name == "__all__":  # `import *` takes Transformer Engine's names that exist here
            return [each for each in upstream_names().get(path, {}) if not is_absent(path, each)]
        found = find(path, name)
        setattr(module, name, found)
        return found

    def __dir__() -> list[str]:
        return sorted({*vars(module), *upstream_names().get(path, {})})

    return __getattr__, __dir__


def _fill(module: ModuleType) -> None:
    """Make an empty module, or the shim's module that is being imported, a module of these names."""
    path = module.__name__
    if getattr(module, "__spec__", None) is None:
        module.__spec__ = ModuleSpec(path, None, origin="mezzotint", is_package=True)
    module.__path__ = list(getattr(module, "__path__", []))
    module.__package__ = path
    sources = ", ".join(PATHS.get(path, ())) or "the modules below it"
    module.__doc__ = f"Mezzotint under the name `{path}`: its attributes are those of {sources}."
    vars(module)["__getattr__"], vars(module)["__dir__"] = _attributes(module)


def install() -> None:
    """Put the modules into `sys.modules`, once; raise ImportError if another `transformer_engine` is imported."""
    roots = [path for path in all_paths() if "." not in path]
    for root in roots:
        present = sys.modules.get(root)
        if present is None or "__getattr__" in vars(present):
            continue
        if MARK not in vars(present):
            where = getattr(present, "__file__", None) or "an unknown place"
            raise ImportError(
                f"{root} is already imported, from {where}: Mezzotint cannot take its place in this process. Import "
                "mezzotint.as_transformer_engine first, or run the program by python -m mezzotint.as_transformer_engine"
            )
        refuse_the_real_one()  # the shim, which is being imported, has the mark
    for path in all_paths():
        module = sys.modules.setdefault(path, ModuleType(path))
        if "__getattr__" in vars(module):
            continue
        _fill(module)
        parent, _, name = path.rpartition(".")
        if parent and path not in BEHIND_A_NAME:
            setattr(sys.modules[parent], name, module)
    for root in roots:
        vars(sys.modules[root])[MARK] = f"mezzotint {import_module('mezzotint').__version__}"
        vars(sys.modules[root])["__version__"] = VERSION
    announce(VERSION)


def refuse_the_real_one() -> None:
    """Raise ImportError if Transformer Engine itself is installed beside the shim, since both write the same files."""
    parts = [f"{DISTRIBUTION}-{part}" for part in ("torch", "jax", "cu12", "cu13", "rocm")]
    for name in (DISTRIBUTION, *parts):
        for found in metadata.distributions(name=name):
            if not is_ours(found):
                raise ImportError(
                    f"{found.metadata['Name']} {found.version} is installed beside the shim that gives Mezzotint the "
                    "name transformer_engine. Both write the same files: uninstall one of them (pip uninstall "
                    f"{found.metadata['Name']}), and install the other anew"
                )
