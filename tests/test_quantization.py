"""Regions, delayed scaling from step to step, calibration, quantized weights, what is available."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import DType, hw, quantization
from mezzotint.functional.delayed import ENDING
from mezzotint.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
)
from mezzotint.region import State, current_state
from tests.recipes import GROUPS, IN, MODULES, OUT, assert_equal, make, run, sample, step
from tests.recipes import STATE as BUFFERS

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Whatever a test does, the state after it is that of the start."""
    yield
    assert State() == current_state()
    assert not ENDING.waiting


# Signatures, as upstream has them

EMPTY = inspect.Parameter.empty
SIGNATURES: dict[str, list[tuple[str, Any]]] = {
    "autocast": [
        ("enabled", True),
        ("calibrating", False),
        ("recipe", None),
        ("amax_reduction_group", None),
        ("_graph", False),
    ],
    "fp8_autocast": [
        ("enabled", True),
        ("calibrating", False),
        ("fp8_recipe", None),
        ("fp8_group", None),
        ("_graph", False),
    ],
    "quantized_model_init": [("enabled", True), ("recipe", None), ("preserve_high_precision_init_val", False)],
    "fp8_model_init": [("enabled", True), ("recipe", None), ("preserve_high_precision_init_val", False)],
    "is_fp8_available": [("return_reason", False), ("native", False)],
    "is_mxfp8_available": [("return_reason", False), ("native", False)],
    "is_fp8_block_scaling_available": [("return_reason", False), ("native", False)],
    "is_nvfp4_available": [("return_reason", False), ("native", False)],
    "is_bf16_available": [("return_reason", False)],
    "get_align_size_for_quantization": [("recipe", EMPTY)],
    "get_fp8_torch_dtype": [("fp8_recipe", EMPTY), ("fprop_tensor", True)],
    "get_fp8_te_dtype": [("fp8_recipe", EMPTY), ("fprop_tensor", True)],
    "_amax_and_scale_update": [("amax_history", EMPTY), ("scale", EMPTY), ("fp8_max", EMPTY), ("recipe", EMPTY)],
    "_default_sf_compute": [
        ("amax", EMPTY),
        ("scale", EMPTY),
        ("fp8_max", EMPTY),
        ("margin", EMPTY),
        ("_fp32_max", torch.finfo(torch.float32).max),
    ],
    "check_fp8_support": [],
    "check_mxfp8_support": [],
    "check_fp8_block_scaling_support": [],
    "check_nvfp4_support": [],
    "get_default_recipe": [],
    "get_device_compute_capability": [],
    "is_non_tn_fp8_gemm_supported": [],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(quantization, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]


# Regions


def in_force() -> tuple[Any, ...]:
    state = current_state()
    return state.enabled, state.calibrating, state.recipe, state.group, state.depth


OUTSIDE = (False, False, None, None, 0)
CURRENT, MX, NV = Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()


def test_regions_nest() -> None:
    group = object()
    assert in_force() == OUTSIDE
    with mz.autocast(recipe=CURRENT, amax_reduction_group=group) as region:
        assert isinstance(region, mz.autocast)
        assert in_force() == (True, False, CURRENT, group, 1)
        with mz.autocast(recipe=MX):
            assert in_force() == (True, False, MX, None, 2)
            with mz.autocast(enabled=False):
                assert in_force() == (False, False, None, None, 3)
                with mz.autocast(enabled=False, calibrating=True, recipe=NV):
                    assert in_force() == (False, True, NV, None, 4)
                assert in_force() == (False, False, None, None, 3)
            assert in_force() == (True, False, MX, None, 2)
        assert in_force() == (True, False, CURRENT, group, 1)
    assert in_force() == OUTSIDE


def test_regions_decide_what_modules_do() -> None:
    """The innermost one, and none where it is disabled."""
    module, x = make("linear"), sample()
    plain, current, mxfp8 = (run(make("linear"), x, recipe)[0] for recipe in (None, CURRENT, MX))
    assert not torch.equal(plain, current)
    assert not torch.equal(current, mxfp8)
    with mz.autocast(recipe=CURRENT):
        assert torch.equal(module(x), current)
        with mz.autocast(recipe=MX):
            assert torch.equal(module(x), mxfp8)
            with mz.autocast(enabled=False):
                assert torch.equal(module(x), plain)
            with mz.autocast(enabled=False, recipe=CURRENT):
                assert torch.equal(module(x), plain)
            assert torch.equal(module(x), mxfp8)
        assert torch.equal(module(x), current)
    assert torch.equal(module(x), plain)


def test_an_exception_leaves_every_region() -> None:
    region = mz.autocast(recipe=MX)

    def fail() -> None:
        with mz.autocast(recipe=CURRENT), region, mz.autocast(enabled=False):
            raise KeyError("inside")

    for _ in range(2):
        with pytest.raises(KeyError, match="inside"):
            fail()
        assert in_force() == OUTSIDE
    with mz.autocast(recipe=CURRENT):
        with pytest.raises(KeyError):
            fail()
        assert in_force() == (True, False, CURRENT, None, 1)


def test_a_region_is_entered_inside_itself() -> None:
    region = mz.autocast(recipe=MX)
    with region:
        with region:
            assert in_force() == (True, False, MX, None, 2)
        assert in_force() == (True, False, MX, None, 1)
    assert in_force() == OUTSIDE


def test_a_region_is_entered_again_later() -> None:
    region = mz.autocast(recipe=MX)
    for outer in (None, CURRENT, None):
        with mz.autocast(enabled=outer is not None, recipe=outer):
            with region:
                assert in_force() == (True, False, MX, None, 2)
            assert in_force() == (outer is not None, False, outer, None, 1)


DEFAULTS = {
    None: DelayedScaling(),
    (8, 9): DelayedScaling(),
    (9, 0): DelayedScaling(),
    (10, 0): MXFP8BlockScaling(),
    (10, 3): MXFP8BlockScaling(),
    (12, 0): Float8CurrentScaling(),
}


@pytest.mark.parametrize("cc", DEFAULTS, ids=str)
def test_default_recipe(cc: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw, "capability", lambda device=None: cc)
    assert mz.get_default_recipe() == DEFAULTS[cc]
    with mz.autocast():
        assert current_state().recipe == DEFAULTS[cc]
    with mz.autocast(enabled=False, calibrating=True):
        assert current_state().recipe == DEFAULTS[cc]
    with mz.autocast(enabled=False):
        assert current_state().recipe is None
    with mz.quantized_model_init():
        assert current_state().init_recipe == DEFAULTS[cc]
    assert mz.get_device_compute_capability() == (cc or (0, 0))
    assert quantization.is_non_tn_fp8_gemm_supported() == (cc in ((10, 0), (10, 3)))


@pytest.mark.parametrize("wrong", [MXFP8BlockScaling, 3])
@pytest.mark.parametrize("context", [mz.autocast, mz.fp8_autocast, mz.quantized_model_init])
def test_wrong_recipe(context: Any, wrong: Any) -> None:
    name = "fp8_recipe" if context is mz.fp8_autocast else "recipe"
    with pytest.raises(TypeError, match=rf"recipe is {type(wrong).__name__}: give one of mezzotint.recipe"):
        context(**{name: wrong})
    assert in_force() == OUTSIDE


def test_former_names() -> None:
    group = object()
    with mz.fp8_autocast(True, False, MX, group) as region:
        assert isinstance(region, mz.autocast)
        assert in_force() == (True, False, MX, group, 1)
    with mz.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=CURRENT, fp8_group=None):
        assert in_force() == (False, True, CURRENT, None, 1)
    with mz.fp8_model_init(recipe=MX):
        assert isinstance(MODULES["linear"]().weight, mz.MXFP8Tensor)


