"""Gated inputs whose halves lie in turns of a few columns, as some GEMM kernels write them: this module reorders
them."""

import torch


def deinterleave_columns(x: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Reorder [a0 | b0 | a1 | b1 | …], each `interleave_size` wide, to [a0 | a1 | … | b0 | b1 | …]."""
    _check(x, interleave_size)
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * interleave_size), 2, interleave_size)
    return parts.transpose(-3, -2).reshape(x.shape)


def interleave_columns(x: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Reorder [a0 | a1 | … | b0 | b1 | …] to [a0 | b0 | a1 | b1 | …], each `interleave_size` wide."""
    _check(x, interleave_size)
    parts = x.reshape(*x.shape[:-1], 2, x.shape[-1] // (2 * interleave_size), interleave_size)
    return parts.transpose(-3, -2).reshape(x.shape)


def _check(x: torch.Tensor, interleave_size: int) -> None:
    if interleave_size < 1 or x.shape[-1] % (2 * interleave_size):
        raise ValueError(
            f"interleave_size is {interleave_size}: the last dimension, {x.shape[-1]}, must be a multiple of twice that"
        )
