"""Many tensors through `save_for_backward`: storages hand out their buffers before it and take them back after it."""

from typing import Any

import torch

from mezzotint.tensor.storage import QuantizedTensorStorage


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
    """Return flat tensors to save of these tensors, Nones and storages, and objects for `restore_from_saved` to
    fill."""
    flat: list[torch.Tensor | None] = []
    objects: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage) and not isinstance(tensor, torch.Tensor):
            buffers, holder = tensor.prepare_for_saving()
            flat.extend(buffers)
            objects.append(holder)
        else:
            flat.append(tensor)
            objects.append(None)
    return flat, objects


def restore_from_saved(tensors: list[Any], saved_tensors: Any, return_saved_tensors: bool = False) -> Any:
    """Return what `prepare_for_saving` was given: `tensors` are its objects, `saved_tensors` its flat tensors.

    With `return_saved_tensors`, also return the flat tensors that were left over.
    """
    rest = list(saved_tensors)
    restored = []
    for holder in tensors:
        if holder is None:
            restored.append(rest.pop(0))
        else:
            rest = holder.restore_from_saved(rest)
            restored.append(holder)
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """Do what `restore_from_saved` does, with `ctx.tensor_objects` and `ctx.saved_tensors`."""
    if not hasattr(ctx, "tensor_objects"):
        raise AttributeError("ctx has no tensor_objects: set it to what prepare_for_saving gave")
    return restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
