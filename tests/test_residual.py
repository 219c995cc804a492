"""The residual stream inside of norms: all bits are those of a sum before the norm and of autograd's sum behind it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from tests.recipes import RECIPES, assert_equal, gradient
from tests.test_transformer import ANGLES, HEADS, HIDDEN, MODERN, PLAIN, step
from tests.test_transformer import make as make_layer
from tests.values import raw

WIDTH, FFN, ROWS = 48, 32, (5, 3)
KINDS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **kw: mz.LayerNormLinear(WIDTH, WIDTH, device="cpu", **kw),
    "mlp": lambda **kw: mz.LayerNormMLP(WIDTH, FFN, device="cpu", **kw),
    "mlp_recomputed": lambda **kw: mz.LayerNormMLP(WIDTH, FFN, device="cpu", checkpoint=True, **kw),
}
over_kinds = pytest.mark.parametrize("kind", KINDS)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(kind: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = KINDS[kind](params_dtype=dtype, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def add(x: torch.Tensor, y: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """In FP32, rounded once; by autograd."""
    if y is None:
        return x
    return (x + (y if bias is None else y + bias.float())).to(x.dtype)


def apart(module: Any) -> Callable[..., Any]:
    """The same without fusion."""

    def run(x: torch.Tensor, _branch: Any) -> tuple[Any, ...]:
        total = add(x, *_branch)
        made = module(total)
        return *(made if isinstance(made, tuple) else (made,)), total

    return run


def inputs(dtype: torch.dtype, form: str) -> list[torch.Tensor | None]:
    """x, branch, its bias."""
    x, y = draw(*ROWS, WIDTH, dtype=dtype, seed=1), draw(*ROWS, WIDTH, dtype=dtype, seed=2)
    bias = draw(WIDTH, dtype=dtype, seed=3)
    return {"none": [x, None, None], "branch": [x, y, None], "bias": [x, y, bias]}[form]


def results(
    module: Any, call: Any, given: list[Any], recipe: str = "none", needs: str = "111", uses: str = "all"
) -> dict[str, Any]:
    """Outputs, gradients of all leaves, state. `uses`: the outputs that get a gradient."""
    leaves = [None if t is None else t.clone().requires_grad_(n == "1") for t, n in zip(given, needs, strict=True)]
    torch.manual_seed(1)
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        *others, total = call(leaves[0], _branch=(leaves[1], leaves[2]))
    outputs = {"all": (*others, total), "others": others, "total": (total,)}[uses]
    loss = sum((gradient(y) * (i + 1) for i, y in enumerate(outputs) if y is not None), torch.zeros(()))
    loss.backward()
    found: dict[str, Any] = {f"output{i}": y for i, y in enumerate((*others, total)) if y is not None}
    found |= {f"input{i}": None if leaf is None else leaf.grad for i, leaf in enumerate(leaves)}
    for name, parameter in module.named_parameters():
        found[name], parameter.grad = parameter.grad, None
    return found | {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal, and the signs of zeros too."""
    assert_equal(actual, expected)
    for name, value in actual.items():
        assert value is None or torch.equal(raw(value.detach()), raw(expected[name].detach())), name


