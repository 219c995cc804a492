"""FP8 with one FP32 scale per 1x128 run or 128x128 tile on CUDA: one launch reads x once.

A program holds one tile in registers, takes the amaxes of its rows, of its columns or of all of it, and writes codes
and scales of the wanted directions. Both directions, and 128x128, need tiles of 128x128; one direction of 1x128 needs
128 only along its blocks, so the tile is smaller and more programs are under way. See `spread` for the order of the
rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import E4M3, E5M2, FP8_BLOCK, cdiv
from mezzotint.kernels._lib import as_matrix
from mezzotint.kernels.quantize_ops import SourceCall
from mezzotint.kernels.triton._dequantize import dequantize_tiles
from mezzotint.kernels.triton._jit import (
    ahead,
    ahead_of_groups,
    cast_fp8,
    drop_nan,
    for_inf,
    inverse,
    natural_span,
    scale_from_amax,
    spread,
    store_tile,
    store_transposed,
    tile_of,
)
from mezzotint.kernels.triton._jit_groups import are_alike, chosen, in_launches, own_rows, pack
from mezzotint.kernels.triton._jit_source import load_halves, load_input, read, source_mode, store_sums
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import ACTIVATION, BACKWARD, NORM, RMSNORM, finish_source

TAKES_SOURCES = True


def tile_config(
    two_d: bool, rowwise: bool, columnwise: bool, sourced: bool = False, halves: bool = False
) -> dict[str, Any]:
    """Return the tile: 128 rows unless only rows are scaled, 128 columns unless only columns are; ONCE: see
    `load_tile`.

    A source needs registers of its own, hence more threads; halves need twice as many.
    """
    if two_d:
        both = rowwise and columnwise
        return {"BM": 128, "BN": 128, "GROUP": 1, "num_warps": 8, "ONCE": both, **({"SPAN": 2} if both else {})}
    if not columnwise:
        return {"BM": 32, "BN": 128, "SPAN": 1, "GROUP": 1, "num_warps": 4 if halves else 2, "ONCE": True}
    if not rowwise:
        return {"BM": 128, "BN": 64, "GROUP": 1, "num_warps": 8 if halves else 4, "ONCE": False}
    return {"BM": 128, "BN": 128, "GROUP": 2, "num_warps": 16 if halves else 8 if sourced else 4, "ONCE": False}


@Fast
@triton.jit
def _block_kernel(
    x,
    data,
    scales,
    transpose,
    col_scales,
    noop,
    given,
    groups,
    M,
    K,
    stride,
    eps,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Quantize by 1x128 into scales[K block, row] and col_scales[M block, column], whose rows are padded with 0 to a
    multiple of 4."""
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    if groups is not None:
        x = chosen(x, groups, pid)
        if data is not None:
            data, scales = chosen(data, groups, pid), chosen(scales, groups, pid)
        if transpose is not None:
            transpose, col_scales = chosen(transpose, groups, pid), chosen(col_scales, groups, pid)
        pid, M = own_rows(groups, pid, ALIGNED)
    PARTS: tl.constexpr = 2 if SOURCE is not None and SOURCE[0] == "halves" else 1
    N = K // PARTS
    row, tile = tile_of(pid, M, N, BM, BN, GROUP)
    r = row * BM + spread(BM, SPAN)
    first, second = load_halves(x, given, r, tile * BN + tl.arange(0, BN), M, K, stride, SOURCE, EVEN, ONCE)
    for part in tl.static_range(PARTS):
        col = part * (N // BN) + tile
        c = col * BN + tl.arange(0, BN)
        value = (first if part == 0 else second).to(tl.float32)
        store_sums(given, value, row, c, K, SOURCE)
        # Both amaxes before the first store: what is left then waits for nothing.
        if data is not None:
            row_scale = scale_from_amax(drop_nan(tl.max(tl.abs(value), 1)), eps, DTYPE, POW2, FOR_INF)
        if transpose is not None:
            col_scale = scale_from_amax(drop_nan(tl.max(tl.abs(value), 0)), eps, DTYPE, POW2, FOR_INF)
        if data is not None:
            store_tile(data, cast_fp8(value * row_scale[:, None], DTYPE), r, c, M, K, EVEN)
            padded = (M + 3) // 4 * 4
            scale_inv = tl.where(r < M, inverse(row_scale, POW2), 0.0)
            tl.store(scales + col * padded + r, scale_inv, mask=r < padded)
        if transpose is not None:
            code = cast_fp8(value * col_scale[None, :], DTYPE)
            store_transposed(transpose, code, row, col, M, K, BM, BN, SPAN, EVEN)
            padded = (K + 3) // 4 * 4
            scale_inv = tl.where(c < K, inverse(col_scale, POW2), 0.0)
            tl.store(col_scales + row * padded + c, scale_inv, mask=c < padded)


@triton.jit
def _store_scale(scales, scale_inv, i, j, count):
    """Store scale_inv at scales[i, j] of a matrix with `count` columns; the last column pads with 0 to a multiple of
    4."""
    padded = (count + 3) // 4 * 4
    end = tl.where(j + 1 == count, padded, j + 1)
    k = tl.arange(0, 4)
    tl.store(scales + i * padded + j + k, tl.where(k == 0, scale_inv, 0.0), mask=j + k < end)


@Fast
@triton.jit
def _square_kernel(
    x,
    data,
    scales,
    transpose,
    col_scales,
    noop,
    given,
    groups,
    M,
    K,
    stride,
    eps,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    FOR_INF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Quantize by 128x128: one scale serves both directions, scales[M block, K block], col_scales[K block, M block]."""
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    if groups is not None:
        x = chosen(x, groups, pid)
        if data is not None:
            data, scales = chosen(data, groups, pid), chosen(scales, groups, pid)
        if transpose is not None:
            transpose, col_scales = chosen(transpose, groups, pid), chosen(col_scales, groups, pid)
        pid, M = own_rows(groups, pid, ALIGNED)
    row, col = tile_of(pid, M, K, BM, BN, GROUP)
    r = row * BM + spread(BM, SPAN)
    c = col * BN + tl.arange(0, BN)
    value = load_input(x, given, r, c, M, K, stride, SOURCE, EVEN, ONCE)
    store_sums(given, value, row, c, K, SOURCE)
    scale = scale_from_amax(drop_nan(tl.max(tl.abs(value))), eps, DTYPE, POW2, FOR_INF)
    scale_inv = inverse(scale, POW2)
    code = cast_fp8(value * scale, DTYPE)
    if data is not None:
        store_tile(data, code, r, c, M, K, EVEN)
        _store_scale(scales, scale_inv, row, col, tl.cdiv(K, BN))
    if transpose is not None:
        store_transposed(transpose, code, row, col, M, K, BM, BN, SPAN, EVEN)
        _store_scale(col_scales, scale_inv, col, row, tl.cdiv(M, BM))


def quantize(
    x: torch.Tensor | SourceCall,
    out: list[torch.Tensor],
    noop: torch.Tensor | None,
    dtype: int,
    pow2: bool,
    eps: float,
    two_d: bool,
    rowwise: bool,
    columnwise: bool,
    config: dict[str, Any] | None = None,
) -> None:
    source = read(x, source_mode(x, "block", 0 if two_d else FP8_BLOCK))
    M, K = source.M, source.K
    if M * K == 0 or not out:
        return
    data, scales = out[:2] if rowwise else (None, None)
    transpose, col_scales = out[-2:] if columnwise else (None, None)
    options = dict(config or tile_config(two_d, rowwise, columnwise, source.kind is not None, source.columns() < K))
    options.setdefault("SPAN", natural_span(options["BM"], options["BN"], options["num_warps"]))
    partials = source.partials(cdiv(M, options["BM"]))
    kernel = _square_kernel if two_d else _block_kernel
    kernel[(cdiv(M, options["BM"]) * cdiv(source.columns(), options["BN"]),)](
        source.x,
        data,
        scales,
        transpose,
        col_scales,
        noop,
        source.given(partials),
        None,
        M,
        K,
        source.x.stride(0),
        eps or None,
        SOURCE=source.kind,
        DTYPE=dtype,
        POW2=pow2,
        FOR_INF=for_inf(source.x.dtype, pow2),
        **options,
        EVEN=M % options["BM"] == 0 and K % options["BN"] == 0,
        ALIGNED=False,
        enable_fp_fusion=False,
    )
    finish_source(source, partials)


def quantize_groups(
    xs: list[torch.Tensor],
    outs: list[list[torch.Tensor]],
    dtype: int,
    pow2: bool,
    eps: float,
    two_d: bool,
    rowwise: bool,
    columnwise: bool,
) -> None:
    """Quantize each of G tensors on its own."""
    if not are_alike(xs):
        for x, out in zip(xs, outs, strict=True):
            quantize(x, out, None, dtype, pow2, eps, two_d, rowwise, columnwise)
        return
    options = tile_config(two_d, rowwise, columnwise)
    options.setdefault("SPAN", natural_span(options["BM"], options["BN"], options["num_warps"]))
    kernel, K = _square_kernel if two_d else _block_kernel, xs[0].shape[-1]
    for part in in_launches(len(xs)):
        matrices, buffers = [as_matrix(x) for x in xs[part]], list(zip(*outs[part], strict=True))
        groups = pack([x.shape[0] for x in matrices], lambda rows: cdiv(rows, options["BM"]) * cdiv(K, options["BN"]))
        if not groups.programs:
            continue
        kernel[(groups.programs,)](
            groups.of(matrices),
            *[groups.of(buffer) for buffer in (buffers[:2] if rowwise else (None, None))],
            *[groups.of(buffer) for buffer in (buffers[-2:] if columnwise else (None, None))],
            None,
            None,
            groups.packed,
            None,
            K,
            K,
            eps or None,
            SOURCE=None,
            DTYPE=dtype,
            POW2=pow2,
            FOR_INF=for_inf(xs[0].dtype, pow2),
            **options,
            **groups.flags(options["BM"], options["BN"], K),
            enable_fp_fusion=False,
        )


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: int,
    two_d: bool,
    transposed: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype(fl32(code · scale_inv)) in the logical shape. Either direction is quantized along its own rows."""
    data, scale_inv = data.contiguous(), scale_inv.contiguous()
    width = scale_inv.shape[1]
    strides = {"along": width, "across": 1, "high": FP8_BLOCK} if two_d else {"along": 1, "across": width}
    return dequantize_tiles(data, scale_inv, dtype, out_dtype, transposed=transposed, **strides)


def _case(
    kernel: Any,
    pointers: str,
    pow2: bool,
    given: str | None = None,
    kind: tuple[Any, ...] | None = None,
    of_groups: bool = False,
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    x, data, _, transpose, *_ = pointers.split()
    halves = kind is not None and kind[0] == "halves"
    options = tile_config(kernel is _square_kernel, data != "-", transpose != "-", kind is not None, halves)
    options.setdefault("SPAN", natural_span(options["BM"], options["BN"], options["num_warps"]))
    maximum = for_inf(torch.float16 if x == "fp16" else torch.float32, pow2)
    constants: dict[str, Any] = {"DTYPE": E4M3 if pow2 else E5M2, "POW2": pow2, "FOR_INF": maximum, **options}
    constants["EVEN"] = pow2
    if pow2:
        constants["eps"] = None
    if of_groups:
        return ahead_of_groups(kernel, pointers, **constants)
    return ahead(kernel, pointers, given, SOURCE=kind, **constants)


AHEAD = [
    _case(_block_kernel, "bf16 u8 fp32 u8 fp32 -", True),
    _case(_block_kernel, "fp16 u8 fp32 u8 fp32 fp32", False),
    _case(_block_kernel, "bf16 fp8e4nv fp32 - - -", True),
    _case(_block_kernel, "fp32 - - u8 fp32 -", False),
    _case(_square_kernel, "bf16 u8 fp32 u8 fp32 -", True),
    _case(_square_kernel, "fp32 u8 fp32 - - fp32", False),
    _case(_square_kernel, "fp16 - - fp8e4nv fp32 -", True),
    _case(_block_kernel, "bf16 u8 fp32 u8 fp32 -", True, of_groups=True),
    _case(_square_kernel, "fp32 - - u8 fp32 -", False, of_groups=True),
    _case(_block_kernel, "bf16 u8 fp32 u8 fp32 -", True, NORM, ("norm", False)),
    _case(_block_kernel, "bf16 u8 fp32 u8 fp32 -", True, ACTIVATION, ("activation", "silu", True)),
    _case(_block_kernel, "bf16 u8 fp32 u8 fp32 -", True, BACKWARD, ("activation_backward", "silu")),
    _case(_block_kernel, "bf16 u8 fp32 u8 fp32 -", True, BACKWARD, ("halves", "silu")),
    _case(_block_kernel, "bf16 u8 fp32 - - -", True, BACKWARD, ("halves", "silu")),
    _case(_block_kernel, "fp16 - - u8 fp32 -", False, BACKWARD.replace("bf16", "fp16"), ("halves", "clamped_swiglu")),
    _case(_block_kernel, "bf16 u8 fp32 - - -", False, RMSNORM, ("norm", True)),
    _case(_square_kernel, "bf16 u8 fp32 u8 fp32 -", True, BACKWARD, ("activation_backward", "gelu")),
]
