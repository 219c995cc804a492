"""This module describes a model of `TransformerLayer`s as an architecture of Hugging Face, if one computes the same.

    embedding, layers × TransformerLayer, norm (RMSNorm), head (a linear layer, or None if it is the embedding)

It is a Llama; with a window on its attention a Mistral, with norms of queries and keys a Qwen3, with experts a Mixtral.
What none of them computes is refused.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from mezzotint.module.layernorm_mlp import LayerNormMLP
from mezzotint.module.norm import RMSNorm
from mezzotint.serving.architectures import CLASSES
from mezzotint.transformer import TransformerLayer


def is_own_model(model: nn.Module) -> bool:
    """Return whether the layers of a model are `TransformerLayer`s."""
    layers = getattr(model, "layers", None)
    return isinstance(layers, nn.ModuleList) and len(layers) > 0 and isinstance(layers[0], TransformerLayer)


def own_config(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of such a model; `given` has what its modules do not know: rope_theta, and the longest
    sequence, max_position_embeddings."""
    for name in ("rope_theta", "max_position_embeddings"):
        if name not in given:
            raise ValueError(
                f"config has no {name!r}: a model of TransformerLayers is given its rotary angles from outside: give "
                "config={'rope_theta': 10000.0, 'max_position_embeddings': 2048}, with what it was trained with"
            )
    for name in ("embedding", "norm"):
        if not hasattr(model, name):
            raise ValueError(f"model has no {name}: name its parts embedding, layers, norm and head")
    first: Any = model.layers[0]
    for number, layer in enumerate(model.layers):
        why = _why_other(layer) or _why_unlike(layer, first)
        if why:
            raise ValueError(f"layers.{number} {why}: no architecture that is published computes that")
    attention, mlp = first.self_attention, first.layernorm_mlp
    if not isinstance(model.norm, RMSNorm) or model.norm.eps != _norm_of(mlp).eps:
        raise ValueError("norm is no RMSNorm with the eps of the layers: no architecture that is published has that")
    kind, experts = "llama", 0
    if not isinstance(mlp, LayerNormMLP):
        kind, experts = "mixtral", mlp.router.weight.shape[0]
    elif attention.q_norm is not None:
        kind = "qwen3"
    elif _window(attention) is not None:
        kind = "mistral"
    config = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "hidden_size": attention.hidden_size,
        "intermediate_size": mlp.experts.fc2.in_features if experts else mlp.ffn_hidden_size,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_gqa_groups,
        "head_dim": attention.hidden_size_per_attention_head,
        "vocab_size": model.embedding.weight.shape[0],
        "rms_norm_eps": _norm_of(mlp).eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": getattr(model, "head", None) is None,
    }
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": mlp.topk, "sliding_window": None}
    if kind == "mistral":
        config["sliding_window"] = _window(attention)
    return {**config, **given}


def _norm_of(mlp: Any) -> Any:
    return mlp if isinstance(mlp, LayerNormMLP) else mlp.norm


def _window(attention: Any) -> int | None:
    """Return how many tokens a query sees, itself among them, or None for all before it."""
    window = attention.window_size
    return None if window is None or window[0] < 0 else window[0] + 1


def _why_other(layer: Any) -> str | None:
    """Return why no architecture computes what a layer does, or None if one does."""
    if not isinstance(layer, TransformerLayer):
        return f"is a {type(layer).__name__}"
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    qkv = getattr(attention, "layernorm_qkv", None)
    if qkv is None or layer.layer_type != "encoder" or layer.parallel_attention_mlp:
        return "is no pre-norm layer of a language model"
    if layer.apply_residual_connection_post_layernorm:
        return "adds to the norm's output (apply_residual_connection_post_layernorm)"
    if attention.tp_size != 1:
        return "has a part of its weights (tensor parallel)"
    norm = _norm_of(mlp)
    if qkv.normalization != "RMSNorm" or not getattr(norm, "rms", False) or qkv.eps != norm.eps:
        return f"has {qkv.normalization} or several eps, not RMSNorm with one"
    if qkv.zero_centered_gamma or norm.zero_centered_gamma:
        return "has zero_centered_gamma=True"
    if any(name.endswith("bias") for name, _ in layer.named_parameters()):
        return "has biases"
    if isinstance(mlp, LayerNormMLP) and mlp.activation != "swiglu":
        return f"has activation={mlp.activation!r}, not 'swiglu'"
    if not isinstance(mlp, LayerNormMLP) and not hasattr(mlp, "router"):
        return f"has {type(mlp).__name__} in the place of its MLP"
    if attention.attn_mask_type != "causal" or attention.core_attention.softmax_type != "vanilla":
        return (
            f"has attn_mask_type={attention.attn_mask_type!r}, softmax_type={attention.core_attention.softmax_type!r}"
        )
    if attention.rotary_pos_interleaved:
        return "has rotary_pos_interleaved=True: published models turn halves of a head"
    if attention.is_qkv_fused and not attention.qkv_weight_interleaved:
        return "has qkv_weight_interleaved=False: give fuse_qkv_params=False, or True with interleaved weights"
    if attention.q_norm is not None and not (
        isinstance(attention.q_norm, RMSNorm) and attention.qk_norm_before_rope and attention.q_norm.eps == qkv.eps
    ):
        return "has norms of queries and keys that are not RMSNorm before the rotary turn with the eps of the others"
    return None


def _why_unlike(layer: Any, first: Any) -> str | None:
    for name in ("num_attention_heads", "num_gqa_groups", "hidden_size_per_attention_head", "window_size"):
        if getattr(layer.self_attention, name) != getattr(first.self_attention, name):
            return f"has another {name} than layers.0"
    if layer.self_attention.layernorm_qkv.eps != first.self_attention.layernorm_qkv.eps:
        return "has another eps than layers.0"
    return None
