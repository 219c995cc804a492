"""The settings of a run: they say how it trains, and all that its numbers follow from."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mezzotint.memory import MEMORY_MODES
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.layout import Layout
from mezzotint.trainer.options import check_options, check_word, flag, option
from mezzotint.trainer.recipe_names import BF16, NAMES, recipe_name
from mezzotint.trainer.sizes import ModelConfig

ONE_RANK_LAYOUT = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A `TrainConfig` says how a model is trained."""

    recipe: str = option(BF16, f"one of {', '.join(NAMES)}")
    rules: str | None = option(None, "TOML file of rules per layer, or of a schedule, in the place of --recipe")
    steps: int = option(150, "optimizer steps; with --resume, in all", at_least=1, may_change=True)
    accumulate: int = option(1, "micro-batches in a step", at_least=1)
    lr: float = option(1e-3, "highest learning rate", at_least=0)
    final_lr: float = option(0.1, "learning rate at the end, as a part of the highest", at_least=0)
    warmup: int = option(40, "steps of a rising learning rate", at_least=0)
    weight_decay: float = option(0.1, "of matrices", at_least=0)
    clip: float = option(1.0, "largest norm of the gradient; 0: any", at_least=0)
    seed: int = option(0, "of weights, order of the data and stochastic rounding", at_least=0, bits=64)
    last: int = option(20, "steps that the final loss is the mean of", at_least=1)
    data: str | None = option(
        None, "text file, folder or tokens.bin; Python's own sources if not given", may_change=True
    )
    tokenizer: str | None = option(None, "tokenizer.json of Hugging Face; bytes if not given", may_change=True)
    device: str = option("auto", "auto, cpu or cuda", may_change=True)
    memory: str = option("default", f"what forward holds for backward: {', '.join(MEMORY_MODES)}")
    compile: bool = option(True, "torch.compile the model, as one graph")
    threads: int | None = option(None, "CPU threads; torch's choice if not given", at_least=1, bits=12, may_change=True)
    log_every: int = option(20, "steps between two lines, or two looks at the loss", at_least=1, may_change=True)
    checkpoint_every: int = option(100, "steps between two checkpoints; 0: none at all", at_least=0, may_change=True)
    hold_out: float = option(0.0, "part of the text, from its end, that is not trained on", at_least=0)
    eval_every: int = option(0, "steps between two looks at the loss on it; 0: none", at_least=0, may_change=True)
    eval_batches: int = option(20, "micro-batches of each look", at_least=1, may_change=True)
    sample: int = option(0, "tokens that the model writes at the end", at_least=0, bits=20, may_change=True)
    keep: int = option(2, "checkpoints that are kept", at_least=1, may_change=True)
    inspect: int = option(0, "steps between two looks at what is quantized; 0: none", at_least=0, may_change=True)
    what_if: bool = option(False, "look at it in the formats of all recipes, too", may_change=True)

    def __post_init__(self) -> None:
        check_options(self)
        check_word("memory", self.memory, MEMORY_MODES)
        if self.hold_out > 0.5:
            raise CommandError(f"--hold-out is {self.hold_out}: give a part of the text, at most 0.5")
        if self.eval_every and not self.hold_out:
            raise CommandError("--eval-every needs text that is not trained on: give --hold-out 0.05 too")
        if self.what_if and not self.inspect:
            raise CommandError("--what-if is for steps that are looked at: give --inspect 50 too")
        object.__setattr__(self, "recipe", recipe_name(self.recipe))  # one spelling for files and comparisons
        if self.rules is not None and self.recipe != BF16:
            raise CommandError(f"--rules and --recipe {self.recipe}: give one of them")
        if self.inspect and self.recipe_label == BF16:
            raise CommandError(f"--inspect looks at what is quantized, and {BF16} quantizes nothing: give a --recipe")

    @property
    def recipe_label(self) -> str:
        """Return the name of the recipe in messages and figures."""
        return self.recipe if self.rules is None else "rules"

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step: it rises linearly, and falls along half a cosine."""
        rise = min((step + 1) / self.warmup, 1.0) if self.warmup else 1.0
        done = min(max(step - self.warmup, 0) / max(self.steps - self.warmup, 1), 1.0)
        return self.lr * rise * (self.final_lr + (1.0 - self.final_lr) * 0.5 * (1.0 + math.cos(math.pi * done)))


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A `RunConfig` holds all that a run's numbers follow from."""

    model: ModelConfig
    train: TrainConfig
    fingerprint: str  # of the text
    layout: Layout = ONE_RANK_LAYOUT

    def as_json(self) -> dict[str, Any]:
        parts = {"model": asdict(self.model), "train": asdict(self.train), "layout": asdict(self.layout)}
        return {**parts, "fingerprint": self.fingerprint}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Return the configuration that `as_json` gave; anything else raises a KeyError, TypeError or CommandError."""
        if not isinstance(values, dict) or not isinstance(values["fingerprint"], str):
            raise TypeError("it is no configuration of a run")
        layout = Layout(**values.get("layout", {}))  # older runs have no layout
        return cls(ModelConfig(**values["model"]), TrainConfig(**values["train"]), values["fingerprint"], layout)

    def differences(self, other: "RunConfig") -> list[str]:
        """Return the options that decide the numbers and differ: "--lr 0.002, not 0.001". A run
        may go on in another layout."""
        found = []
        for mine, its in ((self.model, other.model), (self.train, other.train)):
            for entry in fields(mine):
                value, wanted = getattr(mine, entry.name), getattr(its, entry.name)
                if value != wanted and not entry.metadata["may_change"]:
                    is_text = "\n" in f"{wanted}{value}"  # rules have many lines
                    what = "of another file" if is_text else f"{wanted}, not {value}"
                    found.append(f"{flag(entry.name)} {what}")
        return found


def make_config(model: ModelConfig, train: TrainConfig, given: Mapping[str, Any]) -> tuple[ModelConfig, TrainConfig]:
    """Return both configurations, with the values that were given on the command line put in."""
    parts: list[dict[str, Any]] = []
    for config in (model, train):
        names = {entry.name for entry in fields(config)}
        parts.append({**asdict(config), **{name: value for name, value in given.items() if name in names}})
    return ModelConfig(**parts[0]), TrainConfig(**parts[1])
