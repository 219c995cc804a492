"""A quantized weight in shards of whole rows: what a process sends of its shard, and the whole from what all have sent.

A direction is sent as the buffers that differ between shards (`_along_rows`), flat, without the padding of scales. What
is equal in all shards (the scale of the whole, its amax) is not sent. Which directions:

    the column-wise copy follows from the row-wise one     the row-wise one, for forward and for backward
    it does not, and one is asked for                      what is read: row-wise in forward, column-wise in backward
    it does not                                            both

Where one is asked for both are of equal size, since FSDP2 allocates once; the scales of the other are made NaN, so that
whoever reads it after all finds out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed

from mezzotint.tensor.quantize import has_whole_amaxes, update_quantized, whole_amaxes
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


@dataclass(frozen=True)
class Sent:
    """What is sent of a shard: its directions, and what its buffers are."""

    rowwise: bool
    columnwise: bool
    count: int  # of processes
    meta: dict[str, Any]  # as `fsdp_extract_buffers` gives it
    shared: dict[str, torch.Tensor]  # equal in all shards
    kept: tuple[torch.Tensor, ...] = ()  # of one process, for which FSDP2 hands over the first buffer alone


def directions(quantizer: Quantizer, rows: int, one: bool, backward: bool) -> tuple[bool, bool] | None:
    """Which directions shards of this many rows send: (row-wise, column-wise); None where bytes cannot be gathered."""
    if quantizer.is_custom() or not _parts_go(quantizer) or not _divides(quantizer, rows, False):
        return None
    if quantizer.derives_columnwise():
        return True, False
    if not _divides(quantizer, rows, True):
        return None
    return (not backward, backward) if one else (True, True)


def _parts_go(quantizer: Quantizer) -> bool:
    """Of a quantizer made of two: whether parts are quantized as the whole is, by what they are given with the call."""
    parts = quantizer._parts()
    if parts is None:
        return True
    is_chained = parts[2] is not None and has_whole_amaxes(quantizer, 0)
    return quantizer._is_value() and not is_chained and not any(p is not None and p.is_custom() for p in parts)


def _divides(quantizer: Quantizer, rows: int, columnwise: bool) -> bool:
    multiple = quantizer.gather_multiple(columnwise)
    return multiple is not None and rows % multiple == 0


def in_backward() -> bool:
    """Whether autograd is running a backward: FSDP2 gathers for it, and gathers ahead, from inside of it."""
    return torch._C._current_graph_task_id() != -1


def largest(x: torch.Tensor, groups: Sequence[Any]) -> torch.Tensor:
    """Over the processes of the groups, element by element."""
    x = x.clone()
    for group in groups:
        torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX, group)
    return x


def extract(shard: QuantizedTensorStorage, rowwise: bool, columnwise: bool, count: int) -> tuple[list[Any], Sent]:
    """Flat tensors to gather of a shard that `count` processes hold one of, and what they are."""
    buffers, meta = shard.keep(rowwise=rowwise, columnwise=columnwise).fsdp_extract_buffers()
    flat: list[Any] = [buffer.reshape(-1) for buffer in buffers]
    if rowwise != columnwise and not _derives(shard):
        others, _ = shard.keep(rowwise=not rowwise, columnwise=not columnwise).fsdp_extract_buffers()
        flat = [_lengthened(each, other) for each, other in zip_longest(flat, others)]
    fields = shard.fsdp_buffer_fields()
    shared = {name: buffer for name, buffer in shard._buffers() if name not in fields}
    kept = tuple(flat[1:]) if count == 1 else ()
    return flat[: len(flat) - len(kept)], Sent(rowwise, columnwise, count, meta, shared, kept)


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
    """`fsdp_pre_all_gather` of a quantized shard of rows: what to gather, and what `gathered` must know."""
    count, quantizer = mesh.size(), shard._quantizer
    one = bool(getattr(module, "gathers_one_direction", False))
    which = None if quantizer is None else directions(quantizer, shard.shape[0], one, in_backward())
    if which is None or orig_size[0] % count:
        raise ValueError(
            f"a weight of shape {tuple(orig_size)} in {type(shard).__name__} cannot be gathered from {count} processes:"
            " its rows must divide evenly, in whole blocks; keep it in high precision (without quantized_model_init) "
            "and use low_precision_gather"
        )
    if shard._shard_group is None:
        shard._shard_group = mesh.get_group()
        _agree(shard)
    buffers, sent = extract(shard, *which, count)
    return tuple(buffers), (orig_size, quantizer, sent)


def update_shard(shard: Any, x: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
    """Quantize x into a shard as the whole is quantized: by the amaxes of all shards, which are also those kept."""
    quantizer, groups = shard._quantizer, [shard._shard_group]
    amaxes = whole_amaxes(x, quantizer, 0, lambda amax: largest(amax, groups))
    update_quantized(x, shard, quantizer, noop_flag=noop_flag, **amaxes)
    quantizer.share_amax(lambda amax: largest(amax, groups))


def _agree(shard: Any) -> None:
    """One scale for all shards: each may have been quantized on its own before it was known to be one."""
    along = shard._along_rows()
    shared = [buffer.reshape(-1) for name, buffer in shard._buffers() if name not in along]
    groups = [shard._shard_group]
    shard._quantizer.share_amax(lambda amax: largest(amax, groups))
    if shared:
        both = torch.cat([*shared, *[-buffer for buffer in shared]])
        differs = largest((largest(both, groups) != both).any().float(), groups)
        if bool(differs):
            shard.quantize_(shard._dequantize(torch.float32).view(shard.shape))


def gathered(outputs: Sequence[torch.Tensor], metadata: tuple[Any, Any, Sent], dtype: torch.dtype, out: Any) -> Any:
    """`fsdp_post_all_gather` of shards that `extract` took apart: the whole and its buffers, or nothing for `out`."""
    orig_size, quantizer, sent = metadata
    if out is not None:
        assign(out, outputs, sent)
        return None
    whole = empty_whole(orig_size, quantizer, dtype, outputs[0].device)
    assign(whole, outputs, sent)
    return whole, tuple(buffer for _, buffer in whole._buffers())
