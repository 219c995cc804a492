"""Random numbers for stochastic rounding and dropout: this module runs Philox4x32-10, keyed by a seed.

One call gives 16 bytes, one for each element of a 16-block, so the bytes depend on nothing but the seed, the offset,
the direction and the position in the tensor: computing them again, on another device or in another tiling, repeats
them.

    key = seed (64 bits);  counter = (block index low, block index high, direction, offset)
    element i of the block uses byte i % 4 of word i // 4

The directions are 0 and 1, row-wise and column-wise, for stochastic rounding. Dropout, 2, has blocks of 4 elements and
takes a whole word for each.
"""

import torch

from mezzotint.kernels._lib import leaf

_MASK = 0xFFFFFFFF
ROUNDS = 10
DROPOUT = 2  # its direction


def _mul(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low word of a 32x32-bit product, in int64 (the product wraps, its 64 bits are right)."""
    product = b * a
    return (product >> 32) & _MASK, product & _MASK


def philox_words(rng: torch.Tensor, blocks: int, direction: int) -> torch.Tensor:
    """Return int64 (blocks, 4), words of 32 bits, for `rng` int64 [2] = (seed, offset)."""
    seed, offset = rng[0], rng[1] & _MASK
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    index = torch.arange(blocks, dtype=torch.int64, device=rng.device)
    c0, c1 = index & _MASK, index >> 32
    c2, c3 = torch.full_like(index, direction), offset.expand_as(index)
    for _ in range(ROUNDS):
        hi0, lo0 = _mul(0xD2511F53, c0)
        hi1, lo1 = _mul(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def philox_bytes(rng: torch.Tensor, blocks: int, direction: int) -> torch.Tensor:
    """Return uint8 (blocks, 16) for `rng` int64 [2] = (seed, offset)."""
    words = philox_words(rng, blocks, direction)
    shifts = torch.arange(0, 32, 8, device=rng.device)
    return ((words[..., None] >> shifts) & 0xFF).to(torch.uint8).reshape(blocks, 16)


def _draw(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 2**31 - 1, (2,), dtype=torch.int64, device=x.device)


# This is a leaf op, so that eager and compiled code draw the same numbers from the same generator.
draw_rng = leaf(
    "draw_rng(Tensor x) -> Tensor",
    fake=lambda x: x.new_empty((2,), dtype=torch.int64),
    cpu=_draw,
    tags=(torch.Tag.nondeterministic_seeded,),
)
