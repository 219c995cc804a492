"""This module has small helpers of Transformer Engine that programs import: initialization, sizes,
devices, views, weak references.

Without a GPU, those that ask for one answer for the CPU.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed

from mezzotint.availability import get_device_compute_capability
from mezzotint.comm.groups import rank_in
from mezzotint.tensor.storage import QuantizedTensorStorage

Initializer = Callable[[torch.Tensor], torch.Tensor]

gpu_autocast_ctx = functools.partial(torch.amp.autocast, device_type="cuda")


def torch_version() -> tuple[int, ...]:
    """Return PyTorch's version as numbers, (2, 11, 0)."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3] if part.isdigit())


# Initialisation


def get_default_init_method() -> Initializer:
    """Return the default initialization of a weight: normal, with a standard deviation of 0.023."""
    return init_method_normal(0.023)


def init_method_constant(val: float) -> Initializer:
    """Return a function that fills a tensor with a value."""
    return lambda tensor: torch.nn.init.constant_(tensor, val)


def init_method_normal(sigma: float) -> Initializer:
    """Return a function that fills a tensor from N(0, sigma²)."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Initializer:
    """Return a function that fills a tensor from a normal distribution with standard deviation sigma / sqrt(2 ·
    num_layers), for the layers whose outputs a residual adds up."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


