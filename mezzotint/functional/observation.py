"""What a linear shows an inspector: statistics of its input, weight and output gradient against their quantized copies.

`Probes` are part of the arguments of a linear whose module is inspected, and None otherwise. A probe holds a table
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
    """Quantizers of other formats, which a tensor is tried out in."""

    quantizers: tuple[Quantizer, ...]


class Probe(NamedTuple):
    """Where what is seen of a tensor goes: `table` FP64 (16, 256), and what other formats would make of it `tried` FP64
    (16, number of others); `counts` int64 [3], values that are not finite. None: nobody asks for it."""

    table: torch.Tensor | None
    tried: torch.Tensor | None = None
    others: Others | None = None
    counts: torch.Tensor | None = None


class Probes(NamedTuple):
    """Those of one linear; None: not looked at."""

    input: Probe | None
    weight: Probe | None
    grad_output: Probe | None


def join_probes(seen: tuple[Probes, ...] | None, counted: tuple[Probes, ...] | None) -> tuple[Probes, ...] | None:
    """Return the probes of an inspector that count, too, what is not finite, for each GEMM."""
    if seen is None or counted is None:
        return counted if seen is None else seen
    return tuple([Probes(*map(_join, each, others)) for each, others in zip(seen, counted, strict=True)])


def _join(seen: Probe | None, counted: Probe | None) -> Probe | None:
    if seen is None or counted is None:
        return counted if seen is None else seen
    return Probe(seen.table, seen.tried, seen.others, counted.counts)


def watch_gradient(probes: Probes | None) -> Probes | None:
    """Return what is left to backward of the probes of a linear, and tell the compiler that backward writes it."""
    if probes is None or probes.grad_output is None:
        return None
    read_live(probes.grad_output.table, probes.grad_output.tried, probes.grad_output.counts)
    return Probes(None, None, probes.grad_output)


def statistics_of(x: torch.Tensor, x_q: Any) -> torch.Tensor:
    """Return the table (16, 256) of `x` (…, K) and its quantized copy, which holds its row-wise direction."""
    matrix = as_matrix(x.detach())
    if is_made_by_custom(x_q) and not isinstance(x_q, QuantizedTensorStorage):
        return run_op(tensor_statistics, matrix, as_matrix(x_q.dequantize()).float(), None, 0.0)
    op = operand(x_q, False)
    if op.kind == HIGH:
        return run_op(tensor_statistics, matrix, op.data.float(), None, 0.0)
    return run_op(operand_statistics, matrix, op.data, op.scale, op.amax, op.kind, op.dtype, op.swizzled, op.e4m3_max)


def observe(probe: Probe | None, x: Any, x_q: Any) -> None:
    """Add what is seen of a tensor to its tables. One that came quantized, or is not quantized, is not looked at."""
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
    """`observe` of each group."""
    for probe, x, x_q in zip(probes, xs, xs_q, strict=True):
        observe(probe, x, x_q)
