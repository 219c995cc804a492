"""grouped_mm is GroupedLinear without a module: the same bits, in every recipe without state, eager and compiled."""

from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint.recipe import CustomRecipe, QuantizerRole
from tests.recipes import RECIPES, VARIANTS

E, K, N = 3, 64, 32
SPLITS = [24, 0, 40]
STATELESS = [name for name in RECIPES if name != "delayed"]


def sample(bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (sum(SPLITS), K), "b": (E, K, N), "bias": (E, N)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return {name: value.requires_grad_() for name, value in made.items() if bias or name != "bias"}


def offsets(splits: list[int] = SPLITS) -> torch.Tensor:
    return torch.tensor(splits).cumsum(0).to(torch.int32)


def results(y: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    y.float().square().sum().backward()
    return [y, *(tensor.grad for tensor in inputs.values() if tensor.grad is not None)]


def by_module(inputs: dict[str, torch.Tensor], recipe: Any) -> list[torch.Tensor]:
    module = mz.GroupedLinear(E, K, N, bias="bias" in inputs, single_grouped_weight=True, single_grouped_bias=True)
    with torch.no_grad():
        module.weight = nn.Parameter(inputs["b"].transpose(1, 2).contiguous())
        if "bias" in inputs:
            module.bias = nn.Parameter(inputs["bias"].detach())
    torch.manual_seed(0)  # stochastic rounding
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(inputs["a"], SPLITS)
    made = results(y, {"a": inputs["a"]})
    made.append(module.weight.grad.transpose(1, 2))
    return [*made, module.bias.grad] if "bias" in inputs else made


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", [None, *STATELESS])
def test_equals_grouped_linear(recipe: str | None, bias: bool) -> None:
    chosen = None if recipe is None else RECIPES[recipe]
    expected = by_module(sample(bias), chosen)
    torch.manual_seed(0)
    inputs = sample(bias)
    got = results(mz.grouped_mm(inputs["a"], inputs["b"], offsets(), chosen, bias=inputs.get("bias")), inputs)
    assert_equal(got, expected)


@pytest.mark.parametrize("variant", ["rowwise-wgrad", "current-high_precision", "mxfp8-dequantized"])
def test_variants(variant: str) -> None:
    inputs = sample()
    expected = by_module(sample(), VARIANTS[variant])
    assert_equal(results(mz.grouped_mm(inputs["a"], inputs["b"], offsets(), VARIANTS[variant]), inputs), expected)


def test_in_high_precision_it_is_torchs() -> None:
    inputs, others = sample(), sample()
    got = results(mz.grouped_mm(inputs["a"], inputs["b"], offsets()), inputs)
    parts = [x @ w for x, w in zip(others["a"].split(SPLITS), others["b"], strict=True)]
    for one, other in zip(got, results(torch.cat(parts), others), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-1)


def test_the_region_decides_and_an_argument_wins() -> None:
    inputs = sample()
    a, b = inputs["a"], inputs["b"]
    plain, mxfp8 = mz.grouped_mm(a, b, offsets()), mz.grouped_mm(a, b, offsets(), RECIPES["mxfp8"])
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        assert torch.equal(mz.grouped_mm(a, b, offsets()), mxfp8)
        current = mz.grouped_mm(a, b, offsets(), RECIPES["current"])
    assert len({y.float().sum().item() for y in (plain, mxfp8, current)}) == 3


def test_the_weight_may_lie_either_way() -> None:
    inputs = sample()
    turned = inputs["b"].detach().transpose(1, 2).contiguous().requires_grad_()
    y = mz.grouped_mm(inputs["a"], inputs["b"], offsets(), RECIPES["mxfp8"])
    other = mz.grouped_mm(inputs["a"], turned.transpose(1, 2), offsets(), RECIPES["mxfp8"])
    assert torch.equal(y, other)
    y.sum().backward()
    other.sum().backward()
    assert torch.equal(inputs["b"].grad, turned.grad.transpose(1, 2))


def test_some_gradients() -> None:
    for wanted in ("a", "b"):
        inputs = sample()
        expected = results(mz.grouped_mm(inputs["a"], inputs["b"], offsets(), RECIPES["current"]), inputs)
        some = {name: value.detach().requires_grad_(name == wanted) for name, value in inputs.items()}
        got = results(mz.grouped_mm(some["a"], some["b"], offsets(), RECIPES["current"]), some)
        assert_equal(got, [expected[0], inputs[wanted].grad])


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["mxfp8", "current"])
def test_compiled(recipe: str) -> None:
    """One graph for all sizes of groups, which it reads itself."""
    graphs = 0

    def count(graph: Any, example: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    @torch.compile(fullgraph=True, backend=count)
    def call(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return mz.grouped_mm(a, b, offs, RECIPES[recipe])

    # torch 2.11 reads sizes in a graph only where it is told to
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for splits in (SPLITS, [1, 30, 33], [64, 0, 0]):
            one, other = sample(), sample()
            expected = results(mz.grouped_mm(**other, offs=offsets(splits), recipe=RECIPES[recipe]), other)
            assert_equal(results(call(**one, offs=offsets(splits)), one), expected)
    assert graphs == 1


def test_a_role_has_the_name() -> None:
    seen = set()

    def factory(role: QuantizerRole) -> Any:
        seen.add((role.module_type, role.tensor_type, role.name))
        return mz.IdentityQuantizer()

    mz.grouped_mm(**sample(), offs=offsets(), recipe=CustomRecipe(factory), name="experts.up")
    assert seen == {("grouped_linear", kind, "experts.up") for kind in ("input", "weight", "grad_output")}


def test_no_rows() -> None:
    inputs = sample()
    a = inputs["a"].detach()[:0].requires_grad_()
    mz.grouped_mm(a, inputs["b"], offsets([0] * E), RECIPES["mxfp8"]).sum().backward()
    assert not inputs["b"].grad.any()


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"a": [1.0]}, TypeError, "a is list: give a tensor"),
        ({"b": torch.ones(E, K, N, dtype=torch.float64)}, TypeError, r"b is Tensor of torch\.float64: give"),
        ({"b": torch.ones(E, N, K)}, ValueError, r"a is \(64, 64\), b \(3, 32, 64\): give \(M, K\) and \(E, K, N\)"),
        ({"offs": offsets()[:2]}, ValueError, r"offs is torch\.int32 of shape \(2,\): give the end of each of the 3"),
        ({"offs": offsets().float()}, ValueError, r"offs is torch\.float32"),
        ({"offs": offsets([40, -16, 40])}, ValueError, r"offs is \[40, 24, 64\]: give ends that do not fall"),
        ({"offs": offsets([24, 0, 39])}, ValueError, r"offs is \[24, 24, 63\]: .* the last one 64, the rows of a"),
        ({"bias": torch.ones(N)}, ValueError, r"bias is \(32,\): give \(3, 32\), or None"),
        ({"recipe": "mxfp8"}, TypeError, "recipe is str"),
        ({"recipe": RECIPES["delayed"]}, ValueError, "DelayedScaling, which scales .* by what earlier calls saw"),
    ],
)
def test_bad_input(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        mz.grouped_mm(**{**sample(), "offs": offsets(), **changed})
