"""TransformerLayer: its formula, every recipe eager and compiled, decoding, state."""

import copy
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional

import mezzotint as mz
from mezzotint.layer.configured import config_of
from tests.recipes import RECIPES, assert_equal, gradient

HIDDEN, FFN, HEADS, SIZE, BATCH = 64, 96, 4, 16, 2
CHANNELS = HIDDEN // HEADS
PLAIN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
# As language models have it.
MODERN: dict[str, Any] = {
    **PLAIN,
    "num_gqa_groups": 2,
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "params_dtype": torch.bfloat16,
}
# A gradient that is a sum over tokens, which Inductor adds in an order of its own.
SUMMED = ("self_attention.proj.bias",)
ANGLES = mz.RotaryPositionEmbedding(CHANNELS).cpu()(32)


def make(**options: Any) -> mz.TransformerLayer:
    torch.manual_seed(0)
    module = mz.TransformerLayer(HIDDEN, FFN, HEADS, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4.0 if "proj" in name or "fc2" in name else 2.0)
    return module


def sample(size: int = SIZE, seed: int = 0, dtype: torch.dtype = torch.bfloat16, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(size, batch, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(module: Any, x: torch.Tensor, recipe: str, call: Any = None, **options: Any) -> dict[str, Any]:
    """A forward and a backward: output, gradients by name, delayed scaling's state."""
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = (module if call is None else call)(leaf, **options)
    gradient(y).backward()
    result = {"output": y.detach(), "input": leaf.grad}
    for name, parameter in module.named_parameters():
        result[name], parameter.grad = parameter.grad, None
    return result | {name: buffer.clone() for name, buffer in module.named_buffers()}


def compiled(module: Any, backend: str = "aot_eager", **options: Any) -> tuple[Any, Any]:
    counter = CompileCounterWithBackend(backend)
    counters.clear()
    return torch.compile(module, fullgraph=True, backend=counter, **options), counter


# The formula


def norm_of(part: Any, x: torch.Tensor, prefix: str = "layer_norm_") -> torch.Tensor:
    weight, bias = getattr(part, f"{prefix}weight"), getattr(part, f"{prefix}bias")
    if bias is None:
        return functional.rms_norm(x, (HIDDEN,), weight, 1e-5)
    return functional.layer_norm(x, (HIDDEN,), weight, bias, 1e-5)


def attention_of(part: Any, x: torch.Tensor, mask: Any, memory: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, s, hidden] → the same and what the norm gave; weights are split."""
    name = "layernorm_query" if memory is not None else "layernorm_qkv"
    source = getattr(part, name, None)
    inner = x if source is None else norm_of(source, x)
    keys = source or part.qkv
    others = part.key_value if memory is not None else keys
    memory = inner if memory is None else memory
    q = functional.linear(inner, keys.query_weight, keys.query_bias)
    k = functional.linear(memory, others.key_weight, others.key_bias)
    v = functional.linear(memory, others.value_weight, others.value_bias)
    q, k, v = (t.unflatten(-1, (-1, CHANNELS)).transpose(1, 2) for t in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal").transpose(1, 2).flatten(2)
    return functional.linear(y, part.proj.weight, part.proj.bias), inner


def mlp_of(part: Any, x: torch.Tensor, is_gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    inner = norm_of(part, x)
    hidden = functional.linear(inner, part.fc1_weight, part.fc1_bias)
    if is_gated:
        first, second = hidden.chunk(2, -1)
        hidden = functional.silu(first) * second
    else:
        hidden = functional.gelu(hidden, approximate="tanh")
    return functional.linear(hidden, part.fc2_weight, part.fc2_bias), inner


def formula(module: Any, x: torch.Tensor, memory: Any, options: dict[str, Any]) -> torch.Tensor:
    post = options.get("apply_residual_connection_post_layernorm", False)
    is_gated = options.get("activation") == "swiglu"
    made, inner = attention_of(module.self_attention, x, "causal")
    if options.get("parallel_attention_mlp"):
        return x + made + mlp_of(module.layernorm_mlp, x, is_gated)[0]
    x = made + (inner if post else x)
    if memory is not None:
        made, inner = attention_of(module.inter_attention, x, "no_mask", memory)
        x = made + (inner if post else x)
    made, inner = mlp_of(module.layernorm_mlp, x, is_gated)
    x = made + (inner if post else x)
    return norm_of(module.layernorm, x, "") if options.get("output_layernorm") else x


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "swiglu", "normalization": "RMSNorm"},
        {"output_layernorm": True},
        {"apply_residual_connection_post_layernorm": True},
        {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
        {"parallel_attention_mlp": True},
        {"layer_type": "decoder"},
        {"layer_type": "decoder", "apply_residual_connection_post_layernorm": True},
        {"layer_type": "decoder", "output_layernorm": True},
    ],
    ids=str,
)
def test_formula(options: dict[str, Any], layout: str) -> None:
    module = make(**PLAIN, attn_input_format=layout, **options)
    x = sample(dtype=torch.float32).transpose(0, 1).requires_grad_()  # [b, s, hidden]
    memory = sample(9, 1, torch.float32).transpose(0, 1) if options.get("layer_type") == "decoder" else None
    given = {}
    if memory is not None:
        given["encoder_output"] = memory.transpose(0, 1) if layout == "sbhd" else memory
    got = module(x.transpose(0, 1), **given).transpose(0, 1) if layout == "sbhd" else module(x, **given)
    expected = formula(module, x, memory, options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    leaves = [x, *module.parameters()]
    for one, other in zip(
        torch.autograd.grad(gradient(got), leaves), torch.autograd.grad(gradient(expected), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_packed_batch_equals_a_padded_one() -> None:
    lengths = [5, 9]
    cu = torch.tensor([0, 5, 14], dtype=torch.int32)
    one, other = make(**PLAIN), make(**PLAIN, attn_input_format="thd")
    x = sample(9, dtype=torch.float32)
    options: Any = {"self_attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    y = one(x, rotary_pos_emb=ANGLES, **options)
    flat = torch.cat([x[:n, i] for i, n in enumerate(lengths)])
    expected = torch.cat([y[:n, i] for i, n in enumerate(lengths)])
    torch.testing.assert_close(other(flat, rotary_pos_emb=ANGLES, **options), expected, rtol=1e-5, atol=1e-5)


def test_dropout_and_dropped_paths() -> None:
    x = sample(64, dtype=torch.float32)
    exact = make(**PLAIN)
    dropping = make(**{**PLAIN, "hidden_dropout": 0.5})
    assert torch.equal(dropping.eval()(x), exact(x))
    dropping.train()
    torch.manual_seed(3)
    first = dropping(x)
    assert not torch.equal(first, dropping(x))
    torch.manual_seed(3)
    assert torch.equal(first, dropping(x))
    paths = make(**PLAIN, drop_path_rate=0.5)
    assert torch.equal(paths.eval()(x), exact(x))
    unchanged = (paths.train()(x) == x).all(-1).all(-1)
    assert 0.05 < unchanged.float().mean() < 0.5  # both paths are dropped in a quarter of the samples


def test_a_residual_is_rounded_once() -> None:
    """y + bias + residual in FP32."""
    module = make(**{**PLAIN, "params_dtype": torch.bfloat16})
    y, residual, bias = sample(seed=1), sample(seed=2), sample(seed=3)[0, 0]
    expected = (y.double() + bias.double() + residual.double()).to(torch.bfloat16)
    assert torch.equal(module._bias_dropout_add(config_of(module), y, bias, residual, None), expected)


# Recipes


@pytest.mark.compile
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name in ("delayed", "nvfp4") else pytest.mark.slow) for name in RECIPES],
)
def test_every_recipe_compiles_whole(recipe: str) -> None:
    """The same bits, one graph for three steps, and not the bits of no recipe."""
    eager = make(**MODERN, qk_norm_type="RMSNorm")
    module = copy.deepcopy(eager)
    call, counter = compiled(module)
    for seed in range(3):
        x = sample(seed=seed)
        expected = step(eager, x, recipe, rotary_pos_emb=ANGLES)
        assert_equal(step(module, x, recipe, call, rotary_pos_emb=ANGLES), expected)
        assert all(value is not None and value.isfinite().all() for value in expected.values())
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    if recipe != "none":
        plain = step(make(**MODERN, qk_norm_type="RMSNorm"), x, "none", rotary_pos_emb=ANGLES)
        away = (expected["output"] - plain["output"]).float().norm() / plain["output"].float().norm()
        assert 0.001 < away < 0.3


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize(
    "options",
    [
        {"layer_type": "decoder"},
        {"parallel_attention_mlp": True},
        {"apply_residual_connection_post_layernorm": True, "output_layernorm": True, "fuse_qkv_params": True},
        {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    ],
    ids=str,
)
def test_every_form_compiles_whole(options: dict[str, Any]) -> None:
    eager = make(**{**PLAIN, "params_dtype": torch.bfloat16, **options})
    module = copy.deepcopy(eager)
    call, counter = compiled(module)
    given = {"encoder_output": sample(9, 5)} if "layer_type" in options else {}
    for seed in range(2):
        x = sample(seed=seed)
        got, expected = step(module, x, "mxfp8", call, **given), step(eager, x, "mxfp8", **given)
        if "attention_dropout" in options:
            assert {*got} == {*expected}  # a compiled dropout draws other numbers
        else:
            assert_equal(got, expected)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_two_graphs_for_several_sizes(recipe: str) -> None:
    eager = make(**MODERN)
    module = copy.deepcopy(eager)
    call, counter = compiled(module)
    for seed, (size, batch) in enumerate(((16, 2), (24, 3), (12, 4), (7, 5))):
        x = sample(size, seed, batch=batch)
        assert_equal(step(module, x, recipe, call), step(eager, x, recipe))
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["delayed"])
def test_micro_batches_have_two_graphs(recipe: str) -> None:
    eager = make(**MODERN)
    module = copy.deepcopy(eager)
    call, counter = compiled(module)
    for seed, first in enumerate((True, False, False, True)):
        x = sample(seed=seed)
        got = step(module, x, recipe, call, is_first_microbatch=first)
        assert_equal(got, step(eager, x, recipe, is_first_microbatch=first))
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["delayed"])
def test_inductor(recipe: str) -> None:
    """The same bits but where gradients are `SUMMED`: within one unit of BF16."""
    eager = make(**MODERN)
    module = copy.deepcopy(eager)
    call, counter = compiled(module, "inductor")
    for seed in range(2):
        x = sample(seed=seed)
        got = step(module, x, recipe, call, rotary_pos_emb=ANGLES)
        expected = step(eager, x, recipe, rotary_pos_emb=ANGLES)
        assert_equal(got, expected, but=SUMMED)
        for name in SUMMED:
            away = (got[name].float() - expected[name].float()).norm() / expected[name].float().norm()
            assert away < 2**-8, name
    assert counter.frame_count == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.compile
def test_inductor_that_keeps_roundings() -> None:
    """With `emulate_precision_casts` all bits are the same."""
    eager = make(**MODERN)
    module = copy.deepcopy(eager)
    call = torch.compile(module, fullgraph=True, options={"emulate_precision_casts": True})
    x = sample()
    got = step(module, x, "mxfp8", call, rotary_pos_emb=ANGLES)
    assert_equal(got, step(eager, x, "mxfp8", rotary_pos_emb=ANGLES))


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_recomputed_layer(recipe: str) -> None:
    """`checkpoint` around a layer, and inside of it around the attention."""
    x = sample()
    expected = step(make(**MODERN), x, recipe)
    module = make(**MODERN)
    assert_equal(step(module, x, recipe, lambda leaf: mz.checkpoint(module, leaf, use_reentrant=False)), expected)
    assert_equal(step(make(**MODERN), x, recipe, checkpoint_core_attention=True), expected)


def test_quantized_weights() -> None:
    """They take one weight for queries, keys and values."""
    with mz.quantized_model_init(recipe=RECIPES["mxfp8"]):
        module = mz.TransformerLayer(HIDDEN, FFN, HEADS, **MODERN, fuse_qkv_params=True)
        with pytest.raises(ValueError, match=r"parameters_split with quantized_model_init: .*fuse_qkv_params=True"):
            mz.TransformerLayer(HIDDEN, FFN, HEADS, **MODERN)
    kinds = {name for name, value in module.named_parameters() if isinstance(value, mz.QuantizedTensor)}
    weights = ("self_attention.layernorm_qkv.weight", "self_attention.proj.weight")
    assert kinds == {*weights, "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight"}
    assert step(module, sample(), "mxfp8")["input"].isfinite().all()


# Decoding


class Model(nn.Module):
    """Two layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(**MODERN, layer_number=i + 1, **options) for i in range(2)])

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=ANGLES, **options)
        return x


