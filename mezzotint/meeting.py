"""When the processes of a group compare what they run with, in eager code and in graphs alike.

meet     a module runs whose weights they share. At its first run they ask each other whether they mean the same one.
         After that the first module since a region was entered, or left, compares recipe and input at each of its runs:
         a step compares once, with a region around it or without
agree    a region is entered whose modules take maxima over them

Whether a process compares must not depend on what may differ between them. In a graph each is an operator, which does
what eager code does when the graph runs. Nothing is asked while it is traced: a process may compile, or export, alone,
and cut a model into other graphs than the others do. An operator without outputs stays in a graph, where it is, since
it is known to have a side effect; `dynamo/order.py` has Inductor keep it in line with the collectives.

An operator knows a module by a buffer of its own, its `mark`, which forward does not write to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mezzotint.comm.agreement import check_agreed, check_equal, is_fake, without_addresses
from mezzotint.comm.groups import device_of, group_by_name, world_size
from mezzotint.functional.traced import next_number, read_local, read_written, set_local
from mezzotint.kernels._lib import leaf
from mezzotint.recipe import Recipe
from mezzotint.region import current_state, recipe_in_force


def meet(module: Any, inp: Any) -> None:
    """A module runs, with `inp`, whose weights the processes of its `tp_group` share."""
    recipe, mark = recipe_in_force(), module.scale_bwd
    if not torch.compiler.is_compiling():
        if not is_fake(module.tp_group):
            given = module.tp_group, mark, inp.shape, inp.dtype
            _meet(*given, False, lambda: (without_addresses(recipe), _describe(module)))
    elif torch.compiler.is_dynamo_compiling():
        state, group, text, described, is_first, number = current_state(), "", "", "", False, 0
        torch._dynamo.comptime.comptime(_describe_meeting)  # writes the last five: constants of the graph
        if is_first:
            state.leaders = (*state.leaders, (group, None))
        if group:
            meet_op(mark, list(inp.shape), inp.dtype, text, described, group, is_first, number)


def _describe_meeting(context: Any) -> None:
    """Called by Dynamo in `meet`, whose locals are read and written here."""
    module = read_local(context, "module")
    if torch.compiler.is_exporting() or is_fake(module.tp_group):
        return
    group = module.tp_group.group_name
    # None: this graph has neither entered nor left a region so far. Operators see those that it has when it is over.
    led = read_written(context, "state", "leaders")
    set_local(context, "group", group)
    set_local(context, "text", without_addresses(read_local(context, "recipe")))
    set_local(context, "described", _describe(module))
    set_local(context, "is_first", led is not None and group not in [name for name, _ in led])
    set_local(context, "number", next_number(context))


def _describe(module: Any) -> str:
    return f"{module}, split by {' and '.join(map(str, module._modes))}, sequence_parallel={module.sequence_parallel}"


def _meet(
    group: Any,
    mark: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    is_first: bool,
    describe: Callable[[], tuple[str, str]],
) -> None:
    """`describe()`: recipe and module, which most runs do not ask for."""
    leads, is_known = _leads(group.group_name, mark, is_first), _address(mark) in current_state().known
    if is_known and not leads:
        return
    (recipe, module), inp = describe(), f"{tuple(shape)} of {dtype}"
    if is_known:
        check_equal(group, mark.device, recipe=recipe, inp=inp)
    else:
        check_agreed(group, recipe=recipe, inp=inp, module=module)
        _learn(mark)


def _meet_in_graph(
    mark: torch.Tensor,
    shape: list[int],
    dtype: torch.dtype,
    recipe: str,
    module: str,
    group: str,
    is_first: bool,
    number: int,
) -> None:
    _meet(group_by_name(group), mark, shape, dtype, is_first, lambda: (recipe, module))


def _address(mark: torch.Tensor) -> int:
    """A graph gives its operators other tensors of the same memory."""
    return mark.untyped_storage()._cdata


def _learn(mark: torch.Tensor) -> None:
    """Its address is not given to another one as long as there is a reference."""
    reference = StorageWeakRef(mark.untyped_storage())
    state = current_state()
    alive = {address: each for address, each in state.known.items() if not each.expired()}
    state.known = {**alive, reference.cdata: reference}


def _leads(group: str, mark: torch.Tensor, is_first: bool) -> bool:
    """Whether a module is the first of a group that has run since a region was entered or left. Its mark is kept when
    it is gone: it must not be taken for another one's."""
    state = current_state()
    leader = dict(state.leaders).get(group)
    if leader is None or is_first:
        others = [each for each in state.leaders if each[0] != group]
        state.leaders = (*others, (group, mark))
        return True
    return _address(leader) == _address(mark)


