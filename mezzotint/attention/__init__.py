"""Attention: dot products by PyTorch's kernels, rotary positions, the cache of keys and values, multi-head modules."""
