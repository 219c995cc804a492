"""Groups of rows: this module checks the sizes by which the rows of an input are split."""

from typing import Any

import torch

from mezzotint.tracing import require


def resolve_splits(m_splits: Any, groups: int) -> tuple[int, ...]:
    """Return the number of rows of each group. A tensor is read, which waits for the GPU if it is there."""
    if isinstance(m_splits, torch.Tensor):
        m_splits = m_splits.tolist()
        for size in m_splits:
            require(
                size >= 0,
                lambda: "m_splits holds a negative number of rows",
                lambda: f"m_splits is {m_splits}: give the number of rows of each group, an int of 0 or more",
            )
    if not isinstance(m_splits, list | tuple | torch.Size):
        raise TypeError(f"m_splits is {type(m_splits).__name__}: give a list or a tensor, the rows of each group")
    splits = tuple(m_splits)
    for size in splits:
        if not isinstance(size, int | torch.SymInt) or isinstance(size, bool) or size < 0:
            raise ValueError(f"m_splits holds {size!r}: give the number of rows of each group, an int of 0 or more")
    if len(splits) != groups:
        raise ValueError(f"m_splits has {len(splits)} entries: this module has {groups} groups")
    return splits


def check_rows(splits: tuple[int, ...], rows: int) -> None:
    total = 0
    for size in splits:
        total += size
    require(
        total == rows,
        lambda: "m_splits must add up to the rows of inp",
        lambda: f"m_splits adds up to {total}, inp has {rows} rows: they must be equal",
    )
