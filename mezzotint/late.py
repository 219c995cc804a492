"""Changes to the compiler, which the first `torch.compile` imports, with Triton: nothing here imports it."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` once, when the module of that name has been imported."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `action(module)` once, right after the module of that name was imported."""

    def __init__(self, name: str, action: Any) -> None:
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, action = spec.loader.exec_module, self.action

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec
