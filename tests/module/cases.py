"""Modules as cases of tests."""

from collections.abc import Callable
from typing import Any

import torch

from tests.recipes import OPTIONS, make


def with_main_grad(name: str, value: float = 0.0, **options: Any) -> Any:
    module = make(name, fuse_wgrad_accumulation=True, **options)
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.full(parameter.shape, value)
    return module


def layer(cls: Any, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: cls(*args, **{**OPTIONS, **options})
