"""Work that PyTorch does in every test and that no test looks at: it is left out."""

import functools
import importlib
from typing import Any

import torch


def spare_seeds() -> None:
    """Let `torch.manual_seed` seed the CPU alone where there is no accelerator.

    Otherwise it leaves a note for each kind of accelerator that may still come, and formats the stack for each, which
    is deep below pytest.
    """
    if not torch.accelerator.is_available():
        random: Any = torch.random
        random._manual_seed_impl = torch.default_generator.manual_seed


@functools.cache
def spare_measurements() -> None:
    """Switch off what Dynamo measures and writes down of each graph: the time that its guards take (25 ms, most of it
    to empty the processor's cache), and where each object was written to."""
    guards: Any = importlib.import_module("torch._dynamo.guards")
    guards.profile_guard_manager = lambda *_: 0.0
    config: Any = importlib.import_module("torch._dynamo.config")
    if hasattr(config, "side_effect_replay_policy"):  # not in torch 2.11
        config.side_effect_replay_policy = "silent"
