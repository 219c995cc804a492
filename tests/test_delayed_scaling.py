"""Delayed scaling from step to step, against a model in plain Python."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint.recipe import DelayedScaling, Format
from tests.delayed import CURRENT, DELAYED, amax_of
from tests.recipes import GROUPS, IN, OUT, assert_equal, make, sample, step
from tests.recipes import STATE as BUFFERS

BF16 = torch.bfloat16


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


MAGNITUDES = (1.0, 40.0, 0.01, 3.0, 0.0, 7.0, 7.0)


@pytest.mark.parametrize("case", DELAYED)
@pytest.mark.parametrize("calls", [1, 3])
def test_linear_follows_the_model(case: str, calls: int) -> None:
    """Also with several calls in one region, whose amaxes are taken together."""
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
    """The amaxes of what is inside, nearly, from a computation in FP32 on quantized values; the rest exactly."""
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


@pytest.mark.cover(0)
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
