"""The settings of a run: they say how it trains, and all that its numbers follow from."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from mezzotint.memory import MEMORY_MODES
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.layout import Layout
from mezzotint.trainer.options import check_options, check_word, flag, option
from mezzotint.trainer.recipe_names import BF16, NAMES, recipe_name
from mezzotint.trainer.savings import MEMORY_HELP
from mezzotint.trainer.sizes import ModelConfig

ONE_RANK_LAYOUT = Layout()

# The options of one panel of the help.
_recipe, _optimization, _report, _text, _machine, _evaluation = (
    partial(option, panel=name)
    for name in ("Recipe", "Optimization", "Reports and checkpoints", "Text", "Machine", "Evaluation")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A `TrainConfig` says how a model is trained."""

    recipe: str = _recipe(BF16, f"Train in one of {', '.join(NAMES)}.", metavar="RECIPE")
    rules: str | None = _recipe(
        None, "Read a recipe for each layer, or a schedule, from this TOML file; give it or --recipe.", metavar="FILE"
    )
    steps: int = _optimization(
        150, "Train for this many optimizer steps; with --resume, this many in all.", at_least=1, may_change=True
    )
    accumulate: int = _optimization(1, "Accumulate gradients over this many microbatches in each step.", at_least=1)
    lr: float = _optimization(1e-3, "Set the highest learning rate.", at_least=0)
    final_lr: float = _optimization(0.1, "End with this fraction of the highest learning rate.", at_least=0)
    warmup: int = _optimization(40, "Raise the learning rate over this many steps.", at_least=0)
    weight_decay: float = _optimization(0.1, "Set the weight decay of matrices.", at_least=0)
    clip: float = _optimization(1.0, "Clip the gradient to this norm; 0 leaves it as it is.", at_least=0)
    seed: int = _optimization(
        0, "Seed the weights, the order of the text and stochastic rounding.", at_least=0, bits=64
    )
    last: int = _report(20, "Report the mean loss of this many last steps as the final loss.", at_least=1)
    data: str | None = _text(
        None,
        "Train on this text file, on all text files of this folder, or on the tokens of a *.bin; without it, on the "
        "sources of Python's own library.",
        metavar="PATH",
        may_change=True,
    )
    tokenizer: str | None = _text(
        None,
        "Split the text into tokens by this tokenizer.json of Hugging Face; without it, each byte is a token.",
        metavar="FILE",
        may_change=True,
    )
    device: str = _machine(
        "auto", "Compute on cpu or cuda; auto takes a GPU if there is one.", metavar="DEVICE", may_change=True
    )
    memory: str = _recipe("default", MEMORY_HELP, metavar="MODE")
    compile: bool = _machine(True, "Compile the model as one graph with torch.compile.")
    threads: int | None = _machine(
        None, "Use this many CPU threads; without it, PyTorch chooses.", at_least=1, bits=12, may_change=True
    )
    log_every: int = _report(20, "Report the loss every N steps.", at_least=1, may_change=True)
    checkpoint_every: int = _report(
        100, "Write a checkpoint every N steps; 0 writes none.", at_least=0, may_change=True
    )
    hold_out: float = _evaluation(0.0, "Keep this fraction of the text, at its end, out of training.", at_least=0)
    eval_every: int = _evaluation(
        0, "Evaluate the text that is held out every N steps; 0 never does.", at_least=0, may_change=True
    )
    eval_batches: int = _evaluation(20, "Evaluate on this many microbatches.", at_least=1, may_change=True)
    sample: int = _evaluation(
        0, "Let the model write this many tokens at the end.", at_least=0, bits=20, may_change=True
    )
    keep: int = _report(2, "Keep this many checkpoints.", at_least=1, may_change=True)
    inspect: int = _evaluation(
        0, "Measure what quantization does to tensors every N steps; 0 never does.", at_least=0, may_change=True
    )
    what_if: bool = _evaluation(False, "Measure it in the formats of all recipes, too.", may_change=True)

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
