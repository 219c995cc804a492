"""Caches of transformers in FP8: what is read of them, how far off attention is, and what they are used for."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import mezzotint as mz
from mezzotint import recipe
from tests.attention.test_kv_codes import bound_of_attention, read
from tests.serving.models import SIZES, make_model, tokens
from tests.serving.test_generate import NEW, generate

HEADS, CHANNELS = SIZES["num_attention_heads"], SIZES["head_dim"]
WINDOW = 6
KINDS = ("dynamic", "static")
MODELS = {"Llama": {}, "Mistral": {"sliding_window": WINDOW}}


def make_cache(kind: str, config: Any) -> Any:
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=16)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read(kind: str, name: str) -> None:
    """Bit for bit what a cache in FP32 gives of the values that FP8 leaves, whatever is done to it."""
    config = make_model(name, **MODELS[name]).config
    in_fp8, in_fp32 = mz.quantize_cache(make_cache(kind, config)), make_cache(kind, config)
    caches = {in_fp8: lambda x: x, in_fp32: read}
    if kind == "static":
        for cache in caches:
            cache.early_initialization(2, 3, CHANNELS, torch.float32, torch.device("cpu"))
    make = torch.Generator().manual_seed(0)
    for new in (4, 1, 1, 3, 1):  # past the window
        k, v = torch.randn(2, 2, 3, new, CHANNELS, generator=make) * 10
        got, wanted = (cache.update(kept(k), kept(v), 0) for cache, kept in caches.items())
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])
        for cache in caches:
            cache.reorder_cache(torch.tensor([1, 0]))
    held = in_fp8.layers[0].keys
    assert held.dtype == torch.uint8
    assert held.shape == (*in_fp32.layers[0].keys.shape[:-1], CHANNELS + 4)
    for cache in caches:
        cache.reset()
    k = torch.randn(1 + (kind == "static"), 3, 2, CHANNELS, generator=make)  # a static one has its batch
    got, wanted = (cache.update(kept(k), kept(k), 0) for cache, kept in caches.items())
    assert torch.equal(got[0], wanted[0])


def test_how_far_off_attention_is() -> None:
    """In a model, token by token, against the bound of `docs/serving.md`; the first layer has the same queries."""
    model = make_model(dtype=torch.float32).eval()
    attention, queries, results = model.model.layers[0].self_attn, [], []
    attention.q_proj.register_forward_hook(lambda *seen: queries.append(seen[2][:, -1]))
    attention.o_proj.register_forward_pre_hook(lambda _, given: results.append(given[0][:, -1]))
    plain, in_fp8 = DynamicCache(), mz.quantize_cache(DynamicCache())
    used = []
    for start, stop in ((0, 8), *((at, at + 1) for at in range(8, 16))):
        with torch.no_grad():
            for cache in (plain, in_fp8):
                model(tokens()[:, start:stop], past_key_values=cache)
            angles = model.model.rotary_emb(queries[-1], torch.tensor([[stop - 1]]))
        q = queries[-1].view(2, HEADS, 1, CHANNELS)
        q = apply_rotary_pos_emb(q, q, *angles)[0][:, :, 0]
        for row in range(2):
            k, v = (x[row].transpose(0, 1) for x in (plain.layers[0].keys, plain.layers[0].values))
            off = (results[-1] - results[-2])[row].abs()
            used.append((off / bound_of_attention(q[row], k, v)).max().item())
    assert 0.05 < max(used) < 1


@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str) -> None:
    """What is read of a token does not depend on others: the tokens are those of forwards over the whole sequence."""
    model = mz.convert(make_model(name, **MODELS[name]), recipe.MXFP8BlockScaling()).eval()
    ids = tokens()[:, :8]
    with torch.no_grad():
        for _ in range(NEW):
            fresh = mz.quantize_cache(DynamicCache(config=model.config))
            ids = torch.cat((ids, model(ids, past_key_values=fresh).logits[:, -1:].argmax(-1)), 1)
    for kind in KINDS:
        cache = mz.quantize_cache(make_cache(kind, model.config))
        assert torch.equal(generate(model, past_key_values=cache), ids)
    beams = [generate(model, num_beams=2, past_key_values=mz.quantize_cache(DynamicCache())) for _ in range(2)]
    assert torch.equal(*beams)


def test_a_copy_goes_its_own_way() -> None:
    cache = mz.quantize_cache(DynamicCache())
    x = torch.randn(1, 1, 4, 16)
    cache.update(x, x, 0)
    other = copy.deepcopy(cache)
    assert other.update(x, x, 0)[0].shape[2] == 8
    assert cache.get_seq_length() == 4
    cache.crop(-1)
    assert torch.equal(cache.update(x[:, :, 3:], x[:, :, 3:], 0)[0], read(x))


def test_bad_caches() -> None:
    config = make_model().config
    with pytest.raises(TypeError, match="cache is of class dict: give a DynamicCache or a StaticCache"):
        mz.quantize_cache({})
    with pytest.raises(TypeError, match="cache is of class EncoderDecoderCache: give"):
        mz.quantize_cache(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    with pytest.raises(TypeError, match="layer of class Fp8QuantizedLayer"):
        mz.quantize_cache(QuantizedCache("fp8", config))
    with pytest.raises(ValueError, match="in FP8 already"):
        mz.quantize_cache(mz.quantize_cache(DynamicCache()))
    used = DynamicCache()
    used.update(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8), 0)
    with pytest.raises(ValueError, match="holds keys and values already: give a new one"):
        mz.quantize_cache(used)
