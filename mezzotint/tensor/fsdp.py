"""FSDP2's hooks for quantized tensors: this module says what is sent of a shard, and makes the whole of what was
gathered.

A shard of a weight has whole rows. A direction is sent as the buffers that differ between shards (`_along_rows`), flat,
without the padding of scales. What is equal in all shards (the scale of the whole, its amax) is not sent. Which
directions are sent depends on the format:

    the column-wise copy can be made from the row-wise one    the row-wise one, for forward and for backward
    it cannot                                                 those that are read (`fsdp_directions.py`)

If one direction is sent, its buffers are made as long as those of the other would be, so that FSDP2 need not allocate
anew. The scales of the other direction are set to NaN, so that a read of it does not go unnoticed.

A group of weights of one shape is sharded into whole members, each of which has scales of its own. So a shard is a
smaller group, its buffers are slices of those of the whole group, and the gathered shards, one behind the other, are
the whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from mezzotint.tensor.fsdp_directions import check_one_format, read_directions, unit_of
from mezzotint.tensor.partition import Split, can_gather, join_shards, needs_whole_amaxes
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


@dataclass(frozen=True)
class Sent:
    """A `Sent` says what is sent of a shard: its directions, and what its buffers are."""

    rowwise: bool
    columnwise: bool
    count: int  # how many ranks there are
    meta: dict[str, Any]  # as `fsdp_extract_buffers` returns it
    shared: dict[str, torch.Tensor]  # equal in all shards
    kept: tuple[torch.Tensor, ...] = ()  # if there is one rank: FSDP2 then hands over the first buffer alone


def sendable_directions(quantizer: Quantizer, rows: int) -> tuple[bool, bool] | None:
    """Return (row-wise, column-wise): the directions that shards of this many rows can send, or None if bytes cannot be
    gathered. The column-wise copy is sent only if it cannot be made from the row-wise one."""
    if quantizer.is_custom() or not _has_plain_shards(quantizer) or not can_gather(quantizer, rows, columnwise=False):
        return None
    if quantizer.derives_columnwise():
        return True, False
    return (True, True) if can_gather(quantizer, rows, columnwise=True) else None


def _has_plain_shards(quantizer: Quantizer) -> bool:
    """Return whether shards, given the whole's amaxes, are quantized as it is; a quantizer made of two may fail to."""
    parts = quantizer._parts()
    if parts is None:
        return True
    is_chained = parts[2] is not None and needs_whole_amaxes(quantizer, 0)
    return quantizer._is_value() and not is_chained and not any(p is not None and p.is_custom() for p in parts)


def extract(shard: QuantizedTensorStorage, rowwise: bool, columnwise: bool, count: int) -> tuple[list[Any], Sent]:
    """Return the flat tensors to gather of a shard, of which each of `count` ranks holds one, and what they are."""
    buffers, meta = shard.keep(rowwise=rowwise, columnwise=columnwise).fsdp_extract_buffers()
    flat: list[Any] = [buffer.reshape(-1) for buffer in buffers]
    if rowwise != columnwise and not _derives(shard):
        others, _ = shard.keep(rowwise=not rowwise, columnwise=not columnwise).fsdp_extract_buffers()
        flat = [_lengthened(each, other) for each, other in zip_longest(flat, others)]
    fields = shard.fsdp_buffer_fields()
    shared = {name: buffer for name, buffer in shard._buffers() if name not in fields}
    kept = tuple(flat[1:]) if count == 1 else ()
    return flat[: len(flat) - len(kept)], Sent(rowwise, columnwise, count, meta, shared, kept)


def send(
    storage: QuantizedTensorStorage, shard: Any, which: tuple[bool, bool], mesh: Any, module: Any
) -> tuple[tuple[torch.Tensor, ...], Sent]:
    """Return the flat tensors to gather of `storage`, a shard of the module's weight, and what they are."""
    count, unit = mesh.size(), None
    if which[1]:
        which, unit = read_directions(shard, module, mesh.get_group()), unit_of(shard, module)
    buffers, sent = extract(storage, *which, count)
    if unit is not None:
        unit.fit(buffers, count)
    return tuple(buffers), sent


def _derives(tensor: QuantizedTensorStorage) -> bool:
    return tensor._quantizer is not None and tensor._quantizer.derives_columnwise()


