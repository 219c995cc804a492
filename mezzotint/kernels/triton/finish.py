"""The end of a product on CUDA: this module applies scales and bias to FP32 and casts, with one read and one write."""

from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.finish import Scale
from mezzotint.kernels.triton._jit import ahead, tile_of
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import write_config


@triton.jit
def _times(value, scale, r, c, M, N, KIND: tl.constexpr):
    """Return value times scale: by its KIND a number, a tensor of one, of one per row or per column, or none."""
    if KIND == "number":
        return value * tl.cast(scale, tl.float32)
    elif KIND == "one":
        return value * tl.load(scale)
    elif KIND == "rows":
        return value * tl.load(scale + r, mask=r < M, other=0.0)
    elif KIND == "columns":
        return value * tl.load(scale + c, mask=c < N, other=0.0)
    else:
        return value


@Fast
@triton.jit
def _finish_kernel(
    product,
    out,
    first,
    second,
    third,
    bias,
    M,
    N,
    stride,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Finish product FP32 (M, N), its rows `stride` apart, into `out`, contiguous."""
    row, col = tile_of(tl.program_id(0), M, N, BM, BN, 1)
    r = (row * BM + tl.arange(0, BM))[:, None]
    c = (col * BN + tl.arange(0, BN))[None, :]
    inside = (r < M) & (c < N)
    value = tl.load(product + r * stride + c, mask=inside, other=0.0)
    value = _times(value, first, r, c, M, N, FIRST)
    value = _times(value, second, r, c, M, N, SECOND)
    value = _times(value, third, r, c, M, N, THIRD)
    if bias is not None:
        value += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)
    tl.store(out + r * N + c, value.to(out.dtype.element_ty), mask=inside)


def _kind(scale: Scale | None) -> str:
    if scale is None:
        return "none"
    if not isinstance(scale, torch.Tensor):
        return "number"
    if scale.numel() == 1:
        return "one"
    return "columns" if scale.shape[0] == 1 else "rows"


def finish(out: torch.Tensor, product: torch.Tensor, scales: list[Scale], bias: torch.Tensor | None) -> None:
    M, N = product.shape
    if M * N == 0:
        return
    first, second, third = [*scales, None, None, None][:3]
    options = write_config(N)
    _finish_kernel[(cdiv(M, options["BM"]) * cdiv(N, options["BN"]),)](
        product if product.stride(1) == 1 else product.contiguous(),
        out,
        _dense(first),
        _dense(second),
        _dense(third),
        _dense(bias),
        M,
        N,
        product.stride(0) if product.stride(1) == 1 else N,
        FIRST=_kind(first),
        SECOND=_kind(second),
        THIRD=_kind(third),
        **options,
        enable_fp_fusion=False,
    )


def _dense(value: Scale | None) -> Scale | None:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _case(pointers: str, N: int, *kinds: str) -> tuple[Any, ...]:
    first, second = (*kinds, "none", "none")[:2]
    return ahead(_finish_kernel, pointers, FIRST=first, SECOND=second, THIRD="none", **write_config(N))


AHEAD = [
    _case("fp32 bf16 fp32 - - -", 4096, "one"),
    _case("fp32 fp16 - - - fp16", 100),
    _case("fp32 fp32 fp32 fp32 - bf16", 3, "rows", "columns"),
]
