"""The parameters of a norm: this module registers, initializes and splits them, and describes the residual stream that
goes past the norm."""

from typing import Any

import torch
from torch import nn

from mezzotint.comm.gradients import local_shard
from mezzotint.functional.norm import Residual
from mezzotint.layer.parameters import PlaceParameter, resolve_device

NORMALIZATIONS = ("LayerNorm", "RMSNorm")

# A norm adds (y, bias) to its input before it normalizes, and returns the sum too. With (None, None) it returns its
# input.
Branch = tuple[torch.Tensor | None, torch.Tensor | None]


def check_normalization(normalization: str) -> bool:
    """Check the name of a normalization, and return whether it is RMSNorm."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization is {normalization!r}: give 'LayerNorm' or 'RMSNorm'")
    return normalization == "RMSNorm"


def register_norm(
    module: nn.Module, prefix: str, shape: int | tuple[int, ...], rms: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Register `<prefix>weight` and, for LayerNorm, `<prefix>bias`, uninitialized."""
    module.register_parameter(f"{prefix}weight", nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
    beta = None if rms else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    module.register_parameter(f"{prefix}bias", beta)
    _mark(module, prefix)


def reset_norm(module: nn.Module, prefix: str, zero_centered: bool) -> None:
    """Set the weight to 1 (to 0 if it is zero-centered) and the bias to 0; materialize them if they are on the meta
    device."""
    for name, value in ((f"{prefix}weight", 0.0 if zero_centered else 1.0), (f"{prefix}bias", 0.0)):
        parameter = getattr(module, name)
        if parameter is None:
            continue
        if parameter.is_meta:
            fresh = torch.empty_like(parameter, device=resolve_device(None))
            setattr(module, name, nn.Parameter(fresh, parameter.requires_grad))
        nn.init.constant_(getattr(module, name), value)
    _mark(module, prefix)


def norm_parameters(module: Any, prefix: str) -> tuple[Any, Any]:
    """Return (weight, bias or None) as they are computed with: this rank's tensors where they are DTensors."""
    gamma, beta = getattr(module, f"{prefix}weight"), getattr(module, f"{prefix}bias")
    group = module._norm_group
    if group is None:
        return gamma, beta
    sums_over = group if module.sequence_parallel else None
    return local_shard(gamma, sums_over), None if beta is None else local_shard(beta, sums_over)


def resolve_branch(branch: Branch | None) -> tuple[torch.Tensor | None, torch.Tensor | None, Residual | None]:
    """Return y, its bias, and the `Residual` that describes them to a core; three times None if there is no branch."""
    if branch is None:
        return None, None, None
    y, bias = branch
    return y, bias, Residual(y is not None, bias.dtype if bias is not None and need_grad(bias) else None)


def need_grad(*tensors: torch.Tensor | None) -> bool:
    """Return whether one of these tensors needs a gradient."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def split_norm(module: Any, prefix: str, group: Any, place: PlaceParameter) -> None:
    """Replace the parameters of a norm by DTensors that are whole on every rank of `group`."""
    for name in (f"{prefix}weight", f"{prefix}bias"):
        if getattr(module, name) is not None:
            setattr(module, name, place(getattr(module, name), None, 1))
    module._norm_group = group


def _mark(module: nn.Module, prefix: str) -> None:
    """Mark the parameters in sequence parallelism, where a gradient comes from this rank's tokens only."""
    if getattr(module, "sequence_parallel", False):
        for name in (f"{prefix}weight", f"{prefix}bias"):
            parameter: Any = getattr(module, name)
            if parameter is not None:
                parameter.sequence_parallel = True