def _lengthened(flat: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return `flat`, padded to the length of the same buffer of the other direction if that is longer. If there is no
    `flat`, zeros take its place; if the dtypes differ, both are taken as bytes."""
    if other is not None and flat is not None and flat.dtype != other.dtype:
        flat, other = flat.view(torch.uint8), other.reshape(-1).view(torch.uint8)
    if other is None or (flat is not None and flat.numel() >= other.numel()):
        return flat
    flat = other.new_empty(0) if flat is None else flat
    return torch.nn.functional.pad(flat, (0, other.numel() - flat.numel()))


def empty_whole(shape: Sequence[int], quantizer: Quantizer, dtype: torch.dtype, device: torch.device) -> Any:
    """Return an uninitialised tensor with both directions, which `assign` fills."""
    return quantizer.with_usage(rowwise=True, columnwise=True).make_empty(shape, dtype=dtype, device=device)


def assign(whole: Any, gathered: Sequence[torch.Tensor], sent: Sent) -> None:
    """Fill `whole`, in place, with the shards' tensors, which are one behind the other as a gather returns them.

    Backward finds the buffers that forward saved, with their present contents, so autograd must not count this as a
    write.
    """
    buffers = dict(whole._buffers())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):
        flat, shapes = (*gathered, *sent.kept), sent.meta["shapes"].values()
        dtypes = [buffers[name].dtype for name in sent.meta["shapes"]]
        parts = zip(flat, shapes, dtypes, strict=False)
        whole.fsdp_assign_gathered([_one_below_the_other(f, sent.count, s, d) for f, s, d in parts], sent.meta)
        for name, value in sent.shared.items():
            if name in buffers:
                buffers[name].copy_(value)
                if value.is_cuda:  # the stream of the gathers, which made it, may reuse its memory
                    value.record_stream(torch.cuda.current_stream(value.device))
        if not (sent.rowwise and sent.columnwise):
            _fill_other(whole, buffers, sent)


def _one_below_the_other(flat: torch.Tensor, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the flat tensors of all shards, lengthened or not, bytes or not, as (count · first dimension, …)."""
    size = math.prod(shape) * dtype.itemsize // flat.itemsize
    return flat.view(count, -1)[:, :size].contiguous().view(dtype).view(count * shape[0], *shape[1:])


def _fill_other(whole: Any, buffers: dict[str, torch.Tensor], sent: Sent) -> None:
    """Fill the direction that was not sent: make it from the other one if the format can, else make it unusable."""
    names = whole._COLUMNWISE if sent.rowwise else whole._ROWWISE
    if _derives(whole):
        rows = type(whole)._STORAGE._build(whole.shape, whole.dtype, whole.get_metadata())
        made = rows.keep(rowwise=True, columnwise=False)
        made.update_usage(columnwise_usage=True)
        for name in names:
            buffers[name].copy_(getattr(made, name))
        return
    held = [buffers[name] for name in names if name in buffers]
    for buffer in held[1:] or held:  # all but the codes, if there are others
        buffer.view(torch.uint8).fill_(255)  # NaN in E8M0, E4M3 and high precision


def send_shard(shard: Any, mesh: Any, orig_size: torch.Size, module: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return what to gather of a quantized shard of rows, and what `make_whole` needs, for `fsdp_pre_all_gather`."""
    count, quantizer = mesh.size(), shard._quantizer
    check_one_format(quantizer, shard.device, module, mesh.get_group())
    which = None if quantizer is None else sendable_directions(quantizer, shard.shape[0])
    if which is None or orig_size[0] % count:
        raise ValueError(
            f"a weight of shape {tuple(orig_size)} in {type(shard).__name__} cannot be gathered from {count} ranks:"
            " its rows must divide evenly, in whole blocks; keep it in high precision (without quantized_model_init) "
            "and use low_precision_gather"
        )
    if not shard._splits:
        join_shards(shard, (Split(0, mesh.get_group()), *getattr(module, "_splits_of", _no_splits)(shard)))
    buffers, sent = send(shard, shard, which, mesh, module)
    return buffers, (orig_size, quantizer, sent)


def _no_splits(shard: Any) -> tuple[Split, ...]:
    return ()


def make_whole(outputs: Sequence[torch.Tensor], metadata: tuple[Any, Any, Sent], dtype: torch.dtype, out: Any) -> Any:
    """Return the whole tensor and its buffers, made of gathered shards; or fill `out` and return None.

    This is `fsdp_post_all_gather` for shards that `extract` took apart.
    """
    orig_size, quantizer, sent = metadata
    if out is not None:
        assign(out, outputs, sent)
        return None
    whole = empty_whole(orig_size, quantizer, dtype, outputs[0].device)
    assign(whole, outputs, sent)
    return whole, tuple(buffer for _, buffer in whole._buffers())


# Groups of members


def member_rows(group: Any, start: int, stop: int) -> dict[str, Any] | None:
    """Return the constructor kwargs of members start..stop, or None if there is no member or they differ in shape."""
    if not group.all_same_shape() or start >= stop:
        return None
    fields: dict[str, Any] = {"shapes": group.shapes[start:stop]}
    kwargs = dict(group._FLATTEN_TENSOR_BUFFERS)
    for attribute, buffer in group._buffers():
        size = buffer.shape[0] // group.num_tensors
        fields[kwargs[attribute]] = buffer[start * size : stop * size]
    return fields


def send_members(shard: Any, mesh: Any, orig_size: torch.Size, module: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return all buffers of a shard of members, and what `gather_members` needs, for `fsdp_pre_all_gather`."""
    check_one_format(shard.quantizer, shard.device, module, mesh.get_group())
    usages = shard.get_usages()
    buffers, sent = extract(shard, usages["rowwise"], usages["columnwise"], mesh.size())
    return tuple(buffers), (orig_size[0], sent)


def gather_members(empty: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, out: Any) -> Any:
    """Return the whole group and its buffers, or fill `out` and return None, for `fsdp_post_all_gather`.

    `empty(n)` returns a new group of n members.
    """
    count, sent = metadata
    whole = empty(count) if out is None else out
    assign(whole, outputs, sent)
    return None if out is not None else (whole, tuple(buffer for _, buffer in whole._buffers()))
