"""Probes of an inspected linear: they collect statistics of its input, weight and output gradient against their
quantized copies.

`Probes` are part of the arguments of a linear whose module is inspected; otherwise they are None. A probe holds a table
(`kernels/statistics.py`); what a run sees is added to it, in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mezzotint.formats import HIGH
from mezzotint.functional.gemm import is_made_by_custom, operand
from mezzotint.kernels._lib import as_matrix, run_op, write_op
from mezzotint.kernels.statistics import (
    nonfinite_add_,
    operand_statistics,
    statistics_add_,
    statistics_whole,
    tensor_statistics,
)
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.quantize import quantize_storage
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import read_live


@dataclass(frozen=True)
class Others(GraphConstant):
    """An `Others` holds quantizers of other formats, in which a tensor is tried out."""

    quantizers: tuple[Quantizer, ...]


class Probe(NamedTuple):
    """A `Probe` holds the tensors to which the statistics of one tensor are added: `table` FP64 (16, 256) for its
    quantized copy, `tried` FP64 (16, number of others) for what the other formats would make of it, and `counts` int64
    [3] for values that are not finite. One that is None is not asked for."""

    table: torch.Tensor | None
    tried: torch.Tensor | None = None
    others: Others | None = None
    counts: torch.Tensor | None = None


class Probes(NamedTuple):
    """A `Probes` holds the probes of one linear; a tensor whose probe is None is not looked at."""

    input: Probe | None
    weight: Probe | None
    grad_output: Probe | None


def join_probes(seen: tuple[Probes, ...] | None, counted: tuple[Probes, ...] | None) -> tuple[Probes, ...] | None:
    """Return, for each GEMM, the probes `seen` of an inspector joined with those that count values that are not finite,
    `counted`."""
    if seen is None or counted is None:
        return counted if seen is None else seen
    return tuple([Probes(*map(_join, each, others)) for each, others in zip(seen, counted, strict=True)])


def _join(seen: Probe | None, counted: Probe | None) -> Probe | None:
    if seen is None or counted is None:
        return counted if seen is None else seen
    return Probe(seen.table, seen.tried, seen.others, counted.counts)


def watch_gradient(probes: Probes | None) -> Probes | None:
    """Return the probes of a linear that are left to backward, and tell the compiler that backward writes them."""
    if probes is None or probes.grad_output is None:
        return None
    read_live(probes.grad_output.table, probes.grad_output.tried, probes.grad_output.counts)
    return Probes(None, None, probes.grad_output)


def statistics_of(x: torch.Tensor, x_q: Any) -> torch.Tensor:
    """Return the table (16, 256) of `x` (…, K) and its quantized copy `x_q`, which must hold its row-wise direction."""
    matrix = as_matrix(x.detach())
    if is_made_by_custom(x_q) and not isinstance(x_q, QuantizedTensorStorage):
        return run_op(tensor_statistics, matrix, as_matrix(x_q.dequantize()).float(), None, 0.0)
    op = operand(x_q, False)
    if op.kind == HIGH:
        return run_op(tensor_statistics, matrix, op.data.float(), None, 0.0)
    return run_op(operand_statistics, matrix, op.data, op.scale, op.amax, op.kind, op.dtype, op.swizzled, op.e4m3_max)


def observe(probe: Probe | None, x: Any, x_q: Any) -> None:
    """Add what is seen of a tensor to the tables of its probe. A tensor that came quantized, or is not quantized, is
    left out."""
    if probe is None or x is None or isinstance(x, QuantizedTensorStorage) or isinstance(x_q, torch.Tensor):
        return
    with torch.no_grad():
        if probe.counts is not None:
            write_op(nonfinite_add_, probe.counts, x.detach())
        if probe.table is None:
            return
        write_op(statistics_add_, probe.table, statistics_of(x, x_q))
        if probe.tried is None or probe.others is None:
            return
        tried = [statistics_of(x, quantize_storage(x.detach(), each)) for each in probe.others.quantizers]
        write_op(statistics_add_, probe.tried, torch.stack([run_op(statistics_whole, each) for each in tried], 1))


def observe_groups(probes: Sequence[Probe | None], xs: Sequence[Any], xs_q: Sequence[Any]) -> None:
    """Observe the tensor of each group with its probe."""
    for probe, x, x_q in zip(probes, xs, xs_q, strict=True):
        observe(probe, x, x_q)
