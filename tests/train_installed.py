"""A program of a user: it trains, inspects, exports and compiles, and prints the figures.

`tests/test_packaging.py` runs it where Mezzotint is installed from its wheel.
"""

import sys
from pathlib import Path

import torch

import mezzotint as mz
from mezzotint import recipe
from mezzotint.inspect.page import write_page
from mezzotint.optimizers import FusedAdam


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))


def train(folder: Path) -> list[float]:
    """The losses of a model that is converted, and inspected at every second step."""
    model = make_model()
    mz.convert(model, recipe.MXFP8BlockScaling())
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    x, wanted = torch.randn(64, 64), torch.randn(64, 64)
    losses = []
    inspector = mz.inspect(model, every=2, out=folder / "inspect")
    for _ in range(8):
        with inspector:
            loss = torch.nn.functional.mse_loss(model(x), wanted)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write_page(folder / "inspect", folder / "page.html", "run")
    return losses


class LanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "device": "cpu"}
        self.embedding = torch.nn.Embedding(64, 128)
        self.layers = torch.nn.ModuleList([mz.TransformerLayer(128, 256, 4, **options)])
        self.norm = mz.RMSNorm(128, device="cpu")
        self.head = mz.Linear(128, 64, bias=False, device="cpu")


def export(folder: Path) -> int:
    """How many weights are written in MXFP8."""
    torch.manual_seed(2)
    config = {"rope_theta": 10000.0, "max_position_embeddings": 256}
    return len(mz.export(LanguageModel(), "compressed-tensors-mxfp8", folder / "served", config=config).quantized)


def compile_whole() -> bool:
    """Whether a module that is one graph gives the bits of eager code."""
    torch.manual_seed(1)
    module = mz.LayerNormLinear(64, 64, params_dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with mz.autocast(recipe=recipe.MXFP8BlockScaling()):
        eager = module(x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with mz.autocast(recipe=recipe.MXFP8BlockScaling()):
        return torch.equal(compiled(x), eager)


if __name__ == "__main__":
    print(mz.__version__, [loss.hex() for loss in train(Path(sys.argv[1]))], export(Path(sys.argv[1])), compile_whole())