def follow(old: torch.Tensor, new: torch.Tensor) -> None:
    """A mark has moved, on this process maybe alone: the module is known as before, and leads as before."""
    state = current_state()
    moved = [each is not None and _address(each) == _address(old) for _, each in state.leaders]
    state.leaders = tuple([(each[0], new) if has else each for each, has in zip(state.leaders, moved, strict=True)])
    if _address(old) in state.known:
        _learn(new)


def forget(mark: torch.Tensor) -> None:
    """A module is to meet others."""
    state = current_state()
    state.known = {address: each for address, each in state.known.items() if address != _address(mark)}


def agree(recipe: Recipe | None, group: Any) -> None:
    """All processes that maxima are taken over have this recipe, or all of them raise: one with another recipe would
    take none, and the others wait for it."""
    if not torch.compiler.is_compiling():
        if world_size(group) > 1 and not is_fake(group):
            _agree(device_of(group), without_addresses(recipe), _takes_maxima(recipe), group)
    elif torch.compiler.is_dynamo_compiling():
        name, text, takes_maxima, device, number = "", "", False, "", 0
        torch._dynamo.comptime.comptime(_describe_region)  # writes them
        if name:
            agree_op(torch.empty(0, dtype=torch.uint8, device=device), text, takes_maxima, name, number)


def _describe_region(context: Any) -> None:
    """Called by Dynamo in `agree`, whose locals are read and written here."""
    recipe = read_local(context, "recipe")
    group = group_by_name(read_local(context, "group").group_name)  # itself: Dynamo has something in its place
    if torch.compiler.is_exporting() or world_size(group) == 1 or is_fake(group):
        return
    set_local(context, "name", group.group_name)
    set_local(context, "text", without_addresses(recipe))
    set_local(context, "takes_maxima", _takes_maxima(recipe))
    set_local(context, "device", str(device_of(group)))
    set_local(context, "number", next_number(context))


def _takes_maxima(recipe: Recipe | None) -> bool:
    return recipe is not None and (recipe.custom() or bool(getattr(recipe, "reduce_amax", False)))


def _agree(device: torch.device, recipe: str, takes_maxima: bool, group: Any) -> None:
    """A group is asked once for a recipe; after one that takes maxima each region compares."""
    text = f"{recipe} in autocast"  # apart from what modules compare, which is with their inputs
    state = current_state()
    known = {each: takes for name, each, takes in state.agreed if name == group.group_name}
    if any(known.values()):
        check_equal(group, device, recipe=text)
    if text not in known:
        check_agreed(group, recipe=text)
        state.agreed = (*state.agreed, (group.group_name, text, takes_maxima))


meet_op = leaf(
    "meet(Tensor mark, SymInt[] shape, ScalarType dtype, str recipe, str module, str group, bool is_first, int number) "
    "-> ()",
    fake=lambda *args: None,
    cpu=_meet_in_graph,
)

agree_op = leaf(
    "agree(Tensor mark, str recipe, bool takes_maxima, str group, int number) -> ()",
    fake=lambda *args: None,
    cpu=lambda mark, recipe, takes, group, number: _agree(mark.device, recipe, takes, group_by_name(group)),
)

MEETINGS = (meet_op, agree_op)
for _op in MEETINGS:
    torch.fx.node.has_side_effect(_op)
