"""NVFP4 over 16x16 tiles: this module also chooses between mapping a block's amax to 4 or to 6.

A tensor (A, B) here has one entry per block; 16 neighbours along B belong to one tile.
"""

# mypy: disable-error-code="assignment, var-annotated"
# In a kernel a tuple grows, and its type with it.

import triton
import triton.language as tl

from mezzotint.kernels.triton._jit_fp4 import block_scale, decode_e2m1, round8


@triton.jit
def _tiles(t, SPAN: tl.constexpr):
    """Return (A, B) as (A, B/16, 16). With SPAN, entry t along B stands for the block t % (B/SPAN) · SPAN + t //
    (B/SPAN)."""
    A: tl.constexpr = t.shape[0]
    B: tl.constexpr = t.shape[1]
    if SPAN == 1:
        return tl.reshape(t, [A, B // 16, 16])
    else:
        runs = tl.permute(tl.reshape(t, [A, SPAN, B // 16, 16 // SPAN]), (0, 2, 3, 1))
        return tl.reshape(runs, [A, B // 16, 16])


@triton.jit
def _from_tiles(t, SPAN: tl.constexpr):
    """Return (A, B/16) as (A, B), each entry repeated for its 16 blocks."""
    A: tl.constexpr = t.shape[0]
    B: tl.constexpr = t.shape[1] * 16
    if SPAN == 1:
        return tl.reshape(tl.broadcast_to(t[:, :, None], [A, B // 16, 16]), [A, B])
    else:
        return tl.reshape(tl.broadcast_to(t[:, None, :, None], [A, SPAN, B // 16, 16 // SPAN]), [A, B])


@triton.jit
def tile_max(t, SPAN: tl.constexpr):
    """Return the maximum of each tile of (A, B), at each of its 16 entries."""
    return _from_tiles(tl.max(_tiles(t, SPAN), axis=2), SPAN)


@triton.jit
def _tile_sum(t):
    """Return the sum over each tile of (A, B), at each of its 16 entries: four times the upper half is added to the
    lower."""
    rest = _tiles(t, 1)
    for stage in tl.static_range(4):
        pairs = tl.reshape(rest, [rest.shape[0], rest.shape[1], 2, 8 >> stage])
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        rest = low + high
    return _from_tiles(tl.reshape(rest, [rest.shape[0], rest.shape[1]]), 1)


@triton.jit
def _try(x, d, s_dec, amax, E4M3_MAX: tl.constexpr, ERROR: tl.constexpr):
    """Quantize with one scale; return codes (two words), scale byte and the error, summed in the elements' order."""
    sf, value, factor = block_scale(tl.minimum(d, 448.0), s_dec)
    v = ()
    for i in tl.static_range(16):
        v += (x[i] * factor,)
    low, high = round8(v[:8]), round8(v[8:])
    total = tl.zeros_like(value)
    for i in tl.static_range(16):
        code = ((low if i < 8 else high) >> (i % 8 * 4)) & 15
        delta = tl.div_rn(decode_e2m1(code) * value * amax, tl.full(value.shape, E4M3_MAX * 6.0, tl.float32)) - x[i]
        total += tl.abs(delta) if ERROR == 1 else delta * delta  # 0 + delta is delta: it is no -0
    return low, high, sf, total


@triton.jit
def four_over_six(
    x,
    top,
    s_enc,
    s_dec,
    amax,
    E4M3_MAX: tl.constexpr,
    ERROR: tl.constexpr,
    TWO_D: tl.constexpr,
):
    """Return codes and scale of the choice with the smaller error, 6 if they are equal; ERROR 1 sums |d|, 2 sums d²."""
    if TWO_D:
        top = tile_max(top, 1)
    base = tl.div_rn(top, tl.full(top.shape, 6.0, tl.float32)) * s_enc
    low4, high4, sf4, error4 = _try(x, base * 1.5, s_dec, amax, E4M3_MAX, ERROR)
    low6, high6, sf6, error6 = _try(x, base, s_dec, amax, E4M3_MAX, ERROR)
    if TWO_D:
        error4, error6 = _tile_sum(error4), _tile_sum(error6)
    four = error4 < error6
    return tl.where(four, low4, low6), tl.where(four, high4, high6), tl.where(four, sf4, sf6)
