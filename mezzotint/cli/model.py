"""The model that is trained and planned: a Llama, sized by a few numbers.

    tokens → embedding → layers × (attention with RoPE and grouped heads, SwiGLU; RMSNorm before each) → RMSNorm → head

Linear layers are quantized as the recipe in force says. Embedding, attention, norms and head are BF16, parameters FP32.
With `experts` a layer has a mixture of them instead of its MLP.

Over the processes of a tensor group heads, MLPs and vocabulary are split, and tokens [s, b] between these: each has its
part of the sequence. The embedding's weight, the norms' and the routers' are whole on all of them.
"""

import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mezzotint import hw
from mezzotint.attention.rope import RotaryPositionEmbedding
from mezzotint.cli.console import CommandError
from mezzotint.cli.mixture import Mixture
from mezzotint.cli.options import check, option
from mezzotint.cross_entropy import parallel_cross_entropy
from mezzotint.distributed.collectives import all_gather
from mezzotint.distributed.expert import Exchange, plan_exchange
from mezzotint.distributed.groups import rank_in, world_size
from mezzotint.module.linear import Linear
from mezzotint.module.norm import RMSNorm
from mezzotint.quantization import autocast
from mezzotint.transformer import TransformerLayer

INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a model, and of the batch that a step sees at once."""

    hidden: int = option(128, "width of the model", at_least=1)
    ffn: int = option(384, "width inside the MLP", at_least=1)
    layers: int = option(2, "transformer layers", at_least=1)
    heads: int = option(4, "attention heads", at_least=1)
    kv_heads: int = option(2, "heads of keys and values", at_least=1)
    head_dim: int | None = option(None, "channels of a head; hidden / heads if not given", at_least=2)
    vocab: int = option(256, "tokens that there are", at_least=1)
    sequence: int = option(64, "tokens in a sequence", at_least=1)
    batch: int = option(8, "sequences in a micro-batch", at_least=1)
    rope_base: float = option(10000.0, "base of the rotary positions", at_least=1.0)
    tied: bool = option(False, "the head's weight is the embedding's")
    experts: int = option(0, "MLPs in a layer, of which each token uses topk; 0: one MLP for all", at_least=0)
    topk: int = option(2, "experts of a token", at_least=1)

    def __post_init__(self) -> None:
        check(self)
        if self.head_dim is None and self.hidden % self.heads:
            raise CommandError(f"hidden is {self.hidden}: give a multiple of heads={self.heads}, or head_dim")
        if self.channels % 2:
            raise CommandError(f"a head has {self.channels} channels: rotary positions turn pairs, give an even number")
        if self.heads % self.kv_heads:
            raise CommandError(f"kv_heads is {self.kv_heads}: give a divisor of heads={self.heads}")
        if self.experts and self.topk > self.experts:
            raise CommandError(f"topk is {self.topk}: give at most experts={self.experts}")

    @property
    def channels(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim


_LLAMA3 = ModelConfig(vocab=128256, rope_base=500000.0, sequence=8192, batch=1, kv_heads=8, heads=32, hidden=4096)
MODELS = {
    "tiny": ModelConfig(),
    "llama3.2-1b": replace(_LLAMA3, hidden=2048, ffn=8192, layers=16, tied=True),
    "llama3.2-3b": replace(_LLAMA3, hidden=3072, ffn=8192, layers=28, heads=24, tied=True),
    "llama3-8b": replace(_LLAMA3, ffn=14336, layers=32),
    "llama3-70b": replace(_LLAMA3, hidden=8192, ffn=28672, layers=80, heads=64),
    "llama3-405b": replace(_LLAMA3, hidden=16384, ffn=53248, layers=126, heads=128),
}

# What others call our fields.
ALIASES = {
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "intermediate_size": "ffn",
    "num_layers": "layers",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_gqa_groups": "kv_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab",
    "seq": "sequence",
    "seq_length": "sequence",
    "batch_size": "batch",
    "micro_batch_size": "batch",
    "rope_theta": "rope_base",
    "tie_word_embeddings": "tied",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "num_experts_per_tok": "topk",
}
# Configurations of Hugging Face that are this model; they have many keys that say nothing of sizes.
LLAMA_TYPES = ("llama", "mistral")


def find_model(name: str) -> ModelConfig:
    """A name of `MODELS`, or a JSON or TOML file."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if not path.is_file():
        raise CommandError(f"there is no model {name!r}: give one of {', '.join(MODELS)}, or a .json or .toml file")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read: {error}; give a JSON file, or TOML in a .toml file") from None
    if not isinstance(values, dict):
        raise CommandError(f"{path} holds no table of sizes: give hidden, ffn, layers, heads, … by name")
    return _as_config(values, path)


