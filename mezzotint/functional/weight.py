"""Weights: this module quantizes them once, and keeps them over microbatches in a workspace that lives outside
autograd."""

from collections.abc import Sequence
from typing import Any

import torch

from mezzotint.functional.tensor_parallel import Parallel, splits_of
from mezzotint.tensor.flatten import class_by_name, qualified_name
from mezzotint.tensor.partition import quantize_shard, update_shard
from mezzotint.tensor.quantize import quantize_groups, quantize_scaled, update_scaled
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.scale_slot import DelayedScale, scale_alone
from mezzotint.tensor.storage import QuantizedTensorStorage


def as_storage(x: Any) -> Any:
    """Return the buffers of a quantized tensor in a plain holder, and anything else as it is."""
    if not isinstance(x, QuantizedTensor):
        return x
    # The buffers are those of an alias: otherwise the buffers of a graph's argument would be inputs of their own. Only
    # attributes are read, because the compiler does not call methods of a tensor subclass. The class is looked up in
    # the registry, because torch 2.11 does not look into that of a tensor that the graph has made (from a DTensor).
    cls: Any = class_by_name(qualified_name(type(x)))
    cls, held = cls._STORAGE, x.detach()
    fields = {kwarg: getattr(held, attribute) for attribute, kwarg in cls._FLATTEN_TENSOR_BUFFERS}
    # The quantizer is left out: nobody quantizes into this holder, and the compiler does not know that of an alias. But
    # if the quantizer says what the buffers mean, the one of the tensor itself is taken.
    fields.update({kwarg: getattr(held, attribute) for attribute, kwarg, _ in cls._VALUES if kwarg != "quantizer"})
    if cls._READS_QUANTIZER:
        fields["quantizer"] = x._quantizer
    return cls._build(x.shape, x.dtype, fields)


def quantize_weight(
    tensor: Any,
    quantizer: Quantizer | None,
    workspace: Any = None,
    *,
    scale: DelayedScale = None,
    parallel: Parallel | None = None,
    cache: bool = False,
    update_workspace: bool = True,
    skip_update_flag: torch.Tensor | None = None,
) -> tuple[Any, Any, torch.Tensor | None]:
    """Return the weight as the GEMMs take it, the workspace to keep (None: keep the present one), and the amax if there
    is one.

    A weight that is quantized already, or is not to be quantized, is returned as it is. A valid `workspace` is used; if
    `update_workspace`, it is updated in place first (not if the one-element `skip_update_flag` is 1). Otherwise the
    weight is quantized into a new workspace, which is to be kept if `cache`. A shard of a weight (`parallel`) is
    quantized as the whole would be.
    """
    is_plain = not isinstance(tensor, QuantizedTensorStorage)
    if is_plain and workspace is None and parallel is None and not (quantizer is not None and quantizer.is_custom()):
        # What operators make of a detached tensor has no gradient anyway, and to enter `no_grad` takes time.
        tensor = tensor.detach()
        made, amax = (tensor, None) if quantizer is None else quantize_scaled(tensor, quantizer, scale)
        return made, made if cache and quantizer is not None else None, amax
    with torch.no_grad():
        if not is_plain:
            return as_storage(tensor), None, None
        if quantizer is None:
            return tensor.detach(), None, None
        tensor, splits = tensor.detach(), splits_of(parallel, "weight")
        if workspace is not None and is_valid_workspace(workspace, tensor, quantizer):
            amax = None
            if update_workspace and quantizer.takes_scale():
                amax = update_scaled(tensor, workspace, quantizer, scale_alone(scale), noop_flag=skip_update_flag)
            elif update_workspace and quantizer.is_custom():
                quantizer.update_quantized(tensor, workspace, noop_flag=skip_update_flag)
            elif update_workspace:
                update_shard(tensor, workspace, quantizer, splits, noop_flag=skip_update_flag)
            return workspace, None, amax
        if not splits:
            made, amax = quantize_scaled(tensor, quantizer, scale)
        else:
            made, amax = quantize_shard(tensor, quantizer, splits, scale)
        return made, made if cache else None, amax


def quantize_weights(
    tensors: Sequence[Any], quantizers: Sequence[Quantizer | None], scales: Sequence[torch.Tensor | None]
) -> tuple[tuple[Any, ...], tuple[torch.Tensor | None, ...]] | None:
    """Quantize the weights of many groups at once, and return them and their amaxes, or None if each must be looked at
    on its own."""
    for tensor, quantizer in zip(tensors, quantizers, strict=True):
        if quantizer is None or isinstance(tensor, QuantizedTensorStorage) or tensor.shape != tensors[0].shape:
            return None
    with torch.no_grad():
        return quantize_groups([tensor.detach() for tensor in tensors], quantizers, scales)


def is_valid_workspace(workspace: Any, tensor: torch.Tensor, quantizer: Quantizer) -> bool:
    """Return whether a workspace can be used: it has the same quantizer class, shape, device and meaning of bytes, and
    every usage that is needed now."""
    if type(workspace._quantizer) is not type(quantizer) or tuple(workspace.shape) != tuple(tensor.shape):
        return False
    values = quantizer.storage_metadata()
    if any(getattr(workspace, name) != values[kwarg] for name, kwarg, _ in workspace._VALUES if kwarg in values):
        return False
    held = workspace.get_usages()
    needed = quantizer.get_usages()
    if (needed["rowwise"] and not held["rowwise"]) or (needed["columnwise"] and not held["columnwise"]):
        return False
    return workspace.device == tensor.device and workspace._quantizer._layout() == quantizer._layout()
