"""The amax of each direction that NVFP4 scales by, on CUDA: one read of x serves both.

Without a transform both directions have the amax of x, which is FP8's flat pass with one partial amax per program. With
one, a thread holds 4 columns of 16 rows, so the transform runs between its registers and each program writes two
partial amaxes; only these are rounded to the type of x, since rounding keeps the order. The launch that needs the amax
reduces the partials. Row-scaled amaxes are vectors, raised from 0 by atomics.
"""

# mypy: disable-error-code="assignment, var-annotated"
# In a kernel a tuple grows, and its type with it.

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.triton._jit import ahead, as_rows
from mezzotint.kernels.triton._jit_fp4 import absmax, hadamard_absmax, narrow_absmax, wide_product
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton.float8 import PARTIALS, amax_partials


def tile_config() -> dict[str, int]:
    """Return the tile that a program reads at a time: 16·G rows, BN columns."""
    return {"G": 8, "BN": 64, "num_warps": 4}


def even(M: int, K: int, config: dict[str, int]) -> bool:
    """Return whether no tile is cut."""
    return M % (16 * config["G"]) == 0 and K % config["BN"] == 0


@triton.jit
def _raise(out, top, mask):
    """Raise `out` to max(out, top). FP32 that are not negative are ordered as their bits are."""
    out = out.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(out, top.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@Fast
@triton.jit
def _amax_tile_kernel(
    x,
    row_top,
    col_top,
    noop,
    M,
    K,
    stride,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    """Read every P-th tile in program p, and write row_top[p] and col_top[p], or raise the vectors."""
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    across = tl.cdiv(K, BN)
    tiles = tl.cdiv(M, 16 * G) * across
    rows = tl.zeros([G, BN], tl.float32)
    columns = tl.zeros([G, BN], tl.float32)
    tg, tc = tl.arange(0, G)[:, None], tl.arange(0, BN)[None, :]
    # Of the tile: counted on, because a division takes as long as a tenth of the tile.
    down, right = programs // across, programs % across
    row, col = pid // across, pid % across
    for _ in range(pid, tiles, programs):
        g0, c0 = row * G, col * BN
        at = x + (wide_product(g0 * 16, stride) + c0) + (wide_product(tg * 16, stride) + tc)
        g, c = g0.to(tl.int64) + tg, c0.to(tl.int64) + tc
        values = ()
        for i in tl.static_range(16):
            if EVEN:
                values += (tl.load(at),)
            else:
                values += (tl.load(at, mask=(g * 16 + i < M) & (c < K), other=0.0),)
            at += stride
        col += right
        row += down + (col >= across).to(tl.int32)
        col = tl.where(col >= across, col - across, col)
        if ROW_SCALED and row_top is not None:
            for i in tl.static_range(16):
                top = tl.max(absmax((values[i],)), axis=1, keep_dims=True)
                _raise(row_top + g * 16 + i, top, g * 16 + i < M)
        elif row_top is not None:
            rows = tl.maximum(rows, absmax(values))
        if col_top is not None:
            top = hadamard_absmax(values, SIGN_MASK) if RHT else absmax(values)
            if ROW_SCALED:
                top = tl.max(top, axis=0, keep_dims=True)
                _raise(col_top + c, narrow_absmax(top, x.dtype.element_ty) if RHT else top, c < K)
            else:
                columns = tl.maximum(columns, top)
    if not ROW_SCALED:
        if row_top is not None:
            tl.store(row_top + pid, tl.max(rows))
        if col_top is not None:
            top = tl.max(columns)
            tl.store(col_top + pid, narrow_absmax(top, x.dtype.element_ty) if RHT else top)


@Fast
@triton.jit(do_not_specialize=["count"])
def _amax_finish_kernel(row_source, col_source, row_amax, col_amax, count, BP: tl.constexpr):
    p = tl.arange(0, BP)
    if row_amax is not None:
        tl.store(row_amax, tl.max(tl.load(row_source + p, mask=p < count, other=0.0)))
    if col_amax is not None:
        tl.store(col_amax, tl.max(tl.load(col_source + p, mask=p < count, other=0.0)))


def partials(
    x: torch.Tensor, noop: torch.Tensor | None, rht: bool, sign_mask: int, rowwise: bool, columnwise: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return partial amaxes, at most PARTIALS, of a matrix whose rows are contiguous, for each wanted direction."""
    M, K = x.shape
    if x.is_contiguous() and not (rht and columnwise):
        top = amax_partials(x, noop)
        return top if rowwise else None, top if columnwise else None
    options = tile_config()
    count = max(1, min(PARTIALS, cdiv(M, 16 * options["G"]) * cdiv(K, options["BN"])))
    row, col = x.new_empty((2, count), dtype=torch.float32).unbind(0)
    _amax_tile_kernel[(count,)](
        x,
        row if rowwise else None,
        col if columnwise else None,
        noop,
        M,
        K,
        x.stride(0),
        RHT=rht,
        SIGN_MASK=sign_mask,
        ROW_SCALED=False,
        EVEN=even(M, K, options),
        enable_fp_fusion=False,  # where the reference rounds twice, so does the kernel
        **options,
    )
    return row if rowwise else None, col if columnwise else None


def vectors(
    x: torch.Tensor, noop: torch.Tensor | None, rht: bool, sign_mask: int, rowwise: bool, columnwise: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the amax of every row [M] and column [K], as far as wanted, of a matrix whose rows are contiguous."""
    M, K = x.shape
    options = tile_config()
    row = x.new_zeros(M, dtype=torch.float32) if rowwise else None
    col = x.new_zeros(K, dtype=torch.float32) if columnwise else None
    tiles = cdiv(M, 16 * options["G"]) * cdiv(K, options["BN"])
    if tiles:
        _amax_tile_kernel[(tiles,)](
            x,
            row,
            col,
            noop,
            M,
            K,
            x.stride(0),
            RHT=rht,
            SIGN_MASK=sign_mask,
            ROW_SCALED=True,
            EVEN=even(M, K, options),
            enable_fp_fusion=False,
            **options,
        )
    return row, col


def amax(
    x: torch.Tensor, rht: bool, sign_mask: int, row_scaled: bool, rowwise: bool, columnwise: bool
) -> list[torch.Tensor]:
    """Return the FP32 amax of each wanted direction: [1], or [M] and [K] when `row_scaled`."""
    x = as_rows(x)
    if row_scaled:
        return [top for top in vectors(x, None, rht, sign_mask, rowwise, columnwise) if top is not None]
    row_source, col_source = partials(x, None, rht, sign_mask, rowwise, columnwise)
    row = x.new_empty(1, dtype=torch.float32) if rowwise else None
    col = x.new_empty(1, dtype=torch.float32) if columnwise else None
    source = row_source if rowwise else col_source
    if source is not None:
        _amax_finish_kernel[(1,)](row_source, col_source, row, col, source.numel(), BP=PARTIALS, num_warps=4)
    return [top for top in (row, col) if top is not None]


AHEAD = [
    ahead(
        _amax_tile_kernel,
        "bf16 fp32 fp32 -",
        RHT=True,
        SIGN_MASK=0xD7E8,
        ROW_SCALED=False,
        EVEN=True,
        **tile_config(),
    ),
    ahead(
        _amax_tile_kernel,
        "fp16 fp32 fp32 -",
        RHT=False,
        SIGN_MASK=0,
        ROW_SCALED=True,
        EVEN=False,
        **tile_config(),
    ),
    ahead(_amax_finish_kernel, "fp32 fp32 fp32 fp32", BP=PARTIALS, num_warps=4),
]
