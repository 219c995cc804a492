"""Activations and column sums on CUDA: each reads its input once and writes its output once.

All but the gradients of scales and of a gated activation are a source's `write`. The latter writes both halves from one
read of them, as a quantization that takes it in does (`load_halves`).
"""

from collections.abc import Sequence
from itertools import product

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.quantize_ops import SourceCall
from mezzotint.kernels.triton._jit import ahead, as_rows, raise_amax, tile_of
from mezzotint.kernels.triton._jit_source import larger, load, produce, produce_halves, read, sourced
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import make, sum_columns


def tile_config(N: int) -> dict[str, int]:
    """Return rows and columns of a tile of 2048 elements, as wide as the output up to 1024."""
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
    """Write the gradient of x (M, 2N) to `out` (M, 2N), and raise `amax`, FP32 [1], to its amax; either may be None.
    `given` is that of "halves"."""
    row, col = tile_of(tl.program_id(0), M, N, BM, BN, 1)
    r = row * BM + tl.arange(0, BM)
    c = (col * BN + tl.arange(0, BN))[None, :]
    d1, d2 = produce_halves(x, given, r, c, M, N, stride, ACT, False)
    if out is not None:
        inside = (r < M)[:, None] & (c < N)
        to = out + r[:, None] * (2 * N) + c
        tl.store(to, d1, mask=inside)
        tl.store(to + N, d2, mask=inside)
    if amax is not None:
        raise_amax(amax, larger(d1, d2))


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
    """Sum dy · act(x) over columns, for BM rows."""
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
    return _write(SourceCall("activation", (x, bias, name, params, scales)))


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    name: str,
    params: Sequence[float],
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    return _write(SourceCall("activation_backward", (dy, x, bias, name, params, scales)))


def write_with_amax(made: SourceCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a source makes, and its amax, FP32 [1], which the same launch computes."""
    amax = made.args[0].new_zeros(1, dtype=torch.float32)
    out = _write(made, amax)
    if made.sums is not None:
        sum_columns(read(out), made.sums)
    return out, amax


def amax_of(made: SourceCall) -> torch.Tensor:
    """Return the amax, FP32 [1], of what a source makes; nothing else is written."""
    amax = made.args[0].new_zeros(1, dtype=torch.float32)
    _launch(made, None, amax)
    return amax


def _write(made: SourceCall, amax: torch.Tensor | None = None) -> torch.Tensor:
    out = made.args[made.source == "activation_backward"].new_empty(made.shape)
    _launch(made, out, amax)
    return out


def _launch(made: SourceCall, out: torch.Tensor | None, amax: torch.Tensor | None) -> None:
    """Write what a source makes in one launch; that of a gated gradient makes both halves."""
    source = sourced(made)
    if source.kind is None or source.kind[0] != "halves":
        make(source, out, amax)
        return
    N = source.columns()
    if source.M * N == 0:
        return
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


def scale_gradient(dy: torch.Tensor, x: torch.Tensor, name: str, params: Sequence[float]) -> torch.Tensor:
    if dy.numel() == 0:
        return x.new_zeros(x.shape[:-1], dtype=torch.float32)
    out = x.new_empty(x.shape[:-1], dtype=torch.float32)
    source, dy = sourced(SourceCall("activation", (x, None, name, params, None))), as_rows(dy)
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
        ahead(_gated_backward_kernel, f"bf16 {written}", given, ACT="silu", **tile_config(4096))
        for written, given in product(
            ("bf16 -", "bf16 fp32", "- fp32"), ("- - fp32 fp32 fp32 - *bf16 i32", "- - fp32 fp32 fp32 *fp32 *bf16 i32")
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
