"""Whether the ranks of a group mean the same, before one of them waits for another that does something else.

check_agreed   in torch.distributed's store: says what each of them has
check_equal    in a collective of one number, which stands for the text: cheaper, where all ranks are at one place
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
    """The same on every rank of the group, or an error on every one of them. All must ask, in the same order.

    They meet in torch.distributed's store: ranks that do something else would take a collective for one of theirs. One
    that is alone raises after the timeout of the default group.
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
            f"rank {rank} of the {count} processes of the group has asked alone, {absent} did not: {listed}. Run the "
            "same modules on all of them, in the same regions, and change recipes at the same step"
        ) from None
    found = [json.loads(each) for each in store.multi_get(keys)]
    if number > 1:
        store.delete_key(f"{number - 1}/{rank}")  # all have read it, or they would not ask again
    for name in dict.fromkeys(name for each in found for name in each):  # one of them may be somewhere else
        _check_same(name, [each.get(name, "none") for each in found])


def check_equal(group: Any, device: torch.device, *, waits: bool = False, **values: str) -> None:
    """The same, asked by ranks that all ask here, between the same collectives: one all-gather of a number.

    On a GPU the host does not wait for the answer, unless it `waits`: where it is no, the kernel that finds out fails,
    and so does what comes after it (not tried over NCCL). Else the error says what each rank has.
    """
    if is_fake(group):
        return
    number = int.from_bytes(hashlib.sha256(json.dumps(values).encode()).digest()[:7], "big")  # an int64 holds it
    found = all_gather(torch.full((1,), number, dtype=torch.int64, device=device), group)
    is_equal = (found == number).all()
    if found.is_cuda and not waits:
        names = " or ".join(values)
        torch._assert_async(is_equal, f"mezzotint: {names} is not the same on the processes of a group")
    elif not is_equal:
        check_agreed(group, **values)


def without_addresses(value: Any) -> str:
    """The repr, less what differs between ranks."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def is_fake(group: Any) -> bool:
    """Whether there are no other ranks: nobody answers."""
    return torch.distributed.get_backend(group) == "fake"


def nobody_answers(group: Any) -> bool:
    """Whether other ranks are not to be asked: they are fake, or one process exports a model alone."""
    return torch.compiler.is_exporting() or is_fake(group)


def _store(group: Any) -> Any:
    """Where the ranks of a group meet; None where they are fake, and nobody answers."""
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
            f"{name} is not the same on the {len(given)} processes of the group: {listed}. Their parts belong to one "
            "tensor: give all of them the same"
        )
