"""What of each parameter this process holds, by the names and places of the whole model.

Tensor parallelism gives a process some rows or columns of a weight (of a gated MLP: some of each half), experts are
numbered from 0 on each process, FSDP2 shards the rows of what is then left. So a process has rectangles of the whole:
rows of its tensor, from some place on. Weights are given out by them (`copy_whole`), and DCP writes and reads them, at
any world size and layout (`Parts`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mezzotint.cli.mixture import Mixture
from mezzotint.cli.parallel import Meshes
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


def find_places(model: nn.Module, meshes: Meshes | None) -> dict[str, Place]:
    """Of each parameter, by its name on this process."""
    numbers = _expert_numbers(model)
    found = {}
    for name, parameter in model.named_parameters():
        group = None if meshes is None else meshes.tensor_group
        is_split = getattr(parameter, "tensor_model_parallel", False)
        found[name] = _place(numbers.get(name, name), parameter, group if is_split else None)
    return found


def _place(name: str, parameter: Any, group: Any) -> Place:
    shape, first, last = tuple(parameter.shape), 0, parameter.shape[0]
    if isinstance(parameter, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        first, last = offsets[0], offsets[0] + sizes[0]
    rest = (0,) * (len(shape) - 1)
    if group is None:
        pieces = [Piece(0, last - first, (first, *rest))]
        return Place(name, shape, tuple(piece for piece in pieces if piece.last))
    count, rank = world_size(group), rank_in(group)
    if parameter.partition_dim == 1:
        columns = shape[1]
        whole = (shape[0], columns * count, *shape[2:])
        pieces = [Piece(0, last - first, (first, rank * columns, *rest[1:]))]
        return Place(name, whole, tuple(piece for piece in pieces if piece.last))
    # `partition_stride` weights one below the other, of each of which this process has `rows`.
    rows = shape[0] // parameter.partition_stride
    pieces = []
    for number in range(parameter.partition_stride):
        begin, end = max(first, number * rows), min(last, (number + 1) * rows)
        if begin < end:
            place = (number * count + rank) * rows + begin - number * rows
            pieces.append(Piece(begin - first, end - first, (place, *rest)))
    return Place(name, (shape[0] * count, *shape[1:]), tuple(pieces))


def _expert_numbers(model: nn.Module) -> dict[str, str]:
    """Names of the weights of experts on this process → in the whole model."""
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, Mixture):
            continue
        rank = rank_in(module.group)
        for part in ("fc1", "fc2"):
            count = getattr(module.experts, part).num_gemms
            for number in range(count):
                stem = f"{path}.experts.{part}.weight"
                found[f"{stem}{number}"] = f"{stem}{rank * count + number}"
    return found


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
