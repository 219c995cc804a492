"""`ops.Sequential` of a module's parts is the module, bit for bit: every recipe, three steps, with the state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import ops
from tests.ops.chains import HIDDEN, OPTIONS, WIDTH, linear, spread
from tests.ops.chains import step as chain_step
from tests.recipes import RECIPES, STATE, VARIANTS, assert_equal, sample
from tests.recipes import step as module_step

EXPERTS, ROUTING = 3, [8, 0, 16]
MODULE_OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
OTHERS = ("rowwise-wgrad", "current-high_precision", "mxfp8-dequantized", "delayed-most_recent", "nvfp4-row-scaled")
ALL = RECIPES | {name: VARIANTS[name] for name in OTHERS}

over_recipes = pytest.mark.parametrize("recipe", ALL)
over_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])


@dataclass
class Pair:
    """A module and operations with copies of its parameters. `names`: the operations' parameters → the module's."""

    module: nn.Module
    chain: ops.Sequential
    names: dict[str, str]
    linears: list[int]  # places of the operations that have the state of the module's GEMMs, in order

    def __post_init__(self) -> None:
        spread(self.module)
        with torch.no_grad():
            for name, other in self.names.items():
                self.chain.get_parameter(name).copy_(self.module.get_parameter(other))
        assert len(self.names) == len(list(self.chain.parameters())) == len(list(self.module.parameters()))


def norm_names(place: int, rms: bool) -> dict[str, str]:
    return {f"{place}.weight": "layer_norm_weight"} | ({} if rms else {f"{place}.bias": "layer_norm_bias"})


def linear_names(place: int, prefix: str, bias: bool) -> dict[str, str]:
    names = {f"{place}.basic_ops.0.weight": f"{prefix}weight"}
    return names | ({f"{place}.basic_ops.1.bias": f"{prefix}bias"} if bias else {})


def norm_of(normalization: str, zero_centered_gamma: bool = False) -> Any:
    return getattr(ops, normalization)(WIDTH, zero_centered_gamma=zero_centered_gamma, **OPTIONS)


def make_linear(bias: bool = True) -> Pair:
    module = mz.Linear(WIDTH, HIDDEN, bias=bias, **MODULE_OPTIONS)
    return Pair(module, ops.Sequential(linear(WIDTH, HIDDEN, bias)), linear_names(0, "", bias), [0])


def make_layernorm_linear(
    normalization: str = "LayerNorm", zero_centered_gamma: bool = False, bias: bool = True
) -> Pair:
    options = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma, "bias": bias}
    module = mz.LayerNormLinear(WIDTH, HIDDEN, **options, **MODULE_OPTIONS)
    chain = ops.Sequential(norm_of(normalization, zero_centered_gamma), linear(WIDTH, HIDDEN, bias))
    return Pair(module, chain, norm_names(0, normalization == "RMSNorm") | linear_names(1, "", bias), [1])


def make_mlp(activation: str, normalization: str, bias: bool = True) -> Pair:
    options = {"activation": activation, "normalization": normalization, "bias": bias}
    module = mz.LayerNormMLP(WIDTH, HIDDEN, **options, **MODULE_OPTIONS)
    act, width = (ops.GELU(), HIDDEN) if activation == "gelu" else (ops.SwiGLU(), 2 * HIDDEN)
    chain = ops.Sequential(norm_of(normalization), linear(WIDTH, width, bias), act, linear(HIDDEN, WIDTH, bias))
    names = norm_names(0, normalization == "RMSNorm") | linear_names(1, "fc1_", bias) | linear_names(3, "fc2_", bias)
    return Pair(module, chain, names, [1, 3])


def make_grouped(bias: bool = True) -> Pair:
    module = mz.GroupedLinear(EXPERTS, WIDTH, HIDDEN, bias=bias, **MODULE_OPTIONS)
    chain = ops.Sequential(ops.GroupedLinear(EXPERTS, WIDTH, HIDDEN, bias=bias, **OPTIONS))
    names = {f"0.{name}": name for name, _ in module.named_parameters()}
    return Pair(module, chain, names, [0])


PAIRS: dict[str, Callable[[], Pair]] = {
    "linear": make_linear,
    "layernorm_linear": make_layernorm_linear,
    "mlp": lambda: make_mlp("swiglu", "RMSNorm"),
    "grouped_linear": make_grouped,
}


def as_module(pair: Pair, made: dict[str, Any]) -> dict[str, Any]:
    """What a step of the chain gave, under the module's names; the state of its GEMMs side by side."""
    result = {"output": made["output 0"], "input": made["input"]}
    result |= {other: made[name] for name, other in pair.names.items()}
    for name in STATE:
        parts = [made[key] for key in made if key.split(".")[-1] == name]
        result[name] = torch.cat(parts, -1)
    return result


