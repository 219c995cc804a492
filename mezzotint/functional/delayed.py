"""Delayed scaling's scale updates, for many modules at once: their amaxes are reduced over ranks in one collective.

Forward amaxes are reduced when the outermost `autocast` region ends. In backward, the modules that autograd has passed
wait for the end of backward (`SCALE_UPDATES`), so that one collective serves all of them, too. If a module's next
amaxes come before that (two regions in one backward), the waiting updates are done first. The result is therefore what
each module would compute on its own as soon as its backward is over. A module without groups does just that:
`update_scale_state` enters the amaxes and updates the scales in one launch.

Nothing announces which backward is the last of an iteration. Among the runs of a module in a region, the backward of
the first run comes last, if it comes. So a run that is not the first takes over the amaxes that gradients have left
since the last update (`take`): if the output of the first run was dropped, or detached, they would wait for ever.

Ranks that run different modules would take each other's amaxes. So each rank numbers its modules as it makes them,
and a group registers them when it first reduces their amaxes. The ranks compare which modules they are going to reduce,
and eager code reduces them in the order of their registration, in whatever order they have run.

A compiled graph hands over what its backward saw to an operator (`hand_over`), which does what eager code does. So the
state of gradients is written without the compiler's knowledge. That is sound because nothing else in such a graph
writes it, or reads it in backward: the compiler has no reason to copy it, and gives the operator the buffers
themselves. A user's own update rule is Python, which an operator cannot carry: there a graph has a collective for each
module.
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
from mezzotint.kernels.delayed import delayed_saw_, delayed_step_, delayed_take_, delayed_update_
from mezzotint.tracing import backward_task, eager_only, traced_as


@dataclass(slots=True)
class ScaleState:
    """A `ScaleState` holds the live buffers of one direction (forward or backward) of a module, and how they are
    updated."""

    scale: torch.Tensor  # FP32 [n]
    history: torch.Tensor  # FP32 (L, n), or a buffer that begins with it: see `rows`
    top: float
    most_recent: bool
    update: Callable[[torch.Tensor, torch.Tensor], None] | None  # a user's own rule
    groups: tuple[Any, ...]  # process groups over which amaxes are reduced
    rows: int | None = None  # L; only in a graph without a user's rule. An update clears the rows behind
    number: torch.Tensor | None = None  # int64 [1] on the CPU: the module's number on its rank
    order: torch.Tensor | None = None  # `ORDER_TOKEN`, if it is passed in, as AOTAutograd requires

    def is_alone(self) -> bool:
        """Return whether `update_scale_state` suffices: amaxes are not reduced over ranks, and there is no user's own
        rule."""
        return not self.groups and self.update is None

    def is_handed_over(self) -> bool:
        """Return whether a graph hands what backward saw over to an operator."""
        return self.rows is not None and bool(self.groups)


# This maps a group's name to the numbers of this rank's modules, and each number to the module's place in the group.
# It is global and not in a thread's state, because an operator takes no object: it must find it.
REGISTERED: dict[str, dict[int, int]] = {}


def update_states(states: Sequence[ScaleState]) -> None:
    """Update the scales from the amaxes that were seen, over all ranks, with one collective for each group and one
    launch for each rule."""
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
    """Enter the `amaxes`, FP32 [1] each, into these `slots` of a state that depends on no other rank, and update it."""
    rows = state.history.shape[0] if state.rows is None else state.rows
    write_op(delayed_step_, state.scale, state.history, amaxes, slots, rows, state.top, state.most_recent)


@torch.no_grad()
def take(state: ScaleState, anchor: torch.Tensor) -> None:
    """Update the scales from gradients that were seen since the last update; mostly there are none. It is called in
    forward, before the scale is read. `anchor` is a buffer that forward writes. With a user's own rule a graph does
    nothing here."""
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
    """Do what `take` does, by a user's own rule. That rule always rolls the history, so it is called only if gradients
    were seen, which a graph cannot ask."""
    reduce_amaxes([state])
    if bool(state.history[0].any()):
        assert state.update is not None
        state.update(state.history, state.scale)


def reduce_amaxes(states: Sequence[ScaleState]) -> None:
    """Reduce the amaxes of modules, row 0 of their histories, over the ranks of their groups, in place. There is one
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
    """Return the states in the order of their modules, which is the same on all ranks: first those that the group
    knows, then new ones. A graph keeps the order in which it runs them, because it does not know the values of their
    numbers."""
    if len(states) == 1:
        return states
    known = REGISTERED.get(group, {})
    numbers = [-1 if state.number is None else int(state.number) for state in states]
    order = sorted(range(len(states)), key=lambda i: (known.get(numbers[i], len(known)), numbers[i]))
    return [states[i] for i in order]


