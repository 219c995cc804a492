"""Attention: this package computes dot products by PyTorch's kernels and rotary positions, keeps the cache of keys and
values, and defines the multi-head modules."""
