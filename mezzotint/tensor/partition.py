"""Quantized shards: this module quantizes, updates and gathers them. A shard is the rows, or the columns, of a matrix
that one rank of a group holds.

A shard is quantized as the whole matrix would be. If a scale depends on more than the shard (current scaling, NVFP4,
and in row-wise scaling the scale of a row, or column, that the split cuts), its amax is the largest over the ranks of
the group. Delayed scaling has its scales already, and shares the amaxes that it keeps.

    quantize_shard       quantizes a shard: into a storage, or into a parameter
    update_shard         quantizes a shard into existing buffers
    gather_rows          gathers shards of rows as bytes, if `can_gather` says that they are those of the whole
    join_shards          makes quantized tensors shards of one whole: from then on they have one scale
    have_other_scales    says whether the scales of shards differ

A parameter that is kept quantized knows how it is split (`_splits`), and reduces amaxes over the other ranks whenever
it is written. That is an attribute and none of its plain values: a graph, a file or a clone knows nothing of ranks.
What FSDP2 does with shards of rows is in `fsdp.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mezzotint.comm.collectives import all_reduce_max, start_all_gather, wait
from mezzotint.comm.groups import world_size
from mezzotint.constants import rup
from mezzotint.kernels._lib import run_op
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.quantize import assemble, quantize_buffers, quantize_scaled, quantize_storage, update_quantized
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.scale_slot import DelayedScale
from mezzotint.tensor.storage import QuantizedTensorStorage


@dataclass(frozen=True)
class Split(GraphConstant):
    """A `Split` is a cut along dimension 0 or 1 of a matrix: each rank of the group holds one of the shards."""

    dim: int
    group: Any


# What a shard needs of the whole


def needs_whole_amaxes(quantizer: Quantizer, dim: int) -> bool:
    """Return whether a shard of a matrix that is split along `dim` is quantized with amaxes of the whole."""
    if quantizer.is_custom():
        return False
    parts = quantizer._parts()
    if parts is not None:
        return any(part is not None and needs_whole_amaxes(part, dim) for part in parts[:2])
    return quantizer._amax_plan(dim) is not None


def whole_amaxes(x: torch.Tensor, quantizer: Quantizer, splits: Sequence[Split]) -> dict[str, torch.Tensor]:
    """Return by name the amaxes of the whole that quantizing the shard x needs, with one collective for each split."""
    found: dict[str, torch.Tensor] = {}
    for split in splits:
        # A split between columns leaves the amaxes of columns as they are, and changes those of rows.
        cut = _shard_amaxes(x, quantizer, split.dim)
        cut = {name: found.get(name, amax) for name, amax in cut.items()}
        found.update(_reduced(cut, split.group))
    return found


def _shard_amaxes(x: torch.Tensor, quantizer: Quantizer, dim: int) -> dict[str, torch.Tensor]:
    """Return the amaxes of a shard that is split along `dim`, by the names that the quantization takes them under.

    The largest over all shards are those of the whole. The result is empty for a format that needs none.
    """
    parts = quantizer._parts()
    if parts is not None:
        rowwise, columnwise, chained = parts
        found = {} if rowwise is None else _shard_amaxes(x, rowwise, dim)
        if columnwise is not None:
            if chained is not None and (found or columnwise._amax_plan(dim) is not None):
                raise ValueError(
                    "columnwise_source is 'rowwise_dequantized': a tensor that is split over ranks is quantized "
                    "from the source in both directions; give 'original'"
                )
            found.update(_shard_amaxes(x, columnwise, dim))
        return found
    plan = quantizer._amax_plan(dim)
    if plan is None:
        return {}
    op, names, options = plan
    made = run_op(op, x, *options)
    return dict(zip(names, made if isinstance(made, list | tuple) else (made,), strict=True))


def _reduced(amaxes: dict[str, torch.Tensor], group: Any) -> dict[str, torch.Tensor]:
    """Return the largest amaxes over the ranks of the group, in one collective."""
    if not amaxes:
        return {}
    each = list(amaxes.values())
    if len(each) == 1:
        return dict(zip(amaxes, (all_reduce_max(each[0], group),), strict=True))
    # These are clones, because what an op is given, and keeps, must be no view of another tensor.
    reduced = all_reduce_max(torch.cat(each), group).split([amax.shape[0] for amax in each])
    return dict(zip(amaxes, [amax.clone() for amax in reduced], strict=True))


# Quantizing


def quantize_shard(
    x: torch.Tensor,
    quantizer: Quantizer,
    splits: Sequence[Split],
    scale: DelayedScale = None,
    *,
    is_parameter: bool = False,
) -> tuple[Any, torch.Tensor | None]:
    """Return a shard, quantized as the whole would be, and its amax if the quantizer takes a `scale` (else None).

    Without splits x is the whole. The result is a storage, as from `quantize_scaled`. With `is_parameter` it is a
    tensor that knows its splits, and no amax is returned: its quantizer keeps that.
    """
    if is_parameter:
        is_alone = not splits or quantizer.is_custom()
        return quantizer.quantize(x) if is_alone else _quantize_parameter(x, quantizer, splits), None
    if not any(needs_whole_amaxes(quantizer, split.dim) for split in splits):
        return quantize_scaled(x, quantizer, scale)
    return quantize_storage(x, quantizer, **whole_amaxes(x, quantizer, splits)), None


def _quantize_parameter(x: torch.Tensor, quantizer: Quantizer, splits: Sequence[Split]) -> Any:
    buffers = quantize_buffers(x, quantizer, {**whole_amaxes(x, quantizer, splits)})
    share_amax(quantizer, splits)
    made = assemble(buffers, quantizer, False, x.shape, x.dtype)
    made._splits = tuple(splits)
    return made


def update_shard(
    x: torch.Tensor,
    into: Any,
    quantizer: Quantizer,
    splits: Sequence[Split],
    *,
    noop_flag: torch.Tensor | None = None,
) -> None:
    """Quantize x into the buffers of a shard, in place; nothing changes if `noop_flag` is 1."""
    x = x.dequantize() if isinstance(x, QuantizedTensorStorage) else x
    update_quantized(x, into, quantizer, noop_flag=noop_flag, **whole_amaxes(x, quantizer, splits))


def share_amax(quantizer: Quantizer, splits: Sequence[Split]) -> None:
    """Replace the amax that a quantizer keeps of a shard, if it keeps any, by that of the whole."""
    quantizer.share_amax(partial(_largest, splits=splits))


def _largest(x: torch.Tensor, splits: Sequence[Split]) -> torch.Tensor:
    """Return the largest values over the ranks that hold the other shards, element by element."""
    for split in splits:
        x = all_reduce_max(x, split.group)
    return x


# Tensors that are shards


def join_shards(shard: Any, splits: tuple[Split, ...]) -> None:
    """Mark a quantized tensor as a shard. This is a collective.

    The shards may have been quantized on their own before. If their scales differ, all shards are quantized again, from
    what they hold, so that there is one scale.
    """
    shard._splits = splits
    share_amax(shard._quantizer, splits)
    if splits and have_other_scales(shard, splits):
        shard.quantize_(shard._dequantize(torch.float32).view(shard.shape))


def have_other_scales(shard: QuantizedTensorStorage, splits: Sequence[Split]) -> bool:
    """Return whether buffers that should be equal in all shards differ. This is a collective: all ranks get one
    answer."""
    found = torch.zeros((), device=shard.device)
    for split in splits:
        shared = [buffer.reshape(-1) for buffer in shard._shared_buffers(split.dim)]
        if shared:
            both = torch.cat([*shared, *[-buffer for buffer in shared]])
            found += (all_reduce_max(both, split.group) != both).any()
    return bool(_largest(found, splits))


# Gathering


def can_gather(quantizer: Quantizer, rows: int, *, columnwise: bool) -> bool:
    """Return whether that copy of shards of this many rows each can be gathered as bytes."""
    multiple = quantizer.gather_multiple(columnwise)
    return multiple is not None and rows % multiple == 0


def gather_rows(x: Any, group: Any) -> Any:
    """Gather (m, …) of each rank into (m · ranks, …): a tensor, or a storage buffer by buffer.

    `_along_rows` says how the shards of a storage lie one behind the other. The padding of scales is cut before the
    gather and added again after it.
    """
    if not isinstance(x, QuantizedTensorStorage):
        return wait(start_all_gather(x, group))
    count = world_size(group)
    along = x._along_rows()
    fields: dict[str, Any] = x._plain_values()
    started: list[tuple[str, Any, tuple[int, int, int]]] = []
    for attribute, kwarg in x._FLATTEN_TENSOR_BUFFERS:
        buffer = getattr(x, attribute)
        if buffer is None or attribute not in along:
            fields[kwarg] = buffer
            continue
        dim, extent, _ = along[attribute]
        started.append((kwarg, start_all_gather(buffer.narrow(dim, 0, extent), group), along[attribute]))
    for kwarg, gathered, (dim, extent, multiple) in started:
        fields[kwarg] = _side_by_side(wait(gathered), count, dim, count * extent, multiple)
    shape = (count * x.shape[0], *x.shape[1:])
    return type(x)._build(shape, x._dtype, fields)


def _side_by_side(gathered: torch.Tensor, count: int, dim: int, extent: int, multiple: int) -> torch.Tensor:
    """Return shards that are one below the other as one behind the other along `dim`, padded to a multiple."""
    if dim == 1:
        rows = gathered.shape[0] // count
        shards = gathered.view(count, rows, *gathered.shape[1:])
        gathered = shards.transpose(0, 1).reshape(rows, extent, *gathered.shape[2:])
    padding = rup(extent, multiple) - extent
    if multiple == 1 or padding == 0:
        return gathered
    return torch.nn.functional.pad(gathered, (0, padding) if dim == 1 else (0, 0, 0, padding))
