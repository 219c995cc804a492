"""The directions that FSDP2 gathers: this module finds out which copies of a weight are read until it is gathered
again. It is used if the column-wise copy cannot be made from the row-wise one.

    gathered for forward, and again for backward     row-wise; both if hooks copy what is saved (`save_on_cpu`)
    gathered for forward alone, or by hand           both
    gathered for backward                            column-wise; both if a forward is computed in backward
                                                     (activation checkpointing), or follows it without a gather

What FSDP2 is about to do is in its own bookkeeping (torch 2.11 to 2.15), which is private: if it is not found, both are
gathered. What backward reads is recorded when the module runs in eager code (`RunStatus.reads_rows_again`). A compiled
graph records nothing, since the compiler may compute parts of forward again, and then both are gathered. All ranks must
send the same amount, though a module may have run on some of them only, so they agree once, at the first gather for
backward.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mezzotint.comm.agreement import check_equal
from mezzotint.comm.collectives import all_reduce_max

# These attributes of FSDP2's own objects are read.
_OF_GROUP = ("_reshard_after_forward", "_training_state", "fsdp_params", "modules", "reshard_after_backward")
_OF_PARAM = ("_sharded_local_tensor", "all_gather_outputs")


class Unit:
    """A `Unit` is a weight in FSDP2's bookkeeping, with the group of weights that it is gathered with."""

    __slots__ = ("_group", "_param", "reads_rows_again")

    def __init__(self, group: Any, param: Any) -> None:
        self._group, self._param = weakref.ref(group), weakref.ref(param)  # weak, because they hold the weight
        self.reads_rows_again: bool | None = None  # None until all ranks have agreed

    def __reduce__(self) -> Any:
        return type(None), ()  # FSDP2 does not know a copy of the weight

    def is_of(self, shard: Any) -> bool:
        param = self._param()
        return self._group() is not None and param is not None and param._sharded_local_tensor is shard

    def gathers_again(self) -> bool:
        """Return whether a weight that is gathered for forward is freed after it. If several modules are gathered
        together, it is not freed where only some of them run, so the answer is False."""
        group: Any = self._group()
        return group._reshard_after_forward and len(group.modules) == 1

    def stage(self) -> str:
        """Return what FSDP2 gathers for now, as the name of its training state."""
        group: Any = self._group()
        return group._training_state.name

    def frees_after_backward(self) -> bool:
        group: Any = self._group()
        return group.reshard_after_backward

    def fit(self, buffers: Sequence[torch.Tensor], count: int) -> None:
        """Make FSDP2 allocate its gather outputs anew if `buffers` have other sizes, because it does so only once."""
        param: Any = self._param()
        held = [(x.numel(), x.dtype) for x in param.all_gather_outputs]
        if held != [(x.numel() * count, x.dtype) for x in buffers]:
            param.all_gather_outputs = []


def in_backward() -> bool:
    """Return whether autograd is running a backward. FSDP2 gathers for it, and prefetches, from inside of it."""
    return torch._C._current_graph_task_id() != -1


def saving_hooks() -> Any:
    """Return the hooks that are called with what forward saves for backward, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def copies_saved() -> bool:
    """Return whether the saving hooks may copy what forward saves: they would copy column-wise buffers before these are
    gathered. The hooks of `torch.utils.checkpoint` do not copy."""
    hooks = saving_hooks()
    return hooks is not None and not are_of_checkpoint(hooks)


def are_of_checkpoint(hooks: Any) -> bool:
    """Return whether saving hooks are those of `torch.utils.checkpoint`, which run a forward again for its backward."""
    return getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def unit_of(shard: Any, module: Any) -> Unit | None:
    """Return the `Unit` of a shard of one of the module's weights, or None if FSDP2's bookkeeping is not as expected,
    or it has copied the shard from the CPU."""
    if shard._unit is None or not shard._unit.is_of(shard):
        shard._unit = next((unit for unit in _units(module) if unit.is_of(shard)), None)
    return shard._unit


def _units(module: Any) -> Iterator[Unit]:
    books = sys.modules.get("torch.distributed._composable_state")  # imported once anything is sharded
    for held in list(getattr(books, "_module_state_mapping", {}).values()):
        state: Any = held()
        groups: Any = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]  # torch 2.11
        for group in groups:
            if not all(hasattr(group, name) for name in _OF_GROUP):
                continue
            for param in group.fsdp_params:
                info = getattr(param, "_module_info", None)
                if getattr(info, "module", None) is module and all(hasattr(param, name) for name in _OF_PARAM):
                    yield Unit(group, param)


def check_one_format(quantizer: Any, device: torch.device, module: Any, group: Any) -> None:
    """Raise an error on every rank unless all shards of a module's weight are in one format.

    In different formats the ranks would send different buffers, and hang. This is a collective, at the first gather.
    """
    status = getattr(module, "_run_status", None)
    if status is None or status.is_alike:
        return
    is_own = quantizer is None or quantizer.is_custom()
    text = type(quantizer).__name__ if is_own else repr(quantizer.with_usage(rowwise=True, columnwise=True))
    check_equal(group, device, waits=True, **{"the format of a weight's shards": text})
    status.is_alike = True


def read_directions(shard: Any, module: Any, group: Any) -> tuple[bool, bool]:
    """Return (row-wise, column-wise): which directions a gather over the ranks of `group` must send of each shard."""
    is_one, status = getattr(module, "gathers_one_direction", None), getattr(module, "_run_status", None)
    if is_one is None:
        found = _found_directions(unit_of(shard, module), status, shard.device, group)
    else:
        found = _told_directions(is_one, unit_of(shard, module))
    if status is not None:
        status.held = found
    return found


def _told_directions(is_one: bool, unit: Unit | None) -> tuple[bool, bool]:
    if not is_one:
        return True, True
    if unit is not None and unit.stage() == "FORWARD" and not in_backward() and not unit.gathers_again():
        raise ValueError(
            "one_direction is True, but FSDP2 keeps what it gathers for forward until backward, which reads the other "
            "direction: give fully_shard reshard_after_forward=True, or leave one_direction"
        )
    return not in_backward(), in_backward()


def _found_directions(unit: Unit | None, status: Any, device: torch.device, group: Any) -> tuple[bool, bool]:
    if unit is None:
        return True, True
    stage = unit.stage()
    if stage == "FORWARD" and not in_backward():
        return True, copies_saved() or not unit.gathers_again()
    if stage != "PRE_BACKWARD":  # by hand, or for a recomputed forward, whose backward reads it too
        return True, True
    if unit.reads_rows_again is None:
        is_read = status is None or status.reads_rows_again is not False
        unit.reads_rows_again = bool(all_reduce_max(torch.tensor(float(is_read), device=device), group))
    return unit.reads_rows_again or not unit.frees_after_backward(), True
