"""MultiheadAttention against its formula: how weights lie, groups, norms, rotary positions, layouts."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import mezzotint as mz
from tests.attention.reference import attention
from tests.recipes import RECIPES

HIDDEN, HEADS, CHANNELS, SIZE, BATCH = 24, 4, 6, 5, 2
ANGLES = mz.RotaryPositionEmbedding(CHANNELS).cpu()(16)


def make(**options: Any) -> mz.MultiheadAttention:
    torch.manual_seed(0)
    module = mz.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, device="cpu", **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return module


def sample(size: int = SIZE, seed: int = 0) -> torch.Tensor:
    """[b, s, hidden]."""
    return torch.randn(BATCH, size, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def linear(part: Any, x: torch.Tensor, names: tuple[str, ...], norm: bool = False) -> torch.Tensor:
    """By torch, from a part's parameters, split or not."""
    if norm:
        x = functional.layer_norm(x, (HIDDEN,), part.layer_norm_weight, part.layer_norm_bias, 1e-5)
    state = dict(part.named_parameters())
    weights = [state[f"{name}weight"] for name in names]
    biases = [state[f"{name}bias"] for name in names if f"{name}bias" in state]
    return functional.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)


def split_heads(mixed: torch.Tensor, groups: int, interleaved: bool) -> list[torch.Tensor]:
    """[b, s, (h + 2g) · d] → q, k, v, head by head."""
    heads = list(mixed.split(CHANNELS, -1))
    ratio = HEADS // groups
    if not interleaved:
        parts = heads[:HEADS], heads[HEADS : HEADS + groups], heads[HEADS + groups :]
    else:
        blocks = [heads[i * (ratio + 2) : (i + 1) * (ratio + 2)] for i in range(groups)]
        parts = [h for b in blocks for h in b[:ratio]], [b[ratio] for b in blocks], [b[ratio + 1] for b in blocks]
    return [torch.stack(part, 2) for part in parts]


def normalise(kind: str | None, norm: Any, x: torch.Tensor) -> torch.Tensor:
    match kind:
        case "L2Normalization":
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        case "RMSNorm":
            return functional.rms_norm(x, (CHANNELS,), norm.weight, 1e-6)
        case "LayerNorm":
            return functional.layer_norm(x, (CHANNELS,), norm.weight, norm.bias, 1e-6)
    return x


