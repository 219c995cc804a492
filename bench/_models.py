"""This module has what the peers are measured on, in plain PyTorch and ours: a linear, layers of a
Llama, a mixture of experts.

torchao converts the plain one. Plain and ours have the same sizes and no biases, and rotate queries and keys with the
same function. Ours has one weight for queries, keys and values, side by side (`fuse_qkv_params`), and one for gate and
up, as our layer has them; the plain model has seven linears a layer, as the Llamas that torchao is used on have them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mezzotint as mz


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """A `LlamaSizes` holds the sizes of `layers` layers without embedding and head."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    sequence: int = 4096
    batch: int = 2
    layers: int = 2

    @property
    def weights(self) -> int:
        """Return the number of elements of all weights that are multiplied with."""
        kv = self.hidden // self.heads * self.kv_heads
        return self.layers * self.hidden * (2 * self.hidden + 2 * kv + 3 * self.ffn)


def plain_linear(k: int, n: int, device: str) -> nn.Module:
    return nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)


def our_linear(k: int, n: int, device: str) -> nn.Module:
    return mz.Linear(k, n, bias=False, device=device, params_dtype=torch.bfloat16)


def angles(sizes: LlamaSizes, device: str) -> torch.Tensor:
    """Return the rotary angles, FP32 (sequence, 1, 1, channels of a head)."""
    return mz.RotaryPositionEmbedding(sizes.hidden // sizes.heads)(sizes.sequence).to(device)


class PlainLayer(nn.Module):
    """A `PlainLayer` is a Llama layer in plain PyTorch: it maps x (B, S, H) and angles to (B, S, H)."""

    def __init__(self, sizes: LlamaSizes, device: str) -> None:
        super().__init__()
        channels = sizes.hidden // sizes.heads
        kv = channels * sizes.kv_heads
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.channels = channels
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(sizes.hidden, eps=1e-5, **options) for _ in range(2))
        self.q = plain_linear(sizes.hidden, sizes.hidden, device)
        self.k, self.v = (plain_linear(sizes.hidden, kv, device) for _ in range(2))
        self.o = plain_linear(sizes.hidden, sizes.hidden, device)
        self.gate, self.up = (plain_linear(sizes.hidden, sizes.ffn, device) for _ in range(2))
        self.down = plain_linear(sizes.ffn, sizes.hidden, device)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.channels)) for part in (self.q, self.k, self.v))
        q, k = (mz.apply_rotary_pos_emb(part, turns, "bshd") for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class PlainLlama(nn.Module):
    """A `PlainLlama` has layers in plain PyTorch: it maps x (B, S, H) to (B, S, H)."""

    turns: torch.Tensor

    def __init__(self, sizes: LlamaSizes, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(sizes, device) for _ in range(sizes.layers))
        self.register_buffer("turns", angles(sizes, device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.turns)
        return x


def converted_llama(sizes: LlamaSizes, device: str) -> nn.Module:
    """Return the plain model with its linears swapped for ours, as `mezzotint.convert` does for any model."""
    return mz.convert(PlainLlama(sizes, device))


class OurLlama(nn.Module):
    """An `OurLlama` has our `TransformerLayer`s: it maps x (B, S, H) to (B, S, H)."""

    turns: torch.Tensor

    def __init__(self, sizes: LlamaSizes, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            mz.TransformerLayer(
                sizes.hidden,
                sizes.ffn,
                sizes.heads,
                sizes.kv_heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                qkv_weight_interleaved=False,
                bias=False,
                activation="swiglu",
                normalization="RMSNorm",
                attn_input_format="bshd",
                params_dtype=torch.bfloat16,
                device=device,
            )
            for _ in range(sizes.layers)
        )
        self.register_buffer("turns", angles(sizes, device), persistent=False)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.turns, is_first_microbatch=is_first_microbatch)
        return x


class GroupedExperts(nn.Module):
    """These experts map x (M, K) to (M, N) by PyTorch's grouped product, with one launch for all of them."""

    ends: torch.Tensor

    def __init__(self, splits: list[int], k: int, n: int, device: str) -> None:
        super().__init__()
        stacked = [plain_linear(k, n, device).weight.detach() for _ in splits]
        self.weight = nn.Parameter(torch.stack(stacked))
        ends = torch.tensor(splits, device=device).cumsum(0).to(torch.int32)
        self.register_buffer("ends", ends, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=self.ends)


class LoopedExperts(nn.Module):
    """These experts map x (M, K) to (M, N) one after the other."""

    def __init__(self, splits: list[int], k: int, n: int, device: str) -> None:
        super().__init__()
        self.splits = splits
        self.experts = nn.ModuleList(plain_linear(k, n, device) for _ in splits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(self.experts, x.split(self.splits), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


class OurExperts(nn.Module):
    """These experts map x (M, K) to (M, N) by `GroupedLinear`."""

    def __init__(self, splits: list[int], k: int, n: int, device: str) -> None:
        super().__init__()
        self.splits = splits
        self.experts = mz.GroupedLinear(len(splits), k, n, bias=False, device=device, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.splits)
