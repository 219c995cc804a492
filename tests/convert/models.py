"""Models to convert, and the modules that they become."""

from typing import Any

import torch
from torch import nn


def linear(bias: bool = True, out: int = 80) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, out, bias=bias, dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """tokens (…,) → logits (…, vocabulary)."""

    def __init__(self, num_blocks: int = 2, width: int = 64, vocabulary: int = 96, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.embedding(tokens) * scale
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def tokens(vocabulary: int = 96) -> torch.Tensor:
    return torch.randint(0, vocabulary, (4, 16), generator=torch.Generator().manual_seed(0))


def train(model: Any, call: Any, num_steps: int) -> list[float]:
    """Losses of learning one batch by heart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, losses = tokens(), []
    for _ in range(num_steps):
        loss = nn.functional.cross_entropy(call(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
