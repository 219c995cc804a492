"""Many tensors through `save_for_backward`: storages give up their buffers and take them back."""

from typing import Any

import torch

from mezzotint.tensor.storage import QuantizedTensorStorage


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
    """Plain tensors, None, storages → flat tensors, and objects that `restore_from_saved` fills again."""
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
    """The inverse: `tensors` are the objects, `saved_tensors` the flat tensors that `prepare_for_saving` gave. With
    `return_saved_tensors`, also what was left over of these."""
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
    """As above, from `ctx.tensor_objects` and `ctx.saved_tensors`."""
    if not hasattr(ctx, "tensor_objects"):
        raise AttributeError("ctx has no tensor_objects: set it to what prepare_for_saving gave")
    return restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
