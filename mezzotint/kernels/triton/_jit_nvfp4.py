"""One tile of x, BM rows by BN columns, into NVFP4: its rows, or its columns.

Rows: a thread loads 16 neighbours of a row, one block, twice 8. Columns: a thread loads up to 8 neighbours of each of
16 rows, as many blocks, and the transform runs between its registers. So neither the amax of a block nor its scale, its
random bytes or its codes need another thread. Packed, a block is 8 bytes of the output. What is read outside x is 0 and
has the scale 0, which is the padding.

`amax_out`, `source`: where the amax is written and read, see `_amax_of`. Row-scaled, it is a vector.
"""

# mypy: disable-error-code="assignment, var-annotated"
# In a kernel a tuple grows: its type does, too.

import triton
import triton.language as tl

from mezzotint.kernels.triton._jit_fp4 import (
    absmax,
    absmax16,
    after,
    block_scale,
    encode_scale,
    hadamard16,
    philox16,
    round8,
    round8_stochastic,
    scale_index,
    split8,
    widen,
)
from mezzotint.kernels.triton._jit_fp4_tiles import four_over_six, tile_max


@triton.jit
def _block_factor(top, s_enc, s_dec, TWO_D: tl.constexpr, SPAN: tl.constexpr):
    """Amax of each block → scale byte (int32) and the factor of its elements."""
    if TWO_D:
        top = tile_max(top, SPAN)
    sf, _, factor = block_scale(top * (s_enc * (1.0 / 6.0)), s_dec)
    return sf, factor


@triton.jit
def _round8(v, words, FIRST: tl.constexpr):
    """Eight scaled tensors → their codes, one word; FIRST is the first of their two random words, if there are any."""
    if len(words) == 0:
        return round8(v)
    else:
        return round8_stochastic(v, words[FIRST], words[FIRST + 1])


