"""This module knows which weights of a model are published under which names, for the architectures of Hugging Face.

A model of Hugging Face has those names already, except for experts: published one by one, they are one 3-D parameter in
the model. A model of `TransformerLayer`s has our names, and one weight for queries, keys and values, and for gate and
up. What is one weight here is quantized as one, and its rows are divided among the published names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

DENSE = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = {  # the folder of a layer's experts, and the names of gate, up and down
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
GPT_OSS = "gpt_oss"
MODEL_TYPES = (*DENSE, *EXPERTS, GPT_OSS)
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
LINEAR_NAMES = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"),
}


@dataclass(frozen=True)
class PublishedPart:
    """A `PublishedPart` is what one published name has of a weight."""

    name: str  # without ".weight", if it is linear
    rows: torch.Tensor | None = None  # int64; None: all


@dataclass(frozen=True)
class Mapped:
    """A `Mapped` is a weight of a model, or one expert's share of a parameter that has all of them,
    and what is published of it."""

    keys: tuple[str, ...]  # in the model; several lie one below the other
    parts: tuple[PublishedPart, ...]
    is_linear: bool
    shape: tuple[int, ...]  # as it is multiplied: (out, in)
    expert: int | None = None  # which one of a 3-D parameter
    is_transposed: bool = False  # in the model an expert is (in, out)
    experts: int = 0  # of a 3-D parameter that is published as one: how many there are

    def take(self, parameter: Any) -> Any:
        """Return this weight, taken from the parameter."""
        if self.expert is not None:
            parameter = parameter[self.expert]
        return parameter.t() if self.is_transposed else parameter


def check_model_type(config: Mapping[str, Any]) -> str:
    """Return the architecture that a config.json names, if its names are known here."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type is {kind!r}: names are known of {', '.join(MODEL_TYPES)}")
    return str(kind)


def is_linear_name(name: str) -> bool:
    """Return whether the tensor of this published name is a weight that is quantized."""
    parts = name.split(".")
    return parts[-1] == "weight" and parts[-2:-1] != [] and parts[-2] in LINEAR_NAMES


