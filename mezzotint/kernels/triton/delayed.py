"""Delayed scaling's update on CUDA: one launch updates the states of a whole model.

A model has hundreds of small states. They are concatenated, updated by one launch, and copied back: a handful of
launches for all of them, no wait for the GPU, and nothing that a CUDA graph could not capture. A state that is updated
alone, as that of a module's gradients is, is updated in place, by the launch that enters the amaxes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import FP32_MAX, cdiv
from mezzotint.kernels.delayed import delayed_saw_reference, delayed_snapshot_reference, delayed_step_reference
from mezzotint.kernels.triton._jit import ahead
from mezzotint.kernels.triton._launch import Fast

_FP32_MAX = tl.constexpr(FP32_MAX)
MOST_AMAXES = 4  # amaxes that a kernel takes: each number of them, and each choice of slots, is another kernel


@Fast
@triton.jit
def _saw_kernel(history, a, b, c, d, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """Raise row 0 of history (L, n) to COUNT amaxes of these SLOTS."""
    given = (a, b, c, d)  # not a tuple of the launch, which a compiler's graph does not take
    for k in tl.static_range(COUNT):
        at = history + SLOTS[k]
        tl.store(at, tl.maximum(tl.load(at), tl.load(given[k])))


def update_config() -> dict[str, int]:
    """Return rows at a time and slots per program, with many warps: a program mostly waits for the memory."""
    return {"BL": 256, "BN": 4, "num_warps": 16}


@Fast
@triton.jit
def _update_kernel(
    scale,
    history,
    new_scale,
    new_history,
    a,
    b,
    c,
    d,
    rows,
    L,
    n,
    top,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    RECENT: tl.constexpr,
    BL: tl.constexpr,
    BN: tl.constexpr,
):
    """Update history (L, n) and scale [n], into new ones or in place. `rows` rows are written, of which those behind
    the first L are cleared. `top` is the format's largest value, with its margin. Of a, b, c and d, COUNT are amaxes
    that row 0 has not seen, of these SLOTS."""
    given = (a, b, c, d)
    j = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    wide = j < n
    last = tl.load(history + j, mask=wide, other=0.0)
    for k in tl.static_range(COUNT):
        last = tl.where(j == SLOTS[k], tl.maximum(last, tl.load(given[k])), last)
    seen = last != 0
    tops = tl.zeros([BL, BN], tl.float32)
    for start in range(0, rows, BL):
        i = start + tl.arange(0, BL).to(tl.int64)
        mask = (i < L)[:, None] & wide[None, :]
        at = history + i[:, None] * n + j[None, :]
        value = tl.load(at, mask=mask, other=0.0)
        tops = tl.maximum(tops, value)
        # Row 1 goes, the others move up, this iteration's becomes the last; where it is the only one it is cleared.
        rolled = tl.load(at + n, mask=mask & (i + 1 < L)[:, None], other=0.0)
        rolled = tl.where((i + 1 == L)[:, None], last[None, :], rolled)
        rolled = tl.where((i == 0)[:, None], 0.0, rolled)
        tl.debug_barrier()  # in place: all have read before one writes
        written = (i < rows)[:, None] & wide[None, :]
        tl.store(new_history + i[:, None] * n + j[None, :], tl.where(seen[None, :], rolled, value), mask=written)
    amax = last if RECENT else tl.maximum(tl.max(tops, 0), last)
    fresh = tl.div_rn(tl.cast(top, tl.float32), amax)
    fresh = tl.where(fresh == float("inf"), _FP32_MAX, fresh)
    keep = tl.load(scale + j, mask=wide, other=0.0)
    good = seen & (amax > 0) & (amax < float("inf"))
    tl.store(new_scale + j, tl.where(good, fresh, keep), mask=wide)


@Fast
@triton.jit
def _snapshot_kernel(anchor, scale, other, copy, other_copy, n, m, BLOCK: tl.constexpr):
    """Copy scale [n] and, unless it is None, other [m]. The anchor is written as it was: see `delayed_snapshot_`."""
    i = tl.arange(0, BLOCK)
    tl.store(copy + i, tl.load(scale + i, mask=i < n), mask=i < n)
    if other is not None:
        tl.store(other_copy + i, tl.load(other + i, mask=i < m), mask=i < m)
    tl.store(anchor, tl.load(anchor))


def snapshot(
    anchor: torch.Tensor, scale: torch.Tensor, other: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of one or two vectors, in one launch; without the other its copy is empty."""
    is_dense = scale.is_contiguous() and (other is None or other.is_contiguous())
    if anchor.numel() == 0 or not is_dense:
        return delayed_snapshot_reference(anchor, scale, other)
    n, m = scale.numel(), 0 if other is None else other.numel()
    copy, other_copy = torch.empty_like(scale), scale.new_empty(m)
    options = {"BLOCK": triton.next_power_of_2(max(1, n, m)), "num_warps": 1}
    written = None if other is None else other_copy
    _snapshot_kernel[(1,)](anchor, scale, other, copy, written, n, m, **options, enable_fp_fusion=False)
    return copy, other_copy


