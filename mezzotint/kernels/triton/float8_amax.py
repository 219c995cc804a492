"""The amax of a tensor on CUDA: it is the largest magnitude, and NaN is ignored.

Each program writes one partial amax, so that there is nothing to zero and no atomics.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.triton._jit import ahead, ahead_of_groups, tile_of
from mezzotint.kernels.triton._jit_groups import chosen, own_rows, pack
from mezzotint.kernels.triton._jit_source import Input, load_input
from mezzotint.kernels.triton._launch import Fast
from mezzotint.kernels.triton._produce import ACTIVATION, NORM

PARTIALS = 512  # at most this many partial amaxes: four programs on each of 132 multiprocessors
PARTIALS_EACH = 256  # partial amaxes of each of many groups: one group alone may have all rows


def amax_config() -> dict[str, int]:
    """Return how many elements a program reads at a time."""
    return {"BLOCK": 8192, "num_warps": 8}


def amax_tile_config() -> dict[str, int]:
    """Return the tile of a source that a program makes at a time."""
    return {"BM": 32, "BN": 256, "num_warps": 8}


@Fast
@triton.jit
def _amax_kernel(x, partials, noop, groups, numel, BLOCK: tl.constexpr, EACH: tl.constexpr):
    """Read every P-th block of x in program p, and write partials[p].

    With groups each has EACH programs, and `numel` is of a row.
    """
    if noop is not None and tl.load(noop) == 1.0:
        return
    pid = tl.program_id(0)
    partials += pid
    end = tl.cast(numel, tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    if groups is not None:
        x = chosen(x, groups, pid)
        pid, M = own_rows(groups, pid, False)
        end, step = end * M, EACH * BLOCK
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(pid.to(tl.int64) * BLOCK, end, step):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < end, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(value))  # of NaN and a number, the number
    tl.store(partials, tl.max(top))


@Fast
@triton.jit
def _amax_tile_kernel(
    x, partials, given, M, K, stride, tiles, SOURCE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Make every P-th tile of a source in program p, and write partials[p]."""
    pid = tl.program_id(0)
    top = tl.zeros([BM, BN], tl.float32)
    for tile in range(pid, tiles, tl.num_programs(0)):
        row, col = tile_of(tile, M, K, BM, BN, 1)
        r = row * BM + tl.arange(0, BM)
        c = col * BN + tl.arange(0, BN)
        top = tl.maximum(top, tl.abs(load_input(x, given, r, c, M, K, stride, SOURCE, False, False)))
    tl.store(partials + pid, tl.max(top))


@Fast
@triton.jit
def _amax_finish_kernel(partials, out, count, BP: tl.constexpr):
    p = tl.arange(0, BP)
    tl.store(out, tl.max(tl.load(partials + p, mask=p < count, other=0.0)))


def amax_partials(x: torch.Tensor, noop: torch.Tensor | None) -> torch.Tensor:
    """Return partial amaxes of a contiguous tensor, at most PARTIALS."""
    options = amax_config()
    count = max(1, min(PARTIALS, cdiv(x.numel(), options["BLOCK"])))
    partials = x.new_empty(count, dtype=torch.float32)
    _amax_kernel[(count,)](x, partials, noop, None, x.numel(), **options, EACH=0, enable_fp_fusion=False)
    return partials


def group_partials(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return partial amaxes (G, PARTIALS_EACH) of contiguous matrices (M_i, K), at most as many as a launch takes."""
    groups = pack([x.shape[0] for x in xs], lambda rows: PARTIALS_EACH)
    partials = xs[0].new_empty((len(xs), PARTIALS_EACH), dtype=torch.float32)
    _amax_kernel[(groups.programs,)](
        groups.of(xs),
        partials,
        None,
        groups.packed,
        xs[0].shape[1],
        **amax_config(),
        EACH=PARTIALS_EACH,
        enable_fp_fusion=False,
    )
    return partials


def source_partials(source: Input) -> torch.Tensor:
    """Return partial amaxes of what a source makes, at most PARTIALS."""
    options = amax_tile_config()
    tiles = cdiv(source.M, options["BM"]) * cdiv(source.K, options["BN"])
    partials = source.x.new_empty(min(PARTIALS, tiles), dtype=torch.float32)
    _amax_tile_kernel[(partials.numel(),)](
        source.x,
        partials,
        source.given(),
        source.M,
        source.K,
        source.x.stride(0),
        tiles,
        SOURCE=source.kind,
        **options,
        enable_fp_fusion=False,
    )
    return partials


def amax(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| as FP32 [1]; NaN is ignored."""
    partials = amax_partials(x.contiguous(), None)
    if partials.numel() == 1:
        return partials
    out = partials.new_empty(1)
    _amax_finish_kernel[(1,)](partials, out, partials.numel(), BP=PARTIALS, num_warps=4, enable_fp_fusion=False)
    return out


AHEAD = [
    *(ahead(_amax_kernel, f"{t} fp32 -", **amax_config(), EACH=0) for t in ("bf16", "fp16", "fp32")),
    ahead(_amax_kernel, "bf16 fp32 fp32", **amax_config(), EACH=0),
    ahead_of_groups(_amax_kernel, "bf16 =fp32 -", **amax_config(), EACH=PARTIALS_EACH),
    ahead(_amax_finish_kernel, "fp32 fp32", BP=PARTIALS),
    ahead(_amax_tile_kernel, "bf16 fp32", NORM, SOURCE=("norm", True), **amax_tile_config()),
    ahead(_amax_tile_kernel, "bf16 fp32", ACTIVATION, SOURCE=("activation", "silu", True), **amax_tile_config()),
]