# Delayed scaling: a model in plain Python. One direction of one module: numerics.md, section 3, slot by slot.

FLT_MAX = float(np.finfo(np.float32).max)


class Model:
    def __init__(self, slots: int, length: int, top: float, most_recent: bool) -> None:
        self.scale = [1.0] * slots
        self.history = [[0.0] * slots for _ in range(length)]
        self.top, self.most_recent = top, most_recent

    def saw(self, slot: int, amax: float) -> None:
        self.history[0][slot] = max(self.history[0][slot], amax)

    def update(self) -> None:
        for slot in range(len(self.scale)):
            column = [row[slot] for row in self.history]
            last, past = column[0], column[1:]
            if last == 0:
                continue
            amax = last if self.most_recent else max(column)
            for i, value in enumerate([0.0, *past[1:], last] if past else [0.0]):
                self.history[i][slot] = value
            if math.isfinite(amax):
                quotient = float(np.float32(self.top) / np.float32(amax))
                self.scale[slot] = FLT_MAX if math.isinf(quotient) else quotient

    def check(self, scale: torch.Tensor, history: torch.Tensor) -> None:
        assert scale.tolist() == self.scale
        assert history[: len(self.history)].tolist() == self.history
        assert not history[len(self.history) :].any()


def amax_of(x: torch.Tensor) -> float:
    return float(x.detach().float().abs().max())


