"""LayerNorm and RMSNorm on CUDA: a program holds whole rows in registers, so that x and dy are read once.

Rows that are too wide for this are walked in pieces, once per reduction. For dgamma and dbeta programs add up the rows
that they visit and write one row of partial sums each, which a second small launch adds: the order is fixed, and there
are no atomics. Rows that are too wide for that have column sums of their own. `apply` is a source's `write`, so that a
quantization that takes the norm in has the same bits.
"""

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.norm import norm_add_stats_reference, norm_stats_reference
from mezzotint.kernels.quantize_ops import SourceCall
from mezzotint.kernels.triton._jit import ahead, as_rows
from mezzotint.kernels.triton._jit_source import Input, load
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import finish_sums, sum_columns, write

WHOLE_STATS, WHOLE_BACKWARD = 16384, 8192  # the longest rows that are held in registers
PROGRAMS = 264  # of the backward, at most: two on each of 132 multiprocessors


def stats_config(K: int) -> dict[str, int]:
    """Return rows per program and their padded length."""
    BK = min(max(triton.next_power_of_2(K), 128), WHOLE_STATS)
    BM = max(1, 2048 // BK)
    return {"BM": BM, "BK": BK, "num_warps": min(8, max(1, BM * BK // 1024))}


def backward_config(K: int) -> dict[str, int]:
    """Return rows at a time and their padded length; five numbers of each element are alive."""
    BK = min(max(triton.next_power_of_2(K), 128), WHOLE_BACKWARD)
    BM = max(1, 2048 // BK)
    return {"BM": BM, "BK": BK, "num_warps": min(16, max(2, BM * BK // 512))}


@triton.jit
def _load_sum(x, branch, bias, at, c, inside):
    """Return x, or what x + (branch + bias) is rounded to, in FP32."""
    value = load(x + at, inside)
    if branch is not None:
        other = load(branch + at, inside)
        if bias is not None:
            other = other + load(bias + c, inside)
        value = (value + other).to(x.dtype.element_ty).to(tl.float32)
    return value


@Fast
@triton.jit
def _stats_kernel(
    x, branch, bias, total, mu, rs, M, K, stride, eps, WHOLE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """Write the statistics of BM rows: first the mean, then the squares of the centred values, which avoids
    cancellation. `total` is where the sum with `branch` goes."""
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.arange(0, BK)[None, :]
    high = (r < M)[:, None]
    at = r[:, None] * stride
    width = tl.cast(K, tl.float32)
    if WHOLE:
        wide = c < K
        value = _load_sum(x, branch, bias, at + c, c, high & wide)
        if total is not None:
            tl.store(total + at + c, value.to(total.dtype.element_ty), mask=high & wide)
        if mu is not None:
            mean = tl.div_rn(tl.sum(value, 1), width)
            value = tl.where(wide, value - mean[:, None], 0.0)
        squared = tl.sum(value * value, 1)
    else:
        end = tl.cast(K, tl.int64)
        if mu is not None:
            sums = tl.zeros([BM, BK], tl.float32)
            for start in range(0, end, BK):
                sums += _load_sum(x, branch, bias, at + start + c, start + c, high & (start + c < K))
            mean = tl.div_rn(tl.sum(sums, 1), width)
        squares = tl.zeros([BM, BK], tl.float32)
        for start in range(0, end, BK):
            wide = start + c < K
            value = _load_sum(x, branch, bias, at + start + c, start + c, high & wide)
            if total is not None:
                tl.store(total + at + start + c, value.to(total.dtype.element_ty), mask=high & wide)
            if mu is not None:
                value = tl.where(wide, value - mean[:, None], 0.0)
            squares += value * value
        squared = tl.sum(squares, 1)
    if mu is not None:
        tl.store(mu + r, mean, mask=r < M)
    tl.store(rs + r, tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squared, width) + tl.cast(eps, tl.float32))), mask=r < M)


@triton.jit
def _terms(dy, x, mean, scale, gamma, r, c, M, K, dy_stride, stride, ZERO_CENTERED: tl.constexpr):
    """Return dy, h = rs · (x - mu) and d = g · dy, 0 outside of (M, K)."""
    wide = (c < K)[None, :]
    inside = (r < M)[:, None] & wide
    grad = load(dy + r[:, None] * dy_stride + c[None, :], inside)
    h = load(x + r[:, None] * stride + c[None, :], inside)
    if mean is not None:
        h = tl.where(wide, h - mean[:, None], 0.0)
    g = load(gamma + c, c < K)
    if ZERO_CENTERED:
        g = g + 1.0
    return grad, scale[:, None] * h, grad * g[None, :]


@triton.jit
def _store_dx(dx, residual, value, r, c, M, K):
    """Store dx, rounded; if there is a residual, add it and round once more."""
    inside = (r < M)[:, None] & (c < K)[None, :]
    at = r[:, None] * K + c[None, :]
    value = value.to(dx.dtype.element_ty)
    if residual is not None:
        value = (value.to(tl.float32) + load(residual + at, inside)).to(dx.dtype.element_ty)
    tl.store(dx + at, value, mask=inside)


@Fast
@triton.jit
def _backward_kernel(
    dy,
    x,
    mu,
    rs,
    gamma,
    dx,
    dgammas,
    dbetas,
    residual,
    M,
    K,
    dy_stride,
    stride,
    ZERO_CENTERED: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Write dx of every P-th group of BM rows; row p of dgammas and dbetas (P, K) has the sums over those of program
    p."""
    pid = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BK)
    width = tl.cast(K, tl.float32)
    if WHOLE:
        dgamma = tl.zeros([BM, BK], tl.float32)
        dbeta = tl.zeros([BM, BK], tl.float32)
    for first in range(pid * BM, tl.cast(M, tl.int64), tl.num_programs(0).to(tl.int64) * BM):
        r = first + tl.arange(0, BM)
        scale = tl.load(rs + r, mask=r < M, other=0.0)
        mean = None if mu is None else tl.load(mu + r, mask=r < M, other=0.0)
        if WHOLE:
            grad, h, d = _terms(dy, x, mean, scale, gamma, r, c, M, K, dy_stride, stride, ZERO_CENTERED)
            value = d - h * tl.div_rn(tl.sum(d * h, 1), width)[:, None]
            if mean is not None:
                value = value - tl.div_rn(tl.sum(d, 1), width)[:, None]
            _store_dx(dx, residual, value * scale[:, None], r, c, M, K)
            dgamma += grad * h
            dbeta += grad
        else:
            products = tl.zeros([BM, BK], tl.float32)
            sums = tl.zeros([BM, BK], tl.float32)
            for start in range(0, tl.cast(K, tl.int64), BK):
                grad, h, d = _terms(dy, x, mean, scale, gamma, r, start + c, M, K, dy_stride, stride, ZERO_CENTERED)
                products += d * h
                sums += d
            along = tl.div_rn(tl.sum(products, 1), width)[:, None]
            middle = tl.div_rn(tl.sum(sums, 1), width)[:, None]
            for start in range(0, tl.cast(K, tl.int64), BK):
                grad, h, d = _terms(dy, x, mean, scale, gamma, r, start + c, M, K, dy_stride, stride, ZERO_CENTERED)
                value = d - h * along
                if mean is not None:
                    value = value - middle
                _store_dx(dx, residual, value * scale[:, None], r, start + c, M, K)
    if WHOLE:
        tl.store(dgammas + pid * K + c, tl.sum(dgamma, 0), mask=c < K)
        if dbetas is not None:
            tl.store(dbetas + pid * K + c, tl.sum(dbeta, 0), mask=c < K)


def stats(x: torch.Tensor, eps: float, rms: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = as_rows(x)
    return norm_stats_reference(x, eps, rms) if x.numel() == 0 else _launch_stats(x, None, None, None, eps, rms)


def add_stats(
    x: torch.Tensor, branch: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x.numel() == 0:
        return norm_add_stats_reference(x, branch, bias, eps, rms)
    total = x.new_empty(x.shape)
    # All are contiguous and at least as wide as the sum, so that threads share its rows as in `stats`, and add in its
    # order. Compiled by Triton 3.6 for an H200 the statistics of some shapes still differ from it in the last bit.
    branch = branch.to(torch.promote_types(branch.dtype, x.dtype)).contiguous()
    bias = None if bias is None else bias.contiguous()
    return total, *_launch_stats(as_rows(x.contiguous()), branch, bias, total, eps, rms)


def _launch_stats(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    bias: torch.Tensor | None,
    total: torch.Tensor | None,
    eps: float,
    rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mu and rs of x (M, K); `branch` and `total` have its strides."""
    M, K = x.shape
    rs = x.new_empty(M, dtype=torch.float32)
    mu = rs.new_empty(0 if rms else M)
    options = stats_config(K)
    _stats_kernel[(cdiv(M, options["BM"]),)](
        x,
        branch,
        bias,
        total,
        None if rms else mu,
        rs,
        M,
        K,
        x.stride(0),
        eps,
        WHOLE=options["BK"] >= K,
        **options,
        enable_fp_fusion=False,
    )
    return mu, rs


def apply(
    x: torch.Tensor,
    mu: torch.Tensor,
    rs: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    zero_centered: bool,
    rms: bool,
) -> torch.Tensor:
    return write(SourceCall("norm", (x, mu, rs, gamma, beta, zero_centered, rms)))


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rs: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered: bool,
    rms: bool,
    has_beta: bool,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = x.new_empty(x.shape)
    dgamma, dbeta = gamma.new_empty(gamma.shape), gamma.new_empty(gamma.shape if has_beta else 0)
    dy, x, gamma = as_rows(dy), as_rows(x), gamma.contiguous()
    M, K = x.shape
    if K == 0:
        return dx, dgamma, dbeta
    mean = None if rms else mu.contiguous()
    rs = rs.contiguous()
    if residual is not None:
        # It is as contiguous and as wide as dx: else threads might share the rows otherwise, and add in another order.
        residual = residual.to(torch.promote_types(residual.dtype, x.dtype)).contiguous()
    options = backward_config(K)
    whole = options["BK"] >= K
    programs = min(PROGRAMS, cdiv(M, options["BM"])) if whole else M
    sums = x.new_empty((1 + has_beta, programs if whole else 0, K), dtype=torch.float32)
    if M:
        _backward_kernel[(programs,)](
            dy,
            x,
            mean,
            rs,
            gamma,
            dx,
            sums[0],
            sums[1] if has_beta else None,
            residual,
            M,
            K,
            dy.stride(0),
            x.stride(0),
            ZERO_CENTERED=zero_centered,
            WHOLE=whole,
            **options,
            enable_fp_fusion=False,
        )
    if whole:
        finish_sums(sums[0], dgamma)
        if has_beta:
            finish_sums(sums[1], dbeta)
    else:
        sum_columns(Input(x, M, K, ("norm_gamma", None), (mean, rs, dy, dy.stride(0))), dgamma)
        if has_beta:
            sum_columns(Input(dy, M, K), dbeta)
    return dx, dgamma, dbeta


_WIDE = WHOLE_STATS + 1

AHEAD = [
    ahead(_stats_kernel, "bf16 - - - fp32 fp32", WHOLE=True, **stats_config(4096)),
    ahead(_stats_kernel, "fp32 - - - - fp32", WHOLE=True, **stats_config(100)),
    ahead(_stats_kernel, "fp16 - - - fp32 fp32", WHOLE=False, **stats_config(_WIDE)),
    ahead(_stats_kernel, "bf16 bf16 - bf16 - fp32", WHOLE=True, **stats_config(4096)),
    ahead(_stats_kernel, "bf16 bf16 fp32 bf16 fp32 fp32", WHOLE=True, **stats_config(4096)),
    ahead(_stats_kernel, "fp16 fp32 fp16 fp16 fp32 fp32", WHOLE=False, **stats_config(_WIDE)),
    ahead(
        _backward_kernel,
        "bf16 bf16 fp32 fp32 fp32 bf16 fp32 fp32 -",
        ZERO_CENTERED=True,
        WHOLE=True,
        **backward_config(4096),
    ),
    ahead(
        _backward_kernel,
        "fp32 fp32 - fp32 bf16 fp32 fp32 - -",
        ZERO_CENTERED=False,
        WHOLE=True,
        **backward_config(100),
    ),
    *(
        ahead(
            _backward_kernel,
            f"fp16 fp16 fp32 fp32 fp16 fp16 fp32 fp32 {residual}",
            ZERO_CENTERED=False,
            WHOLE=False,
            **backward_config(_WIDE),
        )
        for residual in ("-", "fp32")
    ),
    ahead(
        _backward_kernel,
        "bf16 bf16 - fp32 bf16 bf16 fp32 - bf16",
        ZERO_CENTERED=False,
        WHOLE=True,
        **backward_config(4096),
    ),
]
