"""This module converts delayed scaling's state from and to the form in Transformer Engine's checkpoints: a pickled
dictionary in a tensor of bytes.

    {"recipe": …, "scale_fwd": [n], "amax_history_fwd": (L, n), "scale_bwd": …, "amax_history_bwd": …,
     "extra_fp8_variables": {"num_gemms": …}}

A module has 3 columns per GEMM forward (input, weight, output) and 2 backward (grad_output, grad_input), in the order
that modules here have them. An operation has no columns for output and grad_input, and its two directions are
dictionaries of their own, under "forward" and "backward".

A pickle is a program, and this reader runs none of it: the few names that a tensor and a recipe need are replaced by
stand-ins that are made for one reading, and any other name raises an error before anything is called.
"""

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch

from mezzotint.files import bytes_of
from mezzotint.recipe import DelayedScaling

EXTRA_STATE = "_extra_state"  # the suffix of the name in a state dict
RECIPES = "transformer_engine.common.recipe"
# A recipe is pickled under these modules: by Transformer Engine, by Megatron-Core, whose recipe is a
# subclass, and by this package.
_RECIPE_MODULES = (RECIPES, "megatron.core.extensions.transformer_engine", "mezzotint.recipe")
_RECIPE_NAMES = {
    *("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling"),
    *("CustomRecipe", "TEDelayedScaling", "Format", "_FormatHelper", "_Maxima", "MMParams", "QParams"),
}
_PER_GEMM = {"fwd": 3, "bwd": 2}


# Reading


class _Reader(pickle.Unpickler):
    """This unpickler reads dictionaries, lists, numbers, strings and tensors; recipes are read too,
    and nothing of them is kept."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _RECIPE_MODULES and name in _RECIPE_NAMES:
            return _stand_in()
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11 pickles a member of an enumeration
            return _Call(lambda kind, member: _stand_in())
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Call(_tensor)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _Call(_storage)
        raise pickle.UnpicklingError(f"the name {module}.{name}, which has no place in it")


class _Call:
    """A `_Call` is a function that a pickle may call. It is made for one reading, so that what a
    pickle sets on it ends with that."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _stand_in() -> type:
    """Return a new class that accepts any arguments and ignores them."""

    def __new__(cls: type, *args: Any) -> Any:
        return object.__new__(cls)

    return type("StandIn", (), {"__new__": __new__, "__init__": lambda self, *args: None})


def _storage(data: bytes) -> torch.UntypedStorage:
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # its message advises to execute the file, so it is replaced
        raise pickle.UnpicklingError("the numbers of a tensor are not what torch.save writes of them") from error
    if isinstance(found, torch.storage.TypedStorage):
        if found.dtype != torch.float32:
            raise pickle.UnpicklingError(f"a tensor of {found.dtype}, where scales and amaxes are FP32")
        return found._untyped_storage  # `untyped()` warns that such storages will be removed
    raise pickle.UnpicklingError(f"{type(found).__name__} where a tensor keeps its numbers")


def _tensor(storage: torch.UntypedStorage, offset: int, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    # Without this check, strides of 0 would make a tensor of any size out of a few bytes.
    if not isinstance(storage, torch.UntypedStorage) or math.prod(size) * 4 > storage.nbytes():
        raise pickle.UnpicklingError("a tensor that is larger than its numbers")
    return torch.empty(0, dtype=torch.float32).set_(storage, offset, tuple(size), tuple(stride))


def read_extra_state(data: torch.Tensor) -> torch.Tensor | None:
    """Return the state in Transformer Engine's bytes as modules here keep it: FP32 (1 + L, 5 per GEMM),
    scales, then amax histories.

    It returns None if the bytes hold no scales, and raises a ValueError if they are no such state. Nothing is executed.
    """
    raw = bytes(bytes_of(data.detach().cpu().contiguous()))
    try:
        found = _Reader(io.BytesIO(raw)).load()
        if found is None:
            return None
        forward, backward, is_operation = found, found, "forward" in found or "backward" in found
        if is_operation:
            forward, backward = found.get("forward", {}), found.get("backward", {})
        if "scale_fwd" not in forward:
            return None
        parts = [_columns(forward, "fwd", is_operation)]
        gemms = parts[0].shape[1] // _PER_GEMM["fwd"]
        # An operation that was not trained has no state of gradients.
        is_there = "scale_bwd" in backward
        parts.append(_columns(backward, "bwd", is_operation) if is_there else _fresh(2 * gemms))
    except Exception as error:
        raise ValueError(
            f"_extra_state is {len(raw)} bytes that cannot be read as Transformer Engine's state of delayed scaling: "
            f"{error}. Nothing of it was executed. Leave the key out to begin with scales of 1"
        ) from error
    rows = max(part.shape[0] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[0])) for part in parts], 1)


