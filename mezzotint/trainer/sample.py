"""What a model writes."""

import torch

from mezzotint.trainer.data import draw_seed
from mezzotint.trainer.evaluate import without_training
from mezzotint.trainer.training import Training


def write_on(training: Training, length: int) -> tuple[list[int], list[int]]:
    """The beginning of the held-out text (of all of it, where nothing is held out), and `length` tokens that the model
    writes after it, each drawn by its probability; the same ones from the same weights and seed. A collective."""
    sequence = training.config.model.sequence
    text = training.held_out if training.config.train.hold_out else training.text
    prompt = text.tokens[: (sequence + 1) // 2].tolist()
    generator = torch.Generator().manual_seed(draw_seed(training.config.train.seed, training.step))
    made = list(prompt)
    with without_training(training):
        for _ in range(length):
            seen = made[-sequence:]
            padded = seen + [0] * (sequence - len(seen))  # which no token before it sees
            logits = training.model(torch.tensor([padded], device=training.device))
            probabilities = logits[0, len(seen) - 1].float().softmax(-1).cpu()
            made.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return prompt, made[len(prompt) :]
