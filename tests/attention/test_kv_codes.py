"""Keys and values that are cached in FP8: what is read of them, how far off it is, and how far off attention is."""

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint.attention.kv_codes import decode_heads, encode_heads
from tests.attention.test_kv_cache import BATCH, CHANNELS, GROUPS, HEADS, LONGEST, STEPS, Stream, arrange, rows_of

FP8 = torch.float8_e4m3fn


def params_of(is_paged: bool, dtype: torch.dtype = FP8) -> mz.InferenceParams:
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": 8} if is_paged else {}
    return mz.InferenceParams(BATCH, LONGEST, GROUPS, CHANNELS, dtype, device="cpu", **pages)


def read(x: torch.Tensor) -> torch.Tensor:
    """What is read of x, by PyTorch's own cast: one scale for each head."""
    scale = torch.full_like(x[..., :1], 448.0) / x.abs().amax(-1, keepdim=True)
    return (x * scale).to(FP8).float() * (torch.ones_like(scale) / scale)


def error_bound(x: torch.Tensor) -> torch.Tensor:
    """Half of the last of three bits of mantissa, and half of the smallest step for what is smaller than that."""
    return x.abs() / 16 * (1 + 2**-20) + x.abs().amax(-1, keepdim=True) / 2**18


def test_what_is_read() -> None:
    make = torch.Generator().manual_seed(0)
    x = torch.randn(512, 2, 16, generator=make) * torch.exp2(torch.randint(-60, 60, (512, 2, 1), generator=make))
    x *= torch.exp2(torch.randint(-16, 1, x.shape, generator=make))
    got = decode_heads(encode_heads(x), torch.float32)
    assert torch.equal(got, read(x))
    used = (got - x).abs() / error_bound(x)
    assert 0.9 < used.max() <= 1
    assert encode_heads(x).shape == (512, 2, 20)
    zeros = torch.zeros(2, 1, 8)
    assert torch.equal(decode_heads(encode_heads(zeros), torch.bfloat16), zeros.bfloat16())
    assert torch.equal(decode_heads(torch.zeros(2, 1, 12, dtype=torch.uint8), torch.float32), zeros)


@pytest.mark.parametrize(("layout", "is_paged"), [("bshd", False), ("sbhd", True), ("thd", False), ("thd", True)])
def test_attention_sees_what_is_read(layout: str, is_paged: bool) -> None:
    """Bit for bit as a cache in FP32 of the values that FP8 leaves of keys and values; sequences come and go."""
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format=layout)
    other, stream = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format=layout), Stream()
    in_fp8, in_fp32 = params_of(is_paged), params_of(is_paged, torch.float32)
    for step in STEPS:
        q, k, v = arrange(stream.grow(step), layout)
        results = []
        for attention, params, given in ((module, in_fp8, (q, k, v)), (other, in_fp32, (q, read(k), read(v)))):
            params.pre_step(OrderedDict(step))
            y = attention(*given, attn_mask_type="padding_causal", inference_params=params)
            results.append(rows_of(y, step, layout))
        for name, got in results[0].items():
            assert torch.equal(got, results[1][name])


def bound_of_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of the last query [h, d] over keys and values [s, g, d]: by how much attention can be off, [h · d].

    A logit is off by at most e, so a probability by a factor of at most exp(2e).
    """
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[1], 1).double() for x in (k, v))
    q, scale = q.double(), 1 / math.sqrt(q.shape[-1])
    logits = torch.einsum("hd,shd->hs", q, k) * scale
    off = (torch.einsum("hd,shd->hs", q.abs(), error_bound(k)) * scale).amax(-1)[:, None]
    p = logits.softmax(-1)
    values = torch.einsum("hs,shd->hd", p, error_bound(v))
    weights = torch.einsum("hs,shd->hd", p, v.abs())
    return ((2 * off).exp() * values + ((2 * off).exp() - 1) * weights).flatten()


def test_how_far_off_attention_is() -> None:
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format="bshd")
    params, stream, used = params_of(False), Stream(), []
    for step in [{0: 5, 1: 3}, *[{0: 1, 1: 1}] * 6]:
        fresh = stream.grow(step)
        params.pre_step(OrderedDict(step))
        y = module(*arrange(fresh, "bshd"), attn_mask_type="padding_causal", inference_params=params)
        for name, got in rows_of(y, step, "bshd").items():
            q, k, v = stream.held[name]
            off = (got[-1] - stream.whole(module, name)[-1]).abs()
            used.append((off / bound_of_attention(q[-1], k, v)).max().item())
    assert 0.05 < max(used) < 1


@pytest.mark.compile
def test_decoding_is_one_graph() -> None:
    """In a layer under a recipe: one graph for the prompt and one for all tokens after it, with the eager bits."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_gqa_groups": GROUPS, "attn_input_format": "bshd", "params_dtype": torch.bfloat16}
    layer = mz.TransformerLayer(32, 64, HEADS, layer_number=1, device="cpu", **options).eval()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(layer, fullgraph=True, backend=counter)
    caches = params_of(False), params_of(False)
    for params in caches:
        params.allocate_memory(1)
    for new in (4, 1, 1, 1, 1):
        x, results = torch.randn(2, new, 32).bfloat16(), []
        for function, params in zip((call, layer), caches, strict=True):
            params.pre_step(OrderedDict({0: new, 1: new}))
            with torch.no_grad(), mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
                results.append(function(x, self_attn_mask_type="padding_causal", inference_params=params))
        assert torch.equal(*results)
    assert counter.frame_count == 2


def test_bad_dtype() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.float8_e5m2: of 8 bits"):
        params_of(False, torch.float8_e5m2)
