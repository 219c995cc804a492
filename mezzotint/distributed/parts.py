"""Places of shards: this module says what of each parameter of the whole model this rank holds, as rectangles and where
they begin.

Tensor parallelism (`tp_group`) gives a rank some rows or columns of a weight (in a gated MLP, some of each half), and
FSDP2 shards the rows of that. So a rank has rows of its tensor, which begin at some place of the whole. Whole weights
are distributed to these places (`copy_whole`), and DCP writes and reads them, at any world size and layout (`Parts`).

DTensors (`parallelize_module`, FSDP2) say themselves what of the whole they are, except those of gated activations,
with some rows of each half: DCP takes a DTensor for one rectangle, and no placements say how FSDP2 cuts the two. They
are recognised by what the style made of them, a strided placement on the last dimension of their mesh.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from mezzotint.comm.groups import rank_in, world_size
from mezzotint.constants import cdiv
from mezzotint.distributed.fsdp import ShardedWeight
from mezzotint.tensor.partition import Split, have_other_scales
from mezzotint.tensor.storage import Along, QuantizedTensorStorage

_KEEP = "Keep it in high precision (without quantized_model_init), or save full_state(model) on each rank"


@dataclass(frozen=True, slots=True)
class Piece:
    """A `Piece` is rows `first` to `last` of this rank's tensor, with the place where they begin in the whole."""

    first: int
    last: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """A `ShardPlacement` says where in the whole lies what this rank has of a parameter and of its optimizer state."""

    name: str  # the parameter's name in the whole model
    shape: tuple[int, ...]  # the whole's shape
    pieces: tuple[Piece, ...]

    def parts(self, value: torch.Tensor) -> "Parts":
        """Return `value`, the parameter or a tensor of its shape, as pieces with their places."""
        local = local_of(value)
        found = [(piece.offsets, local[piece.first : piece.last]) for piece in self.pieces]
        return Parts(self.shape, local.dtype, found)

    def buffers(self, tensor: QuantizedTensorStorage) -> "dict[str, Parts]":
        """Return each buffer of a quantized parameter, by attribute, as pieces with their places."""
        along = tensor._along_matrix()
        if along is None:
            raise ValueError(
                f"{self.name} is quantized ({type(tensor).__name__}), and a shard of a weight (tp_group): its buffers "
                f"are no shards of those of the whole. {_KEEP}"
            )
        width = tensor.shape[1]
        return {name: self._buffer(buffer, width, along[name]) for name, buffer in tensor._buffers()}

    def _buffer(self, buffer: torch.Tensor, width: int, along: tuple[Along, Along]) -> "Parts":
        """Return one buffer as pieces. `width` is how many columns this rank has.

        An entry that covers all rows, or all columns (`along`), is equal on all ranks, and written once.
        """
        shape = list(buffer.shape)
        found: dict[tuple[int, ...], torch.Tensor] = {}
        for number, lies in enumerate(along):
            if lies is not None:
                shape[lies[0]] = cdiv(self.shape[number], lies[1])
        for piece in self.pieces:
            offsets, part = [0] * buffer.dim(), buffer
            # For rows and for columns, these are where they begin in this rank's tensor, where in the whole, and how
            # many they are.
            spans = (piece.first, piece.offsets[0], piece.last - piece.first), (0, piece.offsets[1], width)
            for number, (lies, span) in enumerate(zip(along, spans, strict=True)):
                if lies is not None:
                    first, begin, size = self._entries(number, lies[1], *span)
                    part, offsets[lies[0]] = part.narrow(lies[0], first, size), begin
            found.setdefault(tuple(offsets), part)
        return Parts(tuple(shape), buffer.dtype, list(found.items()))

    def _entries(self, dim: int, each: int, first: int, begin: int, size: int) -> tuple[int, int, int]:
        """Return a span of rows or columns as one of entries that cover `each`; raise ValueError if it cuts one."""
        if first % each or begin % each or (size % each and begin + size != self.shape[dim]):
            raise ValueError(
                f"{self.name} is quantized in blocks of {each} {'columns' if dim else 'rows'}, and a shard of a weight "
                f"of shape {self.shape} (tp_group) that cuts them. {_KEEP}"
            )
        return first // each, begin // each, cdiv(size, each)

    @torch.no_grad()
    def copy_whole(self, value: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy this rank's pieces of `whole` into `value`."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"{self.name} has shape {tuple(whole.shape)}, the model's {self.shape}: give its own")
        for offsets, part in self.parts(value).pieces:
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape, strict=True))
            part.copy_(whole[place])