def check(
    pair: Pair,
    chosen: Any,
    steps: int = 3,
    input_grad: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    **kwargs: Any,
) -> None:
    given = {"op_kwargs": dict.fromkeys(pair.linears, kwargs)} if kwargs else {}
    splits = (ROUTING,) if isinstance(pair.module, mz.GroupedLinear) else ()

    def call(x: torch.Tensor, *_: Any, **kwargs: Any) -> Any:
        return pair.module(x if input_grad else x.detach(), *splits, **kwargs)

    for seed in range(steps):
        x = sample(24, seed, dtype).view(4, 6, WIDTH) * (1 + seed)
        got = as_module(pair, chain_step(pair.chain, x, splits, chosen, input_grad=input_grad, **given))
        assert_equal(got, module_step(pair.module, x, chosen, call, **kwargs))


@over_bias
@over_recipes
def test_linear(recipe: str, bias: bool) -> None:
    check(make_linear(bias), ALL[recipe])


@pytest.mark.cover(2)
@over_bias
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@over_recipes
def test_layernorm_linear(recipe: str, normalization: str, zero_centered_gamma: bool, bias: bool) -> None:
    check(make_layernorm_linear(normalization, zero_centered_gamma, bias), ALL[recipe])


@pytest.mark.cover(1)
@over_bias
@pytest.mark.parametrize(("activation", "normalization"), [("gelu", "LayerNorm"), ("swiglu", "RMSNorm")])
@over_recipes
def test_layernorm_mlp(recipe: str, activation: str, normalization: str, bias: bool) -> None:
    check(make_mlp(activation, normalization, bias), ALL[recipe])


@pytest.mark.cover(1)
@over_bias
@over_recipes
def test_grouped_linear(recipe: str, bias: bool) -> None:
    check(make_grouped(bias), ALL[recipe])


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize("name", PAIRS)
def test_an_input_that_needs_no_gradient(name: str, recipe: str) -> None:
    check(PAIRS[name](), RECIPES[recipe], input_grad=False)


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize(
    ("params_dtype", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PAIRS)
def test_dtypes(
    name: str, params_dtype: torch.dtype, dtype: torch.dtype, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parameters and of activations; and these by torch.autocast."""
    monkeypatch.setitem(OPTIONS, "dtype", params_dtype)
    monkeypatch.setitem(MODULE_OPTIONS, "params_dtype", params_dtype)
    check(PAIRS[name](), RECIPES[recipe], steps=2, dtype=dtype)
    if dtype == torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            check(PAIRS[name](), RECIPES[recipe], steps=1, dtype=dtype)


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
@pytest.mark.parametrize("name", PAIRS)
def test_micro_batches(name: str, recipe: str) -> None:
    """Weights that are kept from the first one on, as the module keeps them."""
    pair = PAIRS[name]()
    for first in (True, False, False, True):
        check(pair, RECIPES[recipe], steps=1, is_first_microbatch=first)


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8", "nvfp4"])
def test_quantized_weights(recipe: str) -> None:
    """Parameters that are made quantized."""
    results = []
    for make in (lambda: mz.Linear(WIDTH, HIDDEN, **MODULE_OPTIONS), lambda: linear(WIDTH, HIDDEN)):
        torch.manual_seed(0)
        with mz.quantized_model_init(recipe=RECIPES[recipe]):
            made = make()
        assert isinstance(made.weight, mz.QuantizedTensor)
        step = chain_step(made, sample(24), (), RECIPES[recipe])
        results.append({key.removeprefix("basic_ops.0.").removeprefix("basic_ops.1."): v for key, v in step.items()})
    assert_equal(*results)


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_checkpoint(recipe: str) -> None:
    """A chain that is run again in backward gives what it gave, and delayed scaling counts once."""
    plain, again = make_mlp("gelu", "LayerNorm"), make_mlp("gelu", "LayerNorm")
    again.chain.load_state_dict(plain.chain.state_dict())

    def call(x: torch.Tensor) -> Any:
        return mz.checkpoint(again.chain, x)

    for seed in range(3):
        x = sample(24, seed)
        got = chain_step(again.chain, x, (), RECIPES[recipe], call)
        assert_equal(got, chain_step(plain.chain, x, (), RECIPES[recipe]))
