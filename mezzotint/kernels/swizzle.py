"""Swizzled scales: Blackwell's block-scaled GEMM reads scale bytes in 512-byte tiles of 128 rows by 4 blocks.

For a logical scale matrix with outer index i (not contracted) and block index j (along the contraction):

    byte = ((i // 128) · ceil(#j / 4) + j // 4) · 512 + (i % 32) · 16 + (i % 128 // 32) · 4 + j % 4

Row-wise scales are stored [i, j]. MXFP8's column-wise scales are stored [j, i]. Sizes are padded already: i to 128, j
to 4. The swizzled bytes keep the shape of the compact ones.
"""

import torch


def swizzle(scale: torch.Tensor, columnwise: bool = False) -> torch.Tensor:
    """Return compact scales (I, J), or (J, I) when `columnwise`, in the same shape but in the GEMM's byte order."""
    if columnwise:
        j, i = scale.shape
        tiles = scale.view(j // 4, 4, i // 128, 4, 32).permute(2, 0, 4, 3, 1)
    else:
        i, j = scale.shape
        tiles = scale.view(i // 128, 4, 32, j // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(scale.shape)


def unswizzle(scale: torch.Tensor, columnwise: bool = False) -> torch.Tensor:
    """Undo `swizzle`: return swizzled scales in their compact order."""
    if columnwise:
        j, i = scale.shape
        return scale.view(i // 128, j // 4, 32, 4, 4).permute(1, 4, 0, 3, 2).reshape(j, i)
    i, j = scale.shape
    return scale.view(i // 128, j // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(i, j)
