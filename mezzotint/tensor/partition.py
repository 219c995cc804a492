"""A quantized weight in shards of whole rows: what a process sends of its shard, and the whole from what all have sent.

A direction is sent as the buffers that differ between shards (`_along_rows`), flat, without the padding of scales. What
is equal in all shards (the scale of the whole, its amax) is not sent. Which directions:

    the column-wise copy follows from the row-wise one     the row-wise one, for forward and for backward
    it does not                                            those that are read (`fsdp_books.py`)

Where one is sent it is as long as the other would be, so that FSDP2 need not allocate anew; the scales of the other are
made NaN, so that whoever reads it after all finds out.

Such a shard, and a part of a weight that tensor parallelism has split by rows or by columns, knows how it is cut
(`Split`): where a scale depends on the whole its maxima are taken over the processes that have the other parts. They
are attributes of a tensor and no values, so that a graph, a file or a copy knows nothing of processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed

from mezzotint.tensor.fsdp_books import check_alike, read_directions, unit_of
from mezzotint.tensor.quantize import (
    assemble,
    has_whole_amaxes,
    largest_amaxes,
    quantize_buffers,
    split_amaxes,
    update_quantized,
)
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


@dataclass(frozen=True)
class Split:
    """A cut along dimension 0 or 1 of a matrix: the processes of the group have the other parts."""

    dim: int
    group: Any


@dataclass(frozen=True)
class Sent:
    """What is sent of a shard: its directions, and what its buffers are."""

    rowwise: bool
    columnwise: bool
    count: int  # of processes
    meta: dict[str, Any]  # as `fsdp_extract_buffers` gives it
    shared: dict[str, torch.Tensor]  # equal in all shards
    kept: tuple[torch.Tensor, ...] = ()  # of one process, for which FSDP2 hands over the first buffer alone


def directions(quantizer: Quantizer, rows: int) -> tuple[bool, bool] | None:
    """Which directions shards of this many rows can send: (row-wise, column-wise), the second where it does not follow
    from the first; None where bytes cannot be gathered."""
    if quantizer.is_custom() or not _parts_go(quantizer) or not _divides(quantizer, rows, False):
        return None
    if quantizer.derives_columnwise():
        return True, False
    return (True, True) if _divides(quantizer, rows, True) else None


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
    """`fsdp_pre_all_gather` of a quantized shard of rows: what to gather, and what `gathered` must know."""
    count, quantizer = mesh.size(), shard._quantizer
    check_alike(quantizer, shard.device, module, mesh.get_group())
    which = None if quantizer is None else directions(quantizer, shard.shape[0])
    if which is None or orig_size[0] % count:
        raise ValueError(
            f"a weight of shape {tuple(orig_size)} in {type(shard).__name__} cannot be gathered from {count} processes:"
            " its rows must divide evenly, in whole blocks; keep it in high precision (without quantized_model_init) "
            "and use low_precision_gather"
        )
    if not shard._splits:
        share(shard, (Split(0, mesh.get_group()), *getattr(module, "_splits_of", _no_splits)(shard)))
    buffers, sent = send(shard, shard, which, mesh, module)
    return buffers, (orig_size, quantizer, sent)


def _no_splits(shard: Any) -> tuple[Split, ...]:
    return ()


def shared_amaxes(x: torch.Tensor, quantizer: Quantizer, splits: Sequence[Split]) -> dict[str, torch.Tensor]:
    """What the quantization of x, a part of a tensor, must be given of the whole."""
    found: dict[str, torch.Tensor] = {}
    for split in splits:
        # A cut between columns leaves the maxima of columns as they are, and makes others of those of rows.
        cut = split_amaxes(x, quantizer, split.dim)
        cut = {name: found.get(name, amax) for name, amax in cut.items()}
        found.update(largest_amaxes(cut, partial(largest, groups=[split.group])))
    return found


def groups_of(splits: Sequence[Split]) -> list[Any]:
    return [split.group for split in splits]


def quantize_part(x: torch.Tensor, quantizer: Quantizer, splits: tuple[Split, ...]) -> Any:
    """A part of a tensor → quantized as the whole is, now and when it is written."""
    if not splits or quantizer.is_custom():
        return quantizer.quantize(x)
    buffers = quantize_buffers(x, quantizer, {**shared_amaxes(x, quantizer, splits)})
    quantizer.share_amax(partial(largest, groups=groups_of(splits)))
    made = assemble(buffers, quantizer, False, x.shape, x.dtype)
    made._splits = splits
    return made


def update_part(part: Any, x: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
    """Quantize x into a part as the whole is quantized: by the amaxes of all parts, which are also those kept."""
    quantizer, splits = part._quantizer, part._splits
    x = x.dequantize() if isinstance(x, QuantizedTensorStorage) else x
    update_quantized(x, part, quantizer, noop_flag=noop_flag, **shared_amaxes(x, quantizer, splits))
    quantizer.share_amax(partial(largest, groups=groups_of(splits)))


def share(part: Any, splits: tuple[Split, ...]) -> None:
    """From now on it is known to be a part. It may have been quantized on its own before: then all of them are again,
    from what they hold, so that there is one scale."""
    part._splits = splits
    part._quantizer.share_amax(partial(largest, groups=groups_of(splits)))
    if splits and differs(part, splits):
        part.quantize_(part._dequantize(torch.float32).view(part.shape))


def differs(part: QuantizedTensorStorage, splits: Sequence[Split]) -> bool:
    """Whether what should be equal in all parts is not. A collective: all of them get one answer."""
    found = torch.zeros((), device=part.device)
    for split in splits:
        shared = [buffer.reshape(-1) for buffer in part._shared_buffers(split.dim)]
        if shared:
            both = torch.cat([*shared, *[-buffer for buffer in shared]])
            found += (largest(both, [split.group]) != both).any()
    return bool(largest(found, groups_of(splits)))


def gathered(outputs: Sequence[torch.Tensor], metadata: tuple[Any, Any, Sent], dtype: torch.dtype, out: Any) -> Any:
    """`fsdp_post_all_gather` of shards that `extract` took apart: the whole and its buffers, or nothing for `out`."""
    orig_size, quantizer, sent = metadata
    if out is not None:
        assign(out, outputs, sent)
        return None
    whole = empty_whole(orig_size, quantizer, dtype, outputs[0].device)
    assign(whole, outputs, sent)
    return whole, tuple(buffer for _, buffer in whole._buffers())
