"""`quantize_cache` makes a cache of transformers keep its keys and values in FP8.

A layer of such a cache moves keys and values: it appends them, writes them to places, picks some, drops some. It
computes nothing with them. So it is given the bytes of `attention/kv_codes.py`, a head of d channels as d + 4 of them,
and what it gives back is decoded. Transformers is not imported: its caches are known by name.
"""

import functools
from typing import Any, TypeVar

import torch

from mezzotint.attention.kv_codes import SCALE_BYTES, decode_heads, encode_heads

CacheT = TypeVar("CacheT")

# The layers of transformers that only move what they are given.
THEIRS = "transformers.cache_utils"
MOVING_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")


class FP8CacheMixin:
    """An `FP8CacheMixin` stands before a class of transformers' caches, whose layers then hold bytes."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values of a layer, and return all of them as they are read, in the dtype of the new
        ones."""
        held: Any = super()
        stored = encode_heads(key_states.detach()), encode_heads(value_states.detach())
        keys, values = held.update(*stored, layer_idx, *args, **kwargs)
        return decode_heads(keys, key_states.dtype), decode_heads(values, value_states.dtype)

    def early_initialization(
        self, batch_size: int, num_heads: Any, head_dim: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate every layer before the first forward; `num_heads` and `head_dim` are numbers, or lists of one for
        each layer."""
        held: Any = super()
        wide = [each + SCALE_BYTES for each in head_dim] if isinstance(head_dim, list) else head_dim + SCALE_BYTES
        held.early_initialization(batch_size, num_heads, wide, torch.uint8, device)


@functools.cache
def fp8_cache_class(theirs: Any) -> Any:
    """Return the class of a cache of this class in FP8. It is made once, as a graph is compiled for a class."""
    return type(f"FP8{theirs.__name__}", (FP8CacheMixin, theirs), {})


def quantize_cache(cache: CacheT) -> CacheT:
    """Make a cache of transformers keep keys and values in FP8, and return it.

    Each head of each token has an FP32 scale of its own, as with `InferenceParams(dtype=torch.float8_e4m3fn)`: about
    half of BF16's memory, and an error of at most a sixteenth of each element (`mezzotint/attention/kv_codes.py` has
    the bound). Attention reads the values in the dtype of the model, and no gradient goes through the cache.

    Args:
        cache: A new `DynamicCache` or `StaticCache`, with layers of full or sliding-window attention. It is changed in
            place; `generate` takes it as `past_key_values`.

    Returns:
        The same cache.

    Raises:
        TypeError: If it is no cache of transformers, or some of its layers do other things than keep keys and values.
        ValueError: If it is in use or in FP8 already.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> from transformers import DynamicCache
        >>> cache = mz.quantize_cache(DynamicCache())
        >>> keys, values = cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
        >>> keys.shape, keys.dtype, cache.layers[0].keys.shape, cache.layers[0].keys.dtype
        (torch.Size([1, 2, 3, 16]), torch.float32, torch.Size([1, 2, 3, 20]), torch.uint8)
    """
    kind: Any = type(cache)
    layers = getattr(cache, "layers", None)
    if isinstance(cache, FP8CacheMixin):
        raise ValueError(f"cache is of class {kind.__name__}, in FP8 already: give it to generate as it is")
    if not any(base.__module__ == THEIRS for base in kind.__mro__) or not isinstance(layers, list):
        raise TypeError(f"cache is of class {kind.__name__}: give a DynamicCache or a StaticCache of transformers")
    lazy = getattr(cache, "layer_class_to_replicate", None)  # the class of layers that are made as they are met
    for each in [*map(type, layers), *([] if lazy is None else [lazy])]:
        if (each.__module__, each.__name__) not in [(THEIRS, name) for name in MOVING_LAYERS]:
            raise TypeError(
                f"cache has a layer of class {each.__name__}, whose keys and values FP8 cannot replace: give a "
                "DynamicCache or a StaticCache with layers of full or sliding-window attention"
            )
    if any(layer.is_initialized for layer in layers):
        raise ValueError("cache holds keys and values already: give a new one")
    cache.__class__ = fp8_cache_class(kind)
    return cache
