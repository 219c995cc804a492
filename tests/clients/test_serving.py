"""Exports, read by transformers and compressed-tensors alone: their weights are our dequantized ones, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, DynamicCache, Mxfp4Config

import mezzotint as mz
from mezzotint.serving.codes import tensor_of
from mezzotint.serving.published import PublishedFolder

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Qwen3Moe": {"num_experts": 2, **EXPERTS},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"]},
}


def make_model(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def values_of(path: Path, dtype: torch.dtype) -> Any:
    """Weights in codes as this package dequantizes them, in a model of transformers."""
    return mz.load_quantized(path, high_precision=True, dtype=dtype).state_dict()


def check_same(theirs: Any, path: Path, dtype: torch.dtype) -> None:
    found, wanted = theirs.state_dict(), values_of(path, dtype)
    for name, value in wanted.items():
        assert found[name].dtype == dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"])
def test_transformers_reads_fp8_tiles(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    report = mz.export(model, "hf-fp8", tmp_path / "out")
    assert len(report.quantized) >= 7
    check_same(AutoModelForCausalLM.from_pretrained(report.path), report.path, torch.bfloat16)


# One scale of a tensor is no power of two, and transformers rounds it to the dtype of the model.
FORMATS = {
    "compressed-tensors-fp8": torch.bfloat16,
    "compressed-tensors-fp8-tensor": torch.float32,
    "compressed-tensors-mxfp8": torch.bfloat16,
    "compressed-tensors-mxfp4": torch.bfloat16,
    "compressed-tensors-nvfp4": torch.bfloat16,
}


@pytest.mark.parametrize("format", FORMATS)
def test_transformers_reads_compressed_tensors(format: str, tmp_path: Path) -> None:
    dtype = FORMATS[format]
    report = mz.export(make_model("Llama", dtype), format, tmp_path / "out")
    dequantized = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(report.path, quantization_config=dequantized)
    check_same(theirs, report.path, dtype)
    assert torch.isfinite(theirs(torch.arange(8)[None]).logits).all()


def test_a_scale_that_is_a_power_of_two_needs_no_wide_model(tmp_path: Path) -> None:
    recipe = mz.recipe.Float8CurrentScaling(use_power_2_scales=True)
    report = mz.export(make_model("Llama"), "compressed-tensors-fp8-tensor", tmp_path / "out", recipe=recipe)
    dequantized = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(report.path, quantization_config=dequantized)
    check_same(theirs, report.path, torch.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
def test_compressed_tensors_alone(format: str, tmp_path: Path) -> None:
    """By the library's own decompression, weight by weight."""
    report = mz.export(make_model("Llama"), format, tmp_path / "out")
    folder = PublishedFolder(report.path)
    config = CompressedTensorsConfig(**folder.config["quantization_config"]).quantization_config
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    quantizer = folder.quantizer()
    for name in report.quantized:
        theirs = compressor.decompress(folder.tensors(name), scheme)["weight"]
        (codes,) = folder.codes(name, quantizer)
        ours = tensor_of(codes, quantizer.with_usage(columnwise=False), theirs.dtype).dequantize()
        assert torch.equal(theirs, ours), name


def test_transformers_reads_mxfp4_experts(tmp_path: Path) -> None:
    report = mz.export(make_model("GptOss"), "mxfp4", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(report.path, quantization_config=Mxfp4Config(dequantize=True))
    check_same(theirs, report.path, torch.bfloat16)


@pytest.mark.parametrize("format", ["hf-fp8", "compressed-tensors-nvfp4"])
def test_lora_on_a_frozen_quantized_base(format: str, tmp_path: Path) -> None:
    """The adapter learns, and the base is exported byte by byte as it was read."""
    first = mz.export(make_model("Llama"), format, tmp_path / "first")
    model: Any = mz.load_quantized(first.path)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    ids = torch.arange(32)[None]
    optimizer, losses = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0), []
    for _ in range(3):
        loss = adapted(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    second = mz.export(adapted.unload(), format, tmp_path / "second")
    assert len(second.as_they_were) == 7
    assert (first.path / "model.safetensors").read_bytes() == (second.path / "model.safetensors").read_bytes()


def test_a_cache_in_fp8(tmp_path: Path) -> None:
    """`generate` with it: an element is off by a sixteenth at most, and caching changes no token."""
    model: Any = mz.load_quantized(mz.export(make_model("Llama"), "hf-fp8", tmp_path / "out").path).eval()
    ids = torch.arange(16).view(2, 8)
    plain, in_fp8 = DynamicCache(), mz.quantize_cache(DynamicCache())
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, max_new_tokens=5, past_key_values=in_fp8, **options)
    with torch.no_grad():
        for _ in range(5):
            logits = model(ids, past_key_values=mz.quantize_cache(DynamicCache())).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        model(ids[:, :-1], past_key_values=plain)  # of the first layer, keys and values do not depend on attention
    assert torch.equal(found, ids)
    empty = torch.empty(2, SIZES["num_key_value_heads"], 0, SIZES["head_dim"], dtype=torch.bfloat16)
    read = in_fp8.update(empty, empty, 0)
    for got, wanted in zip(read, (plain.layers[0].keys, plain.layers[0].values), strict=True):
        wanted = wanted.float()
        bound = wanted.abs() / 16 + wanted.abs().amax(-1, keepdim=True) / 2**18
        bound = bound * (1 + 2**-7) + wanted.abs() / 2**8  # and the values are rounded to BF16
        used = (got.float() - wanted).abs() / bound
        assert 0.5 < used.max() <= 1
