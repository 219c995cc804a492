"""This module has state dicts with Transformer Engine's `_extra_state`, and its rule of what may be unpickled.

`load_state_dict` reads its checkpoints as they are (`extra_state_bytes.py`); `upstream_state_dict` writes one.

`should_load_extra_state_pickle` is one of its own names, which nothing here calls: it walks over the opcodes of a
pickle. A payload without state can be ignored; one with the state of delayed scaling, or of an unknown kind, is refused
unless an environment variable allows it.
"""

import os
import pickletools
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from mezzotint.compat.extra_state_bytes import EXTRA_STATE
from mezzotint.recipe import CustomRecipe, DelayedScaling, Recipe

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
DELAYED_KEYS = {"scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"}
RECIPE_MODULES = ("transformer_engine.common.recipe", "mezzotint.recipe")


def upstream_state_dict(model: nn.Module, recipe: DelayedScaling) -> dict[str, Any]:
    """Return the model's state dict with `_extra_state` as Transformer Engine writes it for a recipe.

    It is bytes that hold the recipe, its scales and its amax histories, and is empty for a module without such state.
    Transformer Engine unpickles them only if NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 is set.
    """
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(
            f"recipe is {type(recipe).__name__}: only DelayedScaling has state; for others use state_dict()"
        )
    state = {key: value for key, value in model.state_dict().items() if key.rpartition(".")[2] != EXTRA_STATE}
    for prefix, module in model.named_modules():
        found: Any = getattr(module, "upstream_extra_state", None)
        if found is not None:
            state[f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE] = found(recipe)
    return state


class IgnoresExtraState(nn.Module):
    """This module has no state, but its counterpart in Transformer Engine writes `_extra_state`: a checkpoint that has
    it loads here, strictly too."""

    def upstream_extra_state(self, recipe: DelayedScaling) -> torch.Tensor:
        """Return no bytes, as Transformer Engine does for a module without state."""
        return torch.empty(0, dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        unexpected = rest[-2]
        if f"{prefix}{EXTRA_STATE}" in unexpected:
            unexpected.remove(f"{prefix}{EXTRA_STATE}")


class CheckpointExtraStatePolicy(Enum):
    """This enumeration says what a recipe leaves in a checkpoint: nothing, scales and amax histories,
    or what its factory asks for."""

    STATELESS = "stateless"
    STATEFUL_FP8_DELAYED_SCALING = "stateful_fp8_delayed_scaling"
    DYNAMIC = "dynamic"


def _recipe_classes(kind: type[Recipe] = Recipe) -> Iterator[type[Recipe]]:
    for each in kind.__subclasses__():
        yield each
        yield from _recipe_classes(each)


def _policy_of(kind: type[Recipe]) -> CheckpointExtraStatePolicy:
    if issubclass(kind, DelayedScaling):
        return CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING
    is_custom = issubclass(kind, CustomRecipe)
    return CheckpointExtraStatePolicy.DYNAMIC if is_custom else CheckpointExtraStatePolicy.STATELESS


# The keys are the module and the name that a pickle has of a recipe's class.
_RECIPE_POLICIES = {
    (module, kind.__name__): _policy_of(kind)
    for kind in _recipe_classes()
    if kind.__module__.startswith(Recipe.__module__)
    for module in RECIPE_MODULES
}


def recipe_extra_state_policy(recipe: Recipe) -> CheckpointExtraStatePolicy | None:
    """Return what a recipe leaves in a checkpoint, or None for an unknown class."""
    return _RECIPE_POLICIES.get((type(recipe).__module__, type(recipe).__name__))


def is_stateless_recipe(recipe: Recipe) -> bool:
    """Return whether a recipe leaves nothing in a checkpoint."""
    return recipe_extra_state_policy(recipe) is CheckpointExtraStatePolicy.STATELESS


def unsafe_pickle_extra_state_enabled() -> bool:
    """Return whether the environment allows pickles to be executed."""
    return os.getenv(UNSAFE_PICKLE_EXTRA_STATE_ENV, "0") == "1"


def extra_state_pickle_advisory(context: str) -> str:
    """Return the message of the error that refuses a pickle."""
    return (
        f"Refusing to load pickled extra state for {context}: it holds the state of delayed scaling, or an unknown "
        "kind of state, and unpickling can execute code that the file brings. Where the file is from a trusted source, "
        f"set {UNSAFE_PICKLE_EXTRA_STATE_ENV}=1"
    )


def should_load_extra_state_pickle(data: bytes, context: str) -> bool:
    """Return whether pickled state is to be loaded, False if it holds none, and raise a
    RuntimeError if it may not be."""
    if not _holds_state(data):
        return False
    if unsafe_pickle_extra_state_enabled():
        return True
    raise RuntimeError(extra_state_pickle_advisory(context))


def _holds_state(data: bytes) -> bool:
    """Return whether a pickle has state, as far as its opcodes tell; one that cannot be read counts as having some."""
    if not data:
        return False
    try:
        strings, names = _contents(data)
    except Exception:
        return True
    has_scales = bool(DELAYED_KEYS & set(strings))
    if not names and not has_scales:  # without a global name nothing can be called, and nothing is worth loading
        return False
    policies = {_RECIPE_POLICIES[name] for name in names if name in _RECIPE_POLICIES}
    is_known = "recipe" in strings and bool(policies)
    return has_scales or not is_known or CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING in policies


def _contents(data: bytes) -> tuple[list[str], list[tuple[str, str] | None]]:
    """Return the strings of a pickle, and the global names that it refers to; None for a name that is not plain."""
    strings: list[str] = []
    names: list[tuple[str, str] | None] = []
    for opcode, argument in _opcodes(data):
        if "STRING" in opcode or "UNICODE" in opcode:
            strings.append(argument.decode() if isinstance(argument, bytes) else str(argument))
        elif opcode == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            names.append((module, name))
        elif opcode == "STACK_GLOBAL":
            names.append((strings[-2], strings[-1]) if len(strings) > 1 else None)
    return strings, names


def _opcodes(data: bytes) -> Iterator[tuple[str, object]]:
    for opcode, argument, _ in pickletools.genops(data):
        yield opcode.name, argument
