"""ops.GroupedLinear with one parameter for all groups, against one with a parameter for each: the same bits."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import ops
from tests.recipes import RECIPES, assert_equal, gradient, sample

GROUPS, WIDTH, HIDDEN, ROWS = 2, 64, 48, [11, 29]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
FORMS = {
    "both": {"single_grouped_weight": True, "single_grouped_bias": True},
    "weight": {"single_grouped_weight": True},
    "bias": {"single_grouped_bias": True},
}


def joined(found: dict[str, Any]) -> dict[str, Any]:
    """With those of all groups as one, whatever form they came in."""
    made = {name: value for name, value in found.items() if not name[-1].isdigit()}
    for name in [name for name in found if name.endswith("0")]:
        made[name[:-1]] = torch.stack([found[f"{name[:-1]}{group}"] for group in range(GROUPS)])
    return {name: made[name] for name in sorted(made)}


def alike(*pair: Any) -> tuple[Any, ...]:
    """With the parameters of the first, which has one for each."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in pair[0].parameters():
            parameter.normal_()
    for other in pair[1:]:
        other.load_state_dict(pair[0].state_dict())
    return pair


def step(made: Any, recipe: Any, *extra: Any, call: Any = None) -> dict[str, Any]:
    """Forward and backward: output and gradients by name."""
    x = sample(sum(ROWS)).requires_grad_()
    extra = tuple([e.detach().requires_grad_() if isinstance(e, torch.Tensor) else e for e in extra])
    torch.manual_seed(1)
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        y = (made if call is None else call)(x, *extra)
    gradient(y).backward()
    given = [e.grad for e in extra if isinstance(e, torch.Tensor)]
    found = {"y": y.detach(), "x": x.grad, **{f"extra {'abc'[i]}": grad for i, grad in enumerate(given)}}
    return {**found, **{name: parameter.grad for name, parameter in made.named_parameters()}}


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", ["none", "delayed", "nvfp4"])
def test_the_bits_of_a_parameter_for_each(recipe: str, form: str, scaled: bool) -> None:
    made = [{}, FORMS[form]]
    each, op = alike(*[ops.GroupedLinear(GROUPS, WIDTH, HIDDEN, scale_bias=scaled, **f, **OPTIONS) for f in made])
    extra = (ROWS, torch.rand(sum(ROWS))) if scaled else (ROWS,)
    assert_equal(joined(step(op, RECIPES[recipe], *extra)), joined(step(each, RECIPES[recipe], *extra)))


def test_weights_that_are_joined_later() -> None:
    each, op = alike(*[ops.GroupedLinear(GROUPS, WIDTH, HIDDEN, **OPTIONS) for _ in range(2)])
    op.make_grouped_weights()
    assert [name for name, _ in op.named_parameters()] == ["weight", "bias0", "bias1"]
    assert op.has_bias
    assert_equal(joined(step(op, RECIPES["mxfp8"], ROWS)), joined(step(each, RECIPES["mxfp8"], ROWS)))


def experts(**form: Any) -> ops.Sequential:
    return ops.Sequential(
        ops.GroupedLinear(GROUPS, WIDTH, 2 * HIDDEN, **form, **OPTIONS),
        ops.SwiGLU(),
        ops.GroupedLinear(GROUPS, HIDDEN, WIDTH, **form, **OPTIONS),
    )


@pytest.mark.compile
def test_fused_with_an_activation() -> None:
    """In a pipeline, eager and compiled; the state dict of the other form has loaded."""
    each, one, other = alike(experts(), experts(**FORMS["both"]), experts(**FORMS["both"]))
    assert list(dict(one.named_parameters())) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    expected = joined(step(each, RECIPES["mxfp8"], ROWS, ROWS))
    assert_equal(joined(step(one, RECIPES["mxfp8"], ROWS, ROWS)), expected)
    assert_equal(joined(step(other, RECIPES["mxfp8"], ROWS, ROWS, call=compiled)), expected)
    assert counter.frame_count == 1


def test_main_grad_and_delayed_gradients() -> None:
    options = {"accumulate_into_main_grad": True, "delay_wgrad_compute": True, **OPTIONS}
    found = []
    for op in alike(*[ops.GroupedLinear(GROUPS, WIDTH, HIDDEN, **form, **options) for form in ({}, FORMS["weight"])]):
        for weight in op._group_parameters()[0]:
            weight.main_grad = torch.ones(weight.shape)
        step(op, RECIPES["mxfp8"], ROWS)
        assert all(bool((weight.main_grad == 1).all()) for weight in op._group_parameters()[0])
        op.backward_dw()
        found.append(joined({name: p.main_grad for name, p in op.named_parameters() if "weight" in name}))
    assert_equal(*found)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_quantized(device: str) -> None:
    """From the meta device initial values are drawn in the first run."""
    found = []
    for form in ({}, FORMS["both"]):
        with mz.quantized_model_init(recipe=RECIPES["mxfp8"]):
            torch.manual_seed(0)
            op = ops.GroupedLinear(GROUPS, WIDTH, HIDDEN, **form, **{**OPTIONS, "device": device})
        found.append(joined(step(op, RECIPES["mxfp8"], ROWS)))
        assert not form or type(op.weight) is mz.GroupedTensor
    assert_equal(*found)
