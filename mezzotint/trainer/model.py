"""The model that is trained and planned: it is a Llama, sized by a few numbers.

    tokens → embedding → layers × (attention with RoPE and grouped heads, SwiGLU; RMSNorm before each) → RMSNorm → head

Linear layers are quantized as the recipe in force says. Embedding, attention, norms and head compute in BF16;
parameters are FP32. With `experts` a layer has a mixture of them instead of its MLP.

The ranks of a tensor group split heads, MLPs and vocabulary. Between these, tokens [s, b] are split: each rank has its
shard of the sequence. The weights of the embedding, the norms and the routers are whole on all of them.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mezzotint import hw
from mezzotint.attention.rope import RotaryPositionEmbedding
from mezzotint.comm.collectives import all_gather
from mezzotint.comm.groups import rank_in, world_size
from mezzotint.cross_entropy import parallel_cross_entropy
from mezzotint.module.linear import Linear
from mezzotint.module.norm import RMSNorm
from mezzotint.moe.exchange import Exchange, plan_exchange
from mezzotint.quantization import autocast
from mezzotint.trainer.mixture import Mixture
from mezzotint.trainer.sizes import ModelConfig
from mezzotint.transformer import TransformerLayer

MODEL_INIT_STD = 0.02


class LanguageModel(nn.Module):
    """A `LanguageModel` maps tokens and targets, int64 [b, s], to the mean loss in FP32; without targets it returns
    the logits, BF16 [b, s, vocab]."""

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
        """Build this rank's shard of the model.

        `tensor_group` has the ranks that split every layer, None for one rank alone; `expert_group` those that share
        the experts, None for all ranks; `exchange` is explained in `Mixture`.
        """
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
            self.head = Linear(
                config.hidden, config.vocab, bias=False, init_method=_normal(MODEL_INIT_STD), **made, **split
            )
        elif not config.tied:
            self.head = nn.Linear(config.hidden, config.vocab, False, device=device, dtype=dtype)
        with torch.no_grad():
            nn.init.normal_(self.embedding.weight, std=MODEL_INIT_STD)
            if size == 1 and self.head is not None:
                nn.init.normal_(self.head.weight, std=MODEL_INIT_STD)
        if size > 1:
            for name, parameter in self.named_parameters():  # each rank applies these to its own tokens
                if "norm" in name.split(".")[-1] or name.endswith(("norm.weight", "router.weight")):
                    parameter.sequence_parallel = True  # type: ignore[attr-defined]
        rotary = RotaryPositionEmbedding(config.channels, rotary_base=config.rope_base).to(device)
        self.register_buffer("angles", rotary(config.sequence), persistent=False)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        x = self.embedding(tokens).to(torch.bfloat16)
        if self.tensor_group is not None:
            x = _OwnRows.apply(x.transpose(0, 1), self.tensor_group)
        for layer in self.layers:
            x = layer(x, is_first_microbatch=is_first_microbatch, rotary_pos_emb=self.angles)
        if self.tensor_group is not None:
            with autocast(enabled=False):
                logits = self.head(self.norm(x))  # this rank's shard of [s, b, vocab]
            assert targets is not None
            return parallel_cross_entropy(logits, targets.t(), reduce_loss=True, dist_process_group=self.tensor_group)
        weight = self.embedding.weight if self.head is None else self.head.weight
        wide = torch.float32 if hw.multiplies_slowly(x) else x.dtype
        logits = functional.linear(self.norm(x).to(wide), weight.to(wide)).to(x.dtype)
        return logits if targets is None else parallel_cross_entropy(logits, targets, reduce_loss=True)


class _OwnRows(torch.autograd.Function):
    """This function returns this rank's shard of the first dimension of a tensor that all ranks have; its
    backward gathers the gradient."""

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
        init_method=_normal(MODEL_INIT_STD),
        # What layers add to the residual stream is small at the start, however many layers there are.
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
        init_method=_normal(MODEL_INIT_STD),
        output_init_method=_small(config),
        **options,
    )


def _small(config: ModelConfig) -> Callable[[torch.Tensor], Any]:
    return _normal(MODEL_INIT_STD / math.sqrt(2 * config.layers))


def _normal(std: float) -> Callable[[torch.Tensor], Any]:
    return partial(nn.init.normal_, std=std)