@triton.jit
def _join(low, high):
    """Two words → uint64."""
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _store_codes(data, codes, line, block, bytes, mask, WORDS: tl.constexpr):
    """Write the 8 bytes of each block; `block` counts along the `line` of the output, `bytes` long."""
    if WORDS:
        at = data.to(tl.pointer_type(tl.uint64), bitcast=True) + (line * (bytes // 8) + block)
        tl.store(at, codes, mask=mask)
    else:
        for i in tl.static_range(8):
            byte = ((codes >> (8 * i)) & 0xFF).to(tl.uint8)
            tl.store(data + line * bytes + block * 8 + i, byte, mask=mask & (block * 8 + i < bytes))


@triton.jit
def _amax_of(source, count, i, size, ROW_SCALED: tl.constexpr, BP: tl.constexpr):
    """The amax: [1], given (BP = 0) or `count` partial maxima; or one for each of the rows `i`."""
    if ROW_SCALED:
        return tl.load(source + i, mask=i < size, other=0.0)
    elif BP == 0:
        return tl.load(source)
    else:
        p = tl.arange(0, BP)
        return tl.max(tl.load(source + p, mask=p < count, other=0.0))


@triton.jit
def quantize_rows(
    x,
    data,
    scale,
    amax_out,
    source,
    rng,
    row,
    col,
    M,
    K,
    stride,
    count,
    first,
    E4M3_MAX: tl.constexpr,
    FOUR: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
):
    NB: tl.constexpr = BN // 16
    t = tl.arange(0, BM)
    r = row * BM + (t % (BM // SPAN) * SPAN + t // (BM // SPAN))
    b = col * NB + tl.arange(0, NB)
    # Blocks come first in the shape because Triton lays the lanes of a warp along the first of two equal dimensions.
    c = (b * 16)[:, None, None] + tl.arange(0, 8)[None, None, :]
    at = x + (r * stride)[None, :, None] + c
    if EVEN:
        low, high = tl.load(at), tl.load(at + 8)
    else:
        inside = (r < M)[None, :, None]
        low = tl.load(at, mask=inside & (c < K), other=0.0)
        high = tl.load(at + 8, mask=inside & (c + 8 < K), other=0.0)
    amax = _amax_of(source, count, r, M, ROW_SCALED, BP)
    s_enc, s_dec = encode_scale(amax, E4M3_MAX * 6.0)
    shared = (amax, s_enc, s_dec)
    if ROW_SCALED:
        if col == 0:
            tl.store(amax_out + r, amax, mask=r < M)
        amax, s_enc, s_dec = amax[None, :], s_enc[None, :], s_dec[None, :]
    elif first:
        tl.store(amax_out, amax)
    blocks = (K + 15) // 16
    r, b = r[None, :], b[:, None]
    top = absmax16(low, high)
    if FOUR != 0:
        values = split8(widen(low)) + split8(widen(high))
        w0, w1, sf = four_over_six(values, top, s_enc, s_dec, amax, E4M3_MAX, FOUR, TWO_D)
    else:
        sf, factor = _block_factor(top, s_enc, s_dec, TWO_D, SPAN)
        words = () if rng is None else philox16(rng, after(r * blocks + b, sf), 0)
        # Widened late and one half at a time: FP32 takes twice the registers.
        factor = factor[:, :, None]
        w0 = _round8(split8(widen(low) * factor), words, 0)
        w1 = _round8(split8(widen(high) * factor), words, 2)
    codes = _join(w0, w1)
    bytes = (K + 1) // 2
    tiles = (blocks + 3) // 4
    at = scale + scale_index(r, b, tiles, SWIZZLED)
    if EVEN:
        _store_codes(data, codes, r, b, bytes, None, WORDS)
        tl.store(at, sf.to(tl.uint8))
    else:
        _store_codes(data, codes, r, b, bytes, (r < M) & (b < blocks), WORDS)
        tl.store(at, sf.to(tl.uint8), mask=(r < (M + 127) // 128 * 128) & (b < tiles * 4))
    return shared


@triton.jit
def quantize_columns(
    x,
    data,
    scale,
    amax_out,
    source,
    shared,
    rng,
    row,
    col,
    M,
    K,
    stride,
    count,
    first,
    E4M3_MAX: tl.constexpr,
    FOUR: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    G: tl.constexpr = BM // 16
    g = (row * G + tl.arange(0, G))[:, None]
    c = col * BN + tl.arange(0, BN)
    at = x + g * 16 * stride + c[None, :]
    inside = (c < K)[None, :]
    raw = ()
    for i in tl.static_range(16):
        if EVEN:
            raw += (tl.load(at + i * stride),)
        else:
            raw += (tl.load(at + i * stride, mask=(g * 16 + i < M) & inside, other=0.0),)
    if len(shared) > 0:
        amax, s_enc, s_dec = shared
    else:
        amax = _amax_of(source, count, c, K, ROW_SCALED, BP)
        s_enc, s_dec = encode_scale(amax, E4M3_MAX * 6.0)
    if ROW_SCALED:
        if row == 0:
            tl.store(amax_out + c, amax, mask=c < K)
        amax, s_enc, s_dec = amax[None, :], s_enc[None, :], s_dec[None, :]
    elif first:
        tl.store(amax_out, amax)
    if RHT:
        raw = hadamard16(raw, SIGN_MASK)
    blocks = (M + 15) // 16
    c = c[None, :]
    top = absmax(raw)
    if FOUR != 0:
        values = ()
        for i in tl.static_range(16):
            values += (widen(raw[i]),)
        w0, w1, sf = four_over_six(values, top, s_enc, s_dec, amax, E4M3_MAX, FOUR, TWO_D)
    else:
        sf, factor = _block_factor(top, s_enc, s_dec, TWO_D, 1)
        words = () if rng is None else philox16(rng, after(c * blocks + g, sf), 1)
        low, high = (), ()
        for i in tl.static_range(8):
            low += (widen(raw[i]) * factor,)
        w0 = _round8(low, words, 0)
        for i in tl.static_range(8):
            high += (widen(raw[8 + i]) * factor,)
        w1 = _round8(high, words, 2)
    codes = _join(w0, w1)
    bytes = blocks * 8 if RHT or WORDS else (M + 1) // 2
    tiles = (blocks + 3) // 4
    at = scale + scale_index(c, g, tiles, SWIZZLED)
    if EVEN:
        _store_codes(data, codes, c, g, bytes, None, WORDS)
        tl.store(at, sf.to(tl.uint8))
    else:
        _store_codes(data, codes, c, g, bytes, (g < blocks) & inside, WORDS)
        tl.store(at, sf.to(tl.uint8), mask=(c < (K + 127) // 128 * 128) & (g < tiles * 4))
