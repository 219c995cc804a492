"""Activations and column sums on CUDA. One read, one write.

All but the gradients of scales and of a gated activation are a source's `write`. The latter writes both halves from
one read of them; a quantization that takes it in computes each half where it needs it, with the same functions and the
same bits.
"""

from collections.abc import Sequence
from itertools import product

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.activation import is_gated
from mezzotint.kernels.quantize_ops import Made
from mezzotint.kernels.triton._jit import ahead, as_rows, raise_amax, tile_of
from mezzotint.kernels.triton._jit_source import gated_gradients, load, load_biased, load_grad, produce, read, sourced
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import sum_columns, write


def tile_config(N: int) -> dict[str, int]:
    """Rows, columns of a tile of 2048 elements, as wide as the output up to 1024."""
    BN = min(max(triton.next_power_of_2(N), 64), 1024)
    return {"BM": 2048 // BN, "BN": BN, "num_warps": 4}


@Fast
@triton.jit
def _gated_backward_kernel(
    x,
    out,
    amax,
    given,
    M,
    N,
    stride,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """x and out are (M, 2N). `given`: as that of the source. `amax`: FP32 [1], raised to that of out, or None."""
    row, col = tile_of(tl.program_id(0), M, N, BM, BN, 1)
    r = row * BM + tl.arange(0, BM)
    c = (col * BN + tl.arange(0, BN))[None, :]
    inside = (r < M)[:, None] & (c < N)
    at = x + r[:, None] * stride
    x1 = load_biased(at, given[1], c, inside)
    x2 = load_biased(at, given[1], c + N, inside)
    grad = load_grad(given[6], given[7], given[5], r, c, r < M, inside, x.dtype.element_ty)
    d1, d2 = gated_gradients(grad, x1, x2, given[2], given[3], given[4], ACT)
    to = out + r[:, None] * (2 * N) + c
    d1, d2 = d1.to(out.dtype.element_ty), d2.to(out.dtype.element_ty)
    tl.store(to, d1, mask=inside)
    tl.store(to + N, d2, mask=inside)
    if amax is not None:  # 0 outside: the gradient that was read there is
        raise_amax(amax, tl.maximum(tl.abs(d1.to(tl.float32)), tl.abs(d2.to(tl.float32))))


@Fast
@triton.jit
def _scale_gradient_kernel(
    x,
    dy,
    out,
    given,
    M,
    K,
    stride,
    dy_stride,
    SOURCE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Sums over the rows of dy · act(x), BM of them."""
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, tl.cast(K, tl.int64), BN):
        c = (start + tl.arange(0, BN))[None, :]
        grad = load(dy + r[:, None] * dy_stride + c, (r < M)[:, None] & (c < K))
        total += produce(x, given, r, c, M, K, stride, SOURCE, False) * grad
    tl.store(out + r, tl.sum(total, 1), mask=r < M)


def forward(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    name: str,
    params: Sequence[float],
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    return write(Made("activation", (x, bias, name, params, scales)))


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    name: str,
    params: Sequence[float],
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    return _write(Made("activation_backward", (dy, x, bias, name, params, scales)))


def write_with_amax(made: Made) -> tuple[torch.Tensor, torch.Tensor]:
    """What an activation or its gradient makes, and its amax, FP32 [1], taken on the way.

    Run in Triton's interpreter and compiled ahead; on a GPU not yet.
    """
    amax = made.args[0].new_zeros(1, dtype=torch.float32)
    out = _write(made, amax)
    if made.sums is not None:
        sum_columns(read(out), made.sums)
    return out, amax


def _write(made: Made, amax: torch.Tensor | None = None) -> torch.Tensor:
    """One launch; of a gated gradient one that writes both halves."""
    if made.source != "activation_backward" or not is_gated(made.args[3]):
        return write(made, amax)
    x = made.args[1]
    out, N = x.new_empty(x.shape), x.shape[-1] // 2
    if out.numel():
        source = sourced(made)
        assert source.kind is not None
        options = tile_config(N)
        _gated_backward_kernel[(cdiv(source.M, options["BM"]) * cdiv(N, options["BN"]),)](
            source.x,
            out,
            amax,
            source.given(),
            source.M,
            N,
            source.x.stride(0),
            ACT=source.kind[1],
            **options,
            enable_fp_fusion=False,
        )
    return out


def scale_gradient(dy: torch.Tensor, x: torch.Tensor, name: str, params: Sequence[float]) -> torch.Tensor:
    if dy.numel() == 0:
        return x.new_zeros(x.shape[:-1], dtype=torch.float32)
    out = x.new_empty(x.shape[:-1], dtype=torch.float32)
    source, dy = sourced(Made("activation", (x, None, name, params, None))), as_rows(dy)
    options = tile_config(source.K)
    _scale_gradient_kernel[(cdiv(source.M, options["BM"]),)](
        source.x,
        dy,
        out,
        source.given(),
        source.M,
        source.K,
        source.x.stride(0),
        dy.stride(0),
        SOURCE=source.kind,
        **options,
        enable_fp_fusion=False,
    )
    return out


def column_sum(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return sum_columns(read(x), x.new_empty(x.shape[-1], dtype=dtype))


AHEAD = [
    *(
        ahead(_gated_backward_kernel, f"bf16 bf16 {amax}", given, ACT="silu", **tile_config(4096))
        for amax, given in product(
            ("-", "fp32"), ("- - fp32 fp32 fp32 - *bf16 i32", "- - fp32 fp32 fp32 *fp32 *bf16 i32")
        )
    ),
    ahead(
        _gated_backward_kernel,
        "fp32 fp32 -",
        "- *fp32 fp32 fp32 fp32 - *fp32 i32",
        ACT="clamped_swiglu",
        **tile_config(9),
    ),
    ahead(
        _gated_backward_kernel,
        "fp16 fp16 fp32",
        "- *fp16 fp32 fp32 fp32 *fp16 *fp16 i32",
        ACT="situglu",
        **tile_config(100),
    ),
    ahead(
        _scale_gradient_kernel,
        "bf16 bf16 fp32",
        "- - fp32 fp32 fp32 -",
        SOURCE=("activation", "silu", True),
        **tile_config(4096),
    ),
    ahead(
        _scale_gradient_kernel,
        "fp16 fp32 fp32",
        "- - fp32 fp32 fp32 -",
        SOURCE=("activation", "gelu", False),
        **tile_config(100),
    ),
]