def models(recipe: Any, gemms: int) -> tuple[Model, Model]:
    backward = 57344.0 if recipe.fp8_format is Format.HYBRID else 448.0
    most_recent = recipe.amax_compute_algo == "most_recent"
    shift = 2.0**-recipe.margin
    return (
        Model(3 * gemms, recipe.amax_history_len, 448.0 * shift, most_recent),
        Model(2 * gemms, recipe.amax_history_len, backward * shift, most_recent),
    )


def check(module: Any, forward: Model, backward: Model) -> None:
    forward.check(module.scale_fwd, module.amax_history_fwd)
    backward.check(module.scale_bwd, module.amax_history_bwd)


def fake(x: torch.Tensor, scale: float, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """FP32 values of x quantized by a scale."""
    top = torch.finfo(dtype).max
    return (x.detach().float() * scale).clamp(-top, top).to(dtype).float() / scale


DELAYED = {
    "max-3": DelayedScaling(amax_history_len=3),
    "max-1": DelayedScaling(amax_history_len=1),
    "most_recent-3": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
    "most_recent-1": DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
    "margin": DelayedScaling(amax_history_len=2, margin=3),
    "negative margin": DelayedScaling(amax_history_len=2, margin=-1),
    "e4m3": DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3),
}
MAGNITUDES = (1.0, 40.0, 0.01, 3.0, 0.0, 7.0, 7.0)


@pytest.mark.parametrize("case", DELAYED)
@pytest.mark.parametrize("calls", [1, 3])
def test_linear_follows_the_model(case: str, calls: int) -> None:
    """Also with several calls in one region, whose maxima are taken together."""
    recipe, module = DELAYED[case], make("linear")
    forward, backward = models(recipe, 1)
    for t, magnitude in enumerate(MAGNITUDES):
        xs = [sample(16, 10 * t + i) * magnitude for i in range(calls)]
        grads = [sample(16, 100 + 10 * t + i, width=OUT) * magnitude * (i + 1) for i in range(calls)]
        outputs = []
        with mz.autocast(recipe=recipe):
            for x in xs:
                outputs.append(module(x.requires_grad_()))
                forward.saw(0, amax_of(x))
                forward.saw(1, amax_of(module.weight))
                check(module, forward, backward)  # seen, and not used yet
        forward.update()
        check(module, forward, backward)
        torch.autograd.backward(outputs, grads)
        for grad in grads:
            backward.saw(0, amax_of(grad))
        backward.update()
        check(module, forward, backward)
    assert module.scale_fwd[2] == module.scale_bwd[1] == 1.0  # output and grad_input: nobody quantized them