@pytest.mark.compile
@pytest.mark.parametrize(
    ("recipe", "is_paged", "compiles"),
    [
        ("none", False, False),
        ("mxfp8", True, True),
        pytest.param("none", False, True, marks=pytest.mark.slow),
        pytest.param("none", True, False, marks=pytest.mark.slow),
        pytest.param("rowwise", False, False, marks=pytest.mark.slow),
        pytest.param("block", True, False, marks=pytest.mark.slow),
        pytest.param("mxfp8", False, False, marks=pytest.mark.slow),
    ],
)
def test_decoding_equals_the_whole(recipe: str, is_paged: bool, compiles: bool) -> None:
    """A ragged prefill, then token by token, in recipes whose scales are of single rows.

    In FP32. PyTorch's kernels sum in another order for one query than for many: 1e-5. With a recipe such a difference
    moves a number to its neighbour now and then.
    """
    torch.manual_seed(0)
    model = Model().float().eval()
    total, prefill = [12, 9], [8, 5]
    x = torch.randn(12, 2, HIDDEN, generator=torch.Generator().manual_seed(7))
    region = mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe])
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": 16} if is_paged else {}
    options: Any = {"self_attn_mask_type": "padding_causal"}
    with torch.no_grad(), region:
        whole = [model(x[:n, i : i + 1])[:, 0] for i, n in enumerate(total)]
    call, counter = compiled(model)
    for function in (model, call) if compiles else (model,):
        params = mz.InferenceParams(2, 32, 2, CHANNELS, torch.float32, qkv_format="sbhd", device="cpu", **pages)
        for layer in (1, 2):
            params.allocate_memory(layer)
        done = [0, 0]
        outputs: list[list[torch.Tensor]] = [[], []]
        for counts in (prefill, *[[1, 1]] * 4):
            params.pre_step(OrderedDict(enumerate(counts)))
            new = torch.zeros(max(counts), 2, HIDDEN)
            for i, count in enumerate(counts):
                new[:count, i] = x[done[i] : done[i] + count, i]
                done[i] += count
            with torch.no_grad(), region:
                y = function(new, inference_params=params, **options)
            for i, count in enumerate(counts):
                outputs[i].append(y[:count, i])
        for got, expected in zip(outputs, whole, strict=True):
            if recipe == "none":
                torch.testing.assert_close(torch.cat(got), expected, rtol=1e-5, atol=1e-5)
            else:
                away = (torch.cat(got) - expected).norm() / expected.norm()
                assert away < 2e-3
    assert counter.frame_count == (2 if compiles else 0)  # the prefill's and the steps'
    assert not counters["graph_break"]


