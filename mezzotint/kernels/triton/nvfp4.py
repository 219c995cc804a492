"""NVFP4 on CUDA: it takes two launches, the amax and one cast that writes both directions.

The amax pass (`nvfp4_amax.py`) writes one partial amax per program, so that there is nothing to zero and no atomics.
Every program of the cast reduces these few partials itself (they sit in the L2 cache), and the cast walks x backwards,
because what the amax pass read last is still cached. Row-scaled amaxes are vectors, raised by atomics instead.

A program of the cast owns one tile or a few in a row and treats the two directions of each one after the other, with
the layout that suits it (`_jit_nvfp4.py`); the second finds the tile in the L1 cache. The grid covers the padding of
the scales.
"""

import torch
import triton
import triton.language as tl

from mezzotint.constants import NVFP4_BLOCK, cdiv, rup
from mezzotint.kernels.quantize_ops import COLUMNWISE, ROWWISE
from mezzotint.kernels.triton._jit import ahead, as_rows
from mezzotint.kernels.triton._jit_fp4 import decode_e2m1, decode_e4m3, philox_key, scale_index
from mezzotint.kernels.triton._jit_nvfp4 import quantize_columns, quantize_rows, tensor_scales
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton.nvfp4_amax import PARTIALS, amax, partials, vectors

__all__ = ["AHEAD", "amax", "dequantize", "quantize"]


