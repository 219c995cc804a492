"""This module samples text from a model."""

import torch

from mezzotint.trainer.data import draw_seed
from mezzotint.trainer.evaluate import without_training
from mezzotint.trainer.training import Training


def write_on(training: Training, length: int) -> tuple[list[int], list[int]]:
    """Return a prompt, and `length` tokens that the model writes after it; all ranks call it.

    The prompt is the beginning of the held-out text, or of all text if nothing is held out. Each token is drawn by its
    probability, and is the same for the same weights and seed.
    """
    sequence = training.config.model.sequence
    text = training.held_out if training.config.train.hold_out else training.text
    prompt = text.tokens[: (sequence + 1) // 2].tolist()
    generator = torch.Generator().manual_seed(draw_seed(training.config.train.seed, training.step))
    made = list(prompt)
    with without_training(training):
        for _ in range(length):
            seen = made[-sequence:]
            padded = seen + [0] * (sequence - len(seen))  # causal attention hides the padding from the tokens before it
            logits = training.model(torch.tensor([padded], device=training.device))
            probabilities = logits[0, len(seen) - 1].float().softmax(-1).cpu()
            made.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return prompt, made[len(prompt) :]