def test_memory_is_allocated_where_it_is_missing() -> None:
    model = Model().float().eval()
    params = mz.InferenceParams(2, 32, 2, CHANNELS, torch.float32, device="cpu")
    params.pre_step(OrderedDict({0: 3, 1: 3}))
    y = model(sample(3, dtype=torch.float32), inference_params=params, self_attn_mask_type="padding_causal")
    torch.testing.assert_close(y, model(sample(3, dtype=torch.float32)), rtol=1e-5, atol=1e-5)
    assert {*params.cache_manager.cache} == {1, 2}


# State


def test_keys_of_the_state() -> None:
    module = make(**PLAIN, layer_type="decoder", output_layernorm=True, fuse_qkv_params=True, normalization="RMSNorm")
    linears = ("self_attention.qkv", "self_attention.proj", "inter_attention.layernorm_query")
    linears += ("inter_attention.key_value", "inter_attention.proj")
    expected = {f"{name}.{kind}" for name in linears for kind in ("weight", "bias")}
    expected |= {f"layernorm_mlp.{fc}_{kind}" for fc in ("fc1", "fc2") for kind in ("weight", "bias")}
    expected |= {"inter_attention.layernorm_query.layer_norm_weight", "layernorm_mlp.layer_norm_weight"}
    expected |= {f"{name}._extra_state" for name in (*linears, "layernorm_mlp")}
    assert {*module.state_dict()} == expected | {"layernorm.weight"}


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_state_round_trip(recipe: str) -> None:
    module = make(**MODERN)
    for seed in range(2):
        step(module, sample(seed=seed), recipe)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = mz.TransformerLayer(HIDDEN, FFN, HEADS, **MODERN)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    x = sample(seed=9)
    assert_equal(step(other, x, recipe), step(module, x, recipe))
    module.reset_fp8_meta_tensors()