@over_kinds
@pytest.mark.parametrize("form", ["none", "branch", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_modules(kind: str, form: str, dtype: torch.dtype) -> None:
    """Norms of both kinds, with and without what else modules give out."""
    for options in (
        {"normalization": "RMSNorm", "bias": False},
        {"normalization": "RMSNorm", "zero_centered_gamma": True, "return_bias": True},
        {"normalization": "LayerNorm", "zero_centered_gamma": True, "return_layernorm_output": True},
        {"normalization": "LayerNorm", "return_bias": True, "return_layernorm_output": True},
    ):
        module = make(kind, dtype, **options)
        given = inputs(dtype, form)
        assert_bits(results(module, module, given), results(module, apart(module), given))


@over_kinds
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(kind: str, recipe: str) -> None:
    """Three steps, so that delayed scaling's state goes on."""
    module = make(kind, torch.bfloat16, normalization="RMSNorm")
    other = copy.deepcopy(module)
    for form in ("bias", "none", "branch"):
        given = inputs(torch.bfloat16, form)
        assert_bits(results(module, module, given, recipe), results(other, apart(other), given, recipe))


@over_kinds
@pytest.mark.parametrize("needs", ["011", "101", "110", "001", "000"])
def test_who_needs_a_gradient(kind: str, needs: str) -> None:
    module = make(kind, torch.bfloat16)
    given = inputs(torch.bfloat16, "bias")
    for frozen in ((), ("weight",), ("layer_norm",), ("",)):
        if needs == "000" and frozen == ("",):
            continue
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        assert_bits(results(module, module, given, needs=needs), results(module, apart(module), given, needs=needs))


@over_kinds
@pytest.mark.parametrize("uses", ["others", "total"])
def test_one_output_has_a_gradient(kind: str, uses: str) -> None:
    """The other's is zero to an autograd function: parameters get zeros where they would get none."""
    module = make(kind, torch.bfloat16)
    given = inputs(torch.bfloat16, "bias")
    got, expected = (results(module, call, given, uses=uses) for call in (module, apart(module)))
    for name, value in expected.items():
        if value is None:
            assert not got[name].any(), name
        else:
            assert torch.equal(got[name], value), name


def test_backward_twice() -> None:
    module = make("mlp", torch.bfloat16)
    x, y, bias = (t.requires_grad_() for t in inputs(torch.bfloat16, "bias") if t is not None)
    out, total = module(x, _branch=(y, bias))
    loss = gradient(out) + gradient(total)
    leaves = (x, y, bias, *module.parameters())
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(a, b)


def test_without_a_graph() -> None:
    module = make("linear", torch.bfloat16)
    x, y, bias = inputs(torch.bfloat16, "bias")
    with torch.no_grad():
        for branch in ((None, None), (y, None), (y, bias)):
            for a, b in zip(module(x, _branch=branch), apart(module)(x, branch), strict=True):
                assert torch.equal(a, b)


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("needs", ["111", "011"])
@pytest.mark.parametrize("kind", ["linear", "mlp_recomputed"])
def test_compiled(kind: str, needs: str) -> None:
    """One graph for each form, the same bits; x out of the graph's middle, or given to it."""
    module = make(kind, torch.bfloat16)
    for form in ("none", "bias"):
        counter = CompileCounterWithBackend("aot_eager")
        given = inputs(torch.bfloat16, form)

        def run(x: torch.Tensor, _branch: Any) -> Any:
            first, total = module(x, _branch=_branch)
            _, again = module(first * 0.5, _branch=_branch)
            return first, again, total

        call = torch.compile(run, fullgraph=True, backend=counter)
        torch._dynamo.reset()
        assert_equal(results(module, call, given, "mxfp8", needs), results(module, run, given, "mxfp8", needs))
        assert counter.frame_count == 1


# The layer


def by_hand(module: Any, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """TransformerLayer of its parts, each called as anybody would."""

    def run(x: torch.Tensor, rotary_pos_emb: Any = None, encoder_output: Any = None) -> torch.Tensor:
        x = add(x, *module.self_attention(x, rotary_pos_emb=rotary_pos_emb, **options))
        if module.layer_type == "decoder":
            x = add(x, *module.inter_attention(x, encoder_output=encoder_output, **options))
        x = add(x, *module.layernorm_mlp(x))
        return module.layernorm(x) if module.output_layernorm else x

    return run


BF16 = {**PLAIN, "params_dtype": torch.bfloat16}
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {**MODERN, "bias": False},
    "modern": MODERN,
    "layernorm": BF16,
    "zero_centered": {**MODERN, "zero_centered_gamma": True, "fuse_qkv_params": True},
    "no_bias": {**BF16, "bias": False},
    "half": {**MODERN, "params_dtype": torch.float16},
    "single": {**PLAIN, "params_dtype": torch.float32},
    "decoder": {**BF16, "layer_type": "decoder"},
    "output_norm": {**BF16, "output_layernorm": True},
    "decoder_output_norm": {**MODERN, "layer_type": "decoder", "output_layernorm": True},
}


def hidden(dtype: torch.dtype, size: int = 7, seed: int = 0) -> torch.Tensor:
    return draw(size, 2, HIDDEN, dtype=dtype, seed=seed)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer(options: dict[str, Any]) -> None:
    """Output and every gradient; in no recipe and in one with state, two steps each."""
    for recipe in ("none", "delayed", "mxfp8"):
        module = make_layer(**options)
        other = copy.deepcopy(module)
        given: dict[str, Any] = {"rotary_pos_emb": ANGLES}
        if options.get("layer_type") == "decoder":
            given["encoder_output"] = hidden(options["params_dtype"], 9, 5)
        for seed in range(2):
            x = hidden(options["params_dtype"], seed=seed)
            assert_equal(step(module, x, recipe, **given), step(other, x, recipe, by_hand(other), **given))


@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_in_every_recipe(recipe: str) -> None:
    module = make_layer(**LAYERS["llama"])
    other, x = copy.deepcopy(module), hidden(torch.bfloat16, 16)
    assert_equal(step(module, x, recipe), step(other, x, recipe, by_hand(other)))


class Saw(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of this library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mezzotint":
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))

    def sums(self) -> tuple[int, int]:
        return self.names.count("norm_add_stats"), self.names.count("norm_backward_add")


def sums_of(module: Any, x: torch.Tensor, **given: Any) -> tuple[int, int]:
    """How many sums norms take in, forward and backward."""
    with Saw() as saw:
        gradient(module(x.clone().requires_grad_(), **given)).backward()
    module.zero_grad()
    return saw.sums()


class Plain(mz.LayerNormMLP):
    """Somebody's own."""

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:  # type: ignore[override]
        return super().forward(inp, is_first_microbatch)


def test_where_norms_take_sums_in() -> None:
    x = hidden(torch.bfloat16)
    assert sums_of(make_layer(**MODERN), x) == (1, 2)
    assert sums_of(make_layer(**LAYERS["decoder"]), x, encoder_output=x) == (2, 3)
    assert sums_of(make_layer(**LAYERS["output_norm"]), x) == (1, 1)
    for options in (
        {"apply_residual_connection_post_layernorm": True},
        {"parallel_attention_mlp": True},
        {"drop_path_rate": 0.5},
        {"hidden_dropout": 0.5},
    ):
        assert sums_of(make_layer(**{**BF16, **options}), x) == (0, 0), options
    assert sums_of(make_layer(**{**BF16, "hidden_dropout": 0.5}).eval(), x) == (1, 2)
    own: Any = make_layer(**MODERN)
    own.layernorm_mlp.__class__ = Plain
    assert sums_of(own, x) == (0, 1)


def test_hooks_see_what_modules_are_given() -> None:
    """The input of the MLP is the sum."""
    module, x = make_layer(**MODERN), hidden(torch.bfloat16)
    want = step(module, x, "none")
    seen: list[Any] = []
    handle = module.layernorm_mlp.register_forward_hook(lambda mlp, inp, out: seen.append((inp[0], out)))
    assert_equal(step(module, x, "none"), want)
    ((inp, out),) = seen
    assert torch.equal(inp, add(x, *module.self_attention(x)))
    assert len(out) == 2
    assert sums_of(module, x) == (0, 1)
    handle.remove()
    assert sums_of(module, x) == (1, 2)


def test_calibration_sees_the_sum() -> None:
    module = make_layer(**MODERN)
    other, x = copy.deepcopy(module), hidden(torch.bfloat16)
    for call in (module, by_hand(other)):
        with torch.no_grad(), mz.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
            call(x)
    for (name, one), (_, two) in zip(module.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(one, two), name
    assert module.layernorm_mlp.amax_history_fwd.any()


def test_recomputed_layer() -> None:
    """`checkpoint` around a whole layer; frozen weights; an input without gradient."""
    for options, recipe in ((LAYERS["llama"], "mxfp8"), (LAYERS["layernorm"], "delayed")):
        module = make_layer(**options)
        other, x = copy.deepcopy(module), hidden(torch.bfloat16, 8)

        def call(leaf: torch.Tensor, module: Any = module) -> Any:
            return mz.checkpoint(module, leaf, use_reentrant=False)

        assert_equal(step(module, x, recipe, call), step(other, x, recipe, by_hand(other)))


def test_frozen_layer() -> None:
    module = make_layer(**MODERN, fuse_qkv_params=True)
    for parts in (("self_attention",), ("layernorm_mlp",), ("weight",), ("bias",), ("",)):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not any(part in name for part in parts))
        other, x = copy.deepcopy(module), hidden(torch.bfloat16, 8)
        assert_equal(step(module, x, "mxfp8"), step(other, x, "mxfp8", by_hand(other)))
    assert mz.TransformerLayer(HIDDEN, FFN, HEADS, **PLAIN)(x.float()).requires_grad
