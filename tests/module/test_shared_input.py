"""In eager code linears that read the same tensor hold one copy of it, with the bits of linears that hold one each."""

import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mezzotint as mz
from mezzotint.layer import rerun, shared_input
from mezzotint.layer.rerun import RECORDED_RUNS
from mezzotint.recipe import RECIPES, Recipe

pytestmark = pytest.mark.filterwarnings("ignore::mezzotint.EmulationWarning")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = torch.bfloat16
SHARING = [name for name in RECIPES if name != "delayed"]  # there each linear has a scale of its own


@pytest.fixture(autouse=True)
def share_small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_input, "SMALLEST_SHARED", 0)


def make(device: str = "cpu") -> list[mz.Linear]:
    """Return linears of different sizes, with and without a bias."""
    torch.manual_seed(0)
    sizes = (64, True), (32, False), (96, True)
    return [mz.Linear(64, size, bias=bias, params_dtype=BF16, device=device) for size, bias in sizes]


def held(y: torch.Tensor) -> torch.Tensor:
    """Return the first tensor that the run behind y holds."""
    found: torch.Tensor = y.grad_fn.saved_tensors[0]  # type: ignore[union-attr]
    return found


def count_held(outputs: list[torch.Tensor]) -> int:
    return len({held(y).data_ptr() for y in outputs})


