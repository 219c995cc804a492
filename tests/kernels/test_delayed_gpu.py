"""Delayed scaling's state on a GPU: the same rules, bit for bit, and nobody waits for the GPU."""

import math
import warnings
from collections.abc import Iterator

import pytest
import torch

from mezzotint.constants import E4M3
from mezzotint.kernels.delayed import delayed_saw_, delayed_snapshot_, delayed_step_, delayed_update_
from mezzotint.kernels.float8 import float8_quantize_scaled
from mezzotint.kernels.quantize_ops import entering
from tests.kernels.test_delayed import COLUMNS, SEEN, TOPS, check, check_step, draw_state

pytestmark = pytest.mark.gpu


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("most_recent", [False, True])
def test_rules(most_recent: bool) -> None:
    history = torch.tensor(COLUMNS).t().contiguous()
    for top in TOPS.values():
        check([(torch.linspace(0.5, 2.0, len(COLUMNS)), history)], [top], most_recent, "cuda")


@pytest.mark.parametrize("length", [1, 2, 511, 512, 513, 1024, 3000])
def test_one_state_is_updated_in_place(length: int) -> None:
    """Rows move up while they are read."""
    for slots in (1, 3, 4, 33):
        check([draw_state(length, slots, slots)], [448.0], False, "cuda")


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("length", [1, 2, 513, 1024])
def test_step(length: int, most_recent: bool) -> None:
    """One launch for few amaxes, two for many."""
    for seen in SEEN:
        check_step(draw_state(length, 6, length), seen, most_recent, "cuda")


def test_many_states() -> None:
    """More than one launch of `torch._foreach_copy_` takes, of all sizes."""
    states = [draw_state(length, slots, slots) for length in (1, 2, 16, 1024) for slots in (2, 3, 6, 33)] * 20
    check(states, [(448.0, 57344.0, 56.0)[i % 3] for i in range(len(states))], False, "cuda")


@pytest.mark.parametrize("usage", [(True, False), (False, True), (True, True)])
def test_a_cast_enters_its_amax(usage: tuple[bool, bool]) -> None:
    """At its place, unless there is no history; with the bytes of the CPU."""
    x = torch.randn(300, 520, dtype=torch.bfloat16)
    for slot, enters in ((0, True), (1, True), (2, True), (1, False)):
        results = []
        for device in ("cpu", "cuda"):
            given, scales = x.to(device), torch.tensor([3.0, 5.0, 0.25], device=device)
            history = torch.tensor([[1.0, 0.5, 99.0], [7.0, 7.0, 7.0]], device=device)
            enter = entering(float8_quantize_scaled, given)
            assert enter is not None
            made = enter(given, scales, slot, history if enters else None, E4M3, *usage)
            results.append([buffer.cpu() for buffer in (*made, history)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (slot, enters)


def test_snapshot() -> None:
    anchor = torch.ones(4, 3, device="cuda")
    for sizes in ([3], [3, 2], [33, 64]):
        scales = [torch.rand(size, device="cuda") for size in sizes]
        copies = delayed_snapshot_(anchor, *scales, *[None] * (2 - len(scales)))
        assert all(torch.equal(copy, scale) for copy, scale in zip(copies, scales, strict=False))
    assert torch.equal(anchor.cpu(), torch.ones(4, 3))


@pytest.mark.usefixtures("_no_waiting")
def test_no_host_synchronization() -> None:
    scales = [torch.ones(3, device="cuda") for _ in range(4)]
    histories = [torch.ones(8, 3, device="cuda") for _ in range(4)]
    amaxes = [torch.ones(1, device="cuda") for _ in range(2)]
    delayed_saw_(histories[0], amaxes, [0, 2])
    delayed_update_(scales, histories, [448.0] * 4, False)
    delayed_step_(scales[0], histories[0], amaxes, [0, 2], len(histories[0]), 448.0, False)


def test_a_graph_captures_it() -> None:
    """A CUDA graph replays the op on the same buffers."""
    amax, scale, history = (torch.zeros(size, device="cuda") for size in ((1,), (1,), (4, 1)))

    def step() -> None:
        delayed_step_(scale, history, [amax], [0], len(history), 448.0, False)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    seen = []
    for value in (8.0, 1.0, 1.0, 1.0, 1.0, 0.0):
        amax.fill_(value)
        graph.replay()
        seen.append(scale.item())
    assert seen == [56.0] * 4 + [448.0] * 2


def test_saw() -> None:
    for length in (1, 3):
        history = torch.tensor([[0.0, 5.0, 1.0, 2.0, 0.0, 0.0]] * length, device="cuda")
        delayed_saw_(history, [torch.tensor([v], device="cuda") for v in (3.0, 4.0, math.inf)], [0, 1, 3])
        assert history[0].tolist() == [3.0, 5.0, 1.0, math.inf, 0.0, 0.0]
        delayed_saw_(history, [torch.tensor([float(v)], device="cuda") for v in range(6)], list(range(6)))
        assert history[0].tolist() == [3.0, 5.0, 2.0, math.inf, 4.0, 5.0]
        assert history[1:].tolist() == [[0.0, 5.0, 1.0, 2.0, 0.0, 0.0]] * (length - 1)
