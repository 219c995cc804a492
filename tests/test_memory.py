"""The memory modes: what each holds for backward, and that it changes no bit where it promises none."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mezzotint as mz
from mezzotint import hw
from mezzotint.functional.activation import ActivationBwdArgs, compress, decompress
from mezzotint.layer import shared_input
from tests.recipes import EVERY_RECIPE

TOKENS, HIDDEN, FFN = 64, 128, 256
BF16 = torch.bfloat16
PARTITIONED = "aot_eager_decomp_partition"  # saves for backward what Inductor would save, and generates no code


class Experts(torch.nn.Module):
    """A grouped linear whose tokens are divided unevenly; one expert has none."""

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__()
        self.linears = mz.GroupedLinear(3, features, features, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linears(x, [len(x) // 4, 0, len(x) - len(x) // 4])
        return y


MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **options: mz.Linear(HIDDEN, HIDDEN, **options),
    "LayerNormLinear": lambda **options: mz.LayerNormLinear(HIDDEN, HIDDEN, **options),
    "LayerNormMLP": lambda **options: mz.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **options),
    "GroupedLinear": lambda **options: Experts(HIDDEN, **options),
}


def make(name: str, **options: Any) -> Any:
    """Return a module with parameters that are not at their initial values, biases and norms among them."""
    torch.manual_seed(0)
    module = MODULES[name](params_dtype=BF16, device="cpu", **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return module


def make_layer() -> Any:
    torch.manual_seed(0)
    return mz.TransformerLayer(
        HIDDEN,
        FFN,
        4,
        num_gqa_groups=1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        fuse_qkv_params=True,
        attn_input_format="bshd",
        params_dtype=BF16,
        device="cpu",
    )


def held_bytes(module: torch.nn.Module, x: torch.Tensor, chosen: Any, memory: str | None = None) -> int:
    """Return the bytes of what one forward saves, beside parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        if chosen is None:
            y = module(x)
        else:
            with mz.autocast(recipe=chosen, memory=memory):
                y = module(x)
    y.sum().backward()
    return sum(found.values())


def batch(*leading: int, features: int = HIDDEN) -> torch.Tensor:
    return torch.randn(*leading, features, dtype=BF16, requires_grad=True)


def train(module: Any, recipe: Any, memory: str | None, run: Any = None) -> list[torch.Tensor]:
    """Return outputs and gradients of three steps with other inputs; a recipe's scales and random numbers move on."""
    run = module if run is None else run
    torch.manual_seed(1)
    seen = []
    for step in range(3):
        x = (torch.randn(TOKENS, HIDDEN, dtype=BF16) * 2.0**step).requires_grad_()
        with mz.autocast(recipe=recipe, memory=memory):
            y = run(x)
        y.float().square().sum().backward()
        seen += [y.detach(), x.grad]
    return [*seen, *[parameter.grad for parameter in module.parameters()]]


def are_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_no_more_than_in_bf16(name: str) -> None:
    """Of fewer tokens than there are features, where a copy of the weight would be more than the input."""
    tokens, features = 128, 512
    plain = torch.nn.Linear(features, features, dtype=BF16)
    ours = mz.Linear(features, features, params_dtype=BF16, device="cpu")
    experts = Experts(features, params_dtype=BF16, device="cpu")
    operation = mz.ops.Linear(features, features, bias=False, dtype=BF16, device="cpu")
    x = batch(tokens, features=features)
    assert held_bytes(ours, x, EVERY_RECIPE[name]) <= held_bytes(plain, x, None)
    for each in (experts, operation):
        assert held_bytes(each, x, EVERY_RECIPE[name]) <= held_bytes(each, x, None)


