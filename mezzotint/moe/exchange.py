"""Expert parallel: rows go to the processes that have their experts, and come back.

    exchange = plan_exchange(tokens_per_expert, x.shape[0], group)   one small all-to-all: who sends how many rows
    rows     = dispatch(x, exchange, group)                          x sorted by expert, as `moe_permute` gives it
    y        = experts(rows, exchange.m_splits)                      a GroupedLinear of this process's experts
    back     = combine(y, exchange, group)                           in the order of x

Of E experts process p of P has those from p · E / P on. Its rows come expert by expert, those of an expert from process
0, 1, …: what one process with all tokens, in that order, would have. Counts are ragged and may be 0 anywhere; every
process takes part in every exchange, forward and backward, also one that has nothing to send. The gradient of an
exchange is the exchange the other way.

The collectives are PyTorch's functional ones, which compile. A graph reads the counts where
`torch._dynamo.config.capture_scalar_outputs` is set; an `Exchange` that is made outside of it is a constant to it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.comm.collectives import all_to_all
from mezzotint.comm.groups import local_size, world_size
from mezzotint.moe.permutation import sort_chunks
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tracing import require


@dataclass(frozen=True, slots=True)
class Exchange:
    """How many rows this process sends and gets."""

    sent: tuple[int, ...]  # rows to each process
    received: tuple[int, ...]  # rows from each process
    m_splits: tuple[int, ...]  # rows of each expert of this process
    counts: torch.Tensor  # int64 [P, experts of this process]: rows from each process for each


def plan_exchange(tokens_per_expert: torch.Tensor, rows: int, group: Any = None) -> Exchange:
    """Counts [E] of this process's rows for every expert, and how many rows there are → what all processes exchange.

    A collective, whose result the host waits for. If the counts of any process do not add up, all of them raise.
    """
    if tokens_per_expert.dim() != 1 or tokens_per_expert.is_floating_point():
        raise ValueError(
            f"tokens_per_expert is {tokens_per_expert.dtype} {tuple(tokens_per_expert.shape)}: give an integer for "
            "each expert"
        )
    count = world_size(group)
    experts = local_size("the number of experts", tokens_per_expert.shape[0], group)
    sent = tokens_per_expert.long().view(count, experts)
    wrong = (sent.sum() != rows) | (sent < 0).any()
    # One message for each process: the rows for each of its experts, and whether the sender has an error.
    message = torch.cat([sent, wrong.long().expand(count, 1)], 1)
    got = _all_to_all(message.view(-1), None, None, group).view(count, experts + 1)
    received = got[:, :experts].contiguous()
    numbers = torch.cat([got[:, -1], sent.sum(1), received.sum(1), received.sum(0)]).tolist()
    for is_wrong in numbers[:count]:
        require(
            is_wrong == 0,
            lambda: "tokens_per_expert must add up to the rows of every rank",
            lambda: (
                "tokens_per_expert does not add up to the rows on rank "
                f"{', '.join(str(rank) for rank, is_wrong in enumerate(numbers[:count]) if is_wrong)} of the group "
                f"(here: {rows} rows, {sent.view(-1).tolist()}): give counts of 0 or more, as many rows in all"
            ),
        )
    for number in numbers:
        torch._check(number >= 0)
    return Exchange(
        tuple(numbers[count : 2 * count]), tuple(numbers[2 * count : 3 * count]), tuple(numbers[3 * count :]), received
    )


def dispatch(x: torch.Tensor, exchange: Exchange, group: Any = None) -> torch.Tensor:
    """Rows of this process [N, …], sorted by expert → rows of all processes for its experts [M, …], sorted too."""
    _check_rows("x", x, exchange.sent)
    got = _all_to_all(x, exchange.received, exchange.sent, group)
    return _sort(got, exchange.counts)


def combine(y: torch.Tensor, exchange: Exchange, group: Any = None) -> torch.Tensor:
    """What was made of the rows that `dispatch` gave [M, …] → what was made of those that it was given [N, …]."""
    _check_rows("y", y, exchange.received)
    return _all_to_all(_sort(y, exchange.counts.t()), exchange.sent, exchange.received, group)


def _sort(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows in chunks of counts [a, b] → the chunks in the order of its transpose."""
    outer, inner = counts.shape
    if outer == 1 or inner == 1:
        return x
    order = torch.arange(outer * inner, device=x.device).view(outer, inner).t().reshape(-1)
    flat = x.reshape(x.shape[0], x.shape[1:].numel())
    return sort_chunks(flat, counts.reshape(-1), order).view(x.shape)


def _all_to_all(x: torch.Tensor, received: Any, sent: Any, group: Any) -> torch.Tensor:
    """Rows from each process, for those to each."""
    x = x.dequantize() if isinstance(x, QuantizedTensor) else x
    return x if world_size(group) == 1 else _AllToAll.apply(x, received, sent, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: Any, sent: Any, group: Any) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return all_to_all(dy, ctx.sent, ctx.received, ctx.group), None, None, None


def _check_rows(name: str, x: torch.Tensor, sizes: tuple[int, ...]) -> None:
    total = 0
    for size in sizes:
        total += size
    require(
        x.dim() > 0 and x.shape[0] == total,
        lambda: "the exchange was planned for another number of rows",
        lambda: f"{name} has shape {tuple(x.shape)}: the exchange was planned for {total} rows",
    )
