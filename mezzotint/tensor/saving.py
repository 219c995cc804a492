"""Many tensors through `save_for_backward`: storages hand out their buffers before it and take them back after it."""

from typing import Any

import torch

from mezzotint.tensor.storage import QuantizedTensorStorage


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
    """Take apart tensors, storages and Nones, so that an autograd function can save them.

    Args:
        *tensors: What is to be saved.

    Returns:
        The flat list of tensors for `ctx.save_for_backward`, and the objects that `restore_from_saved` fills again.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = torch.ones(32, 32)
        >>> saved, objects = mz.prepare_for_saving(x, None)
        >>> again = mz.restore_from_saved(objects, saved)
        >>> again[0] is x, again[1] is None
        (True, True)
    """
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
    """Return what `prepare_for_saving` was given.

    Args:
        tensors: Its objects.
        saved_tensors: Its flat tensors, from `ctx.saved_tensors`.
        return_saved_tensors: Whether the flat tensors that were left over are returned as well. The default is False.

    Returns:
        A list; or with `return_saved_tensors` the pair (list, rest).

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = torch.ones(32, 32)
        >>> saved, objects = mz.prepare_for_saving(x, None)
        >>> again = mz.restore_from_saved(objects, saved)
        >>> again[0] is x, again[1] is None
        (True, True)
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
    """Do what `restore_from_saved` does, with `ctx.tensor_objects` and `ctx.saved_tensors`.

    Args:
        ctx: The context of an autograd function.
        return_saved_tensors: Whether the flat tensors that were left over are returned as well. The default is False.

    Returns:
        A list; or with `return_saved_tensors` the pair (list, rest).

    Raises:
        AttributeError: If the context has no `tensor_objects`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, x_q):
        ...         saved, ctx.tensor_objects = mz.prepare_for_saving(x_q)
        ...         ctx.save_for_backward(*saved)
        ...         return 2 * x
        ...     @staticmethod
        ...     def backward(ctx, dy):
        ...         (x_q,) = mz.restore_from_func_ctx(ctx)
        ...         return 2 * dy, None
        >>> x = torch.ones(32, 32, requires_grad=True)
        >>> Double.apply(x, mz.MXFP8Quantizer()(x.detach())).sum().backward()
        >>> x.grad.shape
        torch.Size([32, 32])
    """
    if not hasattr(ctx, "tensor_objects"):
        raise AttributeError("ctx has no tensor_objects: set it to what prepare_for_saving gave")
    return restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
