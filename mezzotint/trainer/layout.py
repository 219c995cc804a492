"""A layout says how many ranks share a model, and how they do it; `mesh.py` carries it out."""

from dataclasses import dataclass
from functools import partial

from mezzotint.trainer.console import CommandError
from mezzotint.trainer.options import check_options, option
from mezzotint.trainer.sizes import ModelConfig

# These options are one panel of the help.
_of_ranks = partial(option, panel="Several ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A `Layout` holds the number of ranks and the sizes of their dimensions: tensor, expert and data parallelism."""

    world: int = _of_ranks(1, "Plan for this many ranks.", at_least=1, bits=17)
    tp: int = _of_ranks(1, "Share the weights and tokens of each layer among this many ranks.", at_least=1)
    fsdp: bool = _of_ranks(False, "Share weights, gradients and optimizer state among all replicas (FSDP2).")
    ep: int = _of_ranks(1, "Share the experts among this many ranks.", at_least=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.ep > 1 and self.ep % self.tp:
            raise CommandError(f"--ep is {self.ep}: give a multiple of --tp {self.tp}, whose tokens are split too")
        if self.world % max(self.tp, self.ep):
            raise CommandError(f"--world is {self.world}: give a multiple of --tp {self.tp} and --ep {self.ep}")

    def check_model(self, config: ModelConfig) -> None:
        """Raise a `CommandError` if a model of these sizes cannot be shared in this layout."""
        if self.ep > 1 and (not config.experts or config.experts % self.ep):
            raise CommandError(f"--ep is {self.ep}, the model has {config.experts} experts: give a divisor of them")
        if self.tp == 1:
            return
        if config.experts and self.ep == 1:
            raise CommandError(f"--tp is {self.tp}, of a model of experts: give --ep, a multiple of it")
        if config.tied:
            raise CommandError("--tp splits the head, whose weight is the embedding's: give --no-tied")
        for name in ("heads", "kv_heads", "ffn", "vocab", "sequence"):
            if getattr(config, name) % self.tp:
                raise CommandError(f"--tp is {self.tp}: give a divisor of {name}={getattr(config, name)}")
