"""CudaRNGStatesTracker: streams of random numbers by name, in modules, and in what is computed again."""

import io
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import CudaRNGStatesTracker
from tests.recipes import RECIPES


def tracker(**seeds: int) -> CudaRNGStatesTracker:
    made = CudaRNGStatesTracker("cpu")
    for name, seed in (seeds or {"model-parallel-rng": 5}).items():
        made.add(name.replace("_", "-"), seed)
    return made


def stream(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_each_name_has_a_stream_of_its_own() -> None:
    made = tracker(one=1, two=2)
    torch.manual_seed(0)
    drawn: dict[str, list[torch.Tensor]] = {"one": [], "two": [], "default": []}
    for name in ("one", "default", "two", "two", "one", "default"):
        if name == "default":
            drawn[name].append(torch.randn(16))
        else:
            with made.fork(name):
                drawn[name].append(torch.randn(16))
    for name, seed in (("one", 1), ("two", 2), ("default", 0)):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(torch.cat(drawn[name]), torch.cat([torch.randn(16, generator=generator) for _ in range(2)]))


def test_an_error_inside_leaves_the_default_generator_where_it_was() -> None:
    made = tracker()
    torch.manual_seed(0)
    with pytest.raises(IndexError), made.fork():
        torch.randn(3)[7]
    assert torch.equal(torch.randn(16), stream(0, 16))


def test_states_are_kept_and_set() -> None:
    made = tracker()
    file = io.BytesIO()
    torch.save(made.get_states(), file)
    with made.fork():
        first = torch.randn(8)
    file.seek(0)
    made.set_states(torch.load(file, weights_only=True))
    with made.fork():
        assert torch.equal(torch.randn(8), first)
    other = CudaRNGStatesTracker("cpu")
    other.set_states(made.get_states())
    made.reset()
    assert made.get_states() == {}
    made.add("model-parallel-rng", 5)
    with made.fork():
        assert torch.equal(torch.randn(8), first)
    with other.fork():
        assert not torch.equal(torch.randn(8), first)


def test_what_is_there_already_or_not_at_all() -> None:
    made = tracker()
    with pytest.raises(ValueError, match="seed is 5"):
        made.add("another", 5)
    with pytest.raises(ValueError, match="'model-parallel-rng'"):
        made.add("model-parallel-rng", 6)
    made.add("another", 6)  # the error above has not used it up
    with pytest.raises(ValueError, match="known are"), made.fork("unknown"):
        pass
    with pytest.raises(TypeError, match="states"):
        made.set_states([torch.zeros(3)])  # type: ignore[arg-type]


def test_a_generator_of_the_machine_is_the_default() -> None:
    made = CudaRNGStatesTracker()
    made.add("model-parallel-rng", 5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with made.fork():
        first = torch.randn(8, device=device)
    torch.manual_seed(5)
    assert torch.equal(torch.randn(8, device=device), first)


def test_initial_values_of_modules() -> None:
    """From the tracker, without touching the default generator."""
    made = tracker()
    torch.manual_seed(0)
    one = mz.Linear(8, 4, get_rng_state_tracker=lambda: made, device="cpu")
    assert torch.equal(torch.randn(16), stream(0, 16))
    other = tracker()
    two = mz.Linear(8, 4, get_rng_state_tracker=lambda: other, device="cpu")
    assert torch.equal(one.weight, two.weight)


class Noisy(torch.nn.Module):
    """A module between random masks of two streams and of the default one."""

    def __init__(self, made: CudaRNGStatesTracker) -> None:
        super().__init__()
        self.made = made
        torch.manual_seed(0)
        self.linear = mz.Linear(16, 16, params_dtype=torch.float32, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.made.fork("one"):
            x = torch.nn.functional.dropout(x, 0.5)
        x = torch.nn.functional.dropout(self.linear(x), 0.25)
        with self.made.fork("two"):
            return torch.nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_checkpoint_draws_the_same_numbers_again(use_reentrant: bool, nested: bool, recipe: str) -> None:
    """Two checkpointed calls, gradients and all that is drawn after, as without checkpoints."""

    def run(checkpointed: bool) -> list[torch.Tensor]:
        made = tracker(one=1, two=2)
        modules = [Noisy(made), Noisy(made)]
        options: dict[str, Any] = {"get_rng_state_tracker": lambda: made, "use_reentrant": use_reentrant}

        def inner(module: Noisy, x: torch.Tensor) -> torch.Tensor:
            return mz.checkpoint(module, x, **options) if checkpointed and nested else module(x)

        def call(module: Noisy, x: torch.Tensor) -> torch.Tensor:
            return mz.checkpoint(inner, module, x, **options) if checkpointed else inner(module, x)

        torch.manual_seed(3)
        x = torch.randn(32, 16, requires_grad=True)
        chosen = RECIPES[recipe]
        with mz.autocast(enabled=chosen is not None, recipe=chosen):
            y = call(modules[1], call(modules[0], x))
        torch.randn(5)
        with made.fork("two"):
            torch.randn(7)
        y.square().sum().backward()
        assert x.grad is not None
        found = [y.detach(), x.grad]
        for module in modules:
            assert module.linear.weight.grad is not None
            found.append(module.linear.weight.grad)
        for name in ("one", "two"):
            with made.fork(name):
                found.append(torch.randn(4))
        return found

    for plain, again in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, again)


def test_a_checkpoint_that_is_not_told_draws_others() -> None:
    """That the test above can fail: the second run goes on where the first one ended."""
    made = tracker(one=1, two=2)
    module = Noisy(made)
    x = torch.ones(32, 16, requires_grad=True)
    states = made.get_states()
    mz.checkpoint(module, x, use_reentrant=False).sum().backward()
    wrong = x.grad
    made.set_states(states)
    x.grad = None
    mz.checkpoint(module, x, use_reentrant=False, get_rng_state_tracker=lambda: made).sum().backward()
    assert wrong is not None
    assert x.grad is not None
    assert not torch.equal(wrong, x.grad)