def check(got: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=1e-5)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad((got * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("input_layernorm", [False, True])
@pytest.mark.parametrize(("fused", "interleaved"), [(False, True), (True, True), (True, False)])
def test_how_weights_lie(fused: bool, interleaved: bool, input_layernorm: bool, groups: int) -> None:
    module = make(
        num_gqa_groups=groups,
        fuse_qkv_params=fused,
        qkv_weight_interleaved=interleaved,
        input_layernorm=input_layernorm,
    )
    x = sample()
    part = module.layernorm_qkv if input_layernorm else module.qkv
    names = ("",) if fused else ("query_", "key_", "value_")
    mixed = linear(part, x, names, input_layernorm)
    y, _ = attention(*split_heads(mixed, groups, fused and interleaved), "causal")
    expected = linear(module.proj, y.float(), ("",))
    check(module(x.transpose(0, 1)).transpose(0, 1), expected, [x, *module.parameters()])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", [None, "L2Normalization", "RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_norms_and_rotary_positions(layout: str, kind: str | None, before: bool) -> None:
    module = make(
        num_gqa_groups=2, fuse_qkv_params=True, qk_norm_type=kind, qk_norm_before_rope=before, qkv_format=layout
    )
    x = sample()
    q, k, v = split_heads(linear(module.qkv, x, ("",)), 2, True)
    for step in ("norm", "turn") if before else ("turn", "norm"):
        if step == "norm":
            q, k = normalise(kind, module.q_norm, q), normalise(kind, module.k_norm, k)
        else:
            q, k = (mz.apply_rotary_pos_emb(part, ANGLES, "bshd") for part in (q, k))
    y, _ = attention(q, k, v, "causal")
    expected = linear(module.proj, y.float(), ("",))
    if layout == "thd":
        cu = torch.tensor([0, SIZE, 2 * SIZE], dtype=torch.int32)
        options: Any = {"attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        got = module(x.flatten(0, 1), rotary_pos_emb=ANGLES, **options).view(x.shape)
    elif layout == "bshd":
        got = module(x, rotary_pos_emb=(ANGLES, ANGLES))
    else:
        got = module(x.transpose(0, 1), rotary_pos_emb=ANGLES).transpose(0, 1)
    check(got, expected, [x, *module.parameters()])


@pytest.mark.parametrize("input_layernorm", [False, True])
@pytest.mark.parametrize(("fused", "interleaved"), [(False, True), (True, True), (True, False)])
def test_cross_attention(fused: bool, interleaved: bool, input_layernorm: bool) -> None:
    module = make(
        num_gqa_groups=2,
        attention_type="cross",
        attn_mask_type="no_mask",
        fuse_qkv_params=fused,
        qkv_weight_interleaved=interleaved,
        input_layernorm=input_layernorm,
    )
    x, memory = sample(), sample(7, seed=1)
    part = module.layernorm_query if input_layernorm else module.query_layer
    q = linear(part, x, ("query_",) if input_layernorm and not fused else ("",), input_layernorm)
    heads = list(linear(module.key_value, memory, ("",) if fused else ("key_", "value_")).split(CHANNELS, -1))
    pairs = (heads[0::2], heads[1::2]) if fused and interleaved else (heads[:2], heads[2:])
    y, _ = attention(q.unflatten(-1, (HEADS, CHANNELS)), *(torch.stack(pair, 2) for pair in pairs))
    expected = linear(module.proj, y.float(), ("",))
    got = module(x.transpose(0, 1), encoder_output=memory.transpose(0, 1)).transpose(0, 1)
    check(got, expected, [x, memory, *module.parameters()])


def test_arguments_reach_the_attention() -> None:
    """Masks, windows, biases: as in `core_attention`, by default as at the making."""
    x = sample().detach()
    module = make(qkv_format="bshd", attn_mask_type="no_mask", window_size=(1, 1), fuse_qkv_params=True)
    q, k, v = split_heads(linear(module.qkv, x, ("",)), HEADS, True)
    hidden = torch.rand(BATCH, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(2)) < 0.3
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"mask": "no_mask", "window": (1, 1)}),
        ({"attn_mask_type": "causal"}, {"mask": "causal", "window": (1, 1)}),
        ({"window_size": (-1, -1)}, {"mask": "no_mask"}),
        (
            {"attn_mask_type": "arbitrary", "attention_mask": hidden, "window_size": (-1, -1)},
            {"mask": "arbitrary", "hidden": hidden.expand(-1, HEADS, -1, -1)},
        ),
        ({"core_attention_bias_type": "alibi"}, {"mask": "no_mask", "window": (1, 1), "bias_type": "alibi"}),
        ({"checkpoint_core_attention": True}, {"mask": "no_mask", "window": (1, 1)}),
    ]
    for given, expected in cases:
        y, _ = attention(q, k, v, **expected)
        torch.testing.assert_close(
            module(x, **given).double(), linear(module.proj, y.float(), ("",)).double(), rtol=1e-4, atol=1e-5
        )


