"""Delayed scaling's update in Triton's interpreter, on the CPU: every index and mask, with the reference's bytes."""

import math

import torch

from tests.kernels.interpreted import run_interpreted
from tests.kernels.test_delayed import COLUMNS, draw_state


def test_interpreted() -> None:
    run_interpreted(main)


def check(scale: torch.Tensor, history: torch.Tensor, slots: list[int], most_recent: bool) -> None:
    """What is seen now: nothing in the first slot, then less and less, so that the history and it win in turn."""
    from mezzotint.kernels.delayed import delayed_saw_reference, delayed_step_reference
    from mezzotint.kernels.triton import delayed

    amaxes = [torch.tensor([12.0 / k if k else 0.0]) for k in range(len(slots))]
    case = tuple(history.shape), slots, most_recent
    raised, seen = history.clone(), history.clone()
    delayed_saw_reference(raised, amaxes, slots)
    delayed.saw(seen, amaxes, slots)
    assert torch.equal(seen, raised), case
    for rows in {len(history), (len(history) + 1) // 2}:  # all, and the first alone
        want, got = ((scale.clone(), history.clone()) for _ in range(2))
        delayed_step_reference(*want, amaxes, slots, rows, 448.0, most_recent)
        delayed.step(*got, amaxes, slots, rows, 448.0, most_recent)
        assert torch.equal(got[0], want[0]), (*case, rows)
        assert torch.equal(got[1], want[1]), (*case, rows)


def check_snapshot(sizes: list[int]) -> None:
    """Copies are equal and in other memory, and what the kernel says that it writes stays as it was."""
    from mezzotint.kernels.triton.delayed import snapshot

    anchor, scales = torch.tensor([[3.0, math.nan]]), [torch.rand(size) for size in sizes]
    for scale, copy in zip(scales, snapshot(anchor, *scales, *[None] * (2 - len(scales))), strict=False):
        assert torch.equal(copy, scale), sizes
        assert copy.data_ptr() != scale.data_ptr(), sizes
    assert torch.equal(anchor.view(torch.int32), torch.tensor([[3.0, math.nan]]).view(torch.int32)), sizes


def main() -> None:
    from mezzotint.kernels.triton.delayed import MOST_AMAXES

    for sizes in ([2], [3, 2], [1, 33], [128, 64]):
        check_snapshot(sizes)
    for most_recent in (False, True):
        rules = torch.tensor(COLUMNS).t().contiguous()
        check(torch.linspace(0.5, 2.0, len(COLUMNS)), rules, [0, 1, 8], most_recent)
        for length in (1, 2, 16, 513):
            for n, slots in (
                (1, [0]),
                (2, [0]),
                (3, [0, 1]),
                (6, [5, 0, 3]),
                (6, []),
                (9, list(range(MOST_AMAXES + 1))),
            ):
                check(*draw_state(length, n, length), slots, most_recent)
    scale, history = draw_state(4, 6, 0)
    check(scale[::2], history[:, ::2], [0, 2], False)  # of another state
