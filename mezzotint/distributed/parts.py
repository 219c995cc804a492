"""What of each parameter this process holds, in the whole model: rectangles, with where they begin.

Tensor parallelism (`tp_group`) gives a process some rows or columns of a weight (of a gated MLP: some of each half),
FSDP2 shards the rows of what is then left. So a process has rows of its tensor, from some place of the whole on.
Weights are given out by them (`copy_whole`), and DCP writes and reads them, at any world size and layout (`Parts`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mezzotint.distributed.fsdp import ShardedWeight
from mezzotint.distributed.groups import rank_in, world_size


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `first` to `last` of this process's tensor, and where they begin in the whole."""

    first: int
    last: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Of a parameter, and of what an optimizer keeps for it."""

    name: str  # in the whole model
    shape: tuple[int, ...]  # of the whole
    pieces: tuple[Piece, ...]

    def parts(self, value: torch.Tensor) -> "Parts":
        """`value` is the parameter, or of its shape."""
        local = local_of(value)
        found = [(piece.offsets, local[piece.first : piece.last]) for piece in self.pieces]
        return Parts(self.shape, local.dtype, found)

    @torch.no_grad()
    def copy_whole(self, value: torch.Tensor, whole: torch.Tensor) -> None:
        """Into `value`, this process's parts of `whole`."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"{self.name} has shape {tuple(whole.shape)}, the model's {self.shape}: give its own")
        for offsets, part in self.parts(value).pieces:
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape, strict=True))
            part.copy_(whole[place])


def local_of(value: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this process has, over the same memory."""
    local = value.detach()
    local = local._local_tensor if isinstance(local, DTensor) else local
    return local._tensor if isinstance(local, ShardedWeight) else local


def find_split(model: nn.Module) -> dict[str, Place]:
    """Of each parameter that is this process's part of one (`tp_group`), by its name."""
    found = {}
    for path, module in model.named_modules():
        split: dict[str, tuple[int, int]] = getattr(module, "_split_parameters", dict)()
        for own, how in split.items():
            group: Any = module._sharing_group()
            name = f"{path}.{own}" if path else own
            found[name] = _place_of_part(name, getattr(module, own), group, *how)
    return found


def find_places(model: nn.Module) -> dict[str, Place]:
    """Of each parameter, by its name; DTensors are shards of rows."""
    split = find_split(model)
    return {name: split.get(name) or _place(name, parameter) for name, parameter in model.named_parameters()}


def _rows(parameter: Any) -> tuple[int, int]:
    """Which rows of the parameter this process has: all, or those of its shard (from, to)."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offsets[0], offsets[0] + sizes[0]


def _place(name: str, parameter: Any) -> Place:
    first, last = _rows(parameter)
    pieces = (Piece(0, last - first, (first, *(0,) * (parameter.dim() - 1))),) if last > first else ()
    return Place(name, tuple(parameter.shape), pieces)


def _place_of_part(name: str, parameter: Any, group: Any, dim: int, stride: int) -> Place:
    """Of a parameter that is this process's part of a weight, split along `dim`; it may be in shards besides. `stride`:
    of so many weights, one below the other, of each of which this process has its part."""
    shape, (first, last) = tuple(parameter.shape), _rows(parameter)
    count, rank = world_size(group), rank_in(group)
    rest = (0,) * (len(shape) - 1)
    if dim == 1:
        columns = shape[1]
        whole = (shape[0], columns * count, *shape[2:])
        pieces = [Piece(0, last - first, (first, rank * columns, *rest[1:]))]
        return Place(name, whole, tuple(piece for piece in pieces if piece.last))
    rows = shape[0] // stride
    pieces = []
    for number in range(stride):
        begin, end = max(first, number * rows), min(last, (number + 1) * rows)
        if begin < end:
            place = (number * count + rank) * rows + begin - number * rows
            pieces.append(Piece(begin - first, end - first, (place, *rest)))
    return Place(name, (shape[0] * count, *shape[1:]), tuple(pieces))


class Parts(torch.Tensor):
    """A tensor that processes share, to DCP: `pieces`, with where they begin, are what this one has."""

    pieces: list[tuple[tuple[int, ...], torch.Tensor]]

    @staticmethod
    def __new__(
        cls: Any, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[tuple[tuple[int, ...], torch.Tensor]]
    ) -> "Parts":
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.pieces = pieces
        return made

    def __init__(self, *args: Any) -> None:
        pass  # __new__ has set everything

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parts({tuple(self.shape)}, {[offsets for offsets, _ in self.pieces]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: Parts are for checkpoints only")

    # DCP

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(part for offsets, part in self.pieces if torch.Size(offsets) == index.offset)
