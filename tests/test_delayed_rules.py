"""Delayed scaling by a user's own rules, for some tensors, with recomputation, and calibration."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import mezzotint as mz
from mezzotint import quantization
from mezzotint.recipe import CustomRecipe, DelayedScaling
from tests.delayed import DELAYED, MX, amax_of, in_force, only
from tests.recipes import IN, OUT, assert_equal, make, run, sample, step
from tests.recipes import STATE as BUFFERS

BF16 = torch.bfloat16


# Regions


OUTSIDE = (False, False, None, None, 0)


# Delayed scaling: a model in plain Python. One direction of one module: numerics.md, section 3, slot by slot.


FLT_MAX = float(np.finfo(np.float32).max)


# Rules of a user's own


def test_own_functions() -> None:
    calls: dict[str, list[Any]] = {"amax": [], "factor": []}

    def compute_amax(history: torch.Tensor) -> torch.Tensor:
        calls["amax"].append(history.clone())
        return history.mean(0)

    def compute_factor(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: Any) -> torch.Tensor:
        calls["factor"].append((amax.clone(), scale.clone(), fp8_max, recipe.margin))
        return scale + amax

    recipe = DelayedScaling(
        amax_history_len=2, amax_compute_algo=compute_amax, scaling_factor_compute_algo=compute_factor, margin=5
    )
    module = make("linear")
    weight = amax_of(module.weight)
    for t in range(2):
        x, dy = sample(seed=t).requires_grad_(), sample(seed=10 + t, width=OUT)
        before = [getattr(module, name).clone() for name in BUFFERS]
        with mz.autocast(recipe=recipe):
            y = module(x)
        y.backward(dy)
        for (seen, old_scale, history), fp8_max, now, past in zip(
            (([amax_of(x), weight, 0.0], *before[:2]), ([amax_of(dy), 0.0], *before[2:])),
            (448, 57344),
            (module.scale_fwd, module.scale_bwd),
            (module.amax_history_fwd, module.amax_history_bwd),
            strict=True,
        ):
            expected = torch.stack((torch.tensor(seen), history[1]))
            assert torch.equal(calls["amax"].pop(0), expected)
            amax, scale, top, margin = calls["factor"].pop(0)
            assert torch.equal(amax, expected.mean(0))
            assert torch.equal(scale, old_scale)
            assert (top, margin) == (fp8_max, 5)
            assert torch.equal(now, old_scale + expected.mean(0))
            # Every slot is rolled, also one that nobody touched.
            assert past[:2].tolist() == [[0.0] * len(seen), torch.tensor(seen).tolist()]
    assert calls == {"amax": [], "factor": []}


def test_own_amax_with_the_usual_factor() -> None:
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history: history[0] * 2, margin=1)
    module = make("linear")
    step(module, sample(), recipe)
    assert module.scale_fwd[0] == np.float32(448.0) / np.float32(2 * amax_of(sample())) / 2
    assert module.scale_fwd[2] == 1.0


def test_own_factor_with_the_usual_amax() -> None:
    seen: list[torch.Tensor] = []

    def factor(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: Any) -> torch.Tensor:
        seen.append(amax.clone())
        return torch.full_like(scale, 0.5)

    for algorithm, expected in (("max", 90.0), ("most_recent", 1.0)):
        module = make("linear")
        recipe = DelayedScaling(
            amax_history_len=3, amax_compute_algo=algorithm, scaling_factor_compute_algo=factor, reduce_amax=False
        )
        for magnitude in (90.0, 1.0):
            with mz.autocast(recipe=recipe):
                module(torch.full((4, IN), magnitude, dtype=BF16))
        assert seen[-1][0] == expected
        assert module.scale_fwd.tolist() == [0.5, 0.5, 0.5]


def test_a_failing_function_leaves_nothing_behind() -> None:
    """The other modules of the region, too, are updated in the next one."""
    fails = [True]

    def compute(history: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise ArithmeticError("no")
        return history.amax(0)

    recipe, modules = DelayedScaling(amax_history_len=2, amax_compute_algo=compute), [make("linear"), make("linear")]

    def region() -> None:
        with mz.autocast(recipe=recipe):
            for module in modules:
                module(sample())

    with pytest.raises(ArithmeticError):
        region()
    assert in_force() == OUTSIDE
    fails[0] = False
    region()
    for module in modules:
        assert module.scale_fwd[0] == np.float32(448.0) / np.float32(amax_of(sample()))


def test_amax_and_scale_update() -> None:
    """In place; it rolls every column; the guards of the scale."""
    history = torch.tensor([[2.0, 0.0, math.inf, 1e-40, 8.0], [4.0, 0.0, 1.0, 0.0, 1.0], [1.0, 3.0, 1.0, 0.0, 2.0]])
    scale = torch.arange(1.0, 6.0)
    recipe = DelayedScaling(margin=1, amax_history_len=3)
    before = history.clone()
    assert quantization._amax_and_scale_update(history, scale, 448.0, recipe) is None
    assert scale.tolist() == [448 / 4 / 2, np.float32(448) / np.float32(3) / 2, 3.0, FLT_MAX, 448 / 8 / 2]
    assert torch.equal(history, torch.stack((torch.zeros(5), before[2], before[0])))
    single, scale = torch.tensor([[2.0, 0.0]]), torch.ones(2)
    recent = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
    quantization._amax_and_scale_update(single, scale, 57344.0, recent)
    assert scale.tolist() == [57344 / 2, 1.0]
    assert single.tolist() == [[0.0, 0.0]]


def test_default_factor() -> None:
    amax = torch.tensor([7.0, 0.0, math.inf, math.nan, 1e-44, -1.0])
    old = torch.arange(1.0, 7.0)
    kept = old.clone()
    expected = [np.float32(448) / np.float32(7) / 4, 2.0, 3.0, 4.0, FLT_MAX, 6.0]
    assert quantization._default_sf_compute(amax, old, 448.0, 2).tolist() == expected
    assert torch.equal(old, kept)
    assert quantization._default_sf_compute(amax, old, 448.0, 2, 99.0)[4] == 99.0


# Requests of a custom recipe, for some of the tensors


@pytest.mark.parametrize(
    ("name", "wanted", "slots"),
    [
        ("linear", ("input",), [0]),
        ("linear", ("grad_output",), []),
        pytest.param("linear", ("weight",), [1]),
        pytest.param("layernorm_linear", ("weight",), [1]),
        ("layernorm_mlp", ("input",), [0, 3]),
        ("layernorm_mlp", ("weight",), [1, 4]),
        ("layernorm_mlp", ("fc1.input",), [0]),
        pytest.param("layernorm_mlp", ("fc2.input",), [3]),
        ("grouped_linear", ("input", "weight"), [0, 1, 4, 6, 7]),  # the second group has no rows
        pytest.param("grouped_linear", ("weight",), [1, 4, 7]),
        ("grouped_linear", ("input",), [0, 6]),
    ],
)
def test_requests_for_some_tensors(name: str, wanted: tuple[str, ...], slots: list[int]) -> None:
    module, x = make(name), sample()
    for _ in range(2):
        step(module, x, CustomRecipe(only(*wanted)))
    seen = [slot for slot, amax in enumerate(module.amax_history_fwd[1].tolist()) if amax]
    assert seen == slots
    backward = [slot for slot, amax in enumerate(module.amax_history_bwd[1].tolist()) if amax]
    assert backward == ([0] if wanted == ("grad_output",) else [])


# Recomputation


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_module_twice_in_checkpoints(use_reentrant: bool) -> None:
    """Delayed scaling of gradients: new scales after the last backward, that of the first call, and not before."""
    recipe = DelayedScaling(amax_history_len=4)
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module = mz.Linear(32, 32, device="cpu")
        for seed in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).mul_(seed + 1).requires_grad_()
            y = x
            module.zero_grad()
            with mz.autocast(recipe=recipe):
                for _ in range(2):
                    y = mz.checkpoint(module, y, use_reentrant=use_reentrant) if checkpointed else module(y)
            y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in module.parameters()), *module.buffers()])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # reentrant: torch runs without
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["linear", "layernorm_mlp"])
def test_checkpoint_inside_a_checkpoint(name: str, use_reentrant: bool) -> None:
    """What runs a third time, too, uses the scales of the first run and counts nothing again."""
    recipe, module, twin = DELAYED["max-3"], make(name), make(name)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return mz.checkpoint(module, x, use_reentrant=use_reentrant)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return mz.checkpoint(lambda x: inner(x * 2) * 3, x, use_reentrant=use_reentrant)

    for t in range(3):
        x = sample(seed=t) * (3 - t)
        expected = step(twin, x, recipe, lambda x: twin(x * 2) * 3)
        assert_equal(step(module, x, recipe, outer), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_hands_keyword_arguments_on(use_reentrant: bool) -> None:
    module, twin = make("linear"), make("linear")

    def call(x: torch.Tensor) -> torch.Tensor:
        return mz.checkpoint(module, x, use_reentrant=use_reentrant, preserve_rng_state=False, is_first_microbatch=True)

    assert_equal(step(module, sample(), MX, call), step(twin, sample(), MX, is_first_microbatch=True))
    assert module._workspaces is not None


# Calibration


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "layernorm_linear",
        pytest.param("layernorm_mlp"),
        pytest.param("grouped_linear"),
    ],
)
def test_calibration(name: str) -> None:
    """High precision, and the amaxes of this call, not of those before, in the current row; no update."""
    recipe, module = DELAYED["max-3"], make(name)
    arguments = ([10, 10, 20],) if name == "grouped_linear" else ()
    expected = {slot: amax_of(w) for slot, w in weights_of(module).items()}
    for x in (sample(seed=1) * 5, sample()):
        plain = module(x, *arguments)
        with mz.autocast(enabled=False, calibrating=True, recipe=recipe):
            assert torch.equal(module(x, *arguments), plain)
    with torch.no_grad(), mz.autocast(recipe=recipe):  # what quantizing sees
        twin = make(name)
        twin(sample(), *arguments)
    seen = module.amax_history_fwd[0].tolist()
    assert {slot: seen[slot] for slot in expected} == expected
    assert seen[::3] == pytest.approx(twin.amax_history_fwd[0, ::3].tolist(), rel=0.1)
    assert not module.amax_history_fwd[1:].any()
    assert not module.amax_history_bwd.any()
    assert module.scale_fwd.tolist() == [1.0] * len(seen)
    step(module, sample(), recipe)
    assert module.scale_fwd[1] == np.float32(448.0) / np.float32(expected[1])


def weights_of(module: Any) -> dict[int, torch.Tensor]:
    weights = [p for p in module.parameters() if p.dim() == 2]
    return {3 * gemm + 1: weight for gemm, weight in enumerate(weights)}


def test_calibration_of_an_enabled_region_changes_nothing() -> None:
    recipe = DELAYED["max-3"]
    module, twin = make("linear"), make("linear")
    for t in range(2):
        with mz.autocast(calibrating=True, recipe=recipe):
            y = module(sample(seed=t))
        assert torch.equal(y, run(twin, sample(seed=t), recipe)[0])
        assert torch.equal(module.amax_history_fwd, twin.amax_history_fwd)