@pytest.mark.parametrize("case", ["max-3", "most_recent-3", "margin"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_layernorm_mlp_follows_the_model(case: str, checkpoint: bool) -> None:
    """The maxima of what is inside, nearly, from a computation in FP32 on quantized values; the rest exactly."""
    recipe, module = DELAYED[case], make("layernorm_mlp", checkpoint=checkpoint)
    forward, backward = models(recipe, 2)
    p = {key: value.detach().float() for key, value in module.named_parameters()}
    e5m2 = torch.float8_e5m2
    for t, magnitude in enumerate((1.0, 5.0, 0.3, 1.0)):
        x, dy = sample(16, t), sample(16, 50 + t) * magnitude
        s, g = list(forward.scale), list(backward.scale)
        norm = nn.functional.rms_norm(x.float(), (IN,), p["layer_norm_weight"], 1e-5).to(BF16)
        hidden = nn.functional.linear(fake(norm, s[0]), fake(p["fc1_weight"], s[1]), p["fc1_bias"]).to(BF16)
        hidden = hidden.float().requires_grad_()
        act = nn.functional.silu(hidden[:, :OUT]) * hidden[:, OUT:]
        act.backward((fake(dy, g[2], e5m2) @ fake(p["fc2_weight"], s[4])).to(BF16).float())
        assert hidden.grad is not None
        with mz.autocast(recipe=recipe):
            y = module(x)
            seen = module.amax_history_fwd[0].tolist()
        assert seen == pytest.approx(
            [amax_of(norm), amax_of(p["fc1_weight"]), 0.0, amax_of(act), amax_of(p["fc2_weight"]), 0.0], rel=0.02
        )
        assert (seen[1], seen[4]) == (amax_of(p["fc1_weight"]), amax_of(p["fc2_weight"]))
        for slot, amax in enumerate(seen):
            forward.saw(slot, amax)
        forward.update()
        check(module, forward, backward)
        y.backward(dy)
        (last,) = module.amax_history_bwd[recipe.amax_history_len - 1 : recipe.amax_history_len].tolist()
        assert last == pytest.approx([amax_of(hidden.grad), 0.0, amax_of(dy), 0.0], rel=0.04)
        assert last[2] == amax_of(dy)
        for slot, amax in enumerate(last):
            backward.saw(slot, amax)
        backward.update()
        check(module, forward, backward)


def test_grouped_slots() -> None:
    """Three slots for each group forward, two backward; an empty group saw nothing but its weight."""
    recipe, module = DELAYED["max-3"], make("grouped_linear")
    forward, backward = models(recipe, GROUPS)
    sizes = [10, 0, 30]
    for t in range(3):
        x, dy = sample(40, t).requires_grad_(), sample(40, 20 + t, width=OUT)
        with mz.autocast(recipe=recipe):
            y = module(x, sizes)
        y.backward(dy)
        for i, (part, grad) in enumerate(zip(x.split(sizes), dy.split(sizes), strict=True)):
            forward.saw(3 * i + 1, amax_of(getattr(module, f"weight{i}")))
            if len(part):
                forward.saw(3 * i, amax_of(part))
                backward.saw(2 * i, amax_of(grad))
        forward.update()
        backward.update()
        check(module, forward, backward)


def test_the_scales_of_a_step_come_from_steps_before() -> None:
    """A step a thousand times larger than those before saturates; the next one does not."""
    recipe, module = DelayedScaling(amax_history_len=4), make("linear", bias=False)
    for t, magnitude in enumerate((1.0, 1.0, 1000.0, 1000.0)):
        x, dy = (sample(32, t) * magnitude).requires_grad_(), sample(32, 10 + t, width=OUT) * magnitude
        s, g = module.scale_fwd.tolist(), module.scale_bwd.tolist()
        with mz.autocast(recipe=recipe):
            y = module(x)
        y.backward(dy)
        x_q, w_q, dy_q = fake(x, s[0]), fake(module.weight, s[1]), fake(dy, g[0], torch.float8_e5m2)
        for got, expected in ((y, x_q @ w_q.t()), (x.grad, dy_q @ w_q), (module.weight.grad, dy_q.t() @ x_q)):
            assert got is not None
            torch.testing.assert_close(got.float(), expected, rtol=0.01, atol=0.01 * float(expected.abs().max()))
        saturates = amax_of(y) < 0.1 * amax_of(x.detach().float() @ module.weight.detach().float().t())
        assert saturates == (t == 2)
        module.weight.grad = None


def test_update_is_at_the_end_of_the_outermost_region() -> None:
    recipe, module = DELAYED["max-3"], make("linear")
    start = {name: getattr(module, name).clone() for name in BUFFERS}
    with mz.autocast(enabled=False):
        with mz.autocast(recipe=recipe):
            with mz.autocast(recipe=recipe):
                module(sample())
            assert torch.equal(module.scale_fwd, start["scale_fwd"])
        assert torch.equal(module.scale_fwd, start["scale_fwd"])
        with mz.autocast(recipe=recipe):
            module(sample(seed=1) * 2)
        assert torch.equal(module.scale_fwd, start["scale_fwd"])
    amax = max(amax_of(sample()), amax_of(sample(seed=1) * 2))
    assert module.scale_fwd[0] == np.float32(448.0) / np.float32(amax)
    assert module.amax_history_fwd[:3, 0].tolist() == [0.0, 0.0, amax]  # rolled once


def test_backward_updates_at_once() -> None:
    """Inside of the region already; what forward saw waits for the end."""
    recipe, module = DELAYED["max-3"], make("linear")
    x, dy = sample().requires_grad_(), sample(width=OUT)
    with mz.autocast(recipe=recipe):
        module(x).backward(dy)
        assert module.scale_bwd[0] == np.float32(57344.0) / np.float32(amax_of(dy))
        assert module.amax_history_bwd[:3, 0].tolist() == [0.0, 0.0, amax_of(dy)]
        assert module.scale_fwd.tolist() == [1.0, 1.0, 1.0]
        assert module.amax_history_fwd[:3, 0].tolist() == [amax_of(x), 0.0, 0.0]
    assert module.scale_fwd[0] == np.float32(448.0) / np.float32(amax_of(x))


def test_nothing_changes_where_nothing_ran() -> None:
    recipe, module, idle = DELAYED["max-3"], make("linear"), make("linear")
    step(module, sample(), recipe)
    step(idle, sample(seed=3), recipe)
    before = {name: getattr(idle, name).clone() for name in BUFFERS}
    with mz.autocast(recipe=recipe):
        pass
    with mz.autocast(recipe=recipe):
        module(sample())
    with mz.autocast(recipe=CURRENT):
        idle(sample(seed=4))
    idle(sample(seed=5))
    for name in BUFFERS:
        assert torch.equal(getattr(idle, name), before[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_update_without_gradients(mode: Any) -> None:
    """What was seen is kept for the next update."""
    recipe, module = DELAYED["max-3"], make("linear")
    with mode(), mz.autocast(recipe=recipe):
        module(sample() * 50)
    assert module.scale_fwd.tolist() == [1.0, 1.0, 1.0]
    assert module.amax_history_fwd[:3, 0].tolist() == [amax_of(sample() * 50), 0.0, 0.0]
    step(module, sample(), recipe)
    assert module.amax_history_fwd[:3, 0].tolist() == [0.0, 0.0, amax_of(sample() * 50)]


def test_no_update_while_a_graph_is_captured() -> None:
    recipe, module = DELAYED["max-3"], make("linear")
    with mz.autocast(recipe=recipe, _graph=True):
        module(sample())
    assert module.scale_fwd.tolist() == [1.0, 1.0, 1.0]
    step(module, sample(), recipe)
    assert module.scale_fwd[0] != 1.0


def test_no_update_after_an_exception() -> None:
    recipe, module = DELAYED["max-3"], make("linear")

    def fail() -> None:
        with mz.autocast(recipe=recipe):
            module(sample() * 9)
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert module.scale_fwd.tolist() == [1.0, 1.0, 1.0]
    step(module, sample(), recipe)
    assert module.amax_history_fwd[:3, 0].tolist() == [0.0, 0.0, amax_of(sample() * 9)]


def test_each_module_by_its_own_recipe() -> None:
    """One end of a region updates modules whose histories, margins and rules differ."""
    found = [(recipe, make("linear"), models(recipe, 1)[0]) for recipe in DELAYED.values()]
    for t in range(4):
        with mz.autocast(enabled=False):
            for i, (recipe, module, model) in enumerate(found):
                x = sample(16, 10 * t + i) * (i + 1)
                with mz.autocast(recipe=recipe):
                    module(x)
                model.saw(0, amax_of(x))
                model.saw(1, amax_of(module.weight))
        for _, module, model in found:
            model.update()
            model.check(module.scale_fwd, module.amax_history_fwd)


@pytest.mark.compile
@pytest.mark.parametrize("order", ["eager", "compiled", "compiled between", "eager between"])
@pytest.mark.parametrize("name", ["linear", "layernorm_mlp"])
def test_a_history_that_is_lengthened_again_gets_zeros(name: str, order: str) -> None:
    """Also where graphs, which do not know what was before them, take turns with eager code."""
    module, twin = make(name), make(name)
    graph = torch.compile(module, fullgraph=True, backend="aot_eager")
    between, around = {
        "eager": (module, module),
        "compiled": (graph, graph),
        "compiled between": (graph, module),
        "eager between": (module, graph),
    }[order]
    four, two = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=2)
    for seed, (call, recipe) in enumerate([(around, four)] * 4 + [(between, two), (around, four), (between, two)]):
        x = sample(seed=seed) * (100.0 if seed == 1 else 1.0)
        if recipe is two:
            assert twin.amax_history_fwd[2:4].any()
            assert twin.amax_history_bwd[2:4].any()
        got, expected = step(module, x, recipe, call), step(twin, x, recipe)
        assert_equal(got, expected)
        if recipe is two:
            for history in (module.amax_history_fwd, module.amax_history_bwd):
                assert history[:2].any()
                assert not history[2:].any()
    with mz.autocast(recipe=four):
        module(sample())
        assert not module.fp8_meta["scaling_fwd"].amax_history[2:].any()


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


def only(*wanted: str) -> Callable[[QuantizerRole], Any]:
    """Delayed scaling for these tensors, "input" or "fc2.input"; current scaling for the others."""

    def factory(role: QuantizerRole) -> Any:
        if role.tensor_type in wanted or f"{role.name}.{role.tensor_type}" in wanted:
            return DelayedScalingRequest(amax_history_len=2)
        return CURRENT.quantizer(role)

    return factory


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
    """High precision, and the maxima of this call, not of those before, in the current row; no update."""
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


# Weights that are kept quantized


def test_quantized_model_init_nests() -> None:
    kinds = {
        CURRENT: mz.Float8Tensor,
        DELAYED["max-3"]: mz.Float8Tensor,
        Float8RowwiseScaling(): mz.Float8RowwiseTensor,
        Float8BlockScaling(): mz.Float8BlockwiseQTensor,
        MX: mz.MXFP8Tensor,
        NV: mz.NVFP4Tensor,
    }
    region = mz.quantized_model_init(recipe=MX)
    with mz.quantized_model_init(recipe=CURRENT):
        for recipe, kind in kinds.items():
            with mz.quantized_model_init(recipe=recipe):
                module = MODULES["layernorm_mlp"]()
                assert type(module.fc1_weight.data) is kind
                assert type(module.fc2_weight.data) is kind
                assert not isinstance(module.layer_norm_weight, mz.QuantizedTensor)
                assert not isinstance(module.fc1_bias, mz.QuantizedTensor)
        with mz.quantized_model_init(enabled=False):
            assert type(make("linear").weight) is nn.Parameter
            with region, region:  # the same one twice
                assert isinstance(MODULES["linear"]().weight, mz.MXFP8Tensor)
            assert type(make("linear").weight) is nn.Parameter
        assert isinstance(MODULES["linear"]().weight, mz.Float8Tensor)
    assert type(make("linear").weight) is nn.Parameter

    def fail() -> None:
        with mz.quantized_model_init(recipe=MX):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert type(make("linear").weight) is nn.Parameter


def test_quantized_model_init_is_no_autocast() -> None:
    with mz.quantized_model_init(recipe=MX):
        module = MODULES["linear"]()
        assert not current_state().enabled
    with mz.autocast(recipe=MX):
        assert not isinstance(MODULES["linear"]().weight, mz.QuantizedTensor)
    x = sample()
    expected = nn.functional.linear(x, module.weight.dequantize(), module.bias)
    torch.testing.assert_close(module(x), expected, rtol=0.02, atol=0.02)


def test_initial_values_in_high_precision() -> None:
    torch.manual_seed(0)
    plain = MODULES["linear"]()
    torch.manual_seed(0)
    with mz.quantized_model_init(recipe=MX, preserve_high_precision_init_val=True):
        module = MODULES["linear"]()
    kept = module.weight.get_high_precision_init_val()
    assert torch.equal(kept, plain.weight)
    assert kept.device.type == "cpu"
    other = copy.deepcopy(module)
    other.weight.clear_high_precision_init_val()
    assert other.weight.get_high_precision_init_val() is None
    assert torch.equal(module.weight.get_high_precision_init_val(), plain.weight)
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    with mz.quantized_model_init(recipe=MX):
        assert not hasattr(MODULES["linear"]().weight, "get_high_precision_init_val")


def test_resetting_a_quantized_weight_keeps_what_it_had() -> None:
    with mz.quantized_model_init(recipe=MX, preserve_high_precision_init_val=True):
        module = MODULES["linear"]()
    old = module.weight.get_high_precision_init_val()
    module.weight.requires_grad_(False)
    module.weight.tensor_model_parallel = True
    module.reset_parameters()
    assert isinstance(module.weight, mz.MXFP8Tensor)
    assert not module.weight.requires_grad
    assert module.weight.tensor_model_parallel
    assert not torch.equal(module.weight.get_high_precision_init_val(), old)


# What is available

GATES = {
    "is_fp8_available": "float8",
    "is_mxfp8_available": "mxfp8",
    "is_fp8_block_scaling_available": "float8_block",
    "is_fp8_rowwise_available": "float8_rowwise",
    "is_nvfp4_available": "nvfp4",
}
HOW = {
    None: dict.fromkeys(GATES, "reference on cpu: plain torch"),
    (8, 0): dict.fromkeys(GATES, "emulated on sm_80: exact values in BF16"),
    (9, 0): {
        "is_fp8_available": "native on sm_90: torch._scaled_mm",
        "is_mxfp8_available": "emulated on sm_90: exact values in BF16",
        "is_fp8_block_scaling_available": "native on sm_90: cuBLAS 1x128",
        "is_fp8_rowwise_available": "native on sm_90: torch._scaled_mm",
        "is_nvfp4_available": "emulated on sm_90: exact values in BF16",
    },
    (10, 0): {
        "is_fp8_available": "native on sm_100",
        "is_mxfp8_available": "native on sm_100: cuBLAS 1x32",
        "is_fp8_block_scaling_available": "emulated on sm_100",
        "is_fp8_rowwise_available": "native on sm_100",
        "is_nvfp4_available": "native on sm_100: cuBLAS 1x16",
    },
}


@pytest.mark.parametrize("cc", HOW, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str, cc: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw, "capability", lambda device=None: cc)
    monkeypatch.setattr(hw, "cuda_version", lambda: (13, 0))
    hw.gemm_backend.cache_clear()
    available = getattr(mz, gate)
    found = available(), available(return_reason=True)
    hw.gemm_backend.cache_clear()
    assert found[0] is True
    runs, reason = found[1]
    assert runs is True
    assert reason.startswith(HOW[cc][gate])
    assert available.__doc__.startswith(f"Whether {GATES[gate]} runs here")


def test_support_is_availability_with_its_reason() -> None:
    for gate in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"):
        support = getattr(quantization, f"check_{gate}_support")
        assert support() == getattr(quantization, f"is_{gate}_available")(return_reason=True)


def test_bf16_is_available() -> None:
    assert mz.is_bf16_available() is True
    assert mz.is_bf16_available(return_reason=True)[0] is True


def test_alignment() -> None:
    sizes = {
        DelayedScaling(): 16,
        CURRENT: 16,
        Float8RowwiseScaling(): 16,
        Float8BlockScaling(): 16,
        MX: 32,
        NV: 128,
        CustomRecipe(only()): 128,
        CustomRecipe(only(), quantization_alignment=48): 48,
    }
    for recipe, size in sizes.items():
        assert mz.get_align_size_for_quantization(recipe) == size


@pytest.mark.parametrize(
    ("fp8_format", "fprop", "is_e5m2"),
    [
        (Format.E4M3, True, False),
        (Format.E4M3, False, False),
        (Format.HYBRID, True, False),
        (Format.HYBRID, False, True),
    ],
)
def test_element_types(fp8_format: Format, fprop: bool, is_e5m2: bool) -> None:
    for cls in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling):
        recipe = cls(fp8_format=fp8_format)
        dtype = DType.kFloat8E5M2 if is_e5m2 else DType.kFloat8E4M3
        assert quantization.get_fp8_te_dtype(recipe, fprop) == quantization.get_fp8_te_dtype(recipe, fprop_tensor=fprop)
        assert quantization.get_fp8_te_dtype(recipe, fprop) is dtype
        torch_dtype = quantization.get_fp8_torch_dtype(recipe, fprop)
        assert torch_dtype is (torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn)
        assert quantization.get_fp8_max(recipe, fprop) == torch.finfo(torch_dtype).max
    assert quantization.get_fp8_te_dtype(DelayedScaling()) is DType.kFloat8E4M3