# Sizes


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise an error if the numerator is no multiple of the denominator."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient of a division without remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    if denominator == 0:
        raise ValueError("denominator is 0: give another number")
    return -(-numerator // denominator)


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the value."""
    if multiple == 0:
        raise ValueError("multiple is 0: give another number")
    return ceil_div(value, multiple) * multiple


def check_dim_for_fp8_exec(tensor: torch.Tensor) -> bool:
    """Return whether cuBLAS multiplies a matrix of this shape in FP8; modules here pad, and take any shape."""
    return tensor.dim() == 2 and tensor.size(0) % 8 == 0 and tensor.size(1) % 16 == 0


def assert_dim_for_fp8_exec(*tensors: torch.Tensor) -> None:
    """Raise an error if the rows of a tensor are no multiple of 8, or its columns none of 16."""
    for tensor in tensors:
        if tensor.shape[:-1].numel() % 8 or tensor.shape[-1] % 16:
            raise ValueError(f"a tensor has shape {tuple(tensor.shape)}: rows must be a multiple of 8, columns of 16")


# Gated linear units: weights and biases of the layer in front of one


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Return the blocks of rows [a0, b0, a1, b1, …] of a weight or bias as [a0, a1, … b0, b1, …].

    a is the half that a gated activation takes, b the one that it is multiplied with.

    Args:
        tensor: The weight or bias.
        interleave_size: The number of rows of a block.

    Returns:
        A tensor of the same shape.

    Raises:
        ValueError: If the first dimension is no multiple of two blocks.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> mz.deinterleave_glu_tensor(torch.arange(8), 2).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    return _regrouped(tensor, interleave_size, (-1, 2, interleave_size))


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Return the halves [a, b] of a weight or bias, along its first dimension, in alternating blocks. This undoes
    `deinterleave_glu_tensor`.

    Args:
        tensor: The weight or bias.
        interleave_size: The number of rows of a block.

    Returns:
        A tensor of the same shape.

    Raises:
        ValueError: If the first dimension is no multiple of two blocks.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> mz.interleave_glu_tensor(torch.arange(8), 2).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    return _regrouped(tensor, interleave_size, (2, -1, interleave_size))


def _regrouped(tensor: torch.Tensor, interleave_size: int, blocks: tuple[int, int, int]) -> torch.Tensor:
    if interleave_size < 1 or tensor.shape[0] % (2 * interleave_size):
        raise ValueError(
            f"interleave_size is {interleave_size}: the first dimension, {tensor.shape[0]}, must be a multiple of "
            "twice that"
        )
    return tensor.reshape(*blocks, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


# Tensors


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Return whether one of the tensors requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def clear_tensor_data(*tensors: Any) -> None:
    """Free the memory of tensors that others still refer to; they have no elements afterwards."""
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            tensor.clear()
        elif tensor is not None:
            tensor.data = tensor.new_empty(0)


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the tensor in a dtype, or the tensor itself if it has that dtype already."""
    if tensor is None or tensor.dtype == dtype:
        return tensor
    with torch.enable_grad():
        return tensor.to(dtype=dtype)


@functools.cache
def get_cached_ones_tensor(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of ones, the same one at each call, which must not be written."""
    return torch.ones(num_elements, dtype=dtype, device=device)


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return equal parts of a tensor along a dimension."""
    parts = tensor.split(divide(tensor.shape[dim], num_partitions), dim=dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


class SplitAlongDim:
    """`SplitAlongDim.apply` is `torch.split`, by the name of an autograd function of Transformer Engine."""

    @staticmethod
    def apply(
        mixed_x_layer: torch.Tensor, split_dim: int, split_size_or_sections: Any, squeeze: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return the pieces; with `squeeze` the dimension that was split, of size 1 then, is removed."""
        parts = torch.split(mixed_x_layer, split_size_or_sections, dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else tuple(parts)


def combine_tensors(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the tensors stacked along a new dimension."""
    return torch.stack(list(tensors), dim)


def noop_cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return the tensors concatenated along a dimension; a single one is returned as it is."""
    if not tensors:
        raise ValueError("tensors is empty: give at least one")
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)


def needs_quantized_gemm(obj: Any, rowwise: bool = True) -> bool:
    """Return whether a product with this operand is a quantized one."""
    return type(obj) not in (torch.Tensor, torch.nn.Parameter)


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """Return the tensor, or the list of tensors, and raise an error if one is a view of another tensor."""
    if isinstance(tensor, list):
        return [assert_viewless_tensor(each, extra_msg) for each in tensor]
    if isinstance(tensor, torch.Tensor) and tensor._base is not None:
        raise ValueError(
            f"the tensor is a view, and would keep what it is a view of: clone it. {extra_msg or ''}".strip()
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: torch.Tensor, new_data_tensor: torch.Tensor) -> None:
    """Set `tensor.data`, unless the tensor is a view."""
    assert_viewless_tensor(tensor, f"new_data_tensor has shape {tuple(new_data_tensor.shape)}")
    tensor.data = new_data_tensor


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Write -10000 into the scores that are masked, in place, and return them."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


class _Bytes:
    """A `_Bytes` describes the memory of a CUDA tensor, as PyTorch takes it from other
    libraries, without keeping it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        data = (tensor.data_ptr() if size else 0, False)
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": data, "version": 3}


def make_weak_ref(x: Any) -> Any:
    """Return a tensor over the same CUDA memory that does not keep it alive; lists, tuples and dictionaries are mapped.

    It is for buffers that a CUDA graph keeps. What is not on a GPU, or is no tensor, is returned as it is.
    """
    if isinstance(x, torch.Tensor):
        if not x.is_cuda or isinstance(x, QuantizedTensorStorage):
            return x
        return torch.as_tensor(_Bytes(x.contiguous()), device=x.device).view(x.dtype).view(x.shape)
    if isinstance(x, list | tuple):
        return type(x)(make_weak_ref(each) for each in x)
    if isinstance(x, dict):
        return {key: make_weak_ref(value) for key, value in x.items()}
    return x


# Devices, dtypes, groups


def canonicalize_device(device: torch.device | str | None) -> torch.device:
    """Return a device with its index; None means the GPU in use, or the CPU without one."""
    if device is None:
        default = torch.get_default_device()
        device = "cuda" if default.type == "cpu" and torch.cuda.is_available() else default
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype, or PyTorch's default for None."""
    return torch.get_default_dtype() if dtype is None else dtype


def canonicalize_process_group(group: Any) -> Any:
    """Return the group, or the default group for None."""
    return torch.distributed.distributed_c10d._get_default_group() if group is None else group


def devices_match(device1: torch.device | str, device2: torch.device | str) -> bool:
    """Return whether two devices are the same; "cuda" means the GPU in use."""
    first, second = torch.device(device1), torch.device(device2)
    if first.type != second.type or first.type != "cuda":
        return first == second
    return canonicalize_device(first) == canonicalize_device(second)


def get_sm_count() -> int:
    """Return the number of multiprocessors of the GPU in use; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def is_bf16_compatible() -> bool:
    """Return whether the GPU in use computes in BF16, as a CPU does."""
    return not torch.cuda.is_available() or get_device_compute_capability()[0] >= 8


def torch_get_autocast_gpu_dtype() -> torch.dtype:
    """Return the dtype of `torch.autocast` on a GPU."""
    return torch.get_autocast_dtype("cuda")


# Checks, printing, profiling


def validate_ctx_manager(ctx: Callable[[], AbstractContextManager[Any]]) -> None:
    """Raise an error if `ctx` does not make a context manager."""
    try:
        with ctx():
            pass
    except Exception as error:
        raise ValueError("ctx makes no context manager that can be entered and left") from error


def validate_rng_states_func(get_rng_tracker: Any) -> None:
    """Raise an error if a function does not return a tracker of random number generators."""
    if not callable(get_rng_tracker):
        raise TypeError(f"get_rng_tracker is a {type(get_rng_tracker).__name__}: give a function")
    tracker = get_rng_tracker()
    for name in ("get_states", "set_states", "fork"):
        if not callable(getattr(tracker, name, None)):
            raise TypeError(f"get_rng_tracker gives a {type(tracker).__name__} without {name}(): give a tracker")
    validate_ctx_manager(tracker.fork)


def print_rank_0(*args: Any) -> None:
    """Print on rank 0 only."""
    if rank_in(None) == 0:
        print(*args)


def get_nvtx_range_context(msg: str) -> AbstractContextManager[Any]:
    """Return a context that does nothing: profilers see modules and operators by their own names."""
    return nullcontext()


def nvtx_range_push(msg: str) -> None:
    """Do nothing, as Transformer Engine does unless an environment variable is set."""


def nvtx_range_pop(msg: str | None = None) -> None:
    """Do nothing, as Transformer Engine does unless an environment variable is set."""