def train(linears: list[mz.Linear], recipe: Recipe, shares: bool, device: str = "cpu") -> list[Any]:
    """Return outputs and gradients of four steps, with one input for all linears or a view of it for each, and how many
    copies of it they hold."""
    seen: list[Any] = []
    for step in range(4):  # one as it is, one that is recorded, two from the record
        torch.manual_seed(step)
        x = torch.randn(2, 32, 64, dtype=BF16).to(device).requires_grad_()
        with mz.autocast(recipe=recipe):
            outputs = [linear(x if shares else x.view_as(x)) for linear in linears]
        copies = count_held(outputs)
        torch.manual_seed(step)  # of stochastic rounding
        torch.stack([y.float().square().sum() for y in outputs]).sum().backward()
        seen += [copies, *[y.detach() for y in outputs], x.grad]
    return [*seen, *[parameter.grad for linear in linears for parameter in linear.parameters()]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_linears_of_one_input(name: str, is_recorded: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_recorded:
        monkeypatch.setattr(rerun, "form_of_plain", lambda tensors: None)
    RECORDED_RUNS.clear()
    together = train(make(device), RECIPES[name](), True, device)
    apart = train(make(device), RECIPES[name](), False, device)
    copies = [seen for seen in together if isinstance(seen, int)]
    assert copies == [1 if name in SHARING else 3] * 4
    assert [seen for seen in apart if isinstance(seen, int)] == [3] * 4
    for one, other in zip(together, apart, strict=True):
        assert isinstance(one, int) or torch.equal(one, other)


def pair(
    between: Callable[[torch.Tensor], None], other: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], int]:
    """Return what two linears of one input give, and how many copies they hold; `between` is called between them, and
    the second one reads `other` of the input."""
    first, second, _ = make()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    with mz.autocast(recipe=RECIPES["current"]()):
        y = first(x)
        between(x)
        z = second(x if other is None else other(x))
    copies = count_held([y, z])
    (y.float().sum() + z.float().square().sum()).backward()
    return [y, z, *[p.grad for linear in (first, second) for p in linear.parameters() if p.grad is not None]], copies


def write(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.mul_(3)


def test_an_input_that_is_written_to_between() -> None:
    """The second linear makes a copy of its own, of what is there then."""
    outputs, copies = pair(write)
    assert copies == 2
    expected, _ = pair(write, torch.Tensor.clone)
    for one, other in zip(outputs, expected, strict=True):
        assert torch.equal(one, other)


def test_a_thread_sees_its_own_runs_alone() -> None:
    """Another thread may be done with a copy, or not have made it yet, when this one needs it."""
    first, second, _ = make()
    x = torch.randn(32, 64).to(BF16)
    seen: list[torch.Tensor] = []

    def run(linear: mz.Linear) -> None:
        with mz.autocast(recipe=RECIPES["current"]()):
            seen.append(linear(x))

    run(first)
    thread = Thread(target=run, args=(second,))
    thread.start()
    thread.join()
    run(second)
    assert held(seen[0]) is held(seen[2])
    assert held(seen[0]) is not held(seen[1])


def keep(x: torch.Tensor) -> torch.Tensor:
    return x


def test_hooks_on_saved_tensors() -> None:
    """Hooks that count what is saved find one copy. Those that keep another tensor let the copy go."""
    with saved_tensors_hooks(keep, keep):
        assert pair(lambda x: None)[1] == 1
    with saved_tensors_hooks(torch.Tensor.clone, keep):
        assert pair(lambda x: None)[1] == 2


@pytest.mark.gpu
def test_another_stream_makes_its_own_copy() -> None:
    """Its kernels may run before those that make the first copy."""
    first, second, _ = make("cuda")
    x = torch.randn(32, 64, device="cuda").to(BF16)
    with mz.autocast(recipe=RECIPES["current"]()):
        y = first(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            z = second(x)
            torch.cuda.synchronize()
    assert count_held([y, z]) == 2


@pytest.mark.gpu
def test_captured_graphs_share_nothing() -> None:
    """Each is replayed without the others."""
    samples = (torch.randn(32, 64, device="cuda").to(BF16),)
    inputs = [torch.randn(32, 64, device="cuda").to(BF16) for _ in range(2)]

    def gradients(linears: list[mz.Linear]) -> list[Any]:
        found: list[Any] = []
        for linear, x in zip(reversed(linears), inputs, strict=True):
            linear(x).float().square().sum().backward()
            # The next graph may write where this one has left its gradients.
            found += [parameter.grad.clone() for parameter in linear.parameters() if parameter.grad is not None]
        return found

    eager, captured, recipe = make("cuda")[:2], make("cuda")[:2], RECIPES["current"]()
    mz.make_graphed_callables(tuple(captured), (samples, samples), enabled=True, recipe=recipe)
    found = gradients(captured)
    with mz.autocast(recipe=recipe):
        expected = gradients(eager)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_another_recipe_makes_its_own_copy() -> None:
    first, second, _ = make()
    x = torch.randn(32, 64).to(BF16)
    with mz.autocast(recipe=RECIPES["current"]()):
        y = first(x)
    with mz.autocast(recipe=RECIPES["rowwise"]()):
        z = second(x)
    assert held(y).data_ptr() != held(z).data_ptr()


def test_nothing_is_held_longer() -> None:
    """Neither the input nor the copy outlives what holds it; after a backward the next run makes a copy again."""
    first, second, _ = make()
    x = torch.randn(32, 64).to(BF16)
    with mz.autocast(recipe=RECIPES["current"]()):
        y, z = first(x), second(x)
        columns, inputs = weakref.ref(held(y)), weakref.ref(x)
        y.sum().backward()
        assert columns() is held(z)
        z.sum().backward()
        assert columns() is None
        assert count_held([second(x), second(x)]) == 1
        del x
        assert inputs() is None


def test_a_checkpoint_beside_a_linear_that_is_not_in_it() -> None:
    """Its second run does not find what the first one found, and must make the same calls: it is given the results of
    those that are not computed again."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)

    def run(is_inside: bool) -> list[torch.Tensor]:
        first, second, _ = make()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(BF16).requires_grad_()
        with mz.autocast(recipe=RECIPES["current"]()):
            y = first(x)
            z = checkpoint(second, x, use_reentrant=False, context_fn=contexts) if is_inside else second(x)
            first(x.detach())  # this one leaves word of another tensor
            (y.float().sum() + z.float().square().sum()).backward()
        return [x.grad, *[p.grad for linear in (first, second) for p in linear.parameters()]]  # type: ignore[list-item]

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


def test_a_small_input_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look would cost a small step more than the copy."""
    for smallest, copies in ((32 * 64, 1), (32 * 64 + 1, 2)):
        monkeypatch.setattr(shared_input, "SMALLEST_SHARED", smallest)
        assert pair(lambda x: None)[1] == copies
