"""Runs from a record have the bits of runs that are not recorded, and what may take another way is not recorded."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mezzotint as mz
from mezzotint.functional import autograd
from mezzotint.functional.delayed import SCALE_UPDATES, ScaleState
from mezzotint.layer import rerun
from mezzotint.layer.rerun import RECORDED_RUNS
from mezzotint.recipe import RECIPES, CustomRecipe, DelayedScaling, Float8CurrentScaling, Recipe

pytestmark = pytest.mark.filterwarnings("ignore::mezzotint.EmulationWarning")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = {"dtype": torch.bfloat16}
MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "linear": lambda **options: mz.Linear(64, 64, **options),
    "no bias": lambda **options: mz.Linear(64, 64, bias=False, **options),
    "layernorm_linear": lambda **options: mz.LayerNormLinear(64, 64, return_layernorm_output=True, **options),
    "layernorm_mlp": lambda **options: mz.LayerNormMLP(64, 128, activation="swiglu", **options),
    "recomputed": lambda **options: mz.LayerNormMLP(64, 128, checkpoint=True, **options),
    "lean": lambda **options: mz.LayerNormMLP(64, 128, memory="lean", **options),
}


@pytest.fixture(autouse=True)
def no_runs() -> Iterator[None]:
    RECORDED_RUNS.clear()
    yield
    RECORDED_RUNS.clear()


@pytest.fixture
def not_recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Call it with True, and runs are as they are from then on."""
    found = rerun.form_of_plain

    def switch(off: bool) -> None:
        monkeypatch.setattr(rerun, "form_of_plain", (lambda tensors: None) if off else found)

    return switch


def recorded() -> tuple[int, int]:
    """How many forwards and backwards are recorded."""
    runs = list(RECORDED_RUNS.values())
    backwards = [again for run in runs for again in run.backwards.values()]
    return sum(run.forward is not None for run in runs), sum(again is not None for again in backwards)