def test_meta_device() -> None:
    module = mz.TransformerLayer(HIDDEN, FFN, HEADS, **{**MODERN, "device": "meta"}, softmax_type="learnable")
    assert all(parameter.is_meta for parameter in module.parameters())
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert module.cpu()(sample()).isfinite().all()


def test_torch_autocast_and_other_dtypes() -> None:
    module = make(**PLAIN)
    x = sample(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), module(x), rtol=0.05, atol=0.1)
    assert module(x.half()).dtype == torch.float16


def test_bad_input() -> None:
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "layer_type is 'both'", {"layer_type": "both"}),
        (ValueError, "drop_path_rate is 1.0", {"drop_path_rate": 1.0}),
        (ValueError, "drop_path_rate is -0.1", {"drop_path_rate": -0.1}),
        (ValueError, "parallel_attention_mlp goes with", {"parallel_attention_mlp": True, "output_layernorm": True}),
        (ValueError, "parallel_attention_mlp goes with", {"parallel_attention_mlp": True, "layer_type": "decoder"}),
        (ValueError, "fuse_qkv_params=True", {"fuse_wgrad_accumulation": True}),
        (ValueError, "activation is 'tent'", {"activation": "tent"}),
        (ValueError, "qkv_format is 'hd'", {"attn_input_format": "hd"}),
        (NotImplementedError, "ub_tp_comm_overlap=True", {"ub_tp_comm_overlap": True}),
        (ValueError, "it must be divisible by the 7 ranks", {"tp_size": 7, "set_parallel_mode": True}),
    ]
    for error, message, options in wrong:
        with pytest.raises(error, match=message):
            make(**PLAIN, **options)
    module = make(**PLAIN, layer_type="decoder")
    with pytest.raises(ValueError, match="encoder_output is None"):
        module(sample(dtype=torch.float32))
    with pytest.raises(ValueError, match="hidden_states has shape"):
        module(torch.zeros(2, 2, 8))
    with pytest.raises(TypeError, match="hidden_states is list"):
        module([1.0])
