"""Delayed scaling's update on CUDA.

A model has hundreds of small states. They are put side by side, updated by one launch, and copied back: a handful of
launches for all of them, no wait for the GPU, and nothing that a CUDA graph could not capture.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mezzotint.constants import FP32_MAX, cdiv
from mezzotint.kernels.triton._jit import ahead
from mezzotint.kernels.triton._launch import Fast

_FP32_MAX = tl.constexpr(FP32_MAX)


def update_config() -> dict[str, int]:
    """Rows at a time, slots per program."""
    return {"BL": 64, "BN": 16, "num_warps": 4}


@Fast
@triton.jit
def _update_kernel(
    scale, history, new_scale, new_history, L, n, top, RECENT: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr
):
    """history (L, n), scale [n] → new ones. `top`: the format's largest value, with its margin."""
    c = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    wide = c < n
    last = tl.load(history + c, mask=wide, other=0.0)
    seen = last != 0
    tops = tl.zeros([BL, BN], tl.float32)
    for start in range(0, L, BL):
        i = start + tl.arange(0, BL).to(tl.int64)
        mask = (i < L)[:, None] & wide[None, :]
        at = history + i[:, None] * n + c[None, :]
        value = tl.load(at, mask=mask, other=0.0)
        tops = tl.maximum(tops, value)
        # Row 1 goes, the others move up, this iteration's becomes the last; where it is the only one it is cleared.
        rolled = tl.load(at + n, mask=mask & (i + 1 < L)[:, None], other=0.0)
        rolled = tl.where((i + 1 == L)[:, None], last[None, :], rolled)
        rolled = tl.where((i == 0)[:, None], 0.0, rolled)
        tl.store(new_history + i[:, None] * n + c[None, :], tl.where(seen[None, :], rolled, value), mask=mask)
    amax = last if RECENT else tl.max(tops, 0)
    fresh = tl.div_rn(tl.cast(top, tl.float32), amax)
    fresh = tl.where(fresh == float("inf"), _FP32_MAX, fresh)
    keep = tl.load(scale + c, mask=wide, other=0.0)
    good = seen & (amax > 0) & (amax < float("inf"))
    tl.store(new_scale + c, tl.where(good, fresh, keep), mask=wide)


def update(
    device: torch.Tensor,
    scales: Sequence[torch.Tensor],
    histories: Sequence[torch.Tensor],
    tops: Sequence[float],
    most_recent: bool,
) -> None:
    """`device`: any tensor there. States of one length and one top go together."""
    groups: dict[tuple[int, float], list[int]] = {}
    for index, (history, top) in enumerate(zip(histories, tops, strict=True)):
        groups.setdefault((history.shape[0], top), []).append(index)
    options = update_config()
    for (length, top), members in groups.items():
        old_scales, old_histories = [scales[i] for i in members], [histories[i] for i in members]
        scale, history = torch.cat(old_scales), torch.cat(old_histories, 1)
        n = scale.numel()
        if n == 0 or length == 0:
            continue
        fresh, rolled = torch.empty_like(scale), torch.empty_like(history)
        _update_kernel[(cdiv(n, options["BN"]),)](
            scale, history, fresh, rolled, length, n, top, RECENT=most_recent, **options, enable_fp_fusion=False
        )
        sizes = [s.numel() for s in old_scales]
        torch._foreach_copy_(old_scales, fresh.split(sizes))
        torch._foreach_copy_(old_histories, rolled.split(sizes, 1))


AHEAD = [
    ahead(_update_kernel, "fp32 fp32 fp32 fp32", RECENT=False, **update_config()),
    ahead(_update_kernel, "fp32 fp32 fp32 fp32", RECENT=True, **update_config()),
]
