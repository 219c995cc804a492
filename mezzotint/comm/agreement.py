"""Agreement between ranks: these functions raise an error if the ranks of a group do not mean the same, before one of
them waits for another that does something else.

check_agreed   goes through torch.distributed's store, and says what each rank has
check_equal    is one collective of a hash of the text: cheaper, if all ranks ask at the same place
"""

import hashlib
import json
import re
from typing import Any

import torch
import torch.distributed

from mezzotint.comm.collectives import all_gather
from mezzotint.comm.groups import rank_in, world_size


def check_agreed(group: Any, **values: str) -> None:
    """Raise ValueError on every rank of the group unless all have the same values. All must ask, in the same order.

    They meet in torch.distributed's store: ranks that do something else would take a collective for one of theirs. A
    rank that asks alone raises after the timeout of the default group.
    """
    store = _store(group)
    if store is None:
        return
    rank, count = rank_in(group), world_size(group)
    number = store.add(f"{rank}", 1)  # how often this rank has asked
    keys = [f"{number}/{other}" for other in range(count)]
    store.set(keys[rank], json.dumps(values))
    try:
        store.wait(keys)
    except RuntimeError:
        absent = ", ".join(f"rank {other}" for other in range(count) if not store.check([keys[other]]))
        store.delete_key(keys[rank])
        store.add(f"{rank}", -1)
        listed = "; ".join(f"{name} is {value}" for name, value in values.items())
        raise ValueError(
            f"of the {count} ranks of the group, rank {rank} has asked alone, {absent} did not: {listed}. Run the same "
            "modules on all of them, in the same regions, and change recipes at the same step"
        ) from None
    found = [json.loads(each) for each in store.multi_get(keys)]
    if number > 1:
        store.delete_key(f"{number - 1}/{rank}")  # all have read it, or they would not have asked again
    for name in dict.fromkeys(name for each in found for name in each):  # one of them may ask for other values
        _check_same(name, [each.get(name, "none") for each in found])


def check_equal(group: Any, device: torch.device, *, waits: bool = False, **values: str) -> None:
    """Raise an error unless all ranks have the same values, by one all-gather of a number. All ranks must ask here,
    between the same collectives.

    On a GPU the host does not wait for the answer, unless it `waits`: if the values differ, the kernel that finds out
    fails, and so does what comes after it (not tried over NCCL). Otherwise the error says what each rank has.
    """
    if is_fake(group):
        return
    number = int.from_bytes(hashlib.sha256(json.dumps(values).encode()).digest()[:7], "big")  # an int64 holds it
    found = all_gather(torch.full((1,), number, dtype=torch.int64, device=device), group)
    is_equal = (found == number).all()
    if found.is_cuda and not waits:
        names = " or ".join(values)
        torch._assert_async(is_equal, f"mezzotint: {names} is not the same on the ranks of a group")
    elif not is_equal:
        check_agreed(group, **values)


def without_addresses(value: Any) -> str:
    """Return the repr without addresses of objects, which differ between ranks."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def is_fake(group: Any) -> bool:
    """Return whether the group's backend is "fake": there are no other ranks, and nobody answers."""
    return torch.distributed.get_backend(group) == "fake"


def nobody_answers(group: Any) -> bool:
    """Return whether other ranks must not be asked: they are fake, or one process exports a model alone."""
    return torch.compiler.is_exporting() or is_fake(group)


def _store(group: Any) -> Any:
    """Return the store in which the ranks of a group meet, or None if they are fake, since nobody answers."""
    group = torch.distributed.group.WORLD if group is None else group
    if is_fake(group):
        return None
    shared = torch.distributed.distributed_c10d._get_default_store()
    members = torch.distributed.get_process_group_ranks(group)
    return torch.distributed.PrefixStore(f"mezzotint/{group.group_name}/{members}", shared)


def _check_same(name: str, given: list[str]) -> None:
    if any(other != given[0] for other in given):
        listed = "; ".join(f"rank {rank} has {other}" for rank, other in enumerate(given))
        raise ValueError(
            f"{name} is not the same on the {len(given)} ranks of the group: {listed}. Give all of them the same"
        )
