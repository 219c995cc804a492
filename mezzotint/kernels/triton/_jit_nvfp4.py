"""One tile of x in NVFP4: this module quantizes BM rows by BN columns, along the rows or along the columns.

For rows a thread loads 16 neighbours of a row, one block, as twice 8. For columns a thread loads up to 8 neighbours of
each of 16 rows, as many blocks, and the transform runs between its registers. So neither the amax of a block nor its
scale, its random bytes or its codes need another thread. Packed, a block is 8 bytes of the output. What is read outside
of x is 0 and has the scale 0, which is the padding.

`scales` are amax, S_enc and S_dec, or empty: `_scales` then finds them, once the loads of x are on their way.
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# In a kernel a tuple grows, and its type with it.

import triton
import triton.language as tl

from mezzotint.kernels.triton._jit_fp4 import (
    absmax,
    absmax16,
    absmax_pairs,
    block_scale,
    decode_e2m1,
    decode_e4m3,
    encode_scale,
    hadamard16,
    hadamard16_small,
    narrow_pairs,
    neighbours,
    philox16,
    round8,
    round8_stochastic,
    scale_index_in,
    sign_pairs,
    split8,
    wide_product,
    widen,
    widen_pairs,
)
from mezzotint.kernels.triton._jit_fp4_tiles import four_over_six, tile_max


@triton.jit
def _block_factor(top, s_enc, s_dec, TWO_D: tl.constexpr, SPAN: tl.constexpr):
    """Return the scale byte (int32) of each block and the factor of its elements, from the amax of the block."""
    if TWO_D:
        top = tile_max(top, SPAN)
    sf, _, factor = block_scale(top * (s_enc * (1.0 / 6.0)), s_dec)
    return sf, factor


@triton.jit
def _round8(x, factor, signs, words, FIRST: tl.constexpr, NATURAL: tl.constexpr):
    """Round eight tensors, which are still to be scaled, to their codes in one word; FIRST is the first of their two
    random words, if any."""
    if len(words) == 0 or len(signs) == 0:
        v = ()
        for i in tl.static_range(8):
            v += (x[i] * factor,)
        if len(words) == 0:
            return round8(v)
        else:
            return round8_stochastic(v, 1.0, words[FIRST], words[FIRST + 1], sign_pairs(v), False)
    else:
        return round8_stochastic(x, factor, words[FIRST], words[FIRST + 1], signs, NATURAL)


@triton.jit
def _random_words(key, block0, block, like, DIRECTION: tl.constexpr, FAR: tl.constexpr):
    """Return the random words of the blocks block0 + `block`, int64; only if FAR may one be beyond the 32 bits of the
    counter's first word."""
    if len(key) == 0:
        return ()
    elif FAR:
        block += block0
        return philox16(key, (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32), like, DIRECTION)
    else:
        return philox16(key, block0.to(tl.uint32) + block.to(tl.uint32), 0, like, DIRECTION)


@triton.jit
def _transform(raw, amax, SIGN_MASK: tl.constexpr, OWN: tl.constexpr):
    """Return the words of the transform of a block's 16-bit tensors. OWN says that the amax is the transform's."""
    if raw[0].dtype == tl.float16:
        return narrow_pairs(hadamard16_small(raw, SIGN_MASK), raw[0])
    elif OWN:
        # The transform keeps the sum of squares, so no |x| is above 4·amax, unless it ends as NaN either way.
        if amax < 1.329227995784916e36:
            words = narrow_pairs(hadamard16_small(raw, SIGN_MASK), raw[0])
        else:
            words = narrow_pairs(hadamard16(raw, SIGN_MASK), raw[0])
        return words
    else:
        return narrow_pairs(hadamard16(raw, SIGN_MASK), raw[0])


@triton.jit
def _signs(x, key, EVEN: tl.constexpr):
    """Return the signs of (…, 8) elements, if stochastic rounding takes them apart from FP32 values; else nothing.

    Neighbours are packed as a thread holds them: only if loads are aligned are these neighbours in memory.
    """
    if len(key) == 0 or x.dtype == tl.float32 or not EVEN:
        return ()
    else:
        words = split8(neighbours(x))
        return words[0], words[2], words[4], words[6]


