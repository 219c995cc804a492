"""Shapes of the members of a group: this module checks them, says what they make together, and joins and divides values
of members.

members       shape             logical shape     values
all (M, K)    (num, M, K)       (num · M, K)      stacked
(M_i, K)      (Σ M_i, K)        the same          one below the other
(M, K_i)      (M, Σ K_i)        the same          side by side
(M_i, K_i)    (1, Σ M_i · K_i)  the same          flat, one behind the other
"""

from collections.abc import Sequence
from typing import Any

import torch

Shape = tuple[int, ...]


def numel(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def first_dims(shapes: Sequence[Shape]) -> list[int]:
    return [shape[0] for shape in shapes]


def last_dims(shapes: Sequence[Shape]) -> list[int]:
    """Return the last dimension of each member, 1 for a vector."""
    return [shape[1] if len(shape) > 1 else 1 for shape in shapes]


def member_offsets(shapes: Sequence[Shape]) -> list[int]:
    """Return the number of elements before each member, and in all."""
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + numel(shape))
    return ends


def differ(sizes: Sequence[int]) -> bool:
    return any(size != sizes[0] for size in sizes)


def logical_shape(shapes: Sequence[Shape]) -> tuple[int, int]:
    """Return the shape of all members as one matrix."""
    first, last = first_dims(shapes), last_dims(shapes)
    if differ(last):
        return (1, member_offsets(shapes)[-1]) if differ(first) else (first[0], sum(last))
    return sum(first), last[0]


def whole_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of all members as one tensor."""
    is_uniform = not differ(first_dims(shapes)) and not differ(last_dims(shapes))
    return (len(shapes), *shapes[0]) if is_uniform else logical_shape(shapes)


def join_members(members: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> torch.Tensor:
    """Join plain members into one tensor of `whole_shape`."""
    first, last = first_dims(shapes), last_dims(shapes)
    if differ(first) and differ(last):
        return torch.cat([member.reshape(1, -1) for member in members], 1)
    if differ(first) or differ(last):
        return torch.cat(list(members), 0 if differ(first) else 1)
    return torch.stack(list(members))


def divide(whole: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Divide a tensor of `whole_shape` into its members: the inverse of `join_members`."""
    first, last = first_dims(shapes), last_dims(shapes)
    parts: Sequence[torch.Tensor]
    if differ(first) and differ(last):
        parts = whole.reshape(-1).split([numel(shape) for shape in shapes])
    elif differ(first) or differ(last):
        parts = whole.split(first, 0) if differ(first) else whole.split(last, 1)
    else:
        parts = whole.unbind(0)
    return [part.reshape(shape).contiguous() for part, shape in zip(parts, shapes, strict=True)]


# Arguments


def check_count(num_tensors: Any) -> None:
    if not isinstance(num_tensors, int) or num_tensors < 1:
        raise ValueError(f"num_tensors is {num_tensors!r}: give a positive int (a member may have no rows)")


def check_shapes(num_tensors: int, shapes: Sequence[Sequence[int]]) -> tuple[Shape, ...]:
    """Return the shapes of matrices as tuples of plain ints, which a graph carries and is compiled for; raise
    ValueError for other shapes."""
    check_count(num_tensors)
    if len(shapes) != num_tensors:
        raise ValueError(f"shapes has {len(shapes)} entries, num_tensors is {num_tensors}: they must be equal")
    for place, shape in enumerate(shapes):
        if len(shape) != 2 or any(size < 0 for size in shape):
            raise ValueError(f"shapes[{place}] is {tuple(shape)}: give (rows, columns), neither of them negative")
    return tuple([(int(rows), int(cols)) for rows, cols in shapes])


def shapes_of_dims(num_tensors: int, first: Any, last: Any, logical_first: Any, logical_last: Any) -> tuple[Shape, ...]:
    """Return the members' shapes from first and last dimensions, each None if members share it; raise ValueError unless
    they make the given logical shape."""
    check_count(num_tensors)
    for name, size in (("logical_first_dim", logical_first), ("logical_last_dim", logical_last)):
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"{name} is {size!r}: give an int that is not negative")
    if first is None and last is None and logical_first % num_tensors:
        raise ValueError(
            f"logical_first_dim is {logical_first}, num_tensors {num_tensors}: members without first_dims have equal "
            "rows; give a multiple, or first_dims"
        )
    common = logical_first // num_tensors if last is None else logical_first
    rows = [common] * num_tensors if first is None else _read("first_dims", first, num_tensors)
    cols = [logical_last] * num_tensors if last is None else _read("last_dims", last, num_tensors)
    shapes = tuple(zip(rows, cols, strict=True))
    if first is not None and last is not None:
        wanted = (1, member_offsets(shapes)[-1])
    else:
        wanted = (sum(rows), logical_last) if last is None else (logical_first, sum(cols))
    if (logical_first, logical_last) != wanted:
        raise ValueError(
            f"logical_first_dim, logical_last_dim are {(logical_first, logical_last)}: members {list(shapes)} make "
            f"{wanted}"
        )
    return shapes


def _read(name: str, dims: Any, num_tensors: int) -> list[int]:
    """Return the sizes on the host; raise ValueError unless there is one for each member."""
    if isinstance(dims, torch.Tensor):
        if dims.dtype != torch.int64 or dims.dim() != 1:
            raise ValueError(f"{name} is {dims.dtype} of shape {tuple(dims.shape)}: give int64 [{num_tensors}]")
        sizes = dims.tolist()
    else:
        sizes = [int(size) for size in dims]
    if len(sizes) != num_tensors or any(size < 0 for size in sizes):
        raise ValueError(f"{name} is {sizes}: give {num_tensors} sizes (num_tensors), none of them negative")
    return sizes
