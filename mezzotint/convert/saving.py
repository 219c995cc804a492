"""This module makes Hugging Face's `save_pretrained` write a converted model as the model
that it was, and nothing more.

`from_pretrained` builds the original model, which has no place for what delayed scaling has learnt, and would report
it. So a converted model tells `save_pretrained` to leave that out. `state_dict()` has it.
"""

from typing import Any

from torch import nn

from mezzotint.convert.modules import Converted
from mezzotint.layer.scaling_state import StatefulModule

_KEYS = "_keys_to_ignore_on_save"  # an attribute of transformers.PreTrainedModel, for all modules below it
_LEARNT = "_extra_state"


def leave_out_state(model: nn.Module) -> None:
    """Tell `save_pretrained` to leave out the state of the layers that are converted now."""
    for outer in [module for module in model.modules() if hasattr(module, _KEYS)]:
        found = [
            name for name, m in outer.named_modules() if isinstance(m, Converted) and isinstance(m, StatefulModule)
        ]
        _set(outer, _others(outer) | {f"{name}.{_LEARNT}" if name else _LEARNT for name in found})


def leave_nothing_out(model: nn.Module) -> None:
    """Undo `leave_out_state`."""
    for outer in [module for module in model.modules() if hasattr(module, _KEYS)]:
        _set(outer, _others(outer))


def _others(outer: Any) -> set[str]:
    return {key for key in getattr(outer, _KEYS) or () if key.rpartition(".")[2] != _LEARNT}


def _set(outer: Any, keys: set[str]) -> None:
    if keys or getattr(outer, _KEYS):
        setattr(outer, _KEYS, keys)
