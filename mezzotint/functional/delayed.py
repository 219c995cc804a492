"""Delayed scaling's scale updates, for many modules at once: their amaxes are reduced over ranks in one collective.

Forward amaxes are reduced when the outermost `autocast` region ends. In backward, the modules that autograd has gone
through wait for its end (`SCALE_UPDATES`), so that one collective serves all of them, too. A module whose next amaxes
come before that (two regions in one backward) makes those that wait update first. So what is computed is what each
module would compute on its own, as soon as its backward is over; a group of one rank does just that:
`update_scale_state` enters the amaxes and updates the scales in one launch.

Which backward is the last of an iteration nobody says: of the runs of a module in a region the first one's comes last,
if it comes. So a run that is not the first takes what gradients have left since (`take`): where the output of the first
one was dropped, or detached, they would wait for ever.

Processes that run different modules would take each other's maxima. Modules are numbered as a process makes them, and
registered when a group first reduces them. Its processes compare which ones they are going to reduce, and eager code
reduces them in the order of their registration, in whatever order they have run.

A graph hands over what its backward saw to an operator (`hand_over`), which does what eager code does. So the state of
gradients is written without the compiler's knowledge. That is sound because nothing else in such a graph writes it, or
reads it in backward: then the compiler has no reason for a copy of it, and gives the operator the buffers themselves. A
user's own rule is Python, which an operator cannot carry: there a graph has a collective for each module.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mezzotint.comm.agreement import check_equal
from mezzotint.comm.collectives import all_reduce_max
from mezzotint.comm.groups import group_by_name
from mezzotint.kernels._lib import leaf, run_op, write_op
from mezzotint.kernels.delayed import delayed_saw_, delayed_step_, delayed_step_first_, delayed_take_, delayed_update_
from mezzotint.tracing import backward_task, eager_only, traced_as


@dataclass(slots=True)
class ScaleState:
    """One direction of a module: live buffers, and how they are updated."""

    scale: torch.Tensor  # FP32 [n]
    history: torch.Tensor  # FP32 (L, n), or a buffer that begins with it: see `rows`
    top: float
    most_recent: bool
    update: Callable[[torch.Tensor, torch.Tensor], None] | None  # a user's own rule
    groups: tuple[Any, ...]  # of processes over which the maxima are taken
    rows: int | None = None  # in a graph, but for a user's own rule: L. The rows behind are cleared with the update
    number: torch.Tensor | None = None  # int64 [1] on the CPU: which module of its process it is
    order: torch.Tensor | None = None  # `ORDER_TOKEN`, where it is an argument, as AOTAutograd asks

    def is_alone(self) -> bool:
        """Whether `update_scale_state` is all that it needs: no other process is asked, and the rule is ours."""
        return not self.groups and self.update is None

    def is_handed_over(self) -> bool:
        """Whether a graph gives what backward saw to an operator."""
        return self.rows is not None and bool(self.groups)


# By the name of a group: numbers of this process's modules → which ones of the group they are. Not in a thread's state:
# an operator takes no object, it must find it.
REGISTERED: dict[str, dict[int, int]] = {}


def update_states(states: Sequence[ScaleState]) -> None:
    """New scales from what was seen, over all processes: one collective for each group, one launch for each rule."""
    reduce_amaxes([state for state in states if state.groups])
    if len(states) == 1 and states[0].update is None:
        update_scale_state(states[0], [], [])
        return
    batches: dict[bool, tuple[list[Any], list[Any], list[float]]] = {}
    for state in states:
        if state.update is not None:
            state.update(state.history, state.scale)
        else:
            scales, histories, tops = batches.setdefault(state.most_recent, ([], [], []))
            scales.append(state.scale)
            histories.append(state.history)
            tops.append(state.top)
    for most_recent, (scales, histories, tops) in batches.items():
        run_op(delayed_update_, scales, histories, tops, most_recent)


def update_scale_state(state: ScaleState, amaxes: list[torch.Tensor], slots: list[int]) -> None:
    """Enter the amaxes, FP32 [1] each, of these slots into a state that waits for no other, and update it."""
    if state.rows is None or state.rows == state.history.shape[0]:
        write_op(delayed_step_, state.scale, state.history, amaxes, slots, state.top, state.most_recent)
    else:
        options = state.rows, state.top, state.most_recent
        write_op(delayed_step_first_, state.scale, state.history, amaxes, slots, *options)


@torch.no_grad()
def take(state: ScaleState, anchor: torch.Tensor) -> None:
    """New scales from gradients that were seen since the last ones were taken; none were, mostly. In forward, before
    the scale is read. `anchor`: a buffer that forward writes. Of a user's own rule a graph takes none."""
    update_waiting(state.scale)
    if state.is_handed_over():
        hand_over(state, [], [], True)
    elif state.update is not None:
        _take_by_own_rule(state)
    elif state.rows is None:
        update_states([state])
    else:
        delayed_take_(anchor, state.scale, state.history, state.rows, state.top, state.most_recent)