def _as_config(values: dict[str, Any], path: Path) -> ModelConfig:
    known = {entry.name: entry.type for entry in fields(ModelConfig)}
    is_foreign = "model_type" in values
    if is_foreign and values["model_type"] not in LLAMA_TYPES:
        raise CommandError(f"{path} is of a {values['model_type']!r}: this builds {' and '.join(LLAMA_TYPES)} only")
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = ALIASES.get(key, key)
        if name not in known:
            if is_foreign:
                continue
            raise CommandError(f"{path} has {key!r}, which is no size of a model: give {', '.join(known)}")
        if not _is_a(value, known[name]):
            raise CommandError(f"{path} has {key} = {value!r}: give {_words(known[name])}")
        found[name] = value
    found.setdefault("kv_heads", found.get("heads", ModelConfig().heads))  # no groups, if they are not mentioned
    return ModelConfig(**found)


def _is_a(value: Any, kind: Any) -> bool:
    if kind is float:
        kind = int | float
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _words(kind: Any) -> str:
    return {int: "an integer", float: "a number", bool: "true or false"}.get(kind, "an integer")


class LanguageModel(nn.Module):
    """tokens and targets int64 [b, s] → the mean loss, FP32."""

    angles: torch.Tensor  # FP32 [s, 1, 1, channels]

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        tensor_group: Any = None,
        expert_group: Any = None,
        exchange: Callable[[torch.Tensor, int, Any], Exchange] = plan_exchange,
    ) -> None:
        """`tensor_group`: processes that share all of it, None for none; `expert_group`: those that share the experts,
        None for all that there are; `exchange`: see Mixture."""
        super().__init__()
        made: dict[str, Any] = {"device": device, "params_dtype": dtype}
        size = 1 if tensor_group is None else world_size(tensor_group)
        self.tensor_group = tensor_group if size > 1 else None
        split: dict[str, Any] = {"tp_group": self.tensor_group, "sequence_parallel": size > 1}
        self.embedding = nn.Embedding(config.vocab, config.hidden, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            [_make_layer(config, number, {**made, **split}) for number in range(1, config.layers + 1)]
        )
        if config.experts:
            for layer in self.layers:
                layer.layernorm_mlp = _make_mixture(config, group=expert_group, exchange=exchange, **made)
        self.norm = RMSNorm(config.hidden, **made)
        self.head: Any = None
        if size > 1:
            split["parallel_mode"] = "column"
            self.head = Linear(config.hidden, config.vocab, bias=False, init_method=_normal(INIT_STD), **made, **split)
        elif not config.tied:
            self.head = nn.Linear(config.hidden, config.vocab, False, device=device, dtype=dtype)
        with torch.no_grad():
            nn.init.normal_(self.embedding.weight, std=INIT_STD)
            if size == 1 and self.head is not None:
                nn.init.normal_(self.head.weight, std=INIT_STD)
        if size > 1:
            for name, parameter in self.named_parameters():  # which each process uses on its part of the tokens
                if "norm" in name.split(".")[-1] or name.endswith(("norm.weight", "router.weight")):
                    parameter.sequence_parallel = True  # type: ignore[attr-defined]
        rotary = RotaryPositionEmbedding(config.channels, rotary_base=config.rope_base).to(device)
        self.register_buffer("angles", rotary(config.sequence), persistent=False)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        x = self.embedding(tokens).to(torch.bfloat16)
        if self.tensor_group is not None:
            x, targets = _OwnRows.apply(x.transpose(0, 1), self.tensor_group), targets.t()
        for layer in self.layers:
            x = layer(x, is_first_microbatch=is_first_microbatch, rotary_pos_emb=self.angles)
        if self.tensor_group is not None:
            with autocast(enabled=False):
                logits = self.head(self.norm(x))
            return parallel_cross_entropy(logits, targets, reduce_loss=True, dist_process_group=self.tensor_group)
        weight = self.embedding.weight if self.head is None else self.head.weight
        wide = torch.float32 if hw.multiplies_slowly(x) else x.dtype
        logits = functional.linear(self.norm(x).to(wide), weight.to(wide)).to(x.dtype)
        return parallel_cross_entropy(logits, targets, reduce_loss=True)


class _OwnRows(torch.autograd.Function):
    """This process's part of the first dimension of what all have; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.chunk(world_size(group))[rank_in(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return all_gather(dy, ctx.group), None


def _make_layer(config: ModelConfig, number: int, made: dict[str, Any]) -> TransformerLayer:
    return TransformerLayer(
        config.hidden,
        config.ffn,
        config.heads,
        num_gqa_groups=config.kv_heads,
        kv_channels=config.channels,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=_normal(INIT_STD),
        # What is added to the stream is small at the start, however many layers add to it.
        output_layer_init_method=_small(config),
        layer_number=number,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attn_input_format="bshd" if made["tp_group"] is None else "sbhd",
        set_parallel_mode=made["tp_group"] is not None,
        fuse_qkv_params=True,
        name=f"layers.{number - 1}",
        **made,
    )


def _make_mixture(config: ModelConfig, **options: Any) -> Mixture:
    return Mixture(
        config.hidden,
        config.ffn,
        config.experts,
        config.topk,
        init_method=_normal(INIT_STD),
        output_init_method=_small(config),
        **options,
    )


def _small(config: ModelConfig) -> Callable[[torch.Tensor], Any]:
    return _normal(INIT_STD / math.sqrt(2 * config.layers))


def _normal(std: float) -> Callable[[torch.Tensor], Any]:
    return partial(nn.init.normal_, std=std)