def update(
    device: torch.Tensor,
    scales: Sequence[torch.Tensor],
    histories: Sequence[torch.Tensor],
    tops: Sequence[float],
    most_recent: bool,
) -> None:
    """Update the states; those of one length and one top go together. `device` is any tensor on their device."""
    groups: dict[tuple[int, float], list[int]] = {}
    for index, (history, top) in enumerate(zip(histories, tops, strict=True)):
        groups.setdefault((history.shape[0], top), []).append(index)
    for (_, top), members in groups.items():
        old_scales, old_histories = [scales[i] for i in members], [histories[i] for i in members]
        alone = len(members) == 1 and old_scales[0].is_contiguous() and old_histories[0].is_contiguous()
        if alone:
            scale, history = fresh, rolled = old_scales[0], old_histories[0]
        else:
            scale, history = torch.cat(old_scales), torch.cat(old_histories, 1)
            fresh, rolled = torch.empty_like(scale), torch.empty_like(history)
        _launch(scale, history, fresh, rolled, history.shape[0], top, most_recent)
        if alone:
            continue
        sizes = [s.numel() for s in old_scales]
        torch._foreach_copy_(old_scales, fresh.split(sizes))
        torch._foreach_copy_(old_histories, rolled.split(sizes, 1))


def saw(history: torch.Tensor, amaxes: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
    """Raise row 0 of `history` to the amaxes. Few of them go to a kernel that takes their addresses; many go through
    PyTorch, in one launch as well."""
    if 0 < len(amaxes) <= MOST_AMAXES and history.is_contiguous():
        options = {"COUNT": len(amaxes), "SLOTS": tuple(slots), "num_warps": 1}
        _saw_kernel[(1,)](history, *_four(amaxes), **options, enable_fp_fusion=False)
    else:
        delayed_saw_reference(history, amaxes, slots)


def step(
    scale: torch.Tensor,
    history: torch.Tensor,
    amaxes: Sequence[torch.Tensor],
    slots: Sequence[int],
    rows: int,
    top: float,
    most_recent: bool,
) -> None:
    """Enter the amaxes into one state, whose history is the first `rows` rows, and update it in place. Many amaxes, as
    those of experts, enter by their own launch."""
    if len(amaxes) > MOST_AMAXES:
        delayed_saw_reference(history, amaxes, slots)
        amaxes, slots = (), ()
    if scale.is_contiguous() and history.is_contiguous():
        _launch(scale, history, scale, history, rows, top, most_recent, tuple(amaxes), tuple(slots))
    else:
        delayed_step_reference(scale, history, amaxes, slots, rows, top, most_recent)


def _launch(
    scale: torch.Tensor,
    history: torch.Tensor,
    fresh: torch.Tensor,
    rolled: torch.Tensor,
    length: int,
    top: float,
    most_recent: bool,
    amaxes: tuple[torch.Tensor, ...] = (),
    slots: tuple[int, ...] = (),
) -> None:
    rows, n = history.shape
    if n == 0 or rows == 0:
        return
    options = update_config()
    _update_kernel[(cdiv(n, options["BN"]),)](
        scale,
        history,
        fresh,
        rolled,
        *_four(amaxes),
        rows,
        length,
        n,
        top,
        COUNT=len(slots),
        SLOTS=slots or None,
        RECENT=most_recent,
        **options,
        enable_fp_fusion=False,
    )


def _four(amaxes: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Return the amaxes, padded with None to as many as a kernel takes."""
    return (*amaxes, *(None,) * (MOST_AMAXES - len(amaxes)))


_NONE: dict[str, Any] = {"COUNT": 0, "SLOTS": None, **update_config()}
_TWO: dict[str, Any] = {"COUNT": 2, "SLOTS": (0, 2), **update_config()}

AHEAD = [
    ahead(_snapshot_kernel, "fp32 fp32 fp32 fp32 fp32", BLOCK=4, num_warps=1),
    ahead(_snapshot_kernel, "fp32 fp32 - fp32 -", BLOCK=4, num_warps=1),
    ahead(_saw_kernel, "fp32 fp32 fp32 - -", COUNT=2, SLOTS=(0, 1), num_warps=1),
    ahead(_update_kernel, "fp32 fp32 fp32 fp32 - - - -", RECENT=False, **_NONE),
    ahead(_update_kernel, "fp32 fp32 fp32 fp32 - - - -", RECENT=True, **_NONE),
    ahead(_update_kernel, "fp32 fp32 fp32 fp32 fp32 fp32 - -", RECENT=False, **_TWO),
]
