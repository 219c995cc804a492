"""The one mutable state: it has what `autocast` and `quantized_model_init` set, and what modules leave for their ends.

Each thread has its own, as with `torch.autocast`: a region that one thread enters does not concern another.
`current_state` returns it, in eager code and in graphs; modules ask once per call.
"""

import ctypes
import sys
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from mezzotint.recipe import Recipe
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tracing import backward_task, traced_as


@dataclass(frozen=True)
class RegionOptions(GraphConstant):
    """These options are what a region asks of its modules besides the recipe: one value, guarded as one by a graph."""

    memory: str  # what modules without an own mode hold for backward (`memory.py`)
    checks_finite: bool  # modules count values that are not finite (`finite.py`)

    def changed(self, memory: str | None, checks_finite: bool | None) -> "RegionOptions":
        """Return the options of a region inside of this one; None leaves an option as it is."""
        return region_options(
            self.memory if memory is None else memory, self.checks_finite if checks_finite is None else checks_finite
        )


@cache
def region_options(memory: str, checks_finite: bool) -> RegionOptions:
    """Return the options; equal ones are the very same object, which is fast to compare."""
    return RegionOptions(memory, checks_finite)


NO_OPTIONS = region_options("default", False)


class Pending:
    """A `Pending` is a module that waits for its update, with the groups over which its amaxes are reduced, and the one
    before it. It is a chain and no list: a graph that adds to it does not look at how many there are, and so does not
    guard on it."""

    __slots__ = ("before", "groups", "module")

    def __init__(self, module: Any, groups: tuple[Any, ...], before: Any) -> None:
        self.module, self.groups, self.before = module, groups, before


class RunStatus:
    """A `RunStatus` records the runs of one module, apart from it, because setting an attribute of an `nn.Module` is
    slow.

    It has whether a run of the module has a backward since the module is `Pending`, None if it is not pending; whether
    it is counted (`finite.py`); the recipe and options of its last run outside of backward; and what the ranks that
    share its weights were found to have in common (recipe, input, module).

    For sharded weights (`tensor/fsdp_directions.py`) it has which copies, (row-wise, column-wise), are in what FSDP2
    has gathered; whether backward reads the row-wise ones as well, None if no run has said so; and whether all ranks
    were found to quantize them alike.
    """

    __slots__ = (
        "agreed",
        "has_backward",
        "held",
        "is_alike",
        "is_counted",
        "reads_rows_again",
        "request",
        "settings",
    )

    def __init__(self, request: Any = None) -> None:
        self.request = request  # the delayed-scaling request that the module keeps state for
        self.has_backward: bool | None = None
        self.is_alike = self.is_counted = False
        self.settings: tuple[Recipe | None, RegionOptions] = None, NO_OPTIONS
        self.held = True, True
        self.reads_rows_again: bool | None = None
        self.agreed: frozenset[tuple[str, ...]] = frozenset()


class Opened:
    """An `Opened` is an entry into a region that is still open: the region, what was in force before, the entry
    below."""

    __slots__ = ("below", "outer", "region")

    def __init__(self, region: Any, outer: tuple[Any, ...], below: "Opened | None") -> None:
        self.region, self.outer, self.below = region, outer, below


@dataclass(slots=True)
class State:
    """A `State` has what `autocast` and `quantized_model_init` set in one thread."""

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    options: RegionOptions = NO_OPTIONS
    depth: int = 0
    opened: Opened | None = None  # the last `autocast` that was entered
    init_enabled: bool = False
    init_recipe: Recipe | None = None
    preserves_init: bool = False
    init_opened: Opened | None = None  # the last `quantized_model_init` that was entered
    pending: Any = None
    shared_input: Any = field(default=None, compare=False)  # what the last linear left for others (`shared_input.py`)
    counted: Any = None  # a chain of modules whose counters the end of the region reads (`finite.py`)
    num_checked: int = field(default=0, compare=False)  # how many regions have read counters; it only grows
    recomputation: Any = None
    recomputes_in_graph: bool = False
    skip_weight_update: torch.Tensor | None = None  # FP32 [1]: 1 leaves weights that modules keep as they are
    agreed: frozenset[tuple[str, str]] = frozenset()  # (group, recipe) of regions that all ranks of it agreed on
    entered: tuple[Any, ...] = ()  # regions opened by hand (`FP8GlobalStateManager.autocast_enter`)


# PyTorch passes objects that are stashed under a key to the threads in which autograd runs a backward.
_KEY = "mezzotint_state"


class _Thread(threading.local):
    """This is the state of the current thread, in a form that Dynamo can read. `own` differs from `state` in a thread
    of autograd's, where `state` is that of the thread that called backward."""

    own: State
    state: State

    def __init__(self) -> None:
        """Initialize the state of a thread; this is called once in each thread, by its first look at the state."""
        self.own = self.state = State()
        if torch._C._is_key_in_tls(_KEY):
            self.state = torch._C._get_obj_in_tls(_KEY)
        else:
            _stash(self.own)


def _stash(state: State) -> None:
    """Have PyTorch keep the state of this thread. It drops a reference when the thread ends, but torch 2.11 takes none:
    there one is added, because PyTorch would otherwise free what is still in use."""
    references = sys.getrefcount(state)
    torch._C._stash_obj_in_tls(_KEY, state)
    if sys.getrefcount(state) == references:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state))


THREAD = _Thread()


@traced_as(lambda: THREAD.state)
def current_state() -> State:
    """Return the state of this thread. In a backward it is that of the thread which called it, wherever autograd runs
    it, because `torch.utils.checkpoint` computes again there what a region asked for. A graph never runs in one."""
    if backward_task() != -1:
        own = THREAD.own  # this comes first: a thread without a state makes one
        THREAD.state = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else own
    return THREAD.state


def recipe_in_force() -> Recipe | None:
    """Return the recipe of the region around this, or None if nothing is quantized."""
    state = current_state()
    return state.recipe if state.enabled else None


AutocastState = tuple[bool, bool, Recipe | None, Any, RegionOptions]


def get_autocast_state() -> AutocastState:
    """Return what a region sets: enabled, calibrating, recipe, group, options."""
    return settings_in(current_state())


def settings_in(state: State) -> AutocastState:
    """Return what a region sets, out of the state of a thread."""
    return state.enabled, state.calibrating, state.recipe, state.group, state.options


def set_autocast_state(given: AutocastState) -> None:
    """Set what `get_autocast_state` returned."""
    put_settings(current_state(), given)


def put_settings(state: State, given: AutocastState) -> None:
    """Set what `settings_in` returned."""
    state.enabled, state.calibrating, state.recipe, state.group, state.options = given


def leave(opened: Opened | None, region: Any) -> tuple[Opened | None, tuple[Any, ...] | None]:
    """Take the last entry into `region` out of the chain that ends with `opened`.

    Return the chain without it, and what to put in force: what was before it, or None if other regions were entered
    after it and are still open (generators and coroutines of one thread may leave in any order). Those stay in force,
    and the one above it will restore what this one would have restored.
    """
    if opened is not None and opened.region is region:
        return opened.below, opened.outer
    above = opened
    while above is not None:
        entry = above.below
        if entry is not None and entry.region is region:
            above.below, above.outer = entry.below, entry.outer
            return opened, None
        above = entry
    raise RuntimeError(
        f"{type(region).__name__} is left in a thread that has not entered it, or a second time: leave a region once, "
        "in the thread that entered it"
    )