def _compare(device: torch.device, numbers: Sequence[torch.Tensor], group: Any) -> None:
    """Check that all ranks of `group` reduce the same modules, and register the new ones. A known module is compared by
    its place in the group. Several new ones must be as many, and made at the same distances from each other, on all
    ranks. A single one must have the same number on all of them."""
    known, made = REGISTERED.setdefault(group.group_name, {}), [int(number) for number in numbers]
    new = [number for number in made if number not in known]
    first = new[0] if new and len(made) > 1 else 0
    told = [str(known[number]) if number in known else f"new {number - first}" for number in made]
    try:
        check_equal(group, device, modules=", ".join(told))
    except ValueError as error:
        raise ValueError(
            f"delayed scaling reduces amaxes over ranks, which must be those of the same modules: {error}. Modules are "
            "numbered as a group first sees them, new ones as each rank makes them. Run the same modules in a region "
            "on all ranks, and make them in the same order; or leave them out of the reduction (reduce_amax=False)"
        ) from None
    for number in new:
        known[number] = len(known)


def _compare_in_graph(seen: torch.Tensor, numbers: list[torch.Tensor], group: str) -> torch.Tensor:
    _compare(seen.device, numbers, group_by_name(group))
    return seen.clone()


# The operator returns the amaxes, so that they are reduced after they were compared.
delayed_compare = leaf(
    "delayed_compare(Tensor seen, Tensor[] numbers, str group) -> Tensor",
    fake=lambda seen, numbers, group: torch.empty_like(seen),
    cpu=_compare_in_graph,
    tags=(torch.Tag.cudagraph_unsafe,),
)


@dataclass(slots=True)
class ScaleUpdates:
    """A `ScaleUpdates` holds the scale updates that wait for the end of a backward. The one instance is
    `SCALE_UPDATES`, which all threads share: several threads may be in a backward at once, and autograd runs one in
    threads of its own."""

    waiting: dict[int, tuple[int, ScaleState]] = field(default_factory=dict)  # by the scale's id: backward, state
    task: int = field(default=-1, compare=False)  # the last backward in which a callback was queued
    lock: Any = field(default_factory=threading.Lock, compare=False)  # held while `waiting` changes

    def add(self, state: ScaleState) -> None:
        """Schedule the update of a module whose amaxes from backward are all entered: it happens when this backward
        ends. Outside of a backward, and in a graph, it happens now."""
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
        """Do the update that this `scale` waits for, because an amax is going to be entered for its module, or the
        scale read."""
        found = self.waiting.get(id(scale))
        if found is not None:
            self._end(found[0])

    def end(self) -> None:
        """Do all updates that wait, in whatever backward they are."""
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


SCALE_UPDATES = ScaleUpdates()  # global, because an operator takes no object: it must find it


@eager_only()
def update_waiting(scale: torch.Tensor) -> None:
    """Update this `scale` now if it waits for the end of a backward, because an amax is going to be entered for its
    module, or the scale read. In a graph nothing waits but what is handed over, and the operators there do the same."""
    SCALE_UPDATES.before(scale)


ORDER_TOKEN = torch.zeros(1, device="cpu")  # see `_TAGS`


def hand_over(state: ScaleState, amaxes: list[torch.Tensor], slots: list[int], is_last: bool) -> None:
    """Enter the `amaxes`, FP32 [1] each, into these `slots` from a graph. If `is_last`, the scales are updated when the
    backward of all modules ends."""
    if amaxes or is_last:
        groups = [group.group_name for group in state.groups]
        options = (state.rows, state.top, state.most_recent, groups, is_last)
        order = ORDER_TOKEN if state.order is None else state.order
        with torch.no_grad():
            delayed_hand_over_(order, state.number, state.scale, state.history, amaxes, slots, *options)


def catch_up(state: ScaleState) -> torch.Tensor:
    """Return a copy of the scale, FP32 [n], that follows from what was handed over before. It is called in a graph."""
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


# The operators declare that they write `ORDER_TOKEN`: so they are kept, in their order, which is the same on all ranks.
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
