"""Names of Transformer Engine's offloading that programs call: `mezzotint.offload` does the work, by
hooks on what autograd saves."""

from typing import Any

NVTE_CPU_OFFLOAD_V1 = False  # the former implementation does not exist here


def is_cpu_offload_enabled() -> bool:
    """Return False, because no code needs to do anything for tensors that are offloaded."""
    return False


def mark_activation_offload(*tensors: Any) -> None:
    """Do nothing: every large tensor that is saved is offloaded, unless `mark_not_offload` was called with it."""


def start_offload(*tensors: Any, offload_base_tensor: bool = False) -> None:
    """Do nothing: copies begin at the end of a layer."""
