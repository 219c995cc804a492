"""Every fused operation equals its operations one by one: bit for bit, forward, gradients, delayed scaling's state.

Where the bias is added inside the GEMM the result is rounded once instead of twice: it is compared to within one unit
in the last place, and all that follows from it bit for bit with what follows from the same numbers.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from mezzotint.ops import fused
from mezzotint.ops.fused.backward_activation_bias import fuse_backward_activation_bias
from mezzotint.ops.fused.backward_add_rmsnorm import fuse_backward_add_rmsnorm
from mezzotint.ops.fused.backward_linear import fuse_backward_linear_add, fuse_backward_linear_scale
from mezzotint.ops.fused.forward_linear_bias import (
    fuse_forward_linear_bias_add,
    fuse_forward_linear_scale_add,
)
from mezzotint.ops.fused.grouped_mlp import fuse_grouped_mlp
from tests.ops.chains import HIDDEN, OPTIONS, WIDTH, OneByOne, Result, only, spread, step
from tests.recipes import RECIPES, VARIANTS, assert_equal, gradient, sample

# Those, too, whose backward reads other tensors than forward, or which have state that is not the recipe's.
OTHERS = ("rowwise-wgrad", "current-high_precision", "mxfp8-dequantized", "nvfp4-row-scaled", "custom-delayed")
ALL = RECIPES | {name: VARIANTS[name] for name in OTHERS}
GROUPS = 3


@dataclass(frozen=True)
class Case:
    """A fusion whose arithmetic is that of its operations, WIDTH wide at both ends."""

    fusion: Any
    kind: type
    make: Callable[[], list[Any]]
    extra: Callable[[tuple[int, ...]], tuple[Any, ...]] = lambda leading: ()
    forward: bool = False
    backward: bool = False
    is_quantized: bool = False  # only where there is a recipe
    is_joint: bool = False  # not where backward reads what is not quantized


def basic_linear(in_features: int = WIDTH, out_features: int = WIDTH) -> ops.BasicLinear:
    return ops.BasicLinear(in_features, out_features, **OPTIONS)


def residual(leading: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return (sample(math.prod(leading), 9).view(*leading, WIDTH),)


def routing(leading: tuple[int, ...]) -> list[int]:
    rows = math.prod(leading)
    return [rows // 3, 0, rows - rows // 3]


def scaled_routing(leading: tuple[int, ...]) -> tuple[Any, ...]:
    scales = torch.rand(leading, generator=torch.Generator().manual_seed(3))
    return routing(leading), scales, routing(leading)


def activation_bias(activation: Callable[[], Any], width: int) -> Case:
    """Of a linear, so that it is handed the gradient quantized."""

    def make() -> list[Any]:
        return [basic_linear(WIDTH, width), ops.Bias(width, **OPTIONS), activation(), basic_linear(HIDDEN)]

    kind = fused.BackwardActivationBias
    return Case(fuse_backward_activation_bias, kind, make, backward=True, is_quantized=True)


def grouped_mlp(activation: Callable[[], Any], width: int, bias: bool = True) -> Case:
    def make() -> list[Any]:
        fc1 = ops.GroupedLinear(GROUPS, WIDTH, width, bias=bias, **OPTIONS)
        return [fc1, activation(), ops.GroupedLinear(GROUPS, HIDDEN, WIDTH, bias=bias, **OPTIONS)]

    extra = scaled_routing if activation().num_extra_inputs else lambda leading: (routing(leading), routing(leading))
    return Case(fuse_grouped_mlp, fused.GroupedMLP, make, extra, True, True, is_quantized=True, is_joint=True)


CASES: dict[str, Case] = {
    "linear+scale+add": Case(
        fuse_forward_linear_scale_add,
        fused.ForwardLinearScaleAdd,
        lambda: [basic_linear(), ops.ConstantScale(0.3), ops.AddExtraInput()],
        residual,
        forward=True,
    ),
    **{
        f"linear+add{' in place' * in_place}": Case(
            fuse_forward_linear_bias_add,
            fused.ForwardLinearBiasAdd,
            lambda in_place=in_place: [basic_linear(), ops.AddExtraInput(in_place=in_place)],
            residual,
            forward=True,
        )
        for in_place in (False, True)
    },
    "backward add+linear": Case(
        fuse_backward_linear_add,
        fused.BackwardLinearAdd,
        lambda: [ops.MakeExtraOutput(in_place=True), basic_linear()],
        backward=True,
    ),
    "backward linear+scale": Case(
        fuse_backward_linear_scale,
        fused.BackwardLinearScale,
        lambda: [basic_linear(), ops.ConstantScale(0.3)],
        backward=True,
    ),
    "backward bias+gelu": activation_bias(ops.GELU, HIDDEN),
    "backward bias+swiglu": activation_bias(ops.SwiGLU, 2 * HIDDEN),
    "backward bias+swiglu interleaved": activation_bias(lambda: ops.SwiGLU(glu_interleave_size=8), 2 * HIDDEN),
    "backward bias+silu cached": activation_bias(lambda: ops.SiLU(cache_quantized_input=True), HIDDEN),
    "backward add+rmsnorm": Case(
        fuse_backward_add_rmsnorm,
        fused.BackwardAddRMSNorm,
        lambda: [ops.MakeExtraOutput(), ops.RMSNorm(WIDTH, **OPTIONS)],
        backward=True,
    ),
    "backward add+layernorm": Case(
        fuse_backward_add_rmsnorm,
        fused.BackwardAddRMSNorm,
        lambda: [ops.MakeExtraOutput(), ops.LayerNorm((1, WIDTH), zero_centered_gamma=True, **OPTIONS)],
        backward=True,
    ),
    "grouped mlp gelu": grouped_mlp(ops.GELU, HIDDEN),
    "grouped mlp swiglu": grouped_mlp(ops.SwiGLU, 2 * HIDDEN, bias=False),
    "grouped mlp scaled swiglu": grouped_mlp(ops.ScaledSwiGLU, 2 * HIDDEN),
}
over_cases = pytest.mark.parametrize("name", CASES)
over_some = pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8", "rowwise-wgrad"])


def chain_of(name: str, inside: bool) -> ops.Sequential:
    """The case alone, or between linears that want quantized tensors of it."""
    parts = CASES[name].make()
    if inside:
        parts = [basic_linear(), *parts, basic_linear(WIDTH, 32)]
    return spread(ops.Sequential(*parts))


def groups_of(chain: ops.Sequential) -> tuple[list[Any], list[Any]]:
    """Forward and backward, as the last run had them."""
    (fuser,) = chain._module_groups
    return fuser._forward_ops, fuser._backward_ops[::-1]


def is_used(case: Case, recipe: Any) -> bool:
    if recipe is None:
        return not case.is_quantized
    return not (case.is_joint and (recipe.override() is not None or recipe.keeps_wgrad()))


def check(
    name: str,
    recipe: str,
    leading: tuple[int, ...] = (4, 6, 1),
    inside: bool = True,
    frozen: Sequence[str] = (),
    input_grad: bool = True,
    steps: int | None = None,
) -> None:
    case, chosen = CASES[name], ALL[recipe]
    together = chain_of(name, inside)
    for key, parameter in together.named_parameters():
        parameter.requires_grad_(key not in frozen)
    apart = copy.deepcopy(together)
    # Delayed scaling has learnt something in the second step.
    for seed in range(steps or (2 if recipe in ("none", "delayed", "custom-delayed") else 1)):
        x = sample(math.prod(leading), seed).view(*leading, WIDTH) * (1 + seed)
        results: list[Result] = []
        for chain, fusions in ((together, (case.fusion,)), (apart, ())):
            with only(*fusions):
                results.append(step(chain, x, case.extra(leading), chosen, input_grad=input_grad))
        assert_equal(*results)
    forward, backward = groups_of(together)
    for groups, wanted in ((forward, case.forward), (backward, case.backward)):
        used = any(isinstance(op, case.kind) for op, _ in groups)
        assert used == (wanted and is_used(case, chosen))
    assert not any(op.is_fused_op for groups in groups_of(apart) for op, _ in groups)


@pytest.mark.parametrize("recipe", ALL)
@over_cases
def test_fused_is_one_by_one(name: str, recipe: str) -> None:
    check(name, recipe)


@over_some
@over_cases
def test_alone_in_any_shape(name: str, recipe: str) -> None:
    for leading in ((24, 1), (0, 1), (1, 1), (2, 0, 3, 1)):
        check(name, recipe, leading, inside=False, steps=1)


@pytest.mark.cover(1)
@over_some
@over_cases
def test_frozen_parameters(name: str, recipe: str) -> None:
    """Each alone, those of experts together."""
    keys = [key for key, _ in chain_of(name, True).named_parameters()]
    for kind in sorted({key.rstrip("0123456789") for key in keys}):
        check(name, recipe, (24, 1), frozen=[key for key in keys if key.startswith(kind)], steps=1)


@over_some
@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["grouped mlp gelu", "grouped mlp scaled swiglu"])
def test_frozen_experts(name: str, frozen: str, recipe: str) -> None:
    """Of an input that needs no gradient: where only biases are trained there is no product in backward."""
    keys = [key for key, _ in chain_of(name, False).named_parameters() if key.startswith(f"0.{frozen}")]
    check(name, recipe, inside=False, frozen=keys, input_grad=False)


@pytest.mark.cover(1)
@over_some
@over_cases
def test_backward_ends_at_any_operation(name: str, recipe: str) -> None:
    """Where it ends inside of what is fused it runs operation by operation."""
    case, chosen, leading = CASES[name], ALL[recipe], (4, 6, 1)
    x = sample(24).view(*leading, WIDTH)
    for extra_grad in (False, True) if case.extra(leading) else (False,):
        for start in range(len(chain_of(name, True))):
            together = chain_of(name, True)
            for place, op in enumerate(together):
                op.requires_grad_(place >= start)
            apart = copy.deepcopy(together)
            results = []
            for chain, fusions in ((together, (case.fusion,)), (apart, ())):
                with only(*fusions):
                    made = step(chain, x, case.extra(leading), chosen, input_grad=False, extra_grad=extra_grad)
                    results.append(made)
            assert_equal(*results)
            first = next(i for i, op in enumerate(together) if needs_grad(op, extra_grad))
            assert all(not places[0] < first <= places[-1] for _, places in groups_of(together)[1])


def needs_grad(op: Any, extra_grad: bool) -> bool:
    takes = isinstance(op, ops.AddExtraInput | ops.ScaledSwiGLU) and extra_grad
    return takes or any(parameter.requires_grad for parameter in op.parameters())


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
@over_cases
def test_second_backward(name: str, recipe: str) -> None:
    """Of a graph that is kept: the same gradients."""
    case, leading = CASES[name], (4, 6, 1)
    chain = chain_of(name, True)
    x = sample(24).view(*leading, WIDTH).requires_grad_()
    with only(case.fusion), mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        made = chain(x, *case.extra(leading))
    loss = sum(gradient(y) for y in (made if isinstance(made, tuple) else (made,)))
    inputs = (x, *chain.parameters())
    first = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, inputs, allow_unused=True)
    assert_equal(dict(enumerate(second)), dict(enumerate(first)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["linear+scale+add", "linear+add", "linear+add in place"])
def test_a_quantized_extra_input(name: str) -> None:
    """It counts as what it stands for."""
    case, chain = CASES[name], chain_of(name, False)
    extra = mz.MXFP8Quantizer(mz.DType.kFloat8E4M3).quantize(sample(24, 9))
    with only(case.fusion):
        assert torch.equal(chain(sample(24), extra), chain(sample(24), extra.dequantize()))


# With a bias, which is added before the product is rounded


def unit(x: torch.Tensor) -> torch.Tensor:
    """In the last place of x."""
    return torch.exp2(torch.frexp(x.float())[1] - 1.0) * torch.finfo(x.dtype).eps


@pytest.mark.parametrize("recipe", ALL)
def test_linear_bias(recipe: str) -> None:
    """round(x · Wᵀ + b) where the operations give round(round(x · Wᵀ) + b).

    Both are within half a unit of what they round, so they are at most one apart: a unit of the largest number that was
    rounded, as the sum may be much smaller than the product. Gradients do not depend on the output. What would
    quantize it further on may make more of the difference, so it is compared here, where it comes about.
    """
    together = spread(ops.Sequential(ops.Linear(WIDTH, HIDDEN, **OPTIONS)))
    apart, product = copy.deepcopy(together), copy.deepcopy(together[0].basic_ops[0])
    for seed in range(2):
        x = sample(24, seed).view(4, 6, WIDTH)
        got = step(together, x, (), ALL[recipe])
        with only():
            want = step(apart, x, (), ALL[recipe])
        exact = step(product, x, (), ALL[recipe])["output 0"]
        largest = torch.stack([y.abs() for y in (got["output 0"], want["output 0"], exact)]).amax(0)
        difference = (got["output 0"].float() - want["output 0"].float()).abs()
        assert (difference <= unit(largest)).all()
        assert difference.any()
        assert_equal(got, want, but=("output 0",))
    (op, places), *rest = groups_of(together)[0]
    assert isinstance(op, fused.ForwardLinearBiasActivation)
    assert places == (0, 1)
    assert not rest


BIASED: dict[str, tuple[type, Callable[[], list[Any]], int]] = {
    "gelu": (fused.ForwardLinearBiasActivation, lambda: [ops.GELU()], HIDDEN),
    "swiglu": (fused.ForwardLinearBiasActivation, lambda: [ops.SwiGLU()], 2 * HIDDEN),
    "interleaved": (
        fused.ForwardLinearBiasActivation,
        lambda: [ops.ClampedSwiGLU(limit=1.0, glu_interleave_size=8)],
        2 * HIDDEN,
    ),
    "cached": (fused.ForwardLinearBiasActivation, lambda: [ops.SReLU(cache_quantized_input=True)], HIDDEN),
    "nothing": (fused.ForwardLinearBiasActivation, lambda: [], HIDDEN),
    "add": (fused.ForwardLinearBiasAdd, lambda: [ops.AddExtraInput()], HIDDEN),
    "add in place": (fused.ForwardLinearBiasAdd, lambda: [ops.AddExtraInput(in_place=True)], HIDDEN),
}


def check_biased(name: str, recipe: str, leading: tuple[int, ...], input_grad: bool = True, first: int = 0) -> None:
    kind, behind, width = BIASED[name]
    parts = [ops.Linear(WIDTH, width, **OPTIONS), *behind(), basic_linear(HIDDEN, 32)]
    together = spread(ops.Sequential(*parts))
    for place, op in enumerate(together):
        op.requires_grad_(place >= first)
    one_by_one = OneByOne(copy.deepcopy(list(together)))
    extra = (sample(math.prod(leading), 9, width=HIDDEN).view(*leading, HIDDEN),) if "add" in name else ()
    for seed in range(2 if recipe in ("none", "delayed", "custom-delayed") else 1):
        x = sample(math.prod(leading), seed).view(*leading, WIDTH)
        got = step(together, x, extra, ALL[recipe], input_grad=input_grad)
        assert_equal(got, step(one_by_one, x, extra, ALL[recipe], input_grad=input_grad))
    op, places = groups_of(together)[0][0]
    assert isinstance(op, kind)
    assert places == tuple(range(1 + len(parts) - 1))[: len(places)]
    assert len(places) == len(parts)  # the linear is two of them, the last one stands for itself


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("name", BIASED)
def test_linear_bias_and_what_follows(name: str, recipe: str) -> None:
    """What comes behind gets the numbers that linear and bias give without it, and does what it does alone."""
    check_biased(name, recipe, (4, 6))


@over_some
@pytest.mark.parametrize("name", BIASED)
def test_linear_bias_and_what_follows_in_any_shape(name: str, recipe: str) -> None:
    for leading in ((0,), (1,), (2, 0, 3)):
        check_biased(name, recipe, leading)


@over_some
@pytest.mark.parametrize("name", BIASED)
def test_linear_bias_and_what_follows_without_gradients(name: str, recipe: str) -> None:
    """Of the input, and of the linear."""
    for first in (0, 1):
        check_biased(name, recipe, (24,), input_grad=False, first=first)


def test_frozen_bias_alone() -> None:
    for frozen in ("weight", "bias"):
        chain = spread(ops.Sequential(ops.Linear(WIDTH, HIDDEN, **OPTIONS), ops.GELU(), basic_linear(HIDDEN, 32)))
        getattr(chain[0], frozen).requires_grad_(False)
        apart = OneByOne(copy.deepcopy(list(chain)))
        for recipe in ("none", "delayed", "mxfp8"):
            got = step(chain, sample(24), (), RECIPES[recipe], input_grad=False)
            assert_equal(got, step(apart, sample(24), (), RECIPES[recipe], input_grad=False))


# What is refused is refused by the fused operation, too


def test_what_does_not_fit() -> None:
    for parts, extra, message in (
        (
            [basic_linear(), ops.ConstantScale(0.3), ops.AddExtraInput()],
            (sample(5),),
            r"\(5, 64\), the input \(4, 64\)",
        ),
        ([basic_linear(), ops.AddExtraInput()], (sample(5),), r"\(5, 64\), the input \(4, 64\)"),
        ([ops.Linear(WIDTH, 47, **OPTIONS), ops.SwiGLU()], (), r"\(4, 47\): .* must be even"),
        ([ops.Linear(32, WIDTH, **OPTIONS), ops.SwiGLU()], (), r"\(4, 64\): its last dimension must be 32"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.Sequential(*parts)(sample(4), *extra)


@pytest.mark.parametrize("fusions", [(), (fuse_grouped_mlp,)], ids=["apart", "fused"])
def test_grouped_mlp_refuses_what_does_not_fit(fusions: tuple[Any, ...]) -> None:
    def grouped(in_features: int, out_features: int, groups: int = 2) -> ops.GroupedLinear:
        return ops.GroupedLinear(groups, in_features, out_features, **OPTIONS)

    scales, two = torch.ones(4), [1, 3]
    for parts, extra, message in (
        ([grouped(64, 96), ops.SwiGLU(), grouped(40, 64)], (two, two), r"\(4, 48\): its last dimension must be 40"),
        ([grouped(64, 95), ops.SwiGLU(), grouped(47, 64)], (two, two), r"\(4, 95\): .* must be even"),
        ([grouped(64, 96), ops.SwiGLU(), grouped(48, 64)], (two, [2, 3]), "adds up to 5"),
        (
            [grouped(64, 96), ops.ScaledSwiGLU(), grouped(48, 64)],
            (two, scales[:3], two),
            r"the scales have shape \(3,\): .* \(4,\)",
        ),
    ):
        with only(*fusions), mz.autocast(recipe=RECIPES["mxfp8"]), pytest.raises(ValueError, match=message):
            spread(ops.Sequential(*parts))(sample(4), *extra)


def test_which_are_left_alone() -> None:
    """A grouped MLP whose halves do not belong together; an activation with scales behind a bias."""
    for parts, extra in (
        (
            [
                ops.GroupedLinear(2, WIDTH, HIDDEN, **OPTIONS),
                ops.GELU(cache_quantized_input=True),
                ops.GroupedLinear(2, HIDDEN, WIDTH, **OPTIONS),
            ],
            ([1, 3], [1, 3]),
        ),
        (
            [
                ops.GroupedLinear(2, WIDTH, HIDDEN, **OPTIONS),
                ops.GELU(),
                ops.GroupedLinear(3, HIDDEN, WIDTH, **OPTIONS),
            ],
            ([1, 3], [1, 3, 0]),
        ),
        ([ops.Bias(WIDTH, **OPTIONS), ops.ScaledSwiGLU()], (torch.ones(4),)),
    ):
        chain = spread(ops.Sequential(*parts))
        apart = copy.deepcopy(chain)
        got = step(chain, sample(4), extra, RECIPES["mxfp8"])
        with only():
            assert_equal(got, step(apart, sample(4), extra, RECIPES["mxfp8"]))
        assert not any(op.is_fused_op for groups in groups_of(chain) for op, _ in groups)


def test_every_fused_operation_is_here() -> None:
    kinds = {case.kind for case in CASES.values()} | {kind for kind, _, _ in BIASED.values()}
    elsewhere = {"ForwardLinearReduceScatter"}  # needs a second process: test_collectives.py
    assert {kind.__name__ for kind in kinds} | elsewhere == set(fused.__all__)
