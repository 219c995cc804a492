"""The one mutable state: what `autocast` and `quantized_model_init` set, and what modules leave for their ends.

Modules read it once per call. `agreed`, `leaders` and `known` are those of `meeting.py`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from mezzotint.recipe import Recipe


class Pending:
    """A module that waits for its update, the groups that it shares its maxima with, and those before it. A chain, not
    a list: a graph that adds to it does not look at, and so does not guard on, how many there are."""

    __slots__ = ("before", "groups", "module")

    def __init__(self, module: Any, groups: tuple[Any, ...], before: Any) -> None:
        self.module, self.groups, self.before = module, groups, before


class Turn:
    """Whether a module is `Pending`, whether one of its runs since has a backward, and whether its last run was
    quantized. Of its own: to set an attribute of an `nn.Module` is slow.

    In shards (`tensor/gathering.py`): which copies of weights, (row-wise, column-wise), are in what FSDP2 has gathered;
    whether backward reads the row-wise ones too, None where no run has said so; and whether all processes were found to
    quantize them alike.
    """

    __slots__ = ("has_backward", "held", "is_alike", "is_pending", "is_quantized", "reads_rows_again")

    def __init__(self) -> None:
        self.is_pending = self.has_backward = self.is_quantized = self.is_alike = False
        self.held = True, True
        self.reads_rows_again: bool | None = None


@dataclass(slots=True)
class State:
    """What `autocast` and `quantized_model_init` set. One instance, `STATE`."""

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    depth: int = 0
    init_enabled: bool = False
    init_recipe: Recipe | None = None
    preserves_init: bool = False
    pending: Any = None
    recomputation: Any = None
    recomputes_in_graph: bool = False
    skip_weight_update: torch.Tensor | None = None  # FP32 [1]: 1 leaves weights that modules keep as they are
    agreed: tuple[tuple[str, str, bool], ...] = ()  # groups, recipes that all of one had, and whether it takes maxima
    leaders: tuple[tuple[str, torch.Tensor | None], ...] = ()  # groups, and the mark of the module that compares
    known: dict[int, Any] = field(default_factory=dict)  # marks of modules that processes have agreed on
    entered: tuple[Any, ...] = ()  # regions that were opened by hand: `FP8GlobalStateManager.autocast_enter`


STATE = State()

AutocastState = tuple[bool, bool, Recipe | None, Any]


def get_autocast_state() -> AutocastState:
    """What a region sets: enabled, calibrating, recipe, group."""
    return STATE.enabled, STATE.calibrating, STATE.recipe, STATE.group


def set_autocast_state(state: AutocastState) -> None:
    """What `get_autocast_state` gave."""
    STATE.enabled, STATE.calibrating, STATE.recipe, STATE.group = state
