"""One launch for the tensors of many groups (experts): each argument is a tuple, in which each program finds its group.

A kernel that takes groups has one more argument, `groups`: None, or a tuple with a number for each group, which says
how many rows it has and which of the programs is its first. Its tensors are then tuples of the same length, and `M` is
None. A program takes its own tensors by `chosen`, and its number within the group and the group's rows by `own_rows`.

Triton compiles a kernel anew for an int that is 1 or a multiple of 16, and so it would for each way in which rows are
dealt to groups. The numbers that `pack` makes are neither. The kernel learns from ALIGNED whether rows are a multiple
of 16.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

MOST = 16  # groups of one launch: the size of a kernel's arguments is limited


@triton.jit
def _first(group):
    return ((group & 0xFFFFFFFF) >> 1).to(tl.int32)


@triton.jit
def chosen(of, groups, pid):
    """Return what the tuple `of` has for the group of program `pid`."""
    found = of[0]
    for g in tl.static_range(1, len(of)):
        found = tl.where(pid >= _first(groups[g]), of[g], found)
    return found


@triton.jit
def own_rows(groups, pid, ALIGNED: tl.constexpr):
    """Return the number of this program among those of its group, and the group's rows. ALIGNED says that these are a
    multiple of 16."""
    group = chosen(groups, groups, pid)
    M = ((group >> 32) & 0x3FFFFFFF).to(tl.int32)
    if ALIGNED:
        M = M // 16 * 16  # what the compiler then knows
    return pid - _first(group), M


class Groups(NamedTuple):
    """A `Groups` holds the groups of one launch."""

    packed: tuple[int, ...]  # a power of two of them: the last ones have no programs
    programs: int
    sizes: tuple[int, ...]  # rows

    def of(self, tensors: Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, ...] | None:
        """Return an argument of the kernel, the tensors of all groups; groups without programs repeat the last one."""
        if tensors is None:
            return None
        return (*tensors, *[tensors[-1]] * (len(self.packed) - len(tensors)))

    def is_multiple(self, of: int) -> bool:
        """Return whether the rows of every group are a multiple of `of`. A group without rows is none, since a program
        may look for some."""
        return all(size and size % of == 0 for size in self.sizes)

    def flags(self, BM: int, BN: int, K: int) -> dict[str, bool]:
        """Return the constants of a kernel whose programs have tiles of BM rows and BN columns."""
        return {"EVEN": self.is_multiple(BM) and K % BN == 0, "ALIGNED": self.is_multiple(16)}


def pack(sizes: Sequence[int], programs_of: Callable[[int], int]) -> Groups:
    """Return groups of `sizes` rows, at most MOST of them; `programs_of` says how many programs some rows take."""
    packed, programs = [], 0
    for size in sizes:
        packed.append(_packed(size, programs))
        programs += programs_of(size)
    if programs >= 1 << 31 or max(sizes) >= 1 << 30:
        raise ValueError(f"{max(sizes)} rows in a group, {programs} programs in all: too many for one launch")
    packed += [_packed(0, programs)] * (triton.next_power_of_2(len(sizes)) - len(sizes))
    return Groups(tuple(packed), programs, tuple(sizes))


def _packed(rows: int, first: int) -> int:
    return 1 << 62 | rows << 32 | first << 1 | 1


def in_launches(count: int) -> Iterator[slice]:
    """Return which groups go into each launch."""
    return (slice(start, min(start + MOST, count)) for start in range(0, count, MOST))


def are_alike(xs: Sequence[Any]) -> bool:
    """Return whether one kernel can read the tensors: they have one dtype and length of rows, and are contiguous."""
    return all(x.dtype == xs[0].dtype and x.shape[-1] == xs[0].shape[-1] and x.is_contiguous() for x in xs)