@eager_only()
def _take_by_own_rule(state: ScaleState) -> None:
    """Do that by a user's own rule, which rolls a history always: so only where gradients were seen, which a graph
    cannot ask."""
    reduce_amaxes([state])
    if bool(state.history[0].any()):
        assert state.update is not None
        state.update(state.history, state.scale)


def reduce_amaxes(states: Sequence[ScaleState]) -> None:
    """Take the maxima of modules, row 0 of their histories, over the processes of their groups, in place: one
    collective for each group, whatever the number of modules, after one that compares which modules they are."""
    by_name: dict[str, tuple[Any, list[ScaleState]]] = {}
    for state in states:
        for group in state.groups:
            by_name.setdefault(group.group_name, (group, []))[1].append(state)
    for group, members in by_name.values():
        members = in_order(members, group.group_name)
        rows = [state.history[0] for state in members]
        numbers = [state.number for state in members if state.number is not None]
        seen = run_op(delayed_compare, torch.cat(rows), numbers, group.group_name)
        largest = all_reduce_max(seen, group)
        for row, part in zip(rows, largest.split([row.shape[0] for row in rows]), strict=True):
            row.copy_(part)


@traced_as(lambda states, group: states)
def in_order(states: list[ScaleState], group: str) -> list[ScaleState]:
    """Return states in the order of their modules, the same on all processes: those that the group knows, then new
    ones. A graph has them in the order that it runs them in: it has no values of their numbers."""
    if len(states) == 1:
        return states
    known = REGISTERED.get(group, {})
    numbers = [-1 if state.number is None else int(state.number) for state in states]
    order = sorted(range(len(states)), key=lambda i: (known.get(numbers[i], len(known)), numbers[i]))
    return [states[i] for i in order]


def _compare(device: torch.device, numbers: Sequence[torch.Tensor], group: Any) -> None:
    """Modules that a group knows are compared by their place among those. New ones are registered together: as many on
    all processes, that were made as far from each other. One alone must be the same that each process has made."""
    known, made = REGISTERED.setdefault(group.group_name, {}), [int(number) for number in numbers]
    new = [number for number in made if number not in known]
    first = new[0] if new and len(made) > 1 else 0
    told = [str(known[number]) if number in known else f"new {number - first}" for number in made]
    try:
        check_equal(group, device, modules=", ".join(told))
    except ValueError as error:
        raise ValueError(
            f"delayed scaling takes its maxima over processes, of the same modules on all of them: {error}. Modules "
            "are numbered as a group first sees them, new ones as each process makes them. Run the same ones in a "
            "region on all processes, and make them in the same order; or leave them out of the maxima "
            "(reduce_amax=False)"
        ) from None
    for number in new:
        known[number] = len(known)


def _compare_in_graph(seen: torch.Tensor, numbers: list[torch.Tensor], group: str) -> torch.Tensor:
    _compare(seen.device, numbers, group_by_name(group))
    return seen.clone()


# It gives the maxima on, so that they are reduced after they were compared.
delayed_compare = leaf(
    "delayed_compare(Tensor seen, Tensor[] numbers, str group) -> Tensor",
    fake=lambda seen, numbers, group: torch.empty_like(seen),
    cpu=_compare_in_graph,
    tags=(torch.Tag.cudagraph_unsafe,),
)