def map_names(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> list[Mapped]:
    """Return every weight of a model whose state dict has these names and shapes, in that order."""
    kind = check_model_type(config)
    if any(".self_attention." in key for key in shapes):
        return _map_own(shapes, config, kind)
    is_tied = bool(config.get("tie_word_embeddings"))
    mapped = []
    for key, shape in shapes.items():
        if key == "lm_head.weight" and is_tied:
            continue
        if not key.startswith("model.") and key != "lm_head.weight":
            raise ValueError(
                f"{key} is no name of {kind}: give the model itself, with adapters merged into its weights"
            )
        if len(shape) == 3 and ".experts." in key:
            mapped += _map_experts(key, shape, kind)
        elif pair := _pair_of(key, kind):
            if key == pair[0]:
                rows = 2 * shape[0]
                first, second = (name.removesuffix(".weight") for name in pair)
                mapped.append(Mapped(pair, _halves(first, second, rows), True, (rows, *shape[1:])))
        else:
            mapped.append(_whole((key,), _published(key, kind), shape))
    return mapped


def _pair_of(key: str, kind: str) -> tuple[str, str] | None:
    """Return the names of gate and up of an expert that is published already, because in models they are one weight."""
    if kind not in EXPERTS:
        return None
    _, gate, up, _ = EXPERTS[kind]
    found = re.fullmatch(rf"(.+\.experts\.\d+\.)(?:{gate}|{up})\.weight", key)
    return None if found is None else (f"{found[1]}{gate}.weight", f"{found[1]}{up}.weight")


def _published(key: str, kind: str) -> str:
    """Return the published name of a tensor that is one tensor in the model, too."""
    return key.replace(".mlp.gate.", ".block_sparse_moe.gate.") if kind == "mixtral" else key


def _whole(keys: tuple[str, ...], name: str, shape: tuple[int, ...]) -> Mapped:
    is_linear = is_linear_name(name) and len(shape) == 2
    return Mapped(keys, (PublishedPart(name.removesuffix(".weight") if is_linear else name),), is_linear, shape)


def _map_experts(key: str, shape: tuple[int, ...], kind: str) -> list[Mapped]:
    count, first, second = shape
    if kind == GPT_OSS:
        return [Mapped((key,), (PublishedPart(key),), True, (second, first), None, True, count)]
    if kind not in EXPERTS or not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        raise ValueError(f"{key} has shape {shape}: no experts of {kind} are published under such a name")
    folder, gate, up, down = EXPERTS[kind]
    prefix = f"{key.rpartition('.mlp.')[0]}.{folder}.experts"
    mapped = []
    for i in range(count):
        if key.endswith("down_proj"):
            parts: tuple[PublishedPart, ...] = (PublishedPart(f"{prefix}.{i}.{down}"),)
        else:
            parts = _halves(f"{prefix}.{i}.{gate}", f"{prefix}.{i}.{up}", first)
        mapped.append(Mapped((key,), parts, True, (first, second), i))
    return mapped


def _halves(first: str, second: str, rows: int) -> tuple[PublishedPart, PublishedPart]:
    return PublishedPart(first, torch.arange(rows // 2)), PublishedPart(second, torch.arange(rows // 2, rows))


# For a model of TransformerLayers, this maps the end of a name in a layer to the end that it is published under.
_OWN = {
    "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_norm.weight": "self_attn.q_norm.weight",
    "self_attention.k_norm.weight": "self_attn.k_norm.weight",
    "self_attention.proj.weight": "self_attn.o_proj.weight",
    "layernorm_mlp.layer_norm_weight": "post_attention_layernorm.weight",
    "layernorm_mlp.fc2_weight": "mlp.down_proj.weight",
    "layernorm_mlp.norm.weight": "post_attention_layernorm.weight",
    "layernorm_mlp.router.weight": "block_sparse_moe.gate.weight",
}
_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_QKV = ("query_weight", "key_weight", "value_weight")


def _map_own(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], kind: str) -> list[Mapped]:
    mapped = []
    for key, shape in shapes.items():
        if key in _OUTER:
            mapped.append(_whole((key,), _OUTER[key], shape))
            continue
        found = re.fullmatch(r"layers\.(\d+)\.(.+)", key)
        if found is None:
            raise ValueError(f"{key} is no name of embedding, layers, norm and head: it cannot be published")
        layer, end = f"model.layers.{found[1]}", found[2]
        if end in _OWN:
            mapped.append(_whole((key,), f"{layer}.{_OWN[end]}", shape))
        elif end == "self_attention.layernorm_qkv.weight":
            mapped.append(Mapped((key,), _qkv_parts(layer, shape[0], config, True), True, shape))
        elif end == f"self_attention.layernorm_qkv.{_QKV[0]}":
            keys = tuple(key.replace(_QKV[0], each) for each in _QKV)
            rows = sum(shapes[each][0] for each in keys)
            mapped.append(Mapped(keys, _qkv_parts(layer, rows, config, False), True, (rows, shape[1])))
        elif end == "layernorm_mlp.fc1_weight":
            parts = _halves(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj", shape[0])
            mapped.append(Mapped((key,), parts, True, shape))
        elif expert := re.fullmatch(r"layernorm_mlp\.experts\.fc([12])\.weight(\d+)", end):
            prefix = f"{layer}.block_sparse_moe.experts.{expert[2]}"
            halves = _halves(f"{prefix}.w1", f"{prefix}.w3", shape[0]) if expert[1] == "1" else None
            mapped.append(Mapped((key,), halves or (PublishedPart(f"{prefix}.w2"),), True, shape))
        elif not end.endswith(_QKV[1:]):
            raise ValueError(f"{key} has no name in {kind}: it cannot be published")
    return mapped


def _qkv_parts(layer: str, rows: int, config: Mapping[str, Any], interleaved: bool) -> tuple[PublishedPart, ...]:
    """Return the rows of queries, keys and values; if `interleaved`, those of a group lie side by side."""
    heads, groups = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    channels = rows // (heads + 2 * groups)
    sizes = [heads * channels, groups * channels, groups * channels]
    whole = torch.arange(rows)
    if interleaved:
        view = whole.view(groups, -1)
        split = view.split([size // groups for size in sizes], 1)
    else:
        split = whole.split(sizes)
    names = [f"{layer}.self_attn.{letter}_proj" for letter in "qkv"]
    return tuple(PublishedPart(name, part.reshape(-1)) for name, part in zip(names, split, strict=True))
