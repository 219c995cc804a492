"""Transformer Engine's functions about its classes: they must know all modules, so they are here, above them all."""

from typing import Any

import torch

from mezzotint.attention.dot_product import DotProductAttention
from mezzotint.attention.multihead import MultiheadAttention
from mezzotint.module.base import TransformerEngineBaseModule
from mezzotint.module.norm import LayerNorm, RMSNorm
from mezzotint.ops.op import FusibleOperation
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.transformer import TransformerLayer


def get_te_classes() -> tuple[type, ...]:
    """Return the classes of modules."""
    attention = (DotProductAttention, MultiheadAttention, TransformerLayer)
    return (TransformerEngineBaseModule, LayerNorm, RMSNorm, FusibleOperation, *attention)


def has_te_modules(network: Any) -> bool:
    """Return whether a network has one of these modules; True for what is no module, since nobody can know."""
    if not isinstance(network, torch.nn.Module):
        return True
    return any(isinstance(module, get_te_classes()) for module in network.modules())


def get_all_tensor_types() -> list[type]:
    """Return plain tensors, parameters, and the classes of quantized tensors and of their storages."""
    found: list[type] = [torch.Tensor, torch.nn.Parameter]
    waiting: list[type] = [QuantizedTensorStorage]
    while waiting:
        each = waiting.pop(0)
        waiting += each.__subclasses__()
        if each not in found:
            found.append(each)
    return found
