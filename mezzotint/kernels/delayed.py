"""Delayed scaling's state: this module keeps the amaxes that were seen, and the scales that follow from them.

    history   FP32 (L, n)   row 0 collects the amaxes of this iteration; row L-1 is that of the last, row 1 the oldest
    scale     FP32 [n]

An update treats each slot (column) on its own, with last = history[0]. Nothing changes where last is 0. Else amax is
the maximum over the column, or last for "most_recent"; row 1 is dropped, the others move up, last becomes row L-1, row
0 is cleared. scale = top / amax; it stays as it was where amax is not finite, and is the largest FP32 number where the
quotient overflows.
"""

from collections.abc import Sequence

import torch

from mezzotint.constants import FP32_MAX
from mezzotint.kernels._lib import Late, define, launch_in_graphs, leaf, write_op
from mezzotint.kernels.elements import div


def delayed_saw_reference(history: torch.Tensor, amaxes: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
    """Raise row 0 of `history` to the amaxes, FP32 [1] each, of these slots.

    On CUDA this is one launch, and the host does not wait for it.
    """
    if amaxes:
        seen = history[0]
        torch._foreach_maximum_([seen.narrow(0, slot, 1) for slot in slots], list(amaxes))


def delayed_update_reference(
    scales: Sequence[torch.Tensor], histories: Sequence[torch.Tensor], tops: Sequence[float], most_recent: bool
) -> None:
    """Update each state on its own: scale [n], history (L, n), top = the format's largest value · 2^-margin."""
    for scale, history, top in zip(scales, histories, tops, strict=True):
        last = history[0].clone()
        amax = last if most_recent else history.amax(0)
        fresh = div(top, amax)
        fresh = torch.where(fresh.isinf(), FP32_MAX, fresh)
        scale.copy_(torch.where((last != 0) & amax.isfinite() & (amax > 0), fresh, scale))
        rolled = history.roll(-1, 0)
        rolled[0] = 0.0
        if history.shape[0] > 1:
            rolled[-1] = last
        history.copy_(torch.where(last != 0, rolled, history))


def delayed_step_reference(
    scale: torch.Tensor,
    history: torch.Tensor,
    amaxes: Sequence[torch.Tensor],
    slots: Sequence[int],
    rows: int,
    top: float,
    most_recent: bool,
) -> None:
    """Enter the amaxes into one state, which waits for no other, and update it. Its history is the first `rows` rows;
    those behind them are cleared. On CUDA this is one launch."""
    used = history[:rows]
    delayed_saw_reference(used, amaxes, slots)
    delayed_update_reference([scale], [used], [top], most_recent)
    history[rows:].zero_()


_late = Late("delayed:update", lambda device, *args: delayed_update_reference(*args))


def _update_on_cuda(
    scales: Sequence[torch.Tensor], histories: Sequence[torch.Tensor], tops: Sequence[float], most_recent: bool
) -> None:
    _late(scales[0], scales, histories, tops, most_recent)


delayed_saw_ = launch_in_graphs(
    leaf(
        "delayed_saw_(Tensor(a!) history, Tensor[] amaxes, int[] slots) -> ()",
        fake=lambda history, amaxes, slots: None,
        cpu=delayed_saw_reference,
        cuda="delayed:saw",
    )
)

# It takes at least one state, because without a tensor there is no device.
delayed_update_ = define(
    "delayed_update_(Tensor(a!)[] scales, Tensor(b!)[] histories, float[] tops, bool most_recent) -> ()",
    lambda scales, histories, tops, most_recent: None,
    delayed_update_reference,
    _update_on_cuda,
)

# This op takes the whole buffer and a number of rows, because a graph would save a view of the buffer as the whole,
# which backward writes: another backward would then find it changed.
delayed_step_ = launch_in_graphs(
    leaf(
        "delayed_step_(Tensor(a!) scale, Tensor(b!) history, Tensor[] amaxes, int[] slots, int rows, float top, "
        "bool most_recent) -> ()",
        fake=lambda scale, history, amaxes, slots, rows, top, most_recent: None,
        cpu=delayed_step_reference,
        cuda="delayed:step",
    )
)


def delayed_take_reference(
    anchor: torch.Tensor, scale: torch.Tensor, buffer: torch.Tensor, rows: int, top: float, most_recent: bool
) -> None:
    """Run `delayed_step_` without amaxes: the state changes only in slots whose row 0 is not 0."""
    write_op(delayed_step_, scale, buffer, [], [], rows, top, most_recent)


# Forward runs this op on the state of gradients. Its schema does not say that it writes scale and buffer: a graph whose
# forward writes what its backward writes, too, would give backward a copy. `anchor` serves as in `delayed_snapshot_`.
delayed_take_ = leaf(
    "delayed_take_(Tensor(a!) anchor, Tensor scale, Tensor buffer, int rows, float top, bool most_recent) -> ()",
    fake=lambda anchor, scale, buffer, rows, top, most_recent: None,
    cpu=delayed_take_reference,
)


def delayed_snapshot_reference(
    anchor: torch.Tensor, scale: torch.Tensor, other: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of one or two vectors; without the other its copy is empty."""
    return scale.clone(), scale.new_empty(0) if other is None else other.clone()


# This op makes copies in forward. A compiler moves a `clone`, or a kernel, that only backward reads into backward, when
# the original has changed. So the schema says that the op writes `anchor`, a buffer that forward writes.
delayed_snapshot_ = launch_in_graphs(
    leaf(
        "delayed_snapshot_(Tensor(a!) anchor, Tensor scale, Tensor? other) -> (Tensor, Tensor)",
        fake=delayed_snapshot_reference,
        cpu=delayed_snapshot_reference,
        cuda="delayed:snapshot",
    )
)
