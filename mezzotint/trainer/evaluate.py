"""This module computes the loss on text that no step has seen."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mezzotint.comm.collectives import all_reduce
from mezzotint.quantization import autocast
from mezzotint.trainer.training import Training


@contextmanager
def without_training(training: Training) -> Iterator[None]:
    """Run the model in BF16, eagerly and without gradients.

    Nothing that a step depends on changes, neither delayed scaling's scales nor random numbers,
    and nothing is compiled for it.
    """
    training.model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), autocast(enabled=False):
            yield
    finally:
        training.model.train()


def evaluate(training: Training) -> float:
    """Return the mean loss of `eval_batches` microbatches of the held-out text, the same ones
    every time; all ranks call it."""
    batches, train = training.make_batches(training.held_out), training.config.train
    enough = -(-batches.num_windows // (batches.batch * training.replicas))
    count = min(train.eval_batches, enough)
    total = torch.zeros((), device=training.device)
    with without_training(training):
        for _ in range(count):
            tokens, targets = (part.to(training.device) for part in batches.next())
            total += training.model(tokens, targets) / count
    if training.meshes is not None:
        total = all_reduce(total, training.meshes.replica_group) / training.replicas
    return total.item()