def test_what_is_returned() -> None:
    x = sample().detach()
    plain = make(input_layernorm=True)(x)
    module = make(input_layernorm=True, return_bias=True, return_layernorm_output=True)
    y, bias, norm_out = module(x)
    assert torch.equal(bias, module.proj.bias)
    torch.testing.assert_close(y + bias, plain)
    part = module.layernorm_qkv
    expected = functional.layer_norm(x, (HIDDEN,), part.layer_norm_weight, part.layer_norm_bias)
    torch.testing.assert_close(norm_out, expected)
    y, norm_out = make(input_layernorm=True, return_layernorm_output=True)(x)
    assert torch.equal(y, plain)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {f"qkv.{name}_{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")}),
        ({"fuse_qkv_params": True, "bias": False, "qk_norm_type": "L2Normalization"}, {"qkv.weight"}),
        (
            {"input_layernorm": True, "fuse_qkv_params": True, "normalization": "RMSNorm", "bias": False},
            {"layernorm_qkv.layer_norm_weight", "layernorm_qkv.weight"},
        ),
        (
            {"attention_type": "cross", "bias": False},
            {"query_layer.weight", "key_value.key_weight", "key_value.value_weight"},
        ),
        (
            {"attention_type": "cross", "input_layernorm": True, "bias": False},
            {
                "layernorm_query.layer_norm_weight",
                "layernorm_query.layer_norm_bias",
                "layernorm_query.query_weight",
                "key_value.key_weight",
                "key_value.value_weight",
            },
        ),
        (
            {"fuse_qkv_params": True, "bias": False, "qk_norm_type": "LayerNorm"},
            {"qkv.weight", "q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"},
        ),
        (
            {"fuse_qkv_params": True, "bias": False, "softmax_type": "learnable"},
            {"qkv.weight", "core_attention.softmax_offset"},
        ),
    ],
)
def test_keys_of_the_state(options: dict[str, Any], keys: set[str]) -> None:
    module = make(**options)
    proj = {"proj.weight"} if options.get("bias") is False else {"proj.weight", "proj.bias"}
    learnt = {f"{name.split('.')[0]}._extra_state" for name in keys | proj if name.endswith(("_weight", ".weight"))}
    learnt -= {f"{norm}._extra_state" for norm in ("q_norm", "k_norm")}
    assert {*module.state_dict()} == keys | proj | learnt
    other = make(**options)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(module.state_dict(), strict=True)
    x = sample()
    memory = {"encoder_output": x} if options.get("attention_type") == "cross" else {}
    assert torch.equal(other(x, **memory), module(x, **memory))


def test_micro_batches_keep_their_weights() -> None:
    module = make(input_layernorm=True, params_dtype=torch.bfloat16)
    x = sample().detach().to(torch.bfloat16)
    with torch.no_grad(), mz.autocast(recipe=RECIPES["mxfp8"]):
        first = module(x, is_first_microbatch=True)
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        assert torch.equal(module(x, is_first_microbatch=False), first)
        assert not torch.equal(module(x, is_first_microbatch=True), first)


def test_names_reach_the_recipe() -> None:
    seen = set()

    def factory(role: Any) -> Any:
        seen.add(role.name)
        return mz.IdentityQuantizer()

    for options in ({}, {"input_layernorm": True}, {"attention_type": "cross"}):
        module = make(name="block", **options)
        with mz.autocast(recipe=mz.recipe.CustomRecipe(factory)):
            module(sample(), **{"encoder_output": sample()} if options.get("attention_type") else {})
    assert seen == {f"block.{part}" for part in ("qkv", "layernorm_qkv", "query_layer", "key_value", "proj")}


def test_bad_input() -> None:
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "attention_type is 'own'", {"attention_type": "own"}),
        (ValueError, "qk_norm_type is 'Batch'", {"qk_norm_type": "Batch"}),
        (ValueError, "layer_number is 0", {"layer_number": 0}),
        (ValueError, "num_gqa_groups is 3", {"num_gqa_groups": 3}),
        (ValueError, "normalization is 'None'", {"normalization": "None", "input_layernorm": True}),
        (ValueError, "tp_size is 0", {"tp_size": 0}),
        (ValueError, "num_attention_heads is 4: .* 3 ranks", {"tp_size": 3, "set_parallel_mode": True}),
        (NotImplementedError, "ub_overlap_ag=True", {"ub_overlap_ag": True}),
    ]
    for error, message, options in wrong:
        with pytest.raises(error, match=message):
            make(**options)
    with pytest.raises(ValueError, match="hidden_size is 25"):
        mz.MultiheadAttention(25, 4, device="cpu")
    with pytest.raises(ValueError, match="its last dimension must be 24"):
        make()(torch.zeros(2, 2, 8))
    with pytest.raises(ValueError, match="encoder_output is None"):
        make(attention_type="cross")(sample())
    params = mz.InferenceParams(BATCH, 99, HEADS, CHANNELS, torch.float32, device="cpu")
    with pytest.raises(ValueError, match="rotary_pos_emb has 16 positions"):
        make(qkv_format="bshd")(sample(), inference_params=params, rotary_pos_emb=ANGLES)


def test_a_group_of_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make()
    module.set_context_parallel_group(None, None, None)
    module.set_tensor_parallel_group(None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(NotImplementedError, match="cp_group has 2 ranks"):
        module.set_context_parallel_group(object(), [0, 1], None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="the size of tp_group is 2, the module was made for tp_size=1"):
        module.set_tensor_parallel_group(object())
