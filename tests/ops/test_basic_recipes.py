"""Every basic operation under every recipe: between linears, and with a quantized input."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from mezzotint.ops import basic
from tests.ops.chains import OPTIONS, OneByOne, linear, only, plain, spread, step
from tests.ops.formulas import FORMULAS, SCALED, draw, make
from tests.recipes import RECIPES, VARIANTS, assert_equal

over_recipes = pytest.mark.parametrize("recipe", RECIPES)
over_quantized = pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])


ALL: dict[str, Callable[[], Any]] = {
    **{name: (lambda name=name: make(name)) for name in (*FORMULAS, *SCALED)},
    **{f"{name} cached": (lambda name=name: make(name, cache_quantized_input=True)) for name in ("GELU", "SwiGLU")},
    **{f"{name} interleaved": (lambda name=name: make(name, glu_interleave_size=8)) for name in ("SwiGLU",)},
    "LayerNorm": lambda: ops.LayerNorm(64, **OPTIONS),
    "RMSNorm": lambda: ops.RMSNorm(64, zero_centered_gamma=True, **OPTIONS),
    "LayerNorm of two": lambda: ops.LayerNorm((8, 64), **OPTIONS),
    "L2Normalization": ops.L2Normalization,
    "Bias": lambda: ops.Bias(64, **OPTIONS),
    "ConstantScale": lambda: ops.ConstantScale(0.3),
    "Dropout": lambda: ops.Dropout(0.3),
    "Identity": ops.Identity,
    "Reshape": lambda: ops.Reshape((-1, 32)),
    "AddExtraInput": ops.AddExtraInput,
    "MakeExtraOutput": ops.MakeExtraOutput,
    "Quantize": ops.Quantize,
    "BasicLinear": lambda: ops.BasicLinear(64, 48, **OPTIONS),
    "GroupedLinear": lambda: ops.GroupedLinear(3, 64, 48, **OPTIONS),
    "GroupedLinear scaled": lambda: ops.GroupedLinear(3, 64, 48, scale_bias=True, **OPTIONS),
    "AllGather": ops.AllGather,
    "AllReduce": ops.AllReduce,
    "ReduceScatter": ops.ReduceScatter,
}


def extra_of(op: Any) -> tuple[Any, ...]:
    """Extra inputs for an input (3, 8, 64)."""
    scales = draw((3, 8), torch.float32, 5).abs()
    if isinstance(op, ops.GroupedLinear):
        return ([7, 0, 17], scales)[: op.num_extra_inputs]
    if isinstance(op, ops.AddExtraInput):
        return (draw((3, 8, 64), seed=5),)
    return (scales,) if op.num_extra_inputs else ()


def steps(chosen: Any) -> range:
    """Delayed scaling has learnt something in the second one."""
    return range(2 if isinstance(chosen, mz.recipe.DelayedScaling | mz.recipe.CustomRecipe) else 1)


def test_every_basic_operation_is_here() -> None:
    assert {type(make_op()).__name__ for make_op in ALL.values()} == set(basic.__all__)


@pytest.mark.cover(1)
@over_recipes
@pytest.mark.parametrize("name", [name for name in ALL if name != "Quantize"])
def test_between_linears(name: str, recipe: str) -> None:
    """What it hands over, forward and backward, is what its neighbours would have made of it: bit for bit."""
    op = spread(ALL[name]())
    x = draw((3, 8, 64))
    width = op(x, *extra_of(op))
    width = (width[0] if isinstance(width, tuple) else width).shape[-1]
    chain = OneByOne([linear(64, 64, bias=False), op, linear(width, 32, bias=False)])
    pipeline = ops.Sequential(*copy.deepcopy(chain))
    for seed in steps(RECIPES[recipe]):
        x = draw((3, 8, 64), seed=seed)
        with only():
            got = step(pipeline, x, extra_of(op), RECIPES[recipe])
        assert_equal(got, step(chain, x, extra_of(op), RECIPES[recipe]))


@over_quantized
@pytest.mark.parametrize("name", [name for name in ALL if name != "Quantize"])
def test_with_a_quantized_input(name: str, recipe: str) -> None:
    """As with what it stands for."""
    op = spread(ALL[name]())
    alone, quantize = copy.deepcopy(op), ops.Quantize()
    x, chosen = draw((3, 8, 64)), RECIPES[recipe]
    with mz.autocast(recipe=chosen):
        seen = plain(copy.deepcopy(quantize)(x))
    got = step(ops.Sequential(quantize, op), x, extra_of(op), chosen)
    if isinstance(op, ops.BasicLinear):  # it multiplies the quantized input as it is
        want = step(alone, x, (), chosen)
        if recipe == "delayed":  # the maximum of the input is the affair of who quantized it
            got["1.amax_history_fwd"], want["amax_history_fwd"] = got["1.scale_fwd"], got["1.scale_fwd"]
            want["scale_fwd"] = got["1.scale_fwd"]
    else:
        want = step(alone, seen, extra_of(op), chosen)
    own = {key.removeprefix("1."): value for key, value in got.items() if not key.startswith("0.")}
    assert_equal(own, want)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["GELU", "ScaledSwiGLU", "RMSNorm", "Bias", "BasicLinear"])
def test_variants_between_linears(name: str, variant: str) -> None:
    op = spread(ALL[name]())
    width = op(draw((3, 8, 64)), *extra_of(op)).shape[-1]
    chain = OneByOne([linear(64, 64, bias=False), op, linear(width, 32, bias=False)])
    pipeline = ops.Sequential(*copy.deepcopy(chain))
    for seed in steps(VARIANTS[variant]):
        x = draw((3, 8, 64), seed=seed)
        with only():
            got = step(pipeline, x, extra_of(op), VARIANTS[variant])
        assert_equal(got, step(chain, x, extra_of(op), VARIANTS[variant]))
