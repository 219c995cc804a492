"""This module has names around Transformer Engine's CUDA graphs, for programs that capture by themselves.

`mezzotint.make_graphed_callables` captures; `fp8_graph_capturing()` and PyTorch say whether a stream is captured.
"""

from collections.abc import Iterable
from typing import Any

import torch

from mezzotint.recipe import DelayedScaling, Recipe

_is_capturing = False


def set_capture_start() -> None:
    """Note that a capture begins."""
    global _is_capturing
    _is_capturing = True


def set_capture_end() -> None:
    """Note that a capture has ended."""
    global _is_capturing
    _is_capturing = False


def is_graph_capturing() -> bool:
    """Return whether `set_capture_start` was called and `set_capture_end` was not."""
    return _is_capturing


def graph_pool_handle() -> Any:
    """Return the handle of a memory pool that graphs can share."""
    return torch.cuda.graph_pool_handle()


def _stateful(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Return the modules that have state of delayed scaling, in the order of `modules()`."""
    return [each for module in modules for each in module.modules() if hasattr(each, "get_fp8_meta_tensors")]


def save_fp8_tensors(modules: Iterable[torch.nn.Module], recipe: Recipe | None) -> list[Any] | None:
    """Return copies of delayed scaling's scales and amax histories, which warm-up runs
    change, or None for other recipes."""
    if not isinstance(recipe, DelayedScaling):
        return None
    saved = []
    for module in _stateful(modules):
        module.init_fp8_meta_tensors(recipe)
        saved.append(module.get_fp8_meta_tensors())
    return saved


def restore_fp8_tensors(modules: Iterable[torch.nn.Module], fp8_tensors: list[Any] | None) -> None:
    """Write back what `save_fp8_tensors` returned."""
    if fp8_tensors is None:
        return
    found = _stateful(modules)
    if len(found) != len(fp8_tensors):
        raise RuntimeError(
            f"fp8_tensors has the state of {len(fp8_tensors)} modules, modules has {len(found)} with state: give the "
            "modules that save_fp8_tensors was given"
        )
    for module, tensors in zip(found, fp8_tensors, strict=True):
        module.reset_fp8_meta_tensors(tensors)