@triton.jit
def _join(low, high):
    """Join two words into uint64."""
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _store_codes(data, codes, line0, line, block0, block, bytes, mask, WORDS: tl.constexpr):
    """Write the 8 bytes of each block; `block` counts along the `line` of the output, `bytes` long, from block0."""
    if WORDS:
        at = data.to(tl.pointer_type(tl.uint64), bitcast=True) + (wide_product(line0, bytes // 8) + block0)
        tl.store(at + (wide_product(line, bytes // 8) + block), codes, mask=mask)
    else:
        at = data + (wide_product(line0, bytes) + block0 * 8) + (wide_product(line, bytes) + block * 8)
        for i in tl.static_range(8):
            byte = ((codes >> (8 * i)) & 0xFF).to(tl.uint8)
            tl.store(at + i, byte, mask=mask & ((block0.to(tl.int64) + block) * 8 + i < bytes))


@triton.jit
def _four_values(codes, scale):
    """Return four codes times their block's scale, which is exact in BF16, as the bits of four BF16 in uint64."""
    word = tl.zeros_like(codes)
    for i in tl.static_range(4):
        value = decode_e2m1(((codes >> (4 * i)) & 15).to(tl.int32)) * scale
        word |= (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint64) << (16 * i)
    return word


@triton.jit
def _store_values(data, codes, sf, line0, line, block0, block, size, mask, WORDS: tl.constexpr):
    """Write the 16 values of each block, in BF16, as `_store_codes` writes codes; a line is `size` values long."""
    scale = decode_e4m3(sf)
    if WORDS:
        at = data.to(tl.pointer_type(tl.uint64), bitcast=True) + (wide_product(line0, size // 4) + block0 * 4)
        at += wide_product(line, size // 4) + block * 4
        for half in tl.static_range(2):  # 16 bytes at once
            four = codes >> (32 * half)
            pair = tl.join(_four_values(four, scale), _four_values(four >> 16, scale))
            to = (at + 2 * half)[:, :, None] + tl.arange(0, 2)[None, None, :]
            if mask is None:
                tl.store(to, pair)
            else:
                tl.store(to, pair, mask=mask[:, :, None])
    else:
        at = data + (wide_product(line0, size) + block0 * 16) + (wide_product(line, size) + block * 16)
        for i in tl.static_range(16):
            value = decode_e2m1(((codes >> (4 * i)) & 15).to(tl.int32)) * scale
            inside = mask & ((block0.to(tl.int64) + block) * 16 + i < size)
            tl.store(at + i, value.to(tl.bfloat16), mask=inside)


@triton.jit
def _store_block(data, codes, sf, line0, line, block0, block, bytes, mask, WORDS: tl.constexpr):
    """Write each block as `data` holds it: as codes, or unpacked as values."""
    if data.dtype.element_ty == tl.uint8:
        _store_codes(data, codes, line0, line, block0, block, bytes, mask, WORDS)
    else:
        _store_values(data, codes, sf, line0, line, block0, block, bytes * 2, mask, WORDS)


@triton.jit
def tensor_scales(source, amax_out, count, first, E4M3_MAX: tl.constexpr, BP: tl.constexpr):
    """Return amax, S_enc and S_dec. The amax [1] is given (BP = 0) or found in `count` (None: BP) partial amaxes;
    `first` writes it."""
    if BP == 0:
        amax = tl.load(source)
    elif count is None:
        amax = tl.max(tl.load(source + tl.arange(0, BP)))
    else:
        p = tl.arange(0, BP)
        amax = tl.max(tl.load(source + p, mask=p < count, other=0.0))
    if first:
        tl.store(amax_out, amax)
    s_enc, s_dec = encode_scale(amax, E4M3_MAX * 6.0)
    return amax, s_enc, s_dec


@triton.jit
def _row_scales(source, amax_out, i, size, first, E4M3_MAX: tl.constexpr):
    """Return amax, S_enc and S_dec of the rows `i`, each of which has its own amax."""
    amax = tl.load(source + i, mask=i < size, other=0.0)
    if first:
        tl.store(amax_out + i, amax, mask=i < size)
    s_enc, s_dec = encode_scale(amax, E4M3_MAX * 6.0)
    return amax[None, :], s_enc[None, :], s_dec[None, :]


@triton.jit
def _scales(
    scales,
    source,
    amax_out,
    count,
    i,
    size,
    first,
    row_first,
    E4M3_MAX: tl.constexpr,
    BP: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return the given scales, or else those of `source`: of the tensor or, if VECTOR, of each of the rows `i`."""
    if len(scales) > 0:
        return scales
    elif VECTOR:
        return _row_scales(source, amax_out, i, size, row_first, E4M3_MAX)
    else:
        return tensor_scales(source, amax_out, count, first, E4M3_MAX, BP)


@triton.jit
def quantize_rows(
    x,
    data,
    scale,
    amax_out,
    source,
    scales,
    key,
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
    FAR: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
):
    NB: tl.constexpr = BN // 16
    t = tl.arange(0, BM)
    t = t % (BM // SPAN) * SPAN + t // (BM // SPAN)
    r0, b0 = row * BM, col * NB
    # Blocks come first in the shape because Triton lays the lanes of a warp along the first of two equal dimensions.
    tb = tl.arange(0, NB)
    c = (tb * 16)[:, None, None] + tl.arange(0, 8)[None, None, :]
    at = x + (wide_product(r0, stride) + b0 * 16) + (wide_product(t, stride)[None, :, None] + c)
    r = r0.to(tl.int64) + t
    if EVEN:
        low, high = tl.load(at), tl.load(at + 8)
    else:
        inside = (r < M)[None, :, None]
        low = tl.load(at, mask=inside & ((b0 * 16).to(tl.int64) + c < K), other=0.0)
        high = tl.load(at + 8, mask=inside & ((b0 * 16).to(tl.int64) + c + 8 < K), other=0.0)
    scales = _scales(scales, source, amax_out, count, r, M, first, col == 0, E4M3_MAX, BP, ROW_SCALED)
    amax, s_enc, s_dec = scales
    blocks = (K + 15) // 16
    r, b = r[None, :], b0.to(tl.int64) + tb[:, None]
    t, tb = t[None, :], tb[:, None]
    top = absmax16(low, high)
    if FOUR != 0:
        values = split8(widen(low)) + split8(widen(high))
        w0, w1, sf = four_over_six(values, top, s_enc, s_dec, amax, E4M3_MAX, FOUR, TWO_D)
    else:
        sf, factor = _block_factor(top, s_enc, s_dec, TWO_D, SPAN)
        words = _random_words(key, wide_product(r0, blocks) + b0, wide_product(t, blocks) + tb, sf, 0, FAR)
        # Widened late and one half at a time: FP32 takes twice the registers.
        w0 = _round8(split8(widen(low)), factor, _signs(low, key, EVEN), words, 0, True)
        w1 = _round8(split8(widen(high)), factor, _signs(high, key, EVEN), words, 2, True)
    codes = _join(w0, w1)
    bytes = (K + 1) // 2
    tiles = (blocks + 3) // 4
    at = scale + scale_index_in(r0, t, b0, tb, tiles, BM, SWIZZLED)
    if EVEN:
        _store_block(data, codes, sf, r0, t, b0, tb, bytes, None, WORDS)
        tl.store(at, sf.to(tl.uint8))
    else:
        _store_block(data, codes, sf, r0, t, b0, tb, bytes, (r < M) & (b < blocks), WORDS)
        tl.store(at, sf.to(tl.uint8), mask=(r < (M + 127) // 128 * 128) & (b < tiles * 4))
    return scales


@triton.jit
def _values(raw, pairs, FIRST: tl.constexpr):
    """Return eight elements of each block in FP32: from the words `pairs`, or from `raw` if there are none."""
    if len(pairs) > 0:
        return widen_pairs(pairs[FIRST // 2 : FIRST // 2 + 4], raw[0])
    else:
        values = ()
        for i in tl.static_range(8):
            values += (widen(raw[FIRST + i]),)
        return values


@triton.jit
def quantize_columns(
    x,
    data,
    scale,
    amax_out,
    source,
    scales,
    key,
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
    FAR: tl.constexpr,
    SHARED: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    G: tl.constexpr = BM // 16
    tg, tc = tl.arange(0, G)[:, None], tl.arange(0, BN)
    g0, c0 = row * G, col * BN
    at = x + (wide_product(g0 * 16, stride) + c0) + (wide_product(tg * 16, stride) + tc[None, :])
    g, c = g0.to(tl.int64) + tg, c0.to(tl.int64) + tc
    inside = (c < K)[None, :]
    raw = ()
    for i in tl.static_range(16):
        if EVEN:
            raw += (tl.load(at),)
        else:
            raw += (tl.load(at, mask=(g * 16 + i < M) & inside, other=0.0),)
        at += stride
    scales = _scales(scales, source, amax_out, count, c, K, first, row == 0, E4M3_MAX, BP, ROW_SCALED)
    amax, s_enc, s_dec = scales
    if SHARED and first:  # they are those of the rows, who wrote to another place
        tl.store(amax_out, amax)
    pairs = ()
    if RHT and raw[0].dtype == tl.float32:
        raw = hadamard16(raw, SIGN_MASK)
    elif RHT:
        pairs = _transform(raw, amax, SIGN_MASK, BP > 0 and not ROW_SCALED)
    blocks = (M + 15) // 16
    c, tc = c[None, :], tc[None, :]
    top = absmax_pairs(pairs, raw[0]) if len(pairs) > 0 else absmax(raw)
    if FOUR != 0:
        values = _values(raw, pairs, 0) + _values(raw, pairs, 8)
        w0, w1, sf = four_over_six(values, top, s_enc, s_dec, amax, E4M3_MAX, FOUR, TWO_D)
    else:
        sf, factor = _block_factor(top, s_enc, s_dec, TWO_D, 1)
        words = _random_words(key, wide_product(c0, blocks) + g0, wide_product(tc, blocks) + tg, sf, 1, FAR)
        w0 = _round8(_values(raw, pairs, 0), factor, pairs[:4], words, 0, False)
        w1 = _round8(_values(raw, pairs, 8), factor, pairs[4:], words, 2, False)
    codes = _join(w0, w1)
    bytes = blocks * 8 if RHT or WORDS else (M + 1) // 2
    tiles = (blocks + 3) // 4
    at = scale + scale_index_in(c0, tc, g0, tg, tiles, BN, SWIZZLED)
    if EVEN:
        _store_block(data, codes, sf, c0, tc, g0, tg, bytes, None, WORDS)
        tl.store(at, sf.to(tl.uint8))
    else:
        _store_block(data, codes, sf, c0, tc, g0, tg, bytes, (g < blocks) & inside, WORDS)
        tl.store(at, sf.to(tl.uint8), mask=(c < (K + 127) // 128 * 128) & (g < tiles * 4))
