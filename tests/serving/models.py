"""Tiny models of every architecture, for what is exported and read again."""

from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
DENSE: dict[str, dict[str, Any]] = {"Llama": {}, "Mistral": {}, "Qwen2": {"tie_word_embeddings": True}, "Qwen3": {}}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Qwen2Moe": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "Qwen3Moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128},
}
GPT_OSS: dict[str, dict[str, Any]] = {
    "GptOss": {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
MODELS = {**DENSE, **EXPERTS, **GPT_OSS}


def make_model(name: str = "Llama", dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name], **more})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(seed))


def train(model: Any, steps: int, seed: int) -> list[float]:
    """Return the losses of a few steps of plain gradient descent, which keeps no state."""
    torch.manual_seed(seed)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(steps):
        ids = tokens(seed)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
