"""Late changes to the compiler: they are made when the first `torch.compile` imports it, and Triton with it. Nothing
here imports it."""

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
        return
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _AfterImport) and finder.name == name]
    if not waiting:
        waiting = [_AfterImport(name)]
        sys.meta_path.insert(0, waiting[0])
    waiting[0].actions.append(action)


class _AfterImport(importlib.abc.MetaPathFinder):
    """This finder calls each of its `actions` with the module of that name, once, right after it was imported."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.actions: list[Callable[[ModuleType], None]] = []

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            for action in self.actions:
                action(module)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec
