"""CudaRNGStatesTracker: it keeps several named random number generators beside the default one.

Under tensor parallelism the ranks of a group need the same numbers for what they all have, and different ones for what
each has a shard of:

    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", seed + 1 + tp_rank)
    with tracker.fork():                      # the default generator is that one here, and goes on from where it was
        y = dropout(x)

Modules take a function that returns one, `get_rng_state_tracker`, and so does `checkpoint`. Forking reads and writes
the state of a generator, which the compiler does not trace: it breaks the graph there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CudaRNGStatesTracker:
    """A tracker holds named states of a device's generator of random numbers, so that ranks can draw the same numbers
    at one place and different ones at another.

    Args:
        device: The device whose default generator it is. None means the current GPU, or the CPU without one.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> tracker = mz.CudaRNGStatesTracker("cpu")
        >>> tracker.add("model-parallel-rng", seed=1)
        >>> with tracker.fork():
        ...     first = torch.rand(4)
        >>> with tracker.fork():
        ...     second = torch.rand(4)
        >>> torch.equal(first, second)
        False
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = None if device is None else torch.device(device)
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all names and seeds."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return name → state, uint8 on the CPU, which `set_states` and `torch.save` take."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Continue from states that `get_states` returned."""
        if not isinstance(states, dict) or not all(isinstance(state, torch.Tensor) for state in states.values()):
            raise TypeError("states: give what get_states gave, a dict of names and tensors")
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a generator called `name` with this seed; raise ValueError if the name or the seed was given before."""
        if seed in self.seeds_:
            raise ValueError(f"seed is {seed}, which another name has: two generators would give the same numbers")
        if name in self.states_:
            raise ValueError(f"name is {name!r}, which is there already: give another one, or reset() first")
        generator = self._generator()
        before = generator.get_state()
        generator.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = generator.get_state()
        generator.set_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from the generator `name` inside; afterwards the default one is where it was before."""
        if name not in self.states_:
            raise ValueError(f"name is {name!r}, known are {sorted(self.states_)}: add(name, seed) first")
        generator = self._generator()
        before = generator.get_state()
        generator.set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_state()
            generator.set_state(before)

    def _generator(self) -> Any:
        device = self.device
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            return torch.default_generator
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