def tile_config(
    M: int, K: int, rowwise: bool, columnwise: bool, rht: bool, two_d: bool, four_over_six: int
) -> dict[str, int]:
    """Return the tile of the cast: BM and BN are powers of two, 16 or more; TILES is how many tiles a program takes.

    A thread holds BM·BN / (32·num_warps) elements: 128 make the fewest instructions, but the transform of so many does
    not fit the registers, and trying two scales on them takes long to compile. Tiles for rows alone are long: 32 scale
    bytes, a whole sector, lie side by side. The transform's small tiles come four to a program, which then reduces the
    amaxes and computes what depends on the thread alone once for all, as long as there are programs enough.
    """
    if four_over_six:
        return {"BM": 128, "BN": 64, "num_warps": 8, "TILES": 1}
    if not columnwise:
        BN = 512 if K > 256 else 64
        return {"BM": 16384 // BN, "BN": BN, "num_warps": 4, "TILES": 1}
    if rht:
        TILES = 4 if M * K >= 4096 * 128 * 64 else 1
        return {"BM": 128, "BN": 64, "num_warps": 4, "TILES": TILES, "maxnreg": 128}
    if rowwise and M % 128 == 0 and K % 128 == 0:
        return {"BM": 128, "BN": 128, "num_warps": 4 if two_d else 8, "TILES": 1}
    return {"BM": 256, "BN": 64, "num_warps": 4, "TILES": 1}


def dequantize_config() -> dict[str, int]:
    """Return the tile of the dequantization, in codes."""
    return {"BM": 64, "BN": 128, "num_warps": 4}


def span(config: dict[str, int]) -> int:
    """Return how many rows of a tile one thread holds: if these are neighbours, few threads share a 16x16 tile."""
    return max(1, min(NVFP4_BLOCK, config["BM"] * config["BN"] // (512 * config["num_warps"])))


@Fast
@triton.jit(do_not_specialize=["across", "tiles", "count"])
def _quantize_kernel(
    x,
    row_data,
    row_scale,
    col_data,
    col_scale,
    row_amax,
    col_amax,
    row_source,
    col_source,
    rng,
    noop,
    M,
    K,
    stride,
    across,
    tiles,
    count,
    E4M3_MAX: tl.constexpr,
    FOUR: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    RHT: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    COL_WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    FAR: tl.constexpr,
    SHARED: tl.constexpr,
    ROW_BP: tl.constexpr,
    COL_BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    SPAN: tl.constexpr,
):
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    end = tiles - pid * TILES
    start = tl.maximum(end - TILES, 0)
    across = across.to(tl.uint32)
    row, col = start.to(tl.uint32) // across, start.to(tl.uint32) % across
    row_scales, col_scales = (), ()
    if TILES > 1 and not ROW_SCALED:
        if row_data is not None:
            row_scales = tensor_scales(row_source, row_amax, count, pid == 0, E4M3_MAX, ROW_BP)
        if col_data is not None and not SHARED:
            col_scales = tensor_scales(col_source, col_amax, count, pid == 0, E4M3_MAX, COL_BP)
    key = () if rng is None else philox_key(rng)
    for _ in range(0, 1 if TILES == 1 else end - start):
        if row_data is not None:
            scales = quantize_rows(
                x,
                row_data,
                row_scale,
                row_amax,
                row_source,
                row_scales,
                key,
                row,
                col,
                M,
                K,
                stride,
                count,
                pid == 0,
                E4M3_MAX,
                FOUR,
                TWO_D,
                SWIZZLED,
                ROW_SCALED,
                ROW_WORDS,
                EVEN,
                FAR,
                ROW_BP,
                BM,
                BN,
                SPAN,
            )
        if col_data is not None:
            quantize_columns(
                x,
                col_data,
                col_scale,
                col_amax,
                col_source,
                scales if SHARED else col_scales,
                key,
                row,
                col,
                M,
                K,
                stride,
                count,
                pid == 0,
                E4M3_MAX,
                FOUR,
                TWO_D,
                SWIZZLED,
                ROW_SCALED,
                RHT,
                SIGN_MASK,
                COL_WORDS,
                EVEN,
                FAR,
                SHARED,
                COL_BP,
                BM,
                BN,
            )
        if TILES > 1:
            last = col + 1 == across
            row += last.to(tl.uint32)
            col = tl.where(last, 0, col + 1)


@Fast
@triton.jit
def _dequantize_kernel(
    data,
    scale,
    amax,
    out,
    R,
    C,
    bytes,
    E4M3_MAX: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Dequantize (R, C) codes in rows of `bytes`, which are more than C takes if a transform filled them up."""
    across = (C + BN - 1) // BN
    pid = tl.program_id(0)
    r = (pid // across).to(tl.int64) * BM + tl.arange(0, BM)
    start = (pid % across).to(tl.int64) * BN
    byte = start // 2 + tl.arange(0, BN // 2)
    packed = tl.load(
        data + r[:, None] * bytes + byte[None, :],
        mask=(r < R)[:, None] & (byte < bytes)[None, :],
        other=0,
        eviction_policy="evict_first",
    ).to(tl.int32)
    b = start // 16 + tl.arange(0, BN // 16)
    blocks = (C + 15) // 16
    sf = tl.load(
        scale + scale_index(r[:, None], b[None, :], (blocks + 3) // 4, SWIZZLED),
        mask=(r < R)[:, None] & (b < blocks)[None, :],
        other=0,
    )
    top = tl.load(amax + r, mask=r < R, other=0.0)[:, None] if ROW_SCALED else tl.load(amax)
    factor = (decode_e4m3(sf.to(tl.int32)) * top) * (1.0 / (E4M3_MAX * 6.0))
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [BM, BN // 16, 8]), [BM, BN // 2])
    value = tl.join(decode_e2m1(packed & 15) * factor, decode_e2m1(packed >> 4) * factor)
    value = tl.reshape(value, [BM, BN]).to(out.dtype.element_ty)
    c = start + tl.arange(0, BN)
    if TRANSPOSED:
        mask = (c < C)[:, None] & (r < R)[None, :]
        tl.store(out + c[:, None] * R + r[None, :], tl.trans(value), mask=mask)
    else:
        mask = (r < R)[:, None] & (c < C)[None, :]
        tl.store(out + r[:, None] * C + c[None, :], value, mask=mask)


def quantize(
    x: torch.Tensor,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    amax_rowwise: torch.Tensor | None,
    amax_columnwise: torch.Tensor | None,
    rng: torch.Tensor | None,
    e4m3_max: int,
    four_over_six: int,
    sign_mask: int,
    two_d: bool,
    swizzled: bool,
    rht: bool,
    row_scaled: bool,
    rowwise: bool,
    columnwise: bool,
    unpacked: int = 0,
    config: dict[str, int] | None = None,
) -> None:
    """Write the wanted directions of x and their amaxes. Buffers of BF16, which `unpacked` names, get values
    instead of codes."""
    if not out:
        return
    x = as_rows(x)
    (M, K), numel = x.shape, x.numel()
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0
    if four_over_six and two_d and rowwise and not is_aligned:
        # If rows are not aligned, Triton has 16 threads compute the same errors of a block, and takes half a minute to
        # compile that. Rows of no elements get room too, because their stride of 1 would not be aligned.
        x, is_aligned = x.new_empty(M, rup(max(K, 1), 16))[:, :K].copy_(x), True
    missing = (rowwise and amax_rowwise is None), (columnwise and amax_columnwise is None)
    row_source, col_source, count = amax_rowwise, amax_columnwise, 1
    if any(missing):
        row, col = (vectors if row_scaled else partials)(x, noop, rht, sign_mask, *missing)
        for top in (row, col):
            count = count if top is None else top.numel()
        row_source = row if missing[0] else row_source
        col_source = col if missing[1] else col_source
    row_data, row_scale = out[:2] if rowwise else (None, None)
    col_data, col_scale = out[2 * rowwise : 2 * rowwise + 2] if columnwise else (None, None)
    # Blocks must be whole, and at addresses where 8 bytes can be stored at once.
    row_words = row_data is None or (K % NVFP4_BLOCK == 0 and row_data.data_ptr() % 8 == 0)
    col_words = col_data is None or ((rht or M % NVFP4_BLOCK == 0) and col_data.data_ptr() % 8 == 0)
    options = config or tile_config(M, K, rowwise, columnwise, rht, two_d, four_over_six)
    BM, BN = options["BM"], options["BN"]
    across = max(1, cdiv(rup(K, 128), BN))
    tiles = max(1, cdiv(rup(M, 128), BM)) * across
    is_whole = numel > 0 and M % max(BM, 128) == 0 and K % max(BN, 128) == 0
    _quantize_kernel[(cdiv(tiles, options["TILES"]),)](
        x,
        row_data,
        row_scale,
        col_data,
        col_scale,
        out[2 * (rowwise + columnwise)] if rowwise else None,
        out[-1] if columnwise else None,
        row_source if rowwise else None,
        col_source if columnwise else None,
        None if four_over_six else rng,
        noop,
        M,
        K,
        x.stride(0),
        across,
        tiles,
        None if count == PARTIALS else count,
        E4M3_MAX=e4m3_max,
        FOUR=four_over_six,
        SIGN_MASK=sign_mask if rht else 0,
        TWO_D=two_d,
        SWIZZLED=swizzled,
        RHT=rht,
        ROW_SCALED=row_scaled,
        ROW_WORDS=row_words,
        COL_WORDS=col_words,
        EVEN=is_whole and is_aligned and row_words and col_words,
        FAR=rup(M, NVFP4_BLOCK) * rup(K, NVFP4_BLOCK) > NVFP4_BLOCK << 32,
        SHARED=rowwise and row_source is col_source and not row_scaled,
        ROW_BP=PARTIALS if missing[0] else 0,
        COL_BP=PARTIALS if missing[1] else 0,
        SPAN=span(options) if two_d and not four_over_six else 1,
        enable_fp_fusion=False,  # where the reference rounds twice, so does the kernel
        **options,
    )


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    tensor_amax: torch.Tensor,
    e4m3_max: int,
    swizzled: bool,
    transposed: bool,
    cols: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype(fl32(code · fl32(fl32(sf · amax) · fl32(1/(6E))))) as (R, cols), or (cols, R) when `transposed`."""
    data = data.contiguous()
    shape = (cols, data.shape[0]) if transposed else (*data.shape[:-1], cols)
    out = data.new_empty(shape, dtype=out_dtype)
    if out.numel() == 0:
        return out
    R = out.numel() // cols
    options = dequantize_config()
    grid = cdiv(R, options["BM"]) * cdiv(cols, options["BN"])
    _dequantize_kernel[(grid,)](
        data,
        scale_inv.contiguous(),
        tensor_amax.contiguous(),
        out,
        R,
        cols,
        data.shape[-1],
        E4M3_MAX=e4m3_max,
        SWIZZLED=swizzled,
        TRANSPOSED=transposed,
        ROW_SCALED=tensor_amax.numel() > 1,
        enable_fp_fusion=False,
        **options,
    )
    return out


def _ahead(rowwise: bool, columnwise: bool, dtype: str = "bf16", unpacked: int = 0, **options: int) -> tuple:
    """Return a case of the cast for ahead-of-time compilation; `options` override the plain one."""
    rht, random = bool(options.get("RHT")), options.pop("random", 0)
    two_d, four = bool(options.get("TWO_D")), options.get("FOUR", 0)
    config = tile_config(8192, 8192, rowwise, columnwise, rht, two_d, four)
    row, col = ("u8" if wanted else "-" for wanted in (rowwise, columnwise))
    row_amax, col_amax = ("fp32" if wanted else "-" for wanted in (rowwise, columnwise))
    row_data, col_data = ("bf16" if unpacked & flag else side for flag, side in ((ROWWISE, row), (COLUMNWISE, col)))
    pointers = [dtype, row_data, row, col_data, col, row_amax, col_amax, row_amax, col_amax]
    pointers += ["i64" if random else "-", "fp32"]
    constants = {
        "count": None,
        "E4M3_MAX": 448,
        "FOUR": 0,
        "SIGN_MASK": 0xD7E8,
        "TWO_D": False,
        "SWIZZLED": True,
        "RHT": False,
        "ROW_SCALED": False,
        "ROW_WORDS": True,
        "COL_WORDS": True,
        "EVEN": True,
        "FAR": False,
        "SHARED": rowwise and columnwise and not rht,
        "ROW_BP": PARTIALS,
        "COL_BP": PARTIALS,
        "SPAN": span(config) if options.get("TWO_D") else 1,
    }
    return ahead(_quantize_kernel, " ".join(pointers), **config, **constants | options)


AHEAD = [
    _ahead(True, False),
    _ahead(False, True, RHT=True, EVEN=False),
    _ahead(True, True, TWO_D=True),
    _ahead(True, False, "fp16", TWO_D=True, FOUR=1, SPAN=1, EVEN=False, ROW_WORDS=False),
    _ahead(True, True, RHT=True, random=1, SWIZZLED=False),
    _ahead(True, True, "fp32", ROW_SCALED=True, SHARED=False, FOUR=2, ROW_BP=0, COL_BP=0),
    _ahead(True, True, unpacked=ROWWISE | COLUMNWISE, RHT=True, random=1, SWIZZLED=False),
    _ahead(True, True, unpacked=ROWWISE, TWO_D=True, EVEN=False, ROW_WORDS=False),
    *(
        ahead(
            _dequantize_kernel,
            f"u8 u8 fp32 {dtype}",
            E4M3_MAX=448,
            SWIZZLED=swizzled,
            TRANSPOSED=transposed,
            ROW_SCALED=transposed,
            **dequantize_config(),
        )
        for dtype, swizzled, transposed in (("bf16", False, False), ("fp32", True, True))
    ),
]
