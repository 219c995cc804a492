"""This module has the candidates that are compared, PyTorch in BF16, torchao's recipes and ours, and runs a
step of one, eager or compiled."""

import dataclasses
import itertools
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import mezzotint as mz
from bench._peers import quiet_import
from mezzotint import recipe
from mezzotint.recipe import Recipe

BASE = "bf16"
# This maps a mode to torch.compile's mode; None means eager.
MODES: dict[str, str | None] = {"eager": None, "compiled": "default", "graphs": "reduce-overhead"}
Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A `Candidate` is a way to train; `kind` says which model of a case it takes: plain
    (torchao converts it), ours, ..."""

    name: str
    kind: str  # "plain" | "loop" | "torchao" | "mezzotint" | "by hand" | "by hand, scales given"
    recipe: Recipe | None = None

    @property
    def is_base(self) -> bool:
        """Return whether the others are compared with this candidate."""
        return self.kind in ("plain", "loop")

    def build(self, models: dict[str, Callable[[], nn.Module]]) -> nn.Module:
        """Return the model of this candidate's kind, built from the same random numbers each time."""
        torch.manual_seed(0)
        if self.kind != "torchao":
            return models[self.kind]()
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(self.name.removeprefix(TORCHAO))
        model = models["plain"]()
        if next(model.parameters()).device.type == "cpu":
            config = dataclasses.replace(config, emulate=True)
        return convert_to_float8_training(model, config=config)


TORCHAO = "torchao-"
CANDIDATES: dict[str, Candidate] = {
    found.name: found
    for found in (
        Candidate(BASE, "plain"),
        Candidate("bf16-loop", "loop"),
        *(Candidate(TORCHAO + name, "torchao") for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
        Candidate("delayed", "mezzotint", recipe.DelayedScaling()),
        Candidate("current", "mezzotint", recipe.Float8CurrentScaling()),
        Candidate("rowwise", "mezzotint", recipe.Float8RowwiseScaling()),
        Candidate("block", "mezzotint", recipe.Float8BlockScaling()),
        Candidate("mxfp8", "mezzotint", recipe.MXFP8BlockScaling()),
        Candidate("nvfp4", "mezzotint", recipe.NVFP4BlockScaling()),
        Candidate("by-hand", "by hand"),
        Candidate("by-hand-scales-given", "by hand, scales given"),
    )
}
BY_DEFAULT = [name for name, found in CANDIDATES.items() if "by hand" not in found.kind]


def missing(candidate: Candidate) -> str:
    """Return why a candidate cannot run here at all, or ""."""
    return "torchao is not installed" if candidate.kind == "torchao" and not quiet_import() else ""


def called(model: nn.Module, mode: str, backend: str, skips_guards: bool = False) -> Callable[..., Any]:
    """Return what a step calls; `skips_guards` leaves out all guards.

    Compiled, it is a function with code of its own: graphs belong to the code, and candidates that shared it would
    search through each other's.
    """

    def call(x: torch.Tensor, **kwargs: Any) -> Any:
        return model(x, **kwargs)

    if MODES[mode] is None:
        return model
    own = types.FunctionType(call.__code__.replace(), globals(), call.__name__, None, call.__closure__)
    options: dict[str, Any] = {}
    if backend == "inductor":
        options = dict(torch._inductor.list_mode_options(MODES[mode]))
        if skips_guards:
            options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
        options = {"options": options}
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend, **options)


@dataclass(slots=True)
class Runner:
    """A `Runner` runs forward and backward of one candidate; inputs are taken in turn, and
    gradients are new in each step."""

    candidate: Candidate
    model: nn.Module
    call: Callable[..., Any]
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]  # x, the gradient of y
    micro_batches: int = 1
    graphs: bool = False  # CUDA graphs
    memory: str = "default"  # the memory mode of ours: how much forward holds
    turn: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.turn = itertools.cycle(self.inputs)

    @property
    def keeps(self) -> bool:
        """Return whether quantized weights are kept from microbatch to microbatch."""
        return self.micro_batches > 1 and self.candidate.recipe is not None

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        kwargs = {} if first is None else {"is_first_microbatch": first}
        chosen = self.candidate.recipe
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with nullcontext() if chosen is None else mz.autocast(recipe=chosen, memory=self.memory):
            return self.call(x, **kwargs)

    def clear(self) -> None:
        """Clear all gradients, as after an optimizer's step."""
        self.model.zero_grad(set_to_none=True)
        for x, _ in self.inputs:
            x.grad = None

    def __call__(self) -> None:
        """Run a step; over several microbatches ours keeps the weights that the first one quantized."""
        self.clear()
        for i in range(self.micro_batches):
            x, gradient = next(self.turn)
            self.forward(x, i == 0 if self.keeps else None).backward(gradient)
