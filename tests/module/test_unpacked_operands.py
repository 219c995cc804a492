"""Where a GPU emulates a format's products, modules unpack the operands that nobody keeps: with the same bits.

A CPU is told that it emulates them: its reference multiplies the same values, whatever holds them.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import hw, recipe
from mezzotint.functional import linear as core
from mezzotint.layer import plan, unpacking
from mezzotint.tensor.storage import QuantizedTensorStorage

RECIPES = {name: recipe.RECIPES[name]() for name in ("mxfp8", "mxfp6", "mxfp4", "nvfp4")}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unpacking, "is_emulated", lambda quantizer: quantizer.unpacking() is not None)
    plan._kept_plan.cache_clear()
    yield
    plan._kept_plan.cache_clear()


def make(kind: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(1)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
    made: dict[str, Any] = {
        "Linear": lambda: mz.Linear(96, 64, **options),
        "LayerNormLinear": lambda: mz.LayerNormLinear(96, 64, normalization="RMSNorm", **options),
        "LayerNormMLP": lambda: mz.LayerNormMLP(96, 128, activation="swiglu", bias=False, **options),
        "equal weights": lambda: mz.LayerNormMLP(96, 96, **options),  # others quantize them together
    }
    return made[kind](), torch.randn(2, 40, 96, dtype=torch.bfloat16)


def run(kind: str, chosen: recipe.Recipe, steps: int = 2, compiles: bool = False, **region: Any) -> list[torch.Tensor]:
    """Return outputs and gradients of some steps."""
    module, x = make(kind)
    called = torch.compile(module, fullgraph=True, backend="aot_eager") if compiles else module
    found: list[torch.Tensor] = []
    torch.manual_seed(2)
    for _ in range(steps):
        x = x.detach().requires_grad_()
        with mz.autocast(recipe=chosen, **region):
            y = called(x)
        y.backward(torch.ones_like(y))
        found += [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]
    return found


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "equal weights"])
@pytest.mark.parametrize("memory", ["default", "lean"])
def test_modules_compute_the_same_bits(
    name: str, kind: str, memory: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    want = run(kind, RECIPES[name], memory=memory)
    request.getfixturevalue("emulated")
    read: list[torch.dtype] = []
    multiply = core.multiply

    def watched(a: Any, b: Any, **options: Any) -> Any:
        for side, columnwise in ((a, options.get("a_columnwise")), (b, options.get("b_columnwise"))):
            assert isinstance(side, QuantizedTensorStorage)
            read.append(side.gemm_operand(bool(columnwise)).data.dtype)
        return multiply(a, b, **options)

    monkeypatch.setattr(core, "multiply", watched)
    got = run(kind, RECIPES[name], memory=memory)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    # Of the six operands of a linear only x column-wise was kept, and in the lean mode none.
    assert read.count(torch.uint8) == (len(read) // 6 if memory == "default" else 0)


@pytest.mark.compile
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", RECIPES)
def test_a_graph_computes_the_same_bits(name: str) -> None:
    for a, b in zip(run("LayerNormMLP", RECIPES[name], compiles=True), run("LayerNormMLP", RECIPES[name]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("emulated")
def test_what_is_kept_or_read_stays_in_codes() -> None:
    module, x = make("Linear")
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        module(x, is_first_microbatch=True)
    assert module._workspaces[0]._rowwise_data.dtype == torch.uint8
    dequantized = recipe.MXFP8BlockScaling(backward_override="dequantized")
    quantizers = _plan_of(module, dequantized).quantizers[0]
    assert quantizers.input is not None
    assert quantizers.input.unpacked == 0
    assert _plan_of(module, RECIPES["mxfp8"]).quantizers[0].input.unpacked != 0


def _plan_of(module: Any, chosen: recipe.Recipe) -> Any:
    needs = (core.Needs(True, True, True),)
    return module._config.plan(chosen, "", torch.bfloat16, needs, False, plan.RegionOptions("default", False))


def test_hopper_emulates_what_it_has_no_product_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table of products alone."""
    monkeypatch.setattr(hw, "has_triton_kernels", lambda: True)
    for cc, expected in (((9, 0), True), ((10, 0), False), (None, False)):
        monkeypatch.setattr(hw, "capability", lambda device=None, cc=cc: cc)
        monkeypatch.setattr(hw, "cuda_version", lambda: (13, 0))
        hw.gemm_backend.cache_clear()
        for made in (mz.MXFP8Quantizer(), mz.NVFP4Quantizer()):
            assert unpacking.is_emulated(made) is expected
        assert not unpacking.is_emulated(mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3))
    hw.gemm_backend.cache_clear()
