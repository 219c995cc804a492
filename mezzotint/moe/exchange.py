"""Expert parallelism: rows are sent to the ranks that have their experts, and come back.

    exchange = plan_exchange(tokens_per_expert, x.shape[0], group)   one small all-to-all: who sends how many rows
    rows     = dispatch(x, exchange, group)                          x sorted by expert, as `moe_permute` gives it
    y        = experts(rows, exchange.m_splits)                      a GroupedLinear of this rank's experts
    back     = combine(y, exchange, group)                           in the order of x

Of E experts rank p of P has those from p · E / P on. Its rows come expert by expert, those of an expert from rank 0, 1,
…: the same order that one rank with all tokens would have. Counts differ by rank and expert and may be 0 anywhere;
every rank takes part in every exchange, forward and backward, even if it has nothing to send. The gradient of an
exchange is the exchange the other way.

The collectives are PyTorch's functional ones, which compile. A graph reads the counts if
`torch._dynamo.config.capture_scalar_outputs` is set; an `Exchange` that is made outside of the graph is a constant to
it.
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
    """An `Exchange` holds how many rows this rank sends and receives; `plan_exchange` makes it.

    Args:
        sent: The number of rows for each rank.
        received: The number of rows from each rank.
        m_splits: The number of rows of each expert of this rank, as `GroupedLinear` takes it.
        counts: The number of rows from each rank for each expert of this rank, int64 [ranks, experts of this rank].

    Example:
        >>> import torch
        >>> from mezzotint.distributed import combine, dispatch, plan_exchange
        >>> x = torch.randn(6, 8)  # rows of one rank alone, sorted by expert
        >>> exchange = plan_exchange(torch.tensor([4, 2]), rows=6)
        >>> exchange.m_splits
        (4, 2)
        >>> y = dispatch(x, exchange)
        >>> torch.equal(combine(y, exchange), x)
        True
    """

    sent: tuple[int, ...]  # rows to each rank
    received: tuple[int, ...]  # rows from each rank
    m_splits: tuple[int, ...]  # rows of each expert of this rank
    counts: torch.Tensor  # int64 [P, experts of this rank]: rows from each rank for each expert


def plan_exchange(tokens_per_expert: torch.Tensor, rows: int, group: Any = None) -> Exchange:
    """Return how many rows the ranks of a group exchange with each other.

    This is a collective, whose result the host waits for.

    Args:
        tokens_per_expert: This rank's number of rows for every expert of the group, integers [E].
        rows: Their sum.
        group: The process group whose ranks exchange rows. None means all ranks.

    Returns:
        An `Exchange`.

    Raises:
        ValueError: If `tokens_per_expert` has not one integer for each expert; or, on all ranks, if the counts of any
            rank do not add up to its rows.

    Example:
        >>> import torch
        >>> from mezzotint.distributed import combine, dispatch, plan_exchange
        >>> x = torch.randn(6, 8)  # rows of one rank alone, sorted by expert
        >>> exchange = plan_exchange(torch.tensor([4, 2]), rows=6)
        >>> exchange.m_splits
        (4, 2)
        >>> y = dispatch(x, exchange)
        >>> torch.equal(combine(y, exchange), x)
        True
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
    # Each rank gets one message: the rows for each of its experts, and whether the sender has an error.
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
    """Send the rows of `x` to the ranks that have their experts, and return the rows that this rank's experts receive.

    Args:
        x: This rank's rows [N, …], sorted by expert.
        exchange: What `plan_exchange` returned.
        group: The process group whose ranks exchange rows. None means all ranks.

    Returns:
        Rows from all ranks [M, …], sorted by expert.

    Raises:
        ValueError: If the exchange was planned for another number of rows.

    Example:
        >>> import torch
        >>> from mezzotint.distributed import combine, dispatch, plan_exchange
        >>> x = torch.randn(6, 8)  # rows of one rank alone, sorted by expert
        >>> exchange = plan_exchange(torch.tensor([4, 2]), rows=6)
        >>> exchange.m_splits
        (4, 2)
        >>> y = dispatch(x, exchange)
        >>> torch.equal(combine(y, exchange), x)
        True
    """
    _check_rows("x", x, exchange.sent)
    got = _all_to_all(x, exchange.received, exchange.sent, group)
    return _sort(got, exchange.counts)


def combine(y: torch.Tensor, exchange: Exchange, group: Any = None) -> torch.Tensor:
    """Send rows back to the ranks that they came from, which undoes `dispatch`.

    Args:
        y: One row for each row that `dispatch` returned [M, …], usually the experts' outputs.
        exchange: What `plan_exchange` returned.
        group: The process group whose ranks exchange rows. None means all ranks.

    Returns:
        One row for each row that `dispatch` was given [N, …], in the same order.

    Raises:
        ValueError: If the exchange was planned for another number of rows.

    Example:
        >>> import torch
        >>> from mezzotint.distributed import combine, dispatch, plan_exchange
        >>> x = torch.randn(6, 8)  # rows of one rank alone, sorted by expert
        >>> exchange = plan_exchange(torch.tensor([4, 2]), rows=6)
        >>> exchange.m_splits
        (4, 2)
        >>> y = dispatch(x, exchange)
        >>> torch.equal(combine(y, exchange), x)
        True
    """
    _check_rows("y", y, exchange.received)
    return _all_to_all(_sort(y, exchange.counts.t()), exchange.sent, exchange.received, group)


def _sort(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the rows of x, in chunks of counts [a, b], with the chunks in the order of the transpose [b, a]."""
    outer, inner = counts.shape
    if outer == 1 or inner == 1:
        return x
    order = torch.arange(outer * inner, device=x.device).view(outer, inner).t().reshape(-1)
    flat = x.reshape(x.shape[0], x.shape[1:].numel())
    return sort_chunks(flat, counts.reshape(-1), order).view(x.shape)


def _all_to_all(x: torch.Tensor, received: Any, sent: Any, group: Any) -> torch.Tensor:
    """Send `sent` rows of x to each rank and return the `received` rows from each; if there is one rank, return x."""
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
