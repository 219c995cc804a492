"""Shards of quantized tensors: quantized as the whole is, and gathered as bytes.

A format whose scales depend on the whole tensor (current scaling, NVFP4, what is cut in row-wise scaling) takes the
largest amax over the processes; delayed scaling has its own way, at the end of a step. Rows are gathered buffer by
buffer, as the storage says that shards lie one behind the other (`_along_rows`), where the quantizer says that this
gives the whole (`gather_multiple`): blocks along the rows must not be cut. Padding of scales is cut before and made
again after.
"""

from typing import Any

import torch

from mezzotint.comm.collectives import all_reduce_max, start_all_gather, wait
from mezzotint.comm.groups import world_size
from mezzotint.constants import rup
from mezzotint.tensor.quantize import has_whole_amaxes, quantize_scaled, quantize_storage, whole_amaxes
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


def quantize_shard(
    x: torch.Tensor, quantizer: Quantizer, scale: torch.Tensor | None, group: Any, dim: int | None
) -> tuple[Any, torch.Tensor | None]:
    """As `quantize_scaled`, of x that is this process's part, split along `dim`; None: x is whole."""
    if dim is None or not has_whole_amaxes(quantizer, dim):
        return quantize_scaled(x, quantizer, scale)
    amaxes = whole_amaxes(x, quantizer, dim, lambda amax: all_reduce_max(amax, group))
    return quantize_storage(x, quantizer, **amaxes), None


def can_gather(quantizer: Quantizer, rows: int, *, columnwise: bool) -> bool:
    """Whether that copy of shards of this many rows each can be gathered as bytes."""
    multiple = quantizer.gather_multiple(columnwise)
    return multiple is not None and rows % multiple == 0


def gather_rows(x: Any, group: Any) -> Any:
    """(m, …) of each process → (m · processes, …): a tensor, or a storage buffer by buffer."""
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
        fields[kwarg] = _joined(wait(gathered), count, dim, count * extent, multiple)
    shape = (count * x.shape[0], *x.shape[1:])
    return type(x)._build(shape, x._dtype, fields)


def _joined(gathered: torch.Tensor, count: int, dim: int, extent: int, multiple: int) -> torch.Tensor:
    """The shards, one below the other → one behind the other in `dim`, with zeros up to a multiple."""
    if dim == 1:
        rows = gathered.shape[0] // count
        shards = gathered.view(count, rows, *gathered.shape[1:])
        gathered = shards.transpose(0, 1).reshape(rows, extent, *gathered.shape[2:])
    padding = rup(extent, multiple) - extent
    if multiple == 1 or padding == 0:
        return gathered
    return torch.nn.functional.pad(gathered, (0, padding) if dim == 1 else (0, 0, 0, padding))
