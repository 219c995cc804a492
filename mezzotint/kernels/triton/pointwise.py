"""Scale and add, dropout and L2 normalisation on CUDA: each reads its input once and writes its output once.

For the L2 norm a program holds whole rows in registers; rows that are too wide for this are walked in pieces, twice.
"""

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.philox import DROPOUT
from mezzotint.kernels.pointwise import (
    keep_factor,
    keep_limit,
    l2norm_backward_reference,
    l2norm_reference,
)
from mezzotint.kernels.triton._jit import ahead, as_rows, tile_of
from mezzotint.kernels.triton._jit_fp4 import philox16, philox_key
from mezzotint.kernels.triton._jit_source import load
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import write_config

_DROPOUT = tl.constexpr(DROPOUT)
WHOLE = 16384  # the longest rows that are held in registers


def dropout_config() -> dict[str, int]:
    """Return how many blocks of four elements a program takes."""
    return {"BLOCK": 512, "num_warps": 4}


def rows_config(K: int) -> dict[str, int]:
    """Return rows per program and their padded length."""
    BK = min(max(triton.next_power_of_2(K), 128), WHOLE)
    BM = max(1, 2048 // BK)
    return {"BM": BM, "BK": BK, "num_warps": min(16, max(1, BM * BK // 1024))}


@triton.jit
def _load_exact(at, mask):
    """Load like `load`, in a form that LLVM does not take apart: it would add BF16 to FP16 in FP16 if the sum is
    rounded to that, since BF16 has fewer bits, although its range reaches further down."""
    if at.dtype.element_ty == tl.bfloat16:
        bits = tl.load(at, mask=mask, other=0.0).to(tl.uint16, bitcast=True)
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return load(at, mask)


@Fast
@triton.jit
def _scale_add_kernel(x, y, out, M, K, stride, y_stride, factor, BM: tl.constexpr, BN: tl.constexpr):
    """Write round(x · factor) + y, (M, K). All rows of y are the same one if y_stride is 0."""
    row, col = tile_of(tl.program_id(0), M, K, BM, BN, 1)
    r = (row * BM + tl.arange(0, BM))[:, None]
    c = (col * BN + tl.arange(0, BN))[None, :]
    inside = (r < M) & (c < K)
    value = load(x + r * stride + c, inside) * tl.cast(factor, tl.float32)
    value = value.to(out.dtype.element_ty).to(tl.float32) + _load_exact(y + r * y_stride + c, inside)
    tl.store(out + r * K + c, value.to(out.dtype.element_ty), mask=inside)


@Fast
@triton.jit
def _dropout_kernel(x, out, rng, size, limit, factor, BLOCK: tl.constexpr):
    """Drop some of `size` elements; a Philox block is four neighbours, which one thread holds."""
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = (block & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = philox16(philox_key(rng), low, (block >> 32).to(tl.uint32), low, _DROPOUT)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK, 4])
    i = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    value = load(x + i, i < size) * tl.cast(factor, tl.float32)
    value = tl.where((words >> 8).to(tl.int32) >= limit, value, 0.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < size)


@Fast
@triton.jit
def _l2norm_kernel(x, y, rs, M, K, stride, eps, WHOLE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.arange(0, BK)
    high = (r < M)[:, None]
    at, to = x + r[:, None] * stride, y + r[:, None] * K
    if WHOLE:
        inside = high & (c < K)[None, :]
        value = load(at + c[None, :], inside)
        total = tl.sum(value * value, 1)
    else:
        squares = tl.zeros([BM, BK], tl.float32)
        for start in range(0, tl.cast(K, tl.int64), BK):
            value = load(at + start + c[None, :], high & (start + c < K)[None, :])
            squares += value * value
        total = tl.sum(squares, 1)
    scale = tl.div_rn(1.0, tl.sqrt_rn(total + tl.cast(eps, tl.float32)))
    tl.store(rs + r, scale, mask=r < M)
    if WHOLE:
        tl.store(to + c[None, :], (value * scale[:, None]).to(y.dtype.element_ty), mask=inside)
    else:
        for start in range(0, tl.cast(K, tl.int64), BK):
            inside = high & (start + c < K)[None, :]
            value = load(at + start + c[None, :], inside) * scale[:, None]
            tl.store(to + start + c[None, :], value.to(y.dtype.element_ty), mask=inside)


@Fast
@triton.jit
def _l2norm_backward_kernel(
    dy, x, rs, dx, M, K, dy_stride, stride, WHOLE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.arange(0, BK)
    high = (r < M)[:, None]
    from_dy, from_x, to = dy + r[:, None] * dy_stride, x + r[:, None] * stride, dx + r[:, None] * K
    scale = load(rs + r, r < M)[:, None]
    if WHOLE:
        inside = high & (c < K)[None, :]
        grad, h = load(from_dy + c[None, :], inside), load(from_x + c[None, :], inside) * scale
        value = (grad - h * tl.sum(grad * h, 1)[:, None]) * scale
        tl.store(to + c[None, :], value.to(dx.dtype.element_ty), mask=inside)
    else:
        products = tl.zeros([BM, BK], tl.float32)
        for start in range(0, tl.cast(K, tl.int64), BK):
            inside = high & (start + c < K)[None, :]
            h = load(from_x + start + c[None, :], inside) * scale
            products += load(from_dy + start + c[None, :], inside) * h
        along = tl.sum(products, 1)[:, None]
        for start in range(0, tl.cast(K, tl.int64), BK):
            inside = high & (start + c < K)[None, :]
            h = load(from_x + start + c[None, :], inside) * scale
            value = (load(from_dy + start + c[None, :], inside) - h * along) * scale
            tl.store(to + start + c[None, :], value.to(dx.dtype.element_ty), mask=inside)


def scale_add(x: torch.Tensor, factor: float, y: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape)
    if out.numel():
        x, y = torch.atleast_1d(x), torch.atleast_1d(y)
        vector = y.dim() == 1
        x, y = as_rows(x), as_rows(y)
        M, K = x.shape
        options = write_config(K)
        _scale_add_kernel[(cdiv(M, options["BM"]) * cdiv(K, options["BN"]),)](
            x,
            y,
            out,
            M,
            K,
            x.stride(0),
            0 if vector else y.stride(0),
            factor,
            **options,
            enable_fp_fusion=False,
        )
    return out


def dropout(x: torch.Tensor, rng: torch.Tensor, p: float) -> torch.Tensor:
    out, size = x.new_empty(x.shape), x.numel()
    if size:
        options = dropout_config()
        _dropout_kernel[(cdiv(size, 4 * options["BLOCK"]),)](
            x.contiguous(),
            out,
            rng.contiguous(),
            size,
            keep_limit(p),
            keep_factor(p),
            **options,
            enable_fp_fusion=False,
        )
    return out


def l2norm(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    if x.numel() == 0:
        return l2norm_reference(x, eps)
    y, rs = x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)
    x = as_rows(x)
    M, K = x.shape
    options = rows_config(K)
    _l2norm_kernel[(cdiv(M, options["BM"]),)](
        x, y, rs, M, K, x.stride(0), eps, WHOLE=options["BK"] >= K, **options, enable_fp_fusion=False
    )
    return y, rs


def l2norm_backward(dy: torch.Tensor, x: torch.Tensor, rs: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return l2norm_backward_reference(dy, x, rs)
    dx = x.new_empty(x.shape)
    dy, x = as_rows(dy), as_rows(x)
    M, K = x.shape
    options = rows_config(K)
    _l2norm_backward_kernel[(cdiv(M, options["BM"]),)](
        dy,
        x,
        rs.contiguous(),
        dx,
        M,
        K,
        dy.stride(0),
        x.stride(0),
        WHOLE=options["BK"] >= K,
        **options,
        enable_fp_fusion=False,
    )
    return dx


_WIDE = WHOLE + 1

AHEAD = [
    ahead(_scale_add_kernel, "bf16 bf16 bf16", **write_config(4096)),
    ahead(_scale_add_kernel, "fp16 fp32 fp16", **write_config(100)),
    ahead(_scale_add_kernel, "fp16 bf16 fp16", **write_config(100)),
    ahead(_scale_add_kernel, "fp32 bf16 fp32", **write_config(3)),
    *(ahead(_dropout_kernel, f"{dtype} {dtype} i64", **dropout_config()) for dtype in ("bf16", "fp16", "fp32")),
    ahead(_l2norm_kernel, "bf16 bf16 fp32", WHOLE=True, **rows_config(4096)),
    ahead(_l2norm_kernel, "fp32 fp32 fp32", WHOLE=True, **rows_config(100)),
    ahead(_l2norm_kernel, "fp16 fp16 fp32", WHOLE=False, **rows_config(_WIDE)),
    ahead(_l2norm_backward_kernel, "bf16 bf16 fp32 bf16", WHOLE=True, **rows_config(4096)),
    ahead(_l2norm_backward_kernel, "fp32 fp32 fp32 fp32", WHOLE=True, **rows_config(100)),
    ahead(_l2norm_backward_kernel, "fp16 fp16 fp32 fp16", WHOLE=False, **rows_config(_WIDE)),
]
