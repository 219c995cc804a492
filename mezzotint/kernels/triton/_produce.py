"""The output of a source: this module writes it in high precision, or sums it over its rows.

`write` makes the result of a norm or an activation that no quantization takes in. Column sums are two launches without
atomics: FP32 partial sums of strips of rows, then their sum. A quantization makes the first of them on its way
(`store_sums`).
"""

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.quantize_ops import SourceCall
from mezzotint.kernels.triton._jit import ahead, raise_amax, store_tile, tile_of
from mezzotint.kernels.triton._jit_source import Input, load_input, sourced
from mezzotint.kernels.triton._launch import Fast


def write_config(K: int) -> dict[str, int]:
    """Return tiles of 4096 elements, as wide as the matrix up to 1024."""
    BN = min(max(triton.next_power_of_2(K), 64), 1024)
    return {"BM": 4096 // BN, "BN": BN, "num_warps": 4}


def sums_config() -> dict[str, int]:
    """Return rows at a time, columns, and rows per strip."""
    return {"BM": 32, "BN": 128, "STRIP": 256, "num_warps": 4}


def finish_config() -> dict[str, int]:
    """Return how many partial sums are read at a time, and the columns per program."""
    return {"BP": 64, "BS": 32, "num_warps": 4}


@Fast
@triton.jit
def _write_kernel(
    x,
    out,
    amax,
    given,
    M,
    K,
    stride,
    SOURCE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write what the source makes to `out`, unless that is None, and raise `amax`, FP32 [1], to its amax, unless that
    is None."""
    row, col = tile_of(tl.program_id(0), M, K, BM, BN, 1)
    r = row * BM + tl.arange(0, BM)
    c = col * BN + tl.arange(0, BN)
    value = load_input(x, given, r, c, M, K, stride, SOURCE, EVEN, False)
    if out is not None:
        store_tile(out, value.to(out.dtype.element_ty), r, c, M, K, EVEN)
    if amax is not None:
        raise_amax(amax, value)


@Fast
@triton.jit
def _sums_kernel(
    x,
    partials,
    given,
    M,
    K,
    stride,
    SOURCE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Write partials[strip, c], FP32 sums of STRIP rows; if there is one strip they are the result, and are cast."""
    strip, tile = tile_of(tl.program_id(0), M, K, STRIP, BN, 1)
    c = tile * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, STRIP, BM):
        r = strip * STRIP + start + tl.arange(0, BM)
        total += load_input(x, given, r, c, M, K, stride, SOURCE, False, False)
    tl.store(partials + strip * K + c, tl.sum(total, 0).to(partials.dtype.element_ty), mask=c < K)


@Fast
@triton.jit
def _finish_kernel(partials, out, count, K, BP: tl.constexpr, BS: tl.constexpr):
    """Sum (count, K) partial sums to K sums."""
    c = tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    total = tl.zeros([BP, BS], tl.float32)
    for start in range(0, count, BP):
        p = start + tl.arange(0, BP).to(tl.int64)
        mask = (p < count)[:, None] & (c < K)[None, :]
        total += tl.load(partials + p[:, None] * K + c[None, :], mask=mask, other=0.0)
    tl.store(out + c, tl.sum(total, 0).to(out.dtype.element_ty), mask=c < K)


def write(made: SourceCall) -> torch.Tensor:
    """Return what the source makes, in its shape and dtype."""
    out = made.args[made.source == "activation_backward"].new_empty(made.shape)
    make(sourced(made), out, None)
    return out


def make(source: Input, out: torch.Tensor | None, amax: torch.Tensor | None) -> None:
    """Write what the source makes to `out`, raise `amax`, FP32 [1], to its amax, or do both, in one launch."""
    if source.M * source.K == 0:
        return
    options = write_config(source.K)
    even = source.M % options["BM"] == 0 and source.K % options["BN"] == 0
    _write_kernel[(cdiv(source.M, options["BM"]) * cdiv(source.K, options["BN"]),)](
        source.x,
        out,
        amax,
        source.given(),
        source.M,
        source.K,
        source.x.stride(0),
        SOURCE=source.kind,
        EVEN=even,
        **options,
        enable_fp_fusion=False,
    )


def sum_columns(source: Input, out: torch.Tensor) -> torch.Tensor:
    """Sum over the rows in FP32, cast to `out`, [K], and return it."""
    options = sums_config()
    strips = cdiv(source.M, options["STRIP"])
    is_whole = strips == 1 and source.K > 0  # the sums of the one strip are those of all
    partials = out if is_whole else source.x.new_empty((strips, source.K), dtype=torch.float32)
    if partials.numel():
        _sums_kernel[(strips * cdiv(source.K, options["BN"]),)](
            source.x,
            partials,
            source.given(),
            source.M,
            source.K,
            source.x.stride(0),
            SOURCE=source.kind,
            **options,
            enable_fp_fusion=False,
        )
    return out if is_whole else finish_sums(partials, out)


def finish_source(source: Input, partials: torch.Tensor | None) -> None:
    """Finish the column sums after a kernel that has called `store_sums`."""
    if partials is not None:
        assert source.sums is not None
        finish_sums(partials, source.sums)


def finish_sums(partials: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Sum partial sums (any, K) into `out` [K], and return it; it is zeros if there are none."""
    count, K = partials.shape
    if K:
        options = finish_config()
        grid = (cdiv(K, options["BS"]),)
        _finish_kernel[grid](partials, out, count, K, **options, enable_fp_fusion=False)
    return out


NORM = "- *fp32 *fp32 *fp32 *fp32"
RMSNORM = "- - *fp32 *bf16 -"
ACTIVATION = "- *bf16 fp32 fp32 fp32 -"
SCALED = "- - fp32 fp32 fp32 *fp32"
BACKWARD = "*fp32 - fp32 fp32 fp32 - *bf16 i32"  # with partial sums
SCALED_BACKWARD = "*fp32 - fp32 fp32 fp32 *bf16 *bf16 i32"

AHEAD = [
    ahead(_write_kernel, "bf16 bf16 -", NORM, SOURCE=("norm", True), EVEN=True, **write_config(4096)),
    ahead(_write_kernel, "fp32 fp32 -", RMSNORM, SOURCE=("norm", False), EVEN=False, **write_config(100)),
    *(
        ahead(_write_kernel, "bf16 bf16 -", ACTIVATION, SOURCE=("activation", *act), EVEN=True, **write_config(4096))
        for act in (
            ("gelu", False),
            ("qgelu", False),
            ("relu", True),
            ("srelu", False),
            ("sigmoid", True),
            ("silu", True),
            ("clamped_swiglu", True),
            ("situglu", True),
        )
    ),
    ahead(_write_kernel, "bf16 bf16 -", SCALED, SOURCE=("activation", "silu", True), EVEN=True, **write_config(4096)),
    ahead(_write_kernel, "bf16 - fp32", SCALED, SOURCE=("activation", "silu", True), EVEN=True, **write_config(4096)),
    *(
        ahead(
            _write_kernel,
            "fp16 fp16 fp32",
            f"- *fp32 fp32 fp32 fp32 {scales} *fp16 i32",
            SOURCE=("activation_backward", "gelu"),
            EVEN=False,
            **write_config(100),
        )
        for scales in ("-", "*fp32")
    ),
    ahead(_sums_kernel, "bf16 fp32", **sums_config()),
    ahead(_sums_kernel, "bf16 bf16", **sums_config()),
    ahead(_sums_kernel, "bf16 fp32", BACKWARD, SOURCE=("activation_backward", "silu"), **sums_config()),
    ahead(_sums_kernel, "bf16 fp32", "- *fp32 *fp32 *bf16 i32", SOURCE=("norm_gamma", None), **sums_config()),
    ahead(_finish_kernel, "fp32 bf16", **finish_config()),
]
