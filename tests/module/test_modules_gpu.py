"""The matrix on a GPU: CUDA near the CPU, quantized weights bit for bit, eager = compiled, CUDA graphs."""

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import mezzotint as mz
from tests.recipes import MODULES, RECIPES, assert_equal, gradient, make, sample, step

pytestmark = pytest.mark.gpu

over_modules = pytest.mark.parametrize("name", MODULES)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)
over_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])

# Norm of the difference over norm of the CPU's result. The operands of each GEMM are the same bytes or next to them:
# FP32 sums in another order, rounded to BF16, and after an activation a code here and there that falls to the other
# side. Stochastic rounding draws other numbers on a GPU.
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


def on_gpu(module: Any) -> Any:
    return copy.deepcopy(module).cuda()


@over_bias
@over_recipes
@over_modules
def test_cuda_is_cpu(name: str, recipe: str, bias: bool) -> None:
    cpu = make(name, bias=bias)
    cuda = on_gpu(cpu)
    for seed, rows in enumerate((48, 33)):
        x = sample(rows, seed)
        expected = step(cpu, x, RECIPES[recipe], is_first_microbatch=True)
        got = step(cuda, x.cuda(), RECIPES[recipe], is_first_microbatch=True)
        for key, value in expected.items():
            if value is None or not value.any():
                continue
            error = (got[key].cpu().float() - value.float()).norm() / value.float().norm()
            assert error <= BOUNDS[recipe], f"{key}: {error}"
    if recipe in ("none", "delayed"):  # delayed: the second step's scale follows from GEMMs of the first
        return
    for mine, theirs in zip(cpu._workspaces, cuda._workspaces, strict=True):
        for key, buffer in mine._buffers():
            assert torch.equal(getattr(theirs, key).cpu(), buffer), key


@pytest.mark.compile
@over_recipes
@over_modules
def test_compiled_is_eager(name: str, recipe: str) -> None:
    eager = on_gpu(make(name))
    compiled = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("inductor")
    call = torch.compile(compiled, fullgraph=True, backend=counter)
    for seed in range(2):
        x = sample(48, seed).cuda()
        assert_equal(step(compiled, x, RECIPES[recipe], call), step(eager, x, RECIPES[recipe]))
    assert counter.frame_count == 1


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # how Inductor sets up its memory pool
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["linear", "layernorm_mlp"])
def test_cuda_graphs(name: str, recipe: str) -> None:
    """`reduce-overhead` replays every step, on the inputs of that step."""
    eager = on_gpu(make(name))
    captured = copy.deepcopy(eager)
    counters.clear()
    call = torch.compile(captured, fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        x = sample(48, seed).cuda() * (seed + 1)
        torch.compiler.cudagraph_mark_step_begin()
        got = step(captured, x, RECIPES[recipe], call)
        got = {key: None if value is None else value.clone() for key, value in got.items()}
        expected = step(eager, x, RECIPES[recipe])
        if recipe == "nvfp4":  # another stream of random numbers
            got, expected = {"output": got["output"]}, {"output": expected["output"]}
        assert_equal(got, expected)
    assert counters["inductor"]["cudagraph_skips"] == 0


@over_recipes
def test_odd_sizes(recipe: str) -> None:
    torch.manual_seed(0)
    cpu = mz.LayerNormMLP(100, 36, params_dtype=torch.bfloat16, device="cpu")
    cuda = on_gpu(cpu)
    for rows in (0, 1, 7):
        x = sample(rows, width=100)
        expected, got = step(cpu, x, RECIPES[recipe]), step(cuda, x.cuda(), RECIPES[recipe])
        assert got["output"].shape == expected["output"].shape
        assert all(value is None or value.isfinite().all() for value in got.values())


def test_experts_by_a_tensor() -> None:
    module = on_gpu(make("grouped_linear"))
    x = sample().cuda().requires_grad_()
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        y = module(x, torch.tensor([13, 0, 27], device="cuda"))
    gradient(y).backward()
    assert not module.weight1.grad.any()


def test_large_linear_is_near_bf16() -> None:
    torch.manual_seed(0)
    module = mz.Linear(1024, 2048, params_dtype=torch.bfloat16)
    assert module.weight.is_cuda
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    expected = step(module, x, None)
    for name in ("delayed", "current", "rowwise", "block", "mxfp8"):
        for _ in range(2):
            got = step(module, x, RECIPES[name])
        for key in ("output", "input", "weight"):
            error = (got[key].float() - expected[key].float()).norm() / expected[key].float().norm()
            assert error < 0.1, (name, key, error)


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])
def test_graphs_launch_our_kernels_themselves(recipe: str) -> None:
    """The code that Inductor writes calls no operator of ours: casts are its own launches, products PyTorch's. In
    between nothing views bytes as FP8."""
    module = mz.Linear(1024, 1024, params_dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(module, fullgraph=True)
    x = torch.randn(512, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def run() -> None:
        with mz.autocast(recipe=RECIPES[recipe]):
            y = compiled(x)
        y.backward(torch.randn_like(y))

    _, codes = run_and_get_code(run)
    assert len(codes) == 2
    assert not any("torch.ops.mezzotint" in code or "view.dtype" in code for code in codes)