def local_of(value: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that this rank has, over the same memory."""
    local = value.detach()
    local = local._local_tensor if isinstance(local, DTensor) else local
    return local._tensor if isinstance(local, ShardedWeight) else local


def find_split(model: nn.Module) -> dict[str, ShardPlacement]:
    """Return, by name, the placement of each parameter that is this rank's shard and does not say so itself."""
    found = {}
    for path, module in model.named_modules():
        split: dict[str, tuple[int, int]] = getattr(module, "_split_parameters", dict)()
        for own, how in split.items():
            group: Any = module.tp_group
            name = f"{path}.{own}" if path else own
            parameter, of = getattr(module, own), (world_size(group), rank_in(group))
            found[name] = _placement_of_shard(name, parameter.shape, _held(parameter), of, *how)
    found.update({name: placement_of(name, p) for name, p in model.named_parameters() if has_halves(p)})
    return found


def check_shared_scales(model: nn.Module) -> None:
    """Raise ValueError on each rank unless quantized shards of one tensor share scales. This is a collective."""
    for path, module in model.named_modules():
        split: dict[str, tuple[int, int]] = getattr(module, "_split_parameters", dict)()
        for own, (dim, _) in split.items():
            local: Any = local_of(getattr(module, own))
            if isinstance(local, QuantizedTensorStorage) and have_other_scales(local, [Split(dim, module.tp_group)]):
                name = f"{path}.{own}" if path else own
                raise ValueError(
                    f"{name} is quantized ({type(local).__name__}), and a shard of a weight (tp_group) whose "
                    "scales are not those of the other shards: it was loaded from bytes of shards that were quantized "
                    "on their own. Load values in high precision, or take a step of an optimizer first"
                )


def find_placements(model: nn.Module) -> dict[str, ShardPlacement]:
    """Return the placement of each parameter, by its name."""
    split = find_split(model)
    return {name: split.get(name) or placement_of(name, parameter) for name, parameter in model.named_parameters()}


def placement_of(name: str, value: Any) -> ShardPlacement:
    """Return the placement of a tensor that is whole, or of a DTensor, which says what of the whole this rank has."""
    if has_halves(value):
        return _placement_of_halves(name, value)
    shape, offsets = _held(value)
    pieces = (Piece(0, shape[0], tuple(offsets)),) if shape[0] else ()
    return ShardPlacement(name, tuple(value.shape), pieces)


def has_halves(value: Any) -> bool:
    """Return whether it is a DTensor of which this rank has some of each half: of a gated activation, or its shard."""
    return isinstance(value, DTensor) and isinstance(value.placements[-1], _StridedShard)


def whole_of(value: DTensor) -> torch.Tensor:
    """Return what `full_tensor` returns, also for halves: first the shards of this rank's rows are gathered, then the
    rows of all ranks, of which each has its own of each half."""
    if not has_halves(value):
        return value.full_tensor()
    mesh, part = value.device_mesh, local_of(value)
    if mesh.ndim > 1:
        names: Any = mesh.mesh_dim_names
        placements = [Replicate() if p.is_replicate() else Shard(p.dim) for p in value.placements[:-1]]  # type: ignore[attr-defined]
        shape = torch.Size(_part_of_halves(value))
        shards = DTensor.from_local(
            part, mesh[names[:-1]], placements, run_check=False, shape=shape, stride=value.stride()
        )
        part, mesh = shards.full_tensor(), mesh[names[-1]]
    parts = DTensor.from_local(part, mesh, [Shard(0)], run_check=False).full_tensor()
    stride: int = value.placements[-1].split_factor  # type: ignore[attr-defined]
    return parts.view(mesh.size(), stride, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)


def _held(parameter: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shape of what this rank has of a parameter (all, or its shard), and where it begins."""
    if not isinstance(parameter, DTensor):
        return parameter.shape, (0,) * parameter.dim()
    return compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)


def _part_of_halves(parameter: Any) -> tuple[int, ...]:
    """Return the shape of this rank's tensor-parallel shard, which FSDP2 shards further."""
    return parameter.shape[0] // parameter.device_mesh.size(-1), *parameter.shape[1:]


def _placement_of_halves(name: str, parameter: Any) -> ShardPlacement:
    """Return the placement of halves. The mesh's last dimension is for tensor parallelism, those before it for
    FSDP2."""
    mesh, last = parameter.device_mesh, parameter.placements[-1]
    coordinate: Any = mesh.get_coordinate()
    part = _part_of_halves(parameter)
    shape, offsets = list(part), [0] * len(part)
    for number, placement in enumerate(parameter.placements[:-1]):
        if not placement.is_replicate():
            dim = placement.dim
            size = cdiv(part[dim], mesh.size(number))
            offsets[dim] = min(coordinate[number] * size, part[dim])
            shape[dim] = min(size, part[dim] - offsets[dim])
    return _placement_of_shard(name, part, (shape, offsets), (mesh.size(-1), coordinate[-1]), 0, last.split_factor)


def _placement_of_shard(
    name: str,
    part: tuple[int, ...],
    held: tuple[Sequence[int], Sequence[int]],
    of: tuple[int, int],
    dim: int,
    stride: int,
) -> ShardPlacement:
    """Return the placement of a parameter that is a shard, of shape `part`, of a weight that is split along `dim`.

    This rank has `held` of it: its shape, and where it begins. `of` is how many shards there are, and which one this
    is. `stride` is how many weights lie one below the other, of each of which this rank has its shard.
    """
    count, rank = of
    first, last, rest = held[1][0], held[1][0] + held[0][0], held[1][1:]
    whole = tuple(size * count if number == dim else size for number, size in enumerate(part))
    if dim:
        place = tuple(at + rank * part[dim] if number == dim else at for number, at in enumerate(held[1]))
        return ShardPlacement(name, whole, (Piece(0, last - first, place),) if last > first else ())
    rows = part[0] // stride
    pieces = []
    for number in range(stride):
        begin, end = max(first, number * rows), min(last, (number + 1) * rows)
        if begin < end:
            row = (number * count + rank) * rows + begin - number * rows
            pieces.append(Piece(begin - first, end - first, (row, *rest)))
    return ShardPlacement(name, whole, tuple(pieces))


class Parts(torch.Tensor):
    """A `Parts` is to DCP a tensor that ranks share; `pieces`, with where they begin, are what this rank has."""

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
