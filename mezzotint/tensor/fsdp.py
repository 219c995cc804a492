"""What FSDP2's hooks send of a quantized tensor that it has sharded, and the whole that they make of what was gathered.

A shard of whole rows of a weight: a direction is sent as the buffers that differ between shards (`_along_rows`), flat,
without the padding of scales. What is equal in all shards (the scale of the whole, its amax) is not sent. Which
directions:

    the column-wise copy follows from the row-wise one     the row-wise one, for forward and for backward
    it does not                                            those that are read (`fsdp_directions.py`)

Where one is sent it is as long as the other would be, so that FSDP2 need not allocate anew; the scales of the other are
made NaN, so that whoever reads it after all finds out.

A group of weights of one shape, in shards of whole members: each has scales of its own. So a shard is a group of fewer,
its buffers are slices of the whole one's, and what is gathered, one behind the other, is the whole.
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
    """What is sent of a shard: its directions, and what its buffers are."""

    rowwise: bool
    columnwise: bool
    count: int  # of ranks
    meta: dict[str, Any]  # as `fsdp_extract_buffers` gives it
    shared: dict[str, torch.Tensor]  # equal in all shards
    kept: tuple[torch.Tensor, ...] = ()  # of one rank, for which FSDP2 hands over the first buffer alone


def sendable_directions(quantizer: Quantizer, rows: int) -> tuple[bool, bool] | None:
    """Which directions shards of this many rows can send: (row-wise, column-wise), the second where it does not follow
    from the first; None where bytes cannot be gathered."""
    if quantizer.is_custom() or not _has_plain_shards(quantizer) or not can_gather(quantizer, rows, columnwise=False):
        return None
    if quantizer.derives_columnwise():
        return True, False
    return (True, True) if can_gather(quantizer, rows, columnwise=True) else None


def _has_plain_shards(quantizer: Quantizer) -> bool:
    """Of a quantizer made of two: whether shards are quantized as the whole is, by what the call is given."""
    parts = quantizer._parts()
    if parts is None:
        return True
    is_chained = parts[2] is not None and needs_whole_amaxes(quantizer, 0)
    return quantizer._is_value() and not is_chained and not any(p is not None and p.is_custom() for p in parts)


def extract(shard: QuantizedTensorStorage, rowwise: bool, columnwise: bool, count: int) -> tuple[list[Any], Sent]:
    """Flat tensors to gather of a shard that `count` ranks hold one of each, and what they are."""
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
    """Flat tensors to gather of what `storage` holds, a shard of the module's weight, and what they are."""
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
    """As long as the same buffer of the other direction, where that is longer; in its place where there is none. Bytes,
    where their dtypes differ."""
    if other is not None and flat is not None and flat.dtype != other.dtype:
        flat, other = flat.view(torch.uint8), other.reshape(-1).view(torch.uint8)
    if other is None or (flat is not None and flat.numel() >= other.numel()):
        return flat
    flat = other.new_empty(0) if flat is None else flat
    return torch.nn.functional.pad(flat, (0, other.numel() - flat.numel()))


def empty_whole(shape: Sequence[int], quantizer: Quantizer, dtype: torch.dtype, device: torch.device) -> Any:
    """The tensor that `assign` fills, with both directions."""
    return quantizer.with_usage(rowwise=True, columnwise=True).make_empty(shape, dtype=dtype, device=device)


def assign(whole: Any, gathered: Sequence[torch.Tensor], sent: Sent) -> None:
    """Fill `whole` with the shards' tensors, one behind the other as a gather gives them, in place.

    Backward finds the buffers that forward saved, with what is in them now: autograd must not count that as a write.
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
                if value.is_cuda:  # it was made on the stream of the gathers, which may use its memory again
                    value.record_stream(torch.cuda.current_stream(value.device))
        if not (sent.rowwise and sent.columnwise):
            _fill_other(whole, buffers, sent)


def _one_below_the_other(flat: torch.Tensor, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Flat tensors of all shards, lengthened or not, bytes or not → (count · first dimension, …)."""
    size = math.prod(shape) * dtype.itemsize // flat.itemsize
    return flat.view(count, -1)[:, :size].contiguous().view(dtype).view(count * shape[0], *shape[1:])


def _fill_other(whole: Any, buffers: dict[str, torch.Tensor], sent: Sent) -> None:
    """The direction that was not sent: made of the other one, or unusable."""
    names = whole._COLUMNWISE if sent.rowwise else whole._ROWWISE
    if _derives(whole):
        rows = type(whole)._STORAGE._build(whole.shape, whole.dtype, whole.get_metadata())
        made = rows.keep(rowwise=True, columnwise=False)
        made.update_usage(columnwise_usage=True)
        for name in names:
            buffers[name].copy_(getattr(made, name))
        return
    held = [buffers[name] for name in names if name in buffers]
    for buffer in held[1:] or held:  # behind the codes; or what there is
        buffer.view(torch.uint8).fill_(255)  # NaN in E8M0, E4M3 and high precision


def send_shard(shard: Any, mesh: Any, orig_size: torch.Size, module: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """`fsdp_pre_all_gather` of a quantized shard of rows: what to gather, and what `make_whole` must know."""
    count, quantizer = mesh.size(), shard._quantizer
    check_one_format(quantizer, shard.device, module, mesh.get_group())
    which = None if quantizer is None else sendable_directions(quantizer, shard.shape[0])
    if which is None or orig_size[0] % count:
        raise ValueError(
            f"a weight of shape {tuple(orig_size)} in {type(shard).__name__} cannot be gathered from {count} processes:"
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
    """`fsdp_post_all_gather` of shards that `extract` took apart: the whole and its buffers, or nothing for `out`."""
    orig_size, quantizer, sent = metadata
    if out is not None:
        assign(out, outputs, sent)
        return None
    whole = empty_whole(orig_size, quantizer, dtype, outputs[0].device)
    assign(whole, outputs, sent)
    return whole, tuple(buffer for _, buffer in whole._buffers())


# Groups of members


def member_rows(group: Any, start: int, stop: int) -> dict[str, Any] | None:
    """Constructor kwargs of members start..stop; None where there is none, or they differ in shape."""
    if not group.all_same_shape() or start >= stop:
        return None
    fields: dict[str, Any] = {"shapes": group.shapes[start:stop]}
    kwargs = dict(group._FLATTEN_TENSOR_BUFFERS)
    for attribute, buffer in group._buffers():
        size = buffer.shape[0] // group.num_tensors
        fields[kwargs[attribute]] = buffer[start * size : stop * size]
    return fields


def send_members(shard: Any, mesh: Any, orig_size: torch.Size, module: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """`fsdp_pre_all_gather`: all buffers of the shard, and what `gather_members` must know."""
    check_one_format(shard.quantizer, shard.device, module, mesh.get_group())
    usages = shard.get_usages()
    buffers, sent = extract(shard, usages["rowwise"], usages["columnwise"], mesh.size())
    return tuple(buffers), (orig_size[0], sent)


def gather_members(empty: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, out: Any) -> Any:
    """`fsdp_post_all_gather`: the whole and its buffers, or nothing for `out`. `empty(n)`: a new group of so many."""
    count, sent = metadata
    whole = empty(count) if out is None else out
    assign(whole, outputs, sent)
    return None if out is not None else (whole, tuple(buffer for _, buffer in whole._buffers()))
