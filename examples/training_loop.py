"""This training loop of 40 lines trains a language model of bytes in MXFP8, compiled as one graph, on its own text."""

from pathlib import Path

import torch

import mezzotint as mz

HIDDEN, SEQUENCE, BATCH, STEPS = 128, 64, 8, 20
OPTIONS = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "attn_input_format": "bshd"}
OPTIONS |= {"num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}


class LanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, HIDDEN)
        self.layers = torch.nn.ModuleList([mz.TransformerLayer(HIDDEN, 384, 4, **OPTIONS) for _ in range(2)])
        self.head = torch.nn.Sequential(mz.RMSNorm(HIDDEN), torch.nn.Linear(HIDDEN, 256))
        self.register_buffer("angles", mz.RotaryPositionEmbedding(HIDDEN // 4)(SEQUENCE))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).bfloat16()
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles)
        return mz.parallel_cross_entropy(self.head(x.float()), targets, reduce_loss=True)


model = LanguageModel().to("cuda" if torch.cuda.is_available() else "cpu")
compiled = torch.compile(model, fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
for step in range(STEPS):
    windows = text[torch.randint(len(text) - SEQUENCE, (BATCH, 1)) + torch.arange(SEQUENCE + 1)].to(model.angles.device)
    with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
        loss = compiled(windows[:, :-1], windows[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1:2d}  loss {loss.item():.4f}")
