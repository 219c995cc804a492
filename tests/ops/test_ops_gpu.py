"""Chains of operations on a GPU: CUDA near the CPU, eager = compiled bit for bit, CUDA graphs."""

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from mezzotint import ops
from mezzotint.ops import fused
from tests.ops.chains import CHAINS, OPTIONS, WIDTH, build, extras, only, spread, step
from tests.recipes import RECIPES, assert_equal, sample

pytestmark = pytest.mark.gpu

over_chains = pytest.mark.parametrize("name", CHAINS)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)
ROWS = 48

# Norm of the difference over norm of the CPU's result, as for modules: FP32 sums in another order, rounded to BF16, and
# a code here and there that falls to the other side. Stochastic rounding draws other numbers on a GPU.
BOUNDS = {
    "none": 0.006,
    "delayed": 0.02,
    "current": 0.02,
    "rowwise": 0.02,
    "block": 0.02,
    "mxfp8": 0.02,
    "nvfp4": 0.5,
    "custom": 0.05,
}
LONGER = {"mix": 3, "activations": 4}  # chains of more operations, each of which makes more of a difference


def given(name: str, seed: int, rows: int = ROWS, device: str = "cuda") -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Input and extra inputs of a step."""
    extra = [e.to(device) if isinstance(e, torch.Tensor) else e for e in extras(name, rows, seed)]
    return sample(rows, seed).to(device), tuple(extra)


@over_recipes
@over_chains
def test_cuda_is_cpu(name: str, recipe: str) -> None:
    # Each device drops other elements. Operations without parameters have their state on the default device.
    cpu = build(name).cpu().eval()
    cuda = copy.deepcopy(cpu).cuda()
    for seed, rows in enumerate((48, 33)):
        expected = step(cpu, *given(name, seed, rows, "cpu"), RECIPES[recipe])
        got = step(cuda, *given(name, seed, rows), RECIPES[recipe])
        for key, value in expected.items():
            if value is None or not value.any():
                continue
            error = (got[key].cpu().float() - value.float()).norm() / value.float().norm()
            assert error <= BOUNDS[recipe] * LONGER.get(name, 1), f"{key}: {error}"


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *[(name, recipe) for name in ("mlp", "residual") for recipe in RECIPES],
        *[("experts", recipe) for recipe in ("none", "delayed", "rowwise", "nvfp4")],
        *[("mix", recipe) for recipe in ("none", "delayed", "mxfp8")],
        ("activations", "current"),
    ],
)
def test_compiled_is_eager(name: str, recipe: str) -> None:
    eager = build(name).cuda()
    compiled = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("inductor")
    call = torch.compile(compiled, fullgraph=True, backend=counter)
    for seed in range(2):
        x, extra = given(name, seed)
        assert_equal(step(compiled, x, extra, RECIPES[recipe], call), step(eager, x, extra, RECIPES[recipe]))
    assert counter.frame_count == 1


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # how Inductor sets up its memory pool
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_cuda_graphs(name: str, recipe: str) -> None:
    """`reduce-overhead` replays every step, on the inputs of that step."""
    eager = build(name).cuda()
    captured = copy.deepcopy(eager)
    counters.clear()
    call = torch.compile(captured, fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        x, extra = given(name, seed)
        x = x * (seed + 1)
        torch.compiler.cudagraph_mark_step_begin()
        got = step(captured, x, extra, RECIPES[recipe], call)
        expected = step(eager, x, extra, RECIPES[recipe])
        if recipe == "nvfp4":  # another stream of random numbers
            got, expected = {"output": got["output 0"]}, {"output": expected["output 0"]}
        assert_equal(got, expected)
    assert counters["inductor"]["cudagraph_skips"] == 0


@over_recipes
@over_chains
def test_odd_sizes(name: str, recipe: str) -> None:
    chain = build(name).cuda()
    for rows in (0, 1, 7):
        made = step(chain, *given(name, 0, rows), RECIPES[recipe])
        assert all(value is None or value.isfinite().all() for value in made.values())


@over_recipes
def test_fused_backward_is_one_by_one(recipe: str) -> None:
    """A chain in which nothing is rounded once instead of twice: kernels that do several things give the same bits."""
    together = spread(
        ops.Sequential(
            ops.MakeExtraOutput(),
            ops.RMSNorm(WIDTH, **OPTIONS),
            ops.BasicLinear(WIDTH, 2 * WIDTH, **OPTIONS),
            ops.SwiGLU(),
            ops.BasicLinear(WIDTH, WIDTH, **OPTIONS),
            ops.ConstantScale(0.5),
            ops.AddExtraInput(),
            ops.MakeExtraOutput(in_place=True),
            ops.BasicLinear(WIDTH, WIDTH, **OPTIONS),
        )
    ).cuda()
    apart = copy.deepcopy(together)
    for seed in range(2):
        x, extra = sample(ROWS, seed).cuda(), (sample(ROWS, 9).cuda(),)
        got = step(together, x, extra, RECIPES[recipe])
        with only():
            assert_equal(got, step(apart, x, extra, RECIPES[recipe]))
    used = {type(op) for groups in together.fused_ops().values() for group in groups for op in group}
    assert {
        fused.ForwardLinearScaleAdd,
        fused.BackwardLinearScale,
        fused.BackwardAddRMSNorm,
        fused.BackwardLinearAdd,
    } <= used


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "mxfp8"])
def test_grouped_mlp_is_one_by_one(recipe: str) -> None:
    """But for the gradients of biases: rows are summed in another order where the activation's kernel does it."""
    together = build("experts").cuda()
    apart = copy.deepcopy(together)
    biases = tuple([name for name, _ in together.named_parameters() if "bias" in name])
    for seed in range(2):
        x, extra = given("experts", seed)
        got = step(together, x, extra, RECIPES[recipe])
        with only():
            expected = step(apart, x, extra, RECIPES[recipe])
        assert_equal(got, expected, but=biases)
        for name in biases:
            torch.testing.assert_close(got[name], expected[name], rtol=2**-7, atol=1e-3)


def test_experts_by_a_tensor() -> None:
    by_list, by_tensor = build("experts").cuda(), build("experts").cuda()
    x, (splits, scales, _) = given("experts", 0)
    sizes = torch.tensor(splits, device="cuda")
    got = step(by_tensor, x, (sizes, scales, sizes), RECIPES["mxfp8"])
    expected = step(by_list, x, (splits, scales, splits), RECIPES["mxfp8"])
    assert_equal({key: got[key] for key in expected}, expected)
