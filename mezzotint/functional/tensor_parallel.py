"""A linear over the ranks of a group: this module says which tensor is where, what is gathered, and what is summed.

    column   W (N/p, K)   x whole; y, dy (M, N/p); dx is summed
    row      W (N, K/p)   x, dx (M, K/p); y is summed, the bias added after; dy whole

Sequence parallelism splits the tokens of the tensors that are whole above, and gathers them, quantized if the format
can be: x in forward, and again for dW, of which each rank keeps its shard; dy in backward. The sums are then scattered.

A shard is quantized as the whole would be, whichever way it is split (`tensor/partition.py`). So the bytes are the same
as without parallelism, and with them y and dW of "column", dx and dW of "row"; the sums over ranks are in another
order. A tile (128x128, 32x32, 16x16) must not be cut, and stochastic rounding draws for each shard on its own.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.comm.collectives import start_all_reduce, start_reduce_scatter
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.partition import Split, can_gather, gather_rows, needs_whole_amaxes, quantize_shard
from mezzotint.tensor.quantize import quantize_scaled
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.scale_slot import DelayedScale
from mezzotint.tensor.storage import QuantizedTensorStorage


@dataclass(frozen=True)
class Parallel(GraphConstant):
    """A `Parallel` says how a weight is split over the ranks of a group: mode "column" splits N, "row" splits K."""

    mode: str
    group: Any
    size: int
    sequence_parallel: bool

    def split_of(self, tensor_type: str) -> int | None:
        """Return the dimension of its matrix along which a tensor is split, or None if it is whole on every rank."""
        if tensor_type == "weight":
            return 0 if self.mode == "column" else 1
        if self.mode == ("column" if tensor_type == "input" else "row"):
            return 0 if self.sequence_parallel else None
        return 1

    def splits(self, tensor_type: str) -> tuple[Split, ...]:
        """Return how a tensor is split over ranks; the tuple is empty if it is whole."""
        dim = self.split_of(tensor_type)
        return () if dim is None else (Split(dim, self.group),)


def splits_of(parallel: Parallel | None, tensor_type: str) -> tuple[Split, ...]:
    """Return how a tensor of a linear is split over ranks; the tuple is empty if it is whole."""
    return () if parallel is None else parallel.splits(tensor_type)


def gathers(parallel: Parallel | None, tensor_type: str) -> bool:
    """Return whether the tokens of the input, or of grad_output, are gathered."""
    return parallel is not None and parallel.split_of(tensor_type) == 0


def needs_others(parallel: Parallel | None, tensor_type: str, quantizer: Quantizer) -> bool:
    """Return whether a shard is quantized with amaxes over all ranks."""
    return any(needs_whole_amaxes(quantizer, split.dim) for split in splits_of(parallel, tensor_type))


def shard_quantizer(quantizer: Quantizer, rows: int) -> Quantizer | None:
    """Return a quantizer for `rows` tokens whose result can be gathered as bytes, or None if the tokens must be
    gathered before they are quantized."""
    if not can_gather(quantizer, rows, columnwise=False):
        return None
    if quantizer.columnwise_usage and not can_gather(quantizer, rows, columnwise=True):
        return quantizer.with_usage(rowwise=True, columnwise=False)
    return quantizer


def serves_wgrad(quantizer: Quantizer, rows: int) -> bool:
    """Return whether shards of `rows` tokens that are gathered as bytes give the column-wise copy, which the weight
    gradient needs."""
    return can_gather(quantizer, rows, columnwise=True) or _is_derived(quantizer, rows)


def _is_derived(quantizer: Quantizer, rows: int) -> bool:
    """Return whether the column-wise copy is derived from the row-wise one after that is gathered."""
    return quantizer.supports_only_rowwise_all_gather() and can_gather(quantizer, rows, columnwise=False)


def gather_quantized(
    x: Any, quantizer: Quantizer | None, scale: DelayedScale, parallel: Parallel, tensor_type: str
) -> tuple[Any, torch.Tensor | None]:
    """Gather the tokens (m, K) of all ranks, given those of this rank, quantized or not. Return them in the quantizer's
    directions, and the amax if there is one."""
    if isinstance(x, QuantizedTensorStorage):
        assert quantizer is not None
        return _in_directions(gather_rows(x, parallel.group), quantizer), None
    if quantizer is None:
        return gather_rows(x, parallel.group), None
    rows = x.shape[0]
    is_served = can_gather(quantizer, rows, columnwise=False) or not quantizer.rowwise_usage
    if is_served and (serves_wgrad(quantizer, rows) or not quantizer.columnwise_usage):
        derived = quantizer.columnwise_usage and _is_derived(quantizer, rows)
        shard = quantizer.with_usage(rowwise=True, columnwise=False) if derived else quantizer
        x_q, amax = quantize_shard(x, shard, parallel.splits(tensor_type), scale)
        return _in_directions(gather_rows(x_q, parallel.group), quantizer), amax
    return quantize_scaled(gather_rows(x, parallel.group), quantizer, scale)


def _in_directions(x_q: QuantizedTensorStorage, quantizer: Quantizer) -> Any:
    return x_q.keep(rowwise=quantizer.rowwise_usage, columnwise=quantizer.columnwise_usage)


def start_sum(y: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Start the sum over ranks and return it without waiting for it. In sequence parallelism each rank gets the sum for
    its own tokens only."""
    if parallel.sequence_parallel:
        return start_reduce_scatter(y, parallel.group)
    return start_all_reduce(y, parallel.group)


def output_leading(shape: Any, parallel: Parallel | None) -> Any:
    """Return the leading dimensions of the output, given those of the input; dimension 0 holds the tokens."""
    return shape if parallel is None else _leading(shape, parallel, parallel.mode == "column")


def input_leading(shape: Any, parallel: Parallel | None) -> Any:
    """Return the leading dimensions of the input, given those of the output; dimension 0 holds the tokens."""
    return shape if parallel is None else _leading(shape, parallel, parallel.mode == "row")


def _leading(shape: Any, parallel: Parallel, grows: bool) -> Any:
    if not parallel.sequence_parallel:
        return shape
    return (shape[0] * parallel.size if grows else shape[0] // parallel.size, *shape[1:])