@dataclass(slots=True)
class ScaleUpdates:
    """The scale updates that wait for the end of a backward. The one instance is `SCALE_UPDATES`, for all threads:
    several may be in a backward at once, and autograd runs one in threads of its own."""

    waiting: dict[int, tuple[int, ScaleState]] = field(default_factory=dict)  # by scale: in which backward, and what
    task: int = field(default=-1, compare=False)  # the last backward that will call back
    lock: Any = field(default_factory=threading.Lock, compare=False)  # held while `waiting` changes

    def add(self, state: ScaleState) -> None:
        """All that backward saw of a module is entered: new scales at its end; outside of one, and in a graph, now."""
        task = backward_task()
        if task == -1:
            update_states([state])
            return
        with self.lock:
            self.waiting[id(state.scale)] = task, state
        if task != self.task:
            self.task = task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))

    def before(self, scale: torch.Tensor) -> None:
        """Something is going to be entered for a module, or its scale to be read: it must not wait any more."""
        found = self.waiting.get(id(scale))
        if found is not None:
            self._end(found[0])

    def end(self) -> None:
        """None waits any more, in whatever backward it is."""
        with self.lock:
            tasks = {task for task, _ in self.waiting.values()}
        for task in tasks:
            self._end(task)

    @torch.no_grad()
    def _end(self, task: int) -> None:
        with self.lock:
            states = [state for of, state in self.waiting.values() if of == task]
            self.waiting = {key: value for key, value in self.waiting.items() if value[0] != task}
        if states:
            update_states(states)


SCALE_UPDATES = ScaleUpdates()  # not in a thread's state: an operator takes no object, it must find it


@eager_only()
def update_waiting(scale: torch.Tensor) -> None:
    """Have a scale updated that waits for the end of a backward: something is going to be entered for its module, or it
    is going to be read. In a graph none waits but what is handed over, and the operators there do the same."""
    SCALE_UPDATES.before(scale)


ORDER_TOKEN = torch.zeros(1, device="cpu")  # see `_TAGS`


def hand_over(state: ScaleState, amaxes: list[torch.Tensor], slots: list[int], is_last: bool) -> None:
    """In a graph: enter the amaxes, FP32 [1] each, of these slots, and after the last backward of the iteration take
    new scales, when the backward of all modules ends."""
    if amaxes or is_last:
        groups = [group.group_name for group in state.groups]
        options = (state.rows, state.top, state.most_recent, groups, is_last)
        order = ORDER_TOKEN if state.order is None else state.order
        with torch.no_grad():
            delayed_hand_over_(order, state.number, state.scale, state.history, amaxes, slots, *options)


def catch_up(state: ScaleState) -> torch.Tensor:
    """In a graph: the scale, FP32 [n], that follows from what was handed over before; a copy."""
    return delayed_catch_up_(ORDER_TOKEN, state.scale)


def _hand_over(
    order: torch.Tensor,
    number: torch.Tensor,
    scale: torch.Tensor,
    buffer: torch.Tensor,
    amaxes: list[torch.Tensor],
    slots: list[int],
    rows: int,
    top: float,
    most_recent: bool,
    groups: list[str],
    is_last: bool,
) -> None:
    SCALE_UPDATES.before(scale)
    history = buffer[:rows]
    if amaxes:
        run_op(delayed_saw_, history, amaxes, slots)
    if is_last:
        buffer[rows:].zero_()
        found = tuple([group_by_name(name) for name in groups])
        SCALE_UPDATES.add(
            ScaleState(
                scale=scale, history=history, top=top, most_recent=most_recent, update=None, groups=found, number=number
            )
        )


def _catch_up(order: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    SCALE_UPDATES.before(scale)
    return scale.clone()


# The operators say that they write `ORDER_TOKEN`: so they are kept, in their order, the same on all ranks.
# A CUDA graph, which is replayed without Python, is cut at them; where it is not cut, a tensor on the CPU keeps it from
# being recorded.
_TAGS = (torch.Tag.cudagraph_unsafe,)

delayed_hand_over_ = leaf(
    "delayed_hand_over_(Tensor(a!) order, Tensor number, Tensor scale, Tensor buffer, Tensor[] amaxes, int[] slots, "
    "int rows, float top, bool most_recent, str[] groups, bool is_last) -> ()",
    fake=lambda *args: None,
    cpu=_hand_over,
    tags=_TAGS,
)

delayed_catch_up_ = leaf(
    "delayed_catch_up_(Tensor(a!) order, Tensor scale) -> Tensor",
    fake=lambda order, scale: torch.empty_like(scale),
    cpu=_catch_up,
    tags=_TAGS,
)
