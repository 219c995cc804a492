"""Activations and column sums on CUDA. One read, one write.

All but the gradient of a gated activation are a source's `write`. That one writes both halves from one read of them; a
quantization that takes it in computes each half where it needs it, with the same functions and the same bits.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.activation import is_gated
from mezzotint.kernels.quantize_ops import Made
from mezzotint.kernels.triton._jit import ahead, tile_of
from mezzotint.kernels.triton._jit_source import gated_gradients, load, load_biased, read
from mezzotint.kernels.triton._produce import sum_columns, write


def gated_config(N: int) -> dict[str, int]:
    """Tile: 2048 columns of one row of a half, or more rows of fewer."""
    BN = min(max(triton.next_power_of_2(N), 64), 1024)
    return {"BM": 2048 // BN, "BN": BN, "num_warps": 4}


@triton.jit
def _gated_backward_kernel(
    x,
    out,
    given,
    M,
    N,
    stride,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """x and out are (M, 2N). `given`: as that of the source."""
    row, col = tile_of(tl.program_id(0), M, N, BM, BN, 1)
    r = (row * BM + tl.arange(0, BM))[:, None]
    c = (col * BN + tl.arange(0, BN))[None, :]
    inside = (r < M) & (c < N)
    rows = x + r * stride
    x1 = load_biased(rows, given[1], c, inside)
    x2 = load_biased(rows, given[1], c + N, inside)
    grad = load(given[5] + r * given[6] + c, inside)
    d1, d2 = gated_gradients(grad, x1, x2, given[2], given[3], given[4], ACT)
    to = out + r * (2 * N) + c
    tl.store(to, d1.to(out.dtype.element_ty), mask=inside)
    tl.store(to + N, d2.to(out.dtype.element_ty), mask=inside)


def forward(x: torch.Tensor, bias: torch.Tensor | None, name: str, params: Sequence[float]) -> torch.Tensor:
    return write(Made("activation", (x, bias, name, params)))


def backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, name: str, params: Sequence[float]
) -> torch.Tensor:
    made = Made("activation_backward", (dy, x, bias, name, params))
    if not is_gated(name):
        return write(made)
    out, N = x.new_empty(x.shape), x.shape[-1] // 2
    if out.numel():
        source = read(made)
        assert source.kind is not None
        options = gated_config(N)
        _gated_backward_kernel[(cdiv(source.M, options["BM"]) * cdiv(N, options["BN"]),)](
            source.x,
            out,
            source.given(),
            source.M,
            N,
            source.x.stride(0),
            ACT=source.kind[1],
            **options,
            enable_fp_fusion=False,
        )
    return out


def column_sum(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return sum_columns(read(x), x.new_empty(x.shape[-1], dtype=dtype))


AHEAD = [
    ahead(_gated_backward_kernel, "bf16 bf16", "- - fp32 fp32 fp32 *bf16 i32", ACT="silu", **gated_config(4096)),
    ahead(
        _gated_backward_kernel, "fp32 fp32", "- *fp32 fp32 fp32 fp32 *fp32 i32", ACT="clamped_swiglu", **gated_config(9)
    ),
    ahead(_gated_backward_kernel, "fp16 fp16", "- *fp16 fp32 fp32 fp32 *fp16 i32", ACT="situglu", **gated_config(100)),
]