def make(name: str = "linear", device: str = "cpu", **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODULES[name](device=device, **BF16, **options)


def sample(seed: int, shape: tuple[int, ...] = (32, 64), device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def step(
    module: torch.nn.Module,
    chosen: Recipe | None,
    seed: int,
    shape: tuple[int, ...] = (32, 64),
    wrap: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **kwargs: Any,
) -> list[torch.Tensor]:
    """Outputs, gradients, and the state of the module after a step."""
    device = str(next(module.parameters()).device.type)
    x = sample(seed, shape, device).requires_grad_()
    torch.manual_seed(seed)
    module.zero_grad()
    with mz.autocast(enabled=chosen is not None, recipe=chosen):
        outputs = module(wrap(x), **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [sample(seed + 1, tuple(y.shape), device) for y in outputs])
    state = [*module.buffers(), *[p.grad for p in module.parameters()], x.grad]
    return [each.detach().clone() for each in (*outputs, *state) if each is not None]


def same(first: list[list[torch.Tensor]], second: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def recorded_by(steps: Callable[[], list[list[torch.Tensor]]], not_recorded: Callable[[bool], None]) -> tuple[int, int]:
    """How many forwards and backwards the steps record, after they have given the bits of steps without records."""
    made, found = steps(), recorded()
    not_recorded(True)
    assert same(made, steps())
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("chosen", [None, *RECIPES], ids=str)
def test_bits(name: str, chosen: str | None, device: str, not_recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four steps, two of which are made of recorded calls, whose code does not run again."""
    value = None if chosen is None else RECIPES[chosen]()

    def steps() -> list[list[torch.Tensor]]:
        module = make(name, device)
        return [step(module, value, seed, (2, 16, 64)) for seed in range(4)]

    not_recorded(True)
    wanted = steps()
    assert not RECORDED_RUNS
    not_recorded(False)
    module = make(name, device)
    made = [step(module, value, seed, (2, 16, 64)) for seed in range(3)]
    assert recorded() == (1, 1)
    monkeypatch.setattr(autograd, "unflatten", None)  # what was saved is not put together any more
    monkeypatch.setattr(f"mezzotint.module.{type(module).__module__.rsplit('.')[-1]}.quantized_weights", None)
    made.append(step(module, value, 3, (2, 16, 64)))
    assert same(made, wanted)


@pytest.mark.parametrize("chosen", ["delayed", "current"])
def test_modules_of_one_configuration_share_a_record(chosen: str, not_recorded: Any) -> None:
    """Each has its own weights, scales and histories."""
    value = RECIPES[chosen]()

    def steps() -> list[list[torch.Tensor]]:
        modules = [make(), make()]
        torch.nn.init.normal_(modules[1].weight)
        return [step(module, value, seed) for seed in range(4) for module in modules]

    assert recorded_by(steps, not_recorded) == (1, 1)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "fewer rows": lambda x: x[:16],
    "strided": lambda x: x.t().contiguous().t(),
    "other alignment": lambda x: torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view_as(x),
    "three dimensions": lambda x: x.view(2, 16, 64),
    "fp32": lambda x: x.float(),
    "negative": lambda x: torch.complex(x.float(), -x.float()).conj().imag,
}


@pytest.mark.parametrize("chosen", ["delayed", "mxfp8"])
def test_each_form_has_its_own_record(chosen: str, not_recorded: Any) -> None:
    """Also if a module sees them in turn."""
    value = RECIPES[chosen]()

    def steps() -> list[list[torch.Tensor]]:
        module = make()
        return [step(module, value, seed, wrap=wrap) for seed in range(4) for wrap in FORMS.values()]

    others = len(FORMS) - 1  # the negative one is left to PyTorch's dispatcher
    assert recorded_by(steps, not_recorded) == (others, others)


def test_each_form_of_a_gradient_has_its_own_record(not_recorded: Any) -> None:
    """`sum` gives a gradient whose strides are 0."""

    def steps() -> list[list[torch.Tensor]]:
        module, found = make(), []
        for seed in range(8):
            x = sample(seed).requires_grad_()
            with mz.autocast(recipe=Float8CurrentScaling()):
                y = module(x)
            y.backward(sample(seed, (64, 32)).t()) if seed % 2 else y.sum().backward()
            found.append([x.grad])
        return found

    assert recorded_by(steps, not_recorded) == (1, 2)


def test_two_runs_in_a_region_and_a_second_backward(not_recorded: Any) -> None:
    """Only the backward of the first run updates the scales; what one backward entered stays."""

    def steps() -> list[list[torch.Tensor]]:
        module, found = make("layernorm_mlp"), []
        for seed in range(5):
            module.zero_grad()
            with mz.autocast(recipe=DelayedScaling(amax_history_len=3)):
                first, second = module(sample(seed)), module(sample(seed + 1))
            loss = (first * sample(seed + 2)).sum() + (second * sample(seed + 3)).sum()
            loss.backward(retain_graph=seed % 2 == 0)
            if seed % 2 == 0:
                loss.backward()
            found.append(
                [first, second, *[p.grad.clone() for p in module.parameters()], *map(torch.clone, module.buffers())]
            )
        return found

    assert recorded_by(steps, not_recorded) == (1, 2)


@pytest.mark.parametrize("chosen", ["delayed", "current", "mxfp8"])
@pytest.mark.parametrize("name", ["linear", "layernorm_mlp"])
def test_kept_weights(name: str, chosen: str, not_recorded: Any) -> None:
    """The first microbatch of a step quantizes them, the second one reads them."""
    value = RECIPES[chosen]()

    def steps() -> list[list[torch.Tensor]]:
        module, found = make(name), []
        for turn in range(8):
            found.append(step(module, value, turn, is_first_microbatch=turn % 2 == 0))
            with torch.no_grad():
                [parameter.mul_(1.5) for parameter in module.parameters() if turn % 2]
        return found

    assert recorded_by(steps, not_recorded)[0] >= 1


def test_without_gradients(not_recorded: Any) -> None:
    """In `no_grad`, in inference mode, and with frozen weights; a record of one serves the others where it may."""

    def steps() -> list[list[torch.Tensor]]:
        module, found = make("layernorm_mlp"), []
        for seed in range(9):
            mode = [torch.no_grad, torch.inference_mode, nullcontext][seed % 3]
            module.requires_grad_(seed % 3 != 2)
            with mode(), mz.autocast(recipe=Float8CurrentScaling()):
                found.append([module(sample(seed))])
            assert not found[-1][0].requires_grad
        return found

    assert recorded_by(steps, not_recorded)[0] >= 1


def test_frozen_parameters(not_recorded: Any) -> None:
    def steps() -> list[list[torch.Tensor]]:
        module, found = make("layernorm_mlp"), []
        for seed in range(12):
            for i, parameter in enumerate(module.parameters()):
                parameter.requires_grad_((seed % 3 + i) % 3 != 0)
            found.append(step(module, Float8CurrentScaling(), seed))
        return found

    assert recorded_by(steps, not_recorded) == (3, 3)


@pytest.mark.parametrize("chosen", [Float8CurrentScaling(), DelayedScaling()], ids=["current", "delayed"])
def test_activation_checkpoints(chosen: Recipe, not_recorded: Any) -> None:
    """What is saved goes through their hooks, and the second run is in backward: it has the scales of the first, and
    enters no amaxes."""

    def steps() -> list[list[torch.Tensor]]:
        module, found = make("layernorm_mlp"), []
        for seed in range(6):
            x = sample(seed).requires_grad_()
            module.zero_grad()
            with mz.autocast(recipe=chosen):
                y = mz.checkpoint(module, x, use_reentrant=False)
            y.backward(sample(seed + 1))
            state = [*module.buffers(), *[p.grad for p in module.parameters()]]
            found.append([y, x.grad, *[each.clone() for each in state]])
        return found

    assert recorded_by(steps, not_recorded) == (1, 1)
    # In delayed scaling the second runs are not those of the record. Being stopped on their way, they have none.
    assert [run.tries for run in RECORDED_RUNS.values()] == [rerun.MOST_TRIES] * len(RECORDED_RUNS)
    assert len(RECORDED_RUNS) == (2 if isinstance(chosen, DelayedScaling) else 1)


def test_hooks_may_give_saved_tensors_another_form(not_recorded: Any) -> None:
    def other_form(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.flatten(), x.flatten()])[: x.numel()].view_as(x) if x.dim() != 2 else x.t().contiguous().t()

    def steps() -> list[list[torch.Tensor]]:
        module, found = make(), []
        for seed, unpack in enumerate([None, None, None, torch.clone, other_form, None, other_form, torch.clone]):
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack) if unpack else nullcontext()
            with hooks:
                found.append(step(module, Float8CurrentScaling(), seed))
        return found

    assert recorded_by(steps, not_recorded) == (1, 3)


def test_a_tensor_that_is_given_twice_has_its_own_record(not_recorded: Any) -> None:
    def steps() -> list[list[torch.Tensor]]:
        module, found = make("no bias"), []
        for seed in range(6):
            x: Any = next(module.parameters()) if seed < 3 else torch.nn.Parameter(sample(seed, (64, 64)))
            module.zero_grad()
            with mz.autocast(recipe=Float8CurrentScaling()):
                y = module(x)
            y.backward(sample(seed + 1, (64, 64)))
            found.append([y, x.grad.clone(), *[p.grad.clone() for p in module.parameters()]])
        return found

    assert recorded_by(steps, not_recorded) == (2, 2)


def test_what_waits_for_the_end_of_backward_comes_first(not_recorded: Any) -> None:
    """An update of the scales of gradients may wait because another region, in the same backward, reduces amaxes."""

    def steps() -> list[list[torch.Tensor]]:
        module, found = make(), []
        for seed in range(5):

            def enter(gradient: torch.Tensor) -> None:
                module.amax_history_bwd[0] += 3.0
                state = ScaleState(module.scale_bwd, module.amax_history_bwd, 448.0, True, None, ())
                SCALE_UPDATES.add(state)

            with mz.autocast(recipe=DelayedScaling(amax_history_len=4)):
                y = module(sample(seed))
            y.register_hook(enter)
            y.backward(sample(seed + 1))
            found.append([y, *map(torch.clone, module.buffers())])
        return found

    assert recorded_by(steps, not_recorded) == (1, 1)


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [_FunctionMode, _DispatchMode, lambda: torch.autocast("cpu", torch.float16)],
    ids=["function mode", "dispatch mode", "autocast"],
)
def test_nothing_is_recorded_in_modes(mode: Any, not_recorded: Any) -> None:
    """Nor are recorded calls made in them."""

    def steps() -> list[list[torch.Tensor]]:
        module, found = make(), []
        for seed in range(6):
            with nullcontext() if seed < 3 else mode():
                found.append(step(module, Float8CurrentScaling(), seed, wrap=lambda x: x.float()))
        return found

    for seed in range(3):
        with mode():
            step(make(), Float8CurrentScaling(), seed)
    assert not RECORDED_RUNS
    assert recorded_by(steps, not_recorded) == (1, 1)


def test_runs_that_are_looked_into_are_not_recorded() -> None:
    module = make()
    for seed in range(3):
        with mz.autocast(recipe=Float8CurrentScaling(), check_finite=True):
            module(sample(seed))
    assert not RECORDED_RUNS


def test_a_users_own_code_is_not_recorded() -> None:
    def choose(role: Any) -> Any:
        return mz.MXFP8Quantizer()

    own_rule = DelayedScaling(amax_compute_algo=lambda history: history.amax(0))
    for value in (CustomRecipe(qfactory=choose), own_rule):
        module = make()
        for seed in range(3):
            step(module, value, seed)
    assert not RECORDED_RUNS


def test_gradients_that_go_elsewhere_are_not_recorded() -> None:
    module = make(fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(64, 64)
    for seed in range(3):
        with mz.autocast(recipe=Float8CurrentScaling()):
            module(sample(seed)).sum().backward()
    assert not RECORDED_RUNS
    assert module.weight.main_grad.any()


def test_a_second_derivative_is_refused() -> None:
    module = make()
    for _ in range(4):
        x = sample(0).requires_grad_()
        with mz.autocast(recipe=Float8CurrentScaling()):
            y = module(x)
        (dx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            dx.pow(2).sum().backward()
    assert recorded()[0] == 1


def test_what_is_held_for_backward(not_recorded: Any) -> None:
    """As many bytes as without a record, and none after the graph is gone."""

    def held(module: torch.nn.Module) -> int:
        sizes: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), mz.autocast(recipe=Float8CurrentScaling()):
            module(sample(0).requires_grad_())
        return sum(sizes.values())

    module = make("layernorm_mlp")
    bytes_held = [held(module) for _ in range(4)]
    assert recorded()[0] == 1
    not_recorded(True)
    assert set(bytes_held) == {held(module)}


def test_records_hold_no_tensors() -> None:
    """Neither of forward nor of backward, also if backward runs forward again."""

    def tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
        if id(value) in seen or isinstance(value, type):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        items: list[Any] = []
        if isinstance(value, dict):
            items = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set)):
            items = [*value]
        elif type(value).__module__.startswith("mezzotint"):
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            items = [getattr(value, name, None) for name in (*getattr(value, "__dict__", {}), *slots)]
        elif callable(value) and hasattr(value, "__globals__") and "v0" in value.__code__.co_varnames:
            items = [each for name, each in value.__globals__.items() if name != "__builtins__"]
        for item in items:
            yield from tensors_in(item, seen)

    for name in MODULES:
        for chosen in ("delayed", "nvfp4"):
            module, value = make(name), RECIPES[chosen]()
            [step(module, value, seed) for seed in range(3)]
    assert recorded()[0] == recorded()[1] == 2 * len(MODULES)
    assert not list(tensors_in(RECORDED_RUNS, set()))


def test_a_program_of_many_forms_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerun, "MOST_RUNS", 4)
    module = make()
    for rows in range(1, 10):
        step(module, Float8CurrentScaling(), 0, (rows, 64))
        assert len(RECORDED_RUNS) <= 4
