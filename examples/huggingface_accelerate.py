"""Train a converted Hugging Face model in a loop of Accelerate: microbatches, gradient clipping, and a state that is
saved and read again. Nothing is downloaded.

    python examples/huggingface_accelerate.py [folder]

`Accelerator(mixed_precision=...)` is left alone: `mz.convert` has chosen the recipe, and each layer knows it.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import mezzotint as mz
from mezzotint import recipe

try:
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, LlamaConfig
except ImportError:
    sys.exit("this example needs transformers and accelerate: pip install transformers accelerate")

STEPS, MICROBATCHES, SEQUENCE = 6, 2, 64


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return mz.convert(model, recipe.Float8BlockScaling())


def make_rows() -> torch.Tensor:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return text[: len(text) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)


class Run:
    """A model with its optimizer and its rows, as Accelerate prepares them."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=MICROBATCHES)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        rows = torch.utils.data.DataLoader(make_rows(), batch_size=4)
        self.model, self.optimizer, self.rows = self.accelerator.prepare(model, optimizer, rows)

    def train(self, first: int, last: int) -> list[float]:
        """Train the steps from `first` to `last`, and return the loss of each microbatch."""
        losses = []
        begin, end = first * MICROBATCHES, last * MICROBATCHES
        for number, batch in enumerate(self.rows):
            if not begin <= number < end:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def main(folder: Path) -> None:
    run = Run()
    losses = run.train(0, STEPS // 2)
    run.accelerator.save_state(str(folder))
    losses += run.train(STEPS // 2, STEPS)
    for number, loss in enumerate(losses):
        print(f"step {number // MICROBATCHES + 1}, microbatch {number % MICROBATCHES + 1}: loss {loss:.4f}")

    again = Run()
    again.accelerator.load_state(str(folder))
    assert again.train(STEPS // 2, STEPS) == losses[STEPS // 2 * MICROBATCHES :]
    print("read again after half of the steps: the same losses")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