@pytest.mark.parametrize("recipe", EVERY_RECIPE)
@pytest.mark.parametrize("name", MODULES)
def test_lean_has_the_bits_of_default(name: str, recipe: str) -> None:
    default, lean = make(name), make(name)
    expected = train(default, EVERY_RECIPE[recipe], "default")
    assert are_equal(train(lean, EVERY_RECIPE[recipe], "lean"), expected)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("recipe", "memory", "backend"),
    [
        ("delayed", "lean", "aot_eager"),
        ("current", "compressed", "inductor"),
        pytest.param("delayed", "compressed", "inductor", marks=pytest.mark.slow),
        pytest.param("rowwise", "lean", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_has_the_bits_of_eager(recipe: str, memory: str, backend: str) -> None:
    eager, compiled = make("LayerNormMLP"), make("LayerNormMLP")
    expected = train(eager, EVERY_RECIPE[recipe], memory)
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    assert are_equal(train(compiled, EVERY_RECIPE[recipe], memory, run), expected)


# Elements of a token that a layer holds, 16 bits each: the norms' inputs; queries, keys and values; attention's output;
# the activation's input. FP32: a statistic of each norm, and of the attention's four heads the logarithm of the sum.
ELEMENTS = 2 * HIDDEN + HIDDEN + 2 * (HIDDEN // 4) + HIDDEN + 2 * FFN
LEAN_BYTES = TOKENS * (2 * ELEMENTS + 4 * (2 + 4))
# In place of the activation's input: a byte for each element, and an FP32 scale for each 128.
COMPRESSED_BYTES = LEAN_BYTES - TOKENS * (2 * 2 * FFN - 2 * FFN - 4 * 2 * FFN // 128)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_what_a_layer_holds(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw, "SLOW_BF16", False)  # attention would hold FP32 copies
    layer, x = make_layer(), batch(1, TOKENS)
    run = torch.compile(layer, fullgraph=True, backend=PARTITIONED) if compiled else layer
    recipe = EVERY_RECIPE["current"]
    for _ in range(1 + compiled):  # the first call of a graph is its compilation
        held = [held_bytes(run, x, recipe, memory) for memory in ("lean", "compressed")]
    assert held == [LEAN_BYTES, COMPRESSED_BYTES]
    assert LEAN_BYTES < held_bytes(layer, x, recipe, "default") < held_bytes(layer, x, None)


@given(st.integers(0, 2**32), st.floats(-20, 20), st.floats(0, 12))
def test_the_bound_of_compression(seed: int, exponent: float, spread: float) -> None:
    h = torch.randn(5, 300, generator=torch.Generator().manual_seed(seed)).double()
    h = (h.sign() * torch.exp2(exponent + spread * h)).to(BF16)
    again = decompress(ActivationBwdArgs(compress(h), "gelu", ())).x
    assert again.dtype == h.dtype
    largest = torch.nn.functional.pad(h.float().abs(), (0, 84)).view(5, 3, 128).amax(-1)
    largest = largest.repeat_interleave(128, 1)[:, :300]
    bound = torch.maximum(h.float().abs() / 16, largest * 2.0**-10 / 448)
    # The scale and the product with it are rounded to FP32, the result to BF16.
    assert ((again.float() - h.float()).abs() <= bound * 1.0001 + h.float().abs() * 2.0**-8).all()


def test_compressed_changes_gradients_alone() -> None:
    lean, compressed = make("LayerNormMLP"), make("LayerNormMLP")
    recipe = EVERY_RECIPE["current"]
    expected, found = train(lean, recipe, "lean"), train(compressed, recipe, "compressed")
    errors = [float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(expected, found, strict=True)]
    outputs, bias = errors[0:6:2], errors[-1]
    assert [*outputs, bias] == [0.0] * 4
    assert all(0.001 < error < 0.1 for error in errors[1:6:2] + errors[6:-1])


def test_an_inner_region_is_as_the_outer_says() -> None:
    module, x = make("LayerNormLinear"), batch(TOKENS)
    recipe = EVERY_RECIPE["current"]
    lean = held_bytes(module, x, recipe, "lean")
    with mz.autocast(recipe=recipe, memory="lean"):
        assert held_bytes(module, x, recipe) == lean
        assert held_bytes(module, x, recipe, "default") > lean
        inner = mz.autocast(recipe=recipe)(copy.copy(module).forward)
    assert held_bytes(module, x, recipe) > lean
    assert inner(x).requires_grad


def test_a_module_has_its_own_mode() -> None:
    recipe, x = EVERY_RECIPE["current"], batch(TOKENS)
    module = make("LayerNormLinear", memory="lean")
    lean = held_bytes(module, x, recipe, "default")
    module.memory = None
    assert held_bytes(module, x, recipe, "lean") == lean < held_bytes(module, x, recipe, "default")


def test_convert_sets_the_mode_of_all_layers() -> None:
    recipe = EVERY_RECIPE["current"]
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), make_layer())
    mz.convert(model, recipe, memory="compressed")
    assert {module.memory for module in model.modules() if hasattr(module, "memory")} == {"compressed"}
    mz.convert(model, recipe)  # says nothing of it
    assert model[0].memory == "compressed"
    assert mz.unconvert(model)[0].__dict__.get("memory") is None


def test_a_converted_norm_and_linear_hold_the_norms_input_alone() -> None:
    parts = torch.nn.LayerNorm(HIDDEN, dtype=BF16), torch.nn.Linear(HIDDEN, HIDDEN, dtype=BF16)
    model = mz.convert(torch.nn.Sequential(*parts), EVERY_RECIPE["current"], memory="lean")
    statistics = 2 * 4 * TOKENS
    assert held_bytes(model, batch(TOKENS), EVERY_RECIPE["current"]) == 2 * TOKENS * HIDDEN + statistics


def test_words_that_are_no_mode() -> None:
    with pytest.raises(ValueError, match=r"autocast\(memory='small'\): give one of 'default', 'lean', 'compressed'"):
        mz.autocast(memory="small")
    with pytest.raises(ValueError, match=r"convert\(memory=True\)"):
        mz.convert(torch.nn.Linear(64, 64), memory=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Linear\(memory='none'\)"):
        mz.Linear(16, 16, memory="none", device="cpu")


class Attention(torch.nn.Module):
    """x + o(attention(q, k, v)) behind a norm, as models write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.RMSNorm(HIDDEN, dtype=BF16)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=BF16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (4, -1)).transpose(0, 1) for each in (self.q, self.k, self.v))
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(made.transpose(0, 1).flatten(1))


class GatedMLP(torch.nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x))), as models write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.RMSNorm(HIDDEN, dtype=BF16)
        self.gate, self.up = (torch.nn.Linear(HIDDEN, FFN, bias=False, dtype=BF16) for _ in range(2))
        self.down = torch.nn.Linear(FFN, HIDDEN, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_a_converted_model_in_eager_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v hold one copy of what they read. In delayed scaling, where each has a scale of its own, and under a
    user's quantizers they hold three, and attention alone needs lean mode."""
    monkeypatch.setattr(shared_input, "SMALLEST_SHARED", 0)
    x, recipe = batch(TOKENS), EVERY_RECIPE[name]
    layer, attention = torch.nn.Sequential(Attention(), GatedMLP()), Attention()
    plain = held_bytes(layer, x, None), held_bytes(attention, x, None)
    scales = 4 * 5 * 4 if name == "delayed" else 0  # copies in FP32, five for each linear
    assert held_bytes(mz.convert(layer), x, recipe) <= plain[0]
    assert held_bytes(mz.convert(attention, memory="lean"), x, recipe) <= plain[1] + scales
    if name not in ("delayed", "custom"):
        assert held_bytes(mz.convert(Attention()), x, recipe) <= plain[1]


@pytest.mark.compile
def test_a_converted_model_in_a_graph() -> None:
    """The compiler makes the inputs of linears again: it holds the norm's input and statistic, gate and up."""
    recipe = EVERY_RECIPE["current"]
    lean, default = (mz.convert(GatedMLP(), memory=memory) for memory in ("lean", "default"))
    expected = train(default, recipe, None, torch.compile(default, fullgraph=True, backend=PARTITIONED))
    run = torch.compile(lean, fullgraph=True, backend=PARTITIONED)
    assert are_equal(train(lean, recipe, None, run), expected)
    assert held_bytes(run, batch(TOKENS), recipe) == TOKENS * (2 * HIDDEN + 4 + 2 * 2 * FFN)
