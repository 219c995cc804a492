"""Delayed scaling's state against the rules of the history written out slot by slot in plain Python."""

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mezzotint.kernels._lib import write_op
from mezzotint.kernels.delayed import delayed_saw_, delayed_step_, delayed_update_

FLT_MAX = float(np.finfo(np.float32).max)
TOPS = {"e4m3": 448.0, "e5m2": 57344.0, "margin": 448.0 / 8}


def update_slot(scale: float, column: list[float], top: float, most_recent: bool) -> tuple[float, list[float]]:
    """One slot: its scale, and its history from row 0 (this iteration) over row 1 (oldest) to row L-1 (latest)."""
    last, past = column[0], column[1:]
    if last == 0:
        return scale, column
    amax = last if most_recent else max(last, *past) if past else last
    rolled = [0.0, *past[1:], last] if past else [0.0]
    if amax > 0 and math.isfinite(amax):
        with np.errstate(over="ignore"):
            quotient = np.float32(top) / np.float32(amax)
        scale = FLT_MAX if np.isinf(quotient) else float(quotient)
    return scale, rolled


def expected(
    scale: torch.Tensor, history: torch.Tensor, top: float, most_recent: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = [
        update_slot(s, column, top, most_recent) for s, column in zip(scale.tolist(), history.t().tolist(), strict=True)
    ]
    return torch.tensor([s for s, _ in slots]), torch.tensor([h for _, h in slots]).t().contiguous()


def check(
    states: list[tuple[torch.Tensor, torch.Tensor]], tops: list[float], most_recent: bool, device: str = "cpu"
) -> None:
    want = [expected(s, h, top, most_recent) for (s, h), top in zip(states, tops, strict=True)]
    scales, histories = [s.to(device, copy=True) for s, _ in states], [h.to(device, copy=True) for _, h in states]
    delayed_update_(scales, histories, tops, most_recent)
    for got_scale, got_history, (scale, history) in zip(scales, histories, want, strict=True):
        assert torch.equal(got_scale.cpu(), scale)
        assert torch.equal(got_history.cpu(), history)


def draw_state(length: int, slots: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    history = torch.rand(length, slots, generator=generator) * 10
    history[torch.rand(length, slots, generator=generator) < 0.2] = 0.0
    return torch.rand(slots, generator=generator) + 0.5, history


# Row 0 first. Untouched, all untouched, infinite now, infinite before, the quotient overflows, tiny but finite.
COLUMNS = [
    [0.0, 3.0, 4.0, 5.0],
    [0.0, 0.0, 0.0, 0.0],
    [math.inf, 1.0, 2.0, 3.0],
    [1.0, math.inf, 2.0, 3.0],
    [2.0, 1.0, 2.0, math.inf],
    [1e-38, 0.0, 0.0, 0.0],
    [1e-45, 0.0, 0.0, 1e-44],
    [7.0, 0.0, 0.0, 0.0],
    [0.3, 100.0, 0.0, 0.1],
]


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("top", TOPS.values(), ids=TOPS)
def test_rules(top: float, most_recent: bool) -> None:
    history = torch.tensor(COLUMNS).t().contiguous()
    scale = torch.linspace(0.5, 2.0, len(COLUMNS))
    check([(scale, history)], [top], most_recent)


def test_what_the_rules_say() -> None:
    """The same in numbers, for one state: nothing is left to a helper."""
    history = torch.tensor(COLUMNS).t().contiguous()
    scale = torch.full((len(COLUMNS),), 3.0)
    delayed_update_([scale], [history], [448.0], False)
    assert scale.tolist() == [3, 3, 3, 3, 3, FLT_MAX, FLT_MAX, 64, float(np.float32(448) / np.float32(100))]
    columns = history.t().tolist()
    assert columns[0] == [0, 3, 4, 5]  # nothing seen: not rolled
    assert columns[2] == [0, 2, 3, math.inf]
    assert columns[3] == [0, 2, 3, 1]  # the oldest goes
    assert columns[7] == [0, 0, 0, 7]


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 16, 1024])
def test_lengths(length: int, most_recent: bool) -> None:
    check([draw_state(length, 6, length)], [448.0], most_recent)


def test_length_one() -> None:
    """Row 0 is all there is: it is cleared."""
    scale, history = torch.ones(2), torch.tensor([[2.0, 0.0]])
    delayed_update_([scale], [history], [448.0], False)
    assert scale.tolist() == [224.0, 1.0]
    assert history.tolist() == [[0.0, 0.0]]


def test_many_states_of_all_sizes() -> None:
    states = [draw_state(length, slots, slots) for length in (1, 4, 16) for slots in (2, 3, 6, 33)]
    check(states, [(448.0, 57344.0, 56.0)[i % 3] for i in range(len(states))], False)


def check_step(
    state: tuple[torch.Tensor, torch.Tensor], seen: dict[int, float], most_recent: bool, device: str = "cpu"
) -> None:
    """Row 0 raised to what was seen in these slots, then the rules."""
    scale, history = state
    raised = history.clone()
    for slot, value in seen.items():
        raised[0, slot] = max(raised[0, slot].item(), value)
    want = expected(scale, raised, 448.0, most_recent)
    amaxes = [torch.tensor([value], device=device) for value in seen.values()]
    for unused in (0, len(history)):  # rows behind the history, which are cleared
        fresh, buffer = scale.to(device, copy=True), torch.cat((history, torch.ones_like(history)[:unused])).to(device)
        delayed_step_(fresh, buffer, amaxes, list(seen), len(history), 448.0, most_recent)
        assert torch.equal(fresh.cpu(), want[0])
        assert torch.equal(buffer.cpu(), torch.cat((want[1], torch.zeros_like(history)[:unused])))


SEEN: list[dict[int, float]] = [
    {},
    {0: 0.0},
    {1: 20.0},
    {0: math.inf},
    {2: 0.25, 0: 7.0},
    {slot: 2.0 * slot for slot in range(6)},
]


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("length", [1, 2, 16])
def test_step(length: int, most_recent: bool) -> None:
    for seen in SEEN:
        check_step(draw_state(length, 6, length), seen, most_recent)


def test_written_with_gradients_enabled() -> None:
    """State is written past the dispatcher, except where a mode wants to know; either way the same."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    made = []
    for mode in (nullcontext(), Names()):
        scale, history = draw_state(4, 3, 0)
        with mode:
            write_op(delayed_step_, scale, history, [torch.tensor([20.0])], [1], len(history), 448.0, False)
        made.append((scale, history))
    assert names.count("mezzotint::delayed_step_") == 1
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert made[0][0][1] == np.float32(448) / np.float32(20)


def test_the_window_forgets() -> None:
    """A peak counts for L updates, then no longer."""
    scale, history = torch.ones(1), torch.zeros(4, 1)
    seen = []
    for amax in (8.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        delayed_step_(scale, history, [torch.tensor([amax])], [0], len(history), 448.0, False)
        seen.append(scale.item())
    assert seen == [56.0] * 4 + [448.0] * 2


def test_saw() -> None:
    history = torch.tensor([[0.0, 5.0, 1.0, 2.0], [9.0] * 4])
    amaxes = [torch.tensor([v]) for v in (3.0, 4.0, math.inf)]
    delayed_saw_(history, amaxes, [0, 1, 3])
    assert history.tolist() == [[3.0, 5.0, 1.0, math.inf], [9.0] * 4]
    delayed_saw_(history, [], [])
    delayed_saw_(history, [torch.tensor([9.0])], [2])
    assert history.tolist() == [[3.0, 5.0, 9.0, math.inf], [9.0] * 4]
