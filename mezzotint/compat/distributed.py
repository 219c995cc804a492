"""This module has names of Transformer Engine's `distributed`: collectives along the first dimension,
flags of recomputation, chunks.

Collectives return (result, None): they have been waited for, so there is no handle. `mezzotint.comm.collectives` has
those that are started and waited for later, and modules use them.

The flags say where a program is; no module reads them. Recomputation that gives delayed scaling the scales of the first
run is `mezzotint.checkpoint`.
"""

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, ClassVar

import torch

from mezzotint.comm.collectives import all_gather, all_reduce, reduce_scatter
from mezzotint.comm.groups import is_initialized, rank_in, world_size
from mezzotint.functional.tensor_parallel import Parallel, gather_quantized
from mezzotint.region import current_state
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage

HAS_TORCH_SYMMETRIC = False  # no all-reduce by symmetric memory is offered under these names


# Collectives


def get_distributed_world_size(group: Any = None) -> int:
    """Return the number of ranks of a group, or 1 if torch.distributed is not in use."""
    return world_size(group)


def get_distributed_rank(group: Any = None) -> int:
    """Return the rank of this process in a group."""
    if not is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call torch.distributed.init_process_group() first")
    return rank_in(group)


def gather_along_first_dim(
    inp: Any,
    process_group: Any,
    async_op: bool = False,
    quantizer: Quantizer | None = None,
    output_tensor: torch.Tensor | None = None,
    external_coalescing: bool = False,
) -> tuple[Any, None]:
    """Return the shards (m, …) of all ranks as one tensor, (m · ranks, …), and None.

    With a `quantizer` the result is quantized, and has the bits of a whole tensor that is quantized at once; if the
    format allows it, only quantized bytes are sent. `output_tensor` receives a result that is not quantized.
    """
    count = world_size(process_group)
    if quantizer is None and not isinstance(inp, QuantizedTensorStorage):
        made = all_gather(inp, process_group)
        return (made if output_tensor is None else output_tensor.copy_(made)), None
    if output_tensor is not None:
        raise ValueError("output_tensor is given with a quantizer: quantized results are new tensors; leave it None")
    if count == 1:
        return (inp if isinstance(inp, QuantizedTensorStorage) else _quantized(inp, quantizer)), None
    parallel = Parallel("column", process_group, count, True)
    used = inp._quantizer if quantizer is None else quantizer
    if used.takes_scale() or not hasattr(used, "scale"):
        return gather_quantized(inp, used, None, parallel, "input")[0], None
    return _quantized(all_gather(inp, process_group), used), None


def _quantized(x: torch.Tensor, quantizer: Any) -> Any:
    return quantizer(x)


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: Any, async_op: bool = False, output: torch.Tensor | None = None
) -> tuple[torch.Tensor, None]:
    """Return this rank's rows of the sum over ranks, and None."""
    if world_size(tp_group) == 1:
        return inp, None
    made = reduce_scatter(inp, tp_group)
    return (made if output is None else output.copy_(made)), None


def allreduce(inp: torch.Tensor, tp_group: Any = None, async_op: bool = False) -> tuple[torch.Tensor, None]:
    """Write the sum over ranks into the tensor, and return it and None."""
    return (inp if world_size(tp_group) == 1 else inp.copy_(all_reduce(inp, tp_group))), None


def symmetric_all_reduce(
    inp: torch.Tensor, tp_group: Any = None, async_op: bool = False, all_reduce_type: str = "multimem_all_reduce"
) -> tuple[torch.Tensor, None]:
    """Do the same as `allreduce`: PyTorch chooses the algorithm."""
    return allreduce(inp, tp_group, async_op)


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor, tp_group: Any, new_buffer: bool = False) -> torch.Tensor:
    """Return this rank's shard of a tensor, flat: a view, or a copy in a `new_buffer`."""
    size = tensor.numel() // world_size(tp_group)
    start = size * rank_in(tp_group)
    part = tensor.view(-1)[start : start + size]
    return part.detach().clone() if new_buffer else part


def gather_split_1d_tensor(tensor: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """Return the flat shards of all ranks, one after the other; this undoes `split_tensor_into_1d_equal_chunks`."""
    return all_gather(tensor, tp_group)


# Parameters


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Note on a parameter how it is split over ranks, for programs that read it there."""
    for name, value in (("tensor_model_parallel", is_parallel), ("partition_dim", dim), ("partition_stride", stride)):
        if hasattr(tensor, name):
            raise RuntimeError(f"the tensor has {name} already: it was set before, and is set once")
        setattr(tensor, name, value)


def initialize_affine_weight_gpu(
    weight: torch.Tensor,
    init_method: Callable[[torch.Tensor], Any],
    get_rng_state_tracker: Callable[[], Any] | None,
    partition_dim: int = 0,
    stride: int = 1,
    set_tp_attributes: bool = True,
) -> None:
    """Initialize a shard of a weight, with random numbers of the tracker's generator if one is given."""
    if set_tp_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    if get_rng_state_tracker is None:
        init_method(weight)
        return
    with get_rng_state_tracker().fork():
        init_method(weight)


# Recomputation


class activation_recompute_forward(ContextDecorator):
    """This context sets what `is_fp8_activation_recompute_enabled` and
    `in_fp8_activation_recompute_phase` return inside of it."""

    _open: ClassVar[list[tuple[bool, bool]]] = []

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self.activation_recompute, self.recompute_phase = activation_recompute, recompute_phase

    def __enter__(self) -> "activation_recompute_forward":
        self._open.append((self.activation_recompute, self.recompute_phase))
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.pop()


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether this is the first or the second run of code that is recomputed, and something is quantized."""
    state = current_state()
    if state.recomputation is not None:  # set by mezzotint.checkpoint
        return state.enabled
    return bool(activation_recompute_forward._open) and activation_recompute_forward._open[-1][0]


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether this is the second run of code that is recomputed."""
    recomputation = current_state().recomputation
    if recomputation is not None:
        return recomputation.is_second
    return bool(activation_recompute_forward._open) and activation_recompute_forward._open[-1][1]


def get_activation_recompute_contexts() -> tuple[activation_recompute_forward, activation_recompute_forward]:
    """Return the contexts of the first and of the second run, as
    `torch.utils.checkpoint` takes them in `context_fn`."""
    return activation_recompute_forward(True, False), activation_recompute_forward(True, True)


def use_reentrant_activation_recompute() -> bool:
    """Return whether recomputation is PyTorch's reentrant kind, which is the default."""
    return True


# Random numbers


def graph_safe_rng_available() -> bool:
    """Return whether this PyTorch has generators whose state a CUDA graph can hold."""
    return hasattr(torch.cuda.CUDAGraph, "register_generator_state") and hasattr(torch.Generator, "graphsafe_set_state")


def is_graph_safe_rng_state(state: Any) -> bool:
    """Return whether a state is a generator, and not a tensor."""
    return graph_safe_rng_available() and isinstance(state, torch.Generator)


_rng_states: dict[str, Any] = {}


def get_all_rng_states() -> dict[str, Any]:
    """Return what `set_all_rng_states` was given; trackers keep their states themselves."""
    return _rng_states


def set_all_rng_states(states: dict[str, Any]) -> None:
    """Keep the states for `get_all_rng_states`."""
    _rng_states.clear()
    _rng_states.update(states)


# FSDP


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Do nothing: FSDP2 (`fully_shard`) shards and gathers quantized weights by itself."""