def _fresh(columns: int) -> torch.Tensor:
    return torch.cat((torch.ones(1, columns), torch.zeros(1, columns)))


def _columns(state: dict[str, Any], direction: str, is_operation: bool) -> torch.Tensor:
    """Return the scales and the amax history of a direction, (1 + L, columns of our modules)."""
    scale, history = state[f"scale_{direction}"], state[f"amax_history_{direction}"]
    if not isinstance(scale, torch.Tensor) or not isinstance(history, torch.Tensor):
        raise TypeError(f"scale_{direction} or amax_history_{direction} is no tensor")
    joined = torch.cat((scale.reshape(1, -1), history.reshape(-1, scale.numel())))
    if not is_operation:
        return joined
    per_gemm = _PER_GEMM[direction]
    groups = joined.reshape(joined.shape[0], -1, per_gemm - 1)
    missing = torch.zeros(*groups.shape[:2], 1)
    missing[0] = 1.0
    return torch.cat((groups, missing), 2).flatten(1)


# Writing


def write_extra_state(state: torch.Tensor, recipe: DelayedScaling, is_operation: bool = False) -> torch.Tensor:
    """Return a state as modules here keep it, FP32 (1 + L, 5 per GEMM), as bytes that Transformer Engine reads.

    Transformer Engine unpickles such bytes only if NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 is set.
    """
    gemms = state.shape[1] // 5
    state = state.detach().to("cpu", torch.float32)[: 1 + recipe.amax_history_len]
    short = 1 + recipe.amax_history_len - state.shape[0]
    state = torch.nn.functional.pad(state, (0, 0, 0, short))
    named: dict[str, bytes] = {}
    for direction, part in (("fwd", state[:, : 3 * gemms]), ("bwd", state[:, 3 * gemms :])):
        if is_operation:
            part = part.reshape(part.shape[0], gemms, -1)[:, :, :-1].flatten(1)
        named[f"scale_{direction}"] = _dumped(part[0].clone())
        named[f"amax_history_{direction}"] = _dumped(part[1:].clone())
    named["recipe"] = _dumped_recipe(recipe)
    named["extra_fp8_variables"] = _dumped({"num_gemms": gemms, "fp8_checkpoint": True})
    if is_operation:
        common = ("recipe", "extra_fp8_variables")
        modes = (("forward", "_fwd"), ("backward", "_bwd"))
        named = {
            mode: _dictionary({key: value for key, value in named.items() if key in common or key.endswith(end)})
            for mode, end in modes
        }
    return torch.frombuffer(bytearray(b"\x80\x03" + _dictionary(named) + b"."), dtype=torch.uint8)


def _dumped(value: Any) -> bytes:
    """Return a value's pickle of protocol 3 without its frame, to be put into another pickle; it
    refers to no memo of others."""
    return pickle.dumps(value, protocol=3)[2:-1]


def _dictionary(items: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(_dumped(key) + value for key, value in items.items()) + b"u"


def _dumped_recipe(recipe: DelayedScaling) -> bytes:
    """Return a pickled call of Transformer Engine's class by its name; the class need not be installed."""
    if callable(recipe.amax_compute_algo) or callable(recipe.scaling_factor_compute_algo):
        raise ValueError(
            "the recipe has a function of its own for amaxes or scales: a checkpoint has no place for code"
        )
    module = RECIPES.encode()
    member = b"(c" + module + b"\nFormat\n" + _dumped(recipe.fp8_format.name) + b"t"
    format_ = b"cbuiltins\ngetattr\n" + member + b"R"
    rest = (recipe.amax_history_len, recipe.amax_compute_algo, None, recipe.reduce_amax)
    arguments = _dumped(recipe.margin) + format_ + b"".join(_dumped(value) for value in rest)
    return b"c" + module + b"\nDelayedScaling\n(" + arguments + b"tR"
