"""Permutation of tokens: this module sorts tokens by expert, and sorts them back.

    row_id_map int64 [T, C]: the row at which token t stands as its choice c; -1 where it is not routed, or dropped
    permute    y[row_id_map[t, c]] = x[t]                        rows in the order of experts, then of tokens
    unpermute  x[t] = Σ_c p[t, c] · y[row_id_map[t, c]]          one by one in FP32, rounded once

C is the number of experts with a mask (1 where a token is routed) and of choices with an index map (an expert each, or
-1). Each function is the gradient of the other. Rows that no token goes to are zeros. On a GPU the order of the sums is
fixed only under `torch.use_deterministic_algorithms`.

A quantized input is moved as it is, its rows with their scales, if its format can do that (FP8 with one scale or one
per row, MXFP8), and gives a quantized output; other formats are dequantized. What is summed is always dequantized.
"""

import warnings
from typing import Any

import torch

from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tracing import has_values_at_hand, require

MAP_TYPES = ("mask", "index")


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort tokens by the expert that they go to.

    Args:
        inp: The tokens [T, H].
        routing_map: [T, experts] if `map_type` is "mask" (1 where a token goes to an expert), or [T, choices] if it is
            "index" (the number of an expert, or -1).
        num_out_tokens: The number of rows N of the result; rows past it are dropped. -1 (the default) counts the map,
            which waits for the GPU: give the number where it is known, and under `torch.compile`.
        max_token_num: It is accepted and has no effect, because nothing is allocated ahead.
        map_type: What `routing_map` is, "mask" (the default) or "index".

    Returns:
        The rows [N, H], and the row_id_map that `moe_unpermute` takes.

    Raises:
        ValueError: If shapes do not fit each other, or a number makes no sense.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> tokens = torch.randn(4, 8)
        >>> mask = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]])  # which expert each token goes to
        >>> rows, row_id_map = mz.moe_permute(tokens, mask)
        >>> torch.equal(rows, tokens[[0, 2, 1, 3]])
        True
        >>> torch.equal(mz.moe_unpermute(rows, row_id_map), tokens)
        True
    """
    _check_input(inp, routing_map, map_type)
    row_id_map, rows = _route(routing_map, num_out_tokens, map_type)
    return _permute(inp, _sources(row_id_map, rows) // row_id_map.shape[1]), row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort tokens and probabilities by the expert that the tokens go to.

    Args:
        inp: The tokens [T, H].
        probs: The probability of each expert for each token [T, experts].
        routing_map: A mask [T, experts], 1 where a token goes to an expert.
        num_out_tokens: The number of rows N of the result; rows past it are dropped. -1 (the default) counts the map,
            which waits for the GPU: give the number where it is known, and under `torch.compile`.

    Returns:
        The rows [N, H], the probability of each [N], and the row_id_map that `moe_unpermute` takes.

    Raises:
        ValueError: If shapes do not fit each other, or a number makes no sense.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> tokens = torch.randn(4, 8)
        >>> mask = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]])  # which expert each token goes to
        >>> rows, probs, row_id_map = mz.moe_permute_with_probs(tokens, torch.rand(4, 2), mask)
        >>> rows.shape, probs.shape
        (torch.Size([4, 8]), torch.Size([4]))
    """
    _check_input(inp, routing_map, "mask")
    _check_probs("probs", probs, routing_map.shape)
    row_id_map, rows = _route(routing_map, num_out_tokens, "mask")
    sources = _sources(row_id_map, rows)
    return _permute(inp, sources // row_id_map.shape[1]), _permute_probs(probs.reshape(-1), sources), row_id_map


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort as `moe_permute_with_probs` does, and pad each expert's rows with zeros to a multiple of `align_size`.

    Args:
        inp: The tokens [T, H].
        probs: The probability of each expert for each token [T, experts].
        routing_map: A mask [T, experts], 1 where a token goes to an expert.
        tokens_per_expert: The counts of the mask `routing_map` [experts].
        align_size: The number of rows to pad to a multiple of.

    Returns:
        Rows, probabilities, the row_id_map without padding, pad_offsets [experts] (the padding before each expert,
        which `moe_unpermute` takes) and the padded counts [experts].

    Raises:
        ValueError: If shapes do not fit each other, or a number makes no sense.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> tokens = torch.randn(4, 8)
        >>> mask = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]])  # which expert each token goes to
        >>> counts = mask.sum(0)
        >>> rows, *_, padded = mz.moe_permute_and_pad_with_probs(tokens, torch.rand(4, 2), mask, counts, 16)
        >>> rows.shape, padded.tolist()
        (torch.Size([32, 8]), [16, 16])
    """
    _check_input(inp, routing_map, "mask")
    _check_probs("probs", probs, routing_map.shape)
    experts = routing_map.shape[1]
    if align_size < 1:
        raise ValueError(f"align_size is {align_size}: give the number of rows to pad to a multiple of, 1 or more")
    if tuple(tokens_per_expert.shape) != (experts,):
        raise ValueError(
            f"tokens_per_expert has shape {tuple(tokens_per_expert.shape)}: give a count for each of {experts} experts"
        )
    tokens_per_expert = tokens_per_expert.to(inp.device)
    row_id_map = _rows_of_mask(routing_map)
    padded = (tokens_per_expert + align_size - 1) // align_size * align_size
    wrong = (routing_map.ne(0).sum(0) != tokens_per_expert).any()
    rows, is_wrong = torch.stack([padded.sum(), wrong.to(padded.dtype)]).tolist()
    require(
        is_wrong == 0,
        lambda: "tokens_per_expert must be the counts of routing_map",
        lambda: (
            f"tokens_per_expert is {tokens_per_expert.tolist()}, routing_map routes "
            f"{routing_map.ne(0).sum(0).tolist()}: they must be equal"
        ),
    )
    torch._check(rows >= 0)
    added = padded - tokens_per_expert
    pad_offsets = added.cumsum(0) - added
    sources = _sources(_with_padding(row_id_map, pad_offsets), rows)
    moved = _permute(inp, sources // experts)
    return moved, _permute_probs(probs.reshape(-1), sources), row_id_map, pad_offsets, padded


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Undo `moe_permute`: return for each token the sum of its rows, weighted if probabilities are given. A token
    without rows is zeros.

    Args:
        inp: The rows [N, H], usually the experts' outputs.
        row_id_map: What the permutation returned [T, C].
        merging_probs: The weight of each row [T, C], or None (the default) for a plain sum.
        restore_shape: It is only checked, because T is known from the map.
        map_type: "mask" or "index", with no effect.
        probs: The former name of `merging_probs`.
        pad_offsets: What the permutation returned if it padded, or None.

    Returns:
        The tokens [T, H].

    Raises:
        ValueError: If shapes do not fit each other, or a number makes no sense.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> tokens = torch.randn(4, 8)
        >>> mask = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]])  # which expert each token goes to
        >>> rows, row_id_map = mz.moe_permute(tokens, mask)
        >>> torch.equal(mz.moe_unpermute(rows, row_id_map), tokens)
        True
    """
    if probs is not None:
        warnings.warn("probs of moe_unpermute is called merging_probs", DeprecationWarning, stacklevel=2)
        merging_probs = probs
    _check_map_type(map_type)
    if inp.dim() != 2 or row_id_map.dim() != 2:
        raise ValueError(
            f"inp has shape {tuple(inp.shape)}, row_id_map {tuple(row_id_map.shape)}: give matrices, rows and the map "
            "that moe_permute gave"
        )
    tokens, choices = row_id_map.shape
    if restore_shape is not None and tuple(restore_shape) != (tokens, inp.shape[1]):
        raise ValueError(f"restore_shape is {tuple(restore_shape)}: the map is of shape {(tokens, inp.shape[1])}")
    if merging_probs is not None:
        _check_probs("merging_probs", merging_probs, row_id_map.shape)
    if pad_offsets is not None:
        if tuple(pad_offsets.shape) != (choices,):
            raise ValueError(
                f"pad_offsets has shape {tuple(pad_offsets.shape)}, row_id_map {tuple(row_id_map.shape)}: give what "
                "moe_permute_and_pad_with_probs gave, one offset for each expert"
            )
        row_id_map = _with_padding(row_id_map, pad_offsets)
    y = inp.dequantize() if isinstance(inp, QuantizedTensor) else inp
    sources = _sources(row_id_map, y.shape[0])
    if merging_probs is None:
        return _Sum.apply(y, sources // choices, tokens)
    return _WeightedSum.apply(y, merging_probs, sources)


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: Any, sorted_index: Any) -> torch.Tensor:
    """Return the chunks of rows of a matrix in another order.

    Args:
        inp: The rows [N, H].
        split_sizes: The number of rows of each chunk.
        sorted_index: The chunks in their new order, a permutation.

    Returns:
        The rows in their new order.

    Raises:
        ValueError: If shapes do not fit each other, or a number makes no sense.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = torch.arange(6.0).view(3, 2)
        >>> torch.equal(mz.moe_sort_chunks_by_index(x, [1, 2], [1, 0]), x[[1, 2, 0]])
        True
    """
    sizes, order = _check_chunks(inp, split_sizes, sorted_index)
    return sort_chunks(inp, sizes, order)


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: Any, sorted_index: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunks of rows of a matrix, and the probability of each row, in another order.

    Args:
        inp: The rows [N, H].
        probs: The probability of each row [N].
        split_sizes: The number of rows of each chunk.
        sorted_index: The chunks in their new order, a permutation.

    Returns:
        The rows and the probabilities in their new order.

    Raises:
        ValueError: If shapes do not fit each other, or a number makes no sense.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = torch.arange(6.0).view(3, 2)
        >>> y, probs = mz.moe_sort_chunks_by_index_with_probs(x, torch.rand(3), [1, 2], [1, 0])
        >>> y.shape, probs.shape
        (torch.Size([3, 2]), torch.Size([3]))
    """
    _check_probs("probs", probs, inp.shape[:1])
    sizes, order = _check_chunks(inp, split_sizes, sorted_index)
    return sort_chunks(inp, sizes, order), probs.index_select(0, _sorted_rows(probs.shape[0], sizes, order))


def sort_chunks(x: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Reorder chunks of rows of x [N, H] without reading `sizes` and `order` (int64 [chunks] on x's device) on the
    host."""
    return _Reorder.apply(x, _sorted_rows(x.shape[0], sizes, order))


# Rows of tokens


def _route(routing_map: torch.Tensor, num_out_tokens: int, map_type: str) -> tuple[torch.Tensor, int]:
    """Return the row_id_map [T, C] and the number of rows. Rows past `num_out_tokens` are dropped; -1 keeps all."""
    if num_out_tokens < -1:
        raise ValueError(f"num_out_tokens is {num_out_tokens}: give the number of rows, or -1 for all that are routed")
    row_id_map = _rows_of_mask(routing_map) if map_type == "mask" else _rows_of_index(routing_map)
    if num_out_tokens == -1:
        rows = int((row_id_map >= 0).sum())
        torch._check(rows >= 0)
        return row_id_map, rows
    return torch.where(row_id_map < num_out_tokens, row_id_map, -1), num_out_tokens


def _rows_of_mask(mask: torch.Tensor) -> torch.Tensor:
    routed = mask.ne(0).t()  # [experts, T]: rows are counted expert by expert
    before = routed.reshape(-1).cumsum(0).view(routed.shape) - 1
    return torch.where(routed, before, -1).t().contiguous()


def _rows_of_index(index: torch.Tensor) -> torch.Tensor:
    flat = index.reshape(-1).long()
    last = torch.iinfo(torch.int64).max  # sorts what is not routed behind all that is
    order = torch.where(flat < 0, last, flat).argsort(stable=True)
    rows = torch.empty_like(order).scatter(0, order, torch.arange(flat.shape[0], device=flat.device))
    return torch.where(flat < 0, -1, rows).view(index.shape)


def _with_padding(row_id_map: torch.Tensor, pad_offsets: torch.Tensor) -> torch.Tensor:
    return torch.where(row_id_map < 0, -1, row_id_map + pad_offsets)


def _sources(row_id_map: torch.Tensor, rows: int) -> torch.Tensor:
    """Return int64 [rows]: for each row its place in the map, t · C + c, or -1 (and -1 // C) for a row of zeros."""
    flat = row_id_map.reshape(-1)
    places = torch.arange(flat.shape[0], device=flat.device)
    made = torch.full((rows + 1,), -1, dtype=torch.int64, device=flat.device)  # the last row takes what is not routed
    return made.scatter(0, torch.where(flat < 0, rows, flat), places)[:rows]


def _sorted_rows(count: int, sizes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return int64 [count]: for each row of the result the row of the input that goes there."""
    starts, ends = (sizes.cumsum(0) - sizes)[order], sizes[order].cumsum(0)
    rows = torch.arange(count, device=sizes.device)
    if order.shape[0] == 0:
        return rows
    chunk = torch.searchsorted(ends, rows, right=True)
    return rows - (ends - sizes[order])[chunk] + starts[chunk]


# Moving and adding rows


def _permute(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the rows [N, H] of these tokens of x [T, H]; zeros for -1."""
    return _Take.apply(x, tokens)


def _permute_probs(probs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if probs.shape[0] == 0:  # zeros that depend on probs, which gets a gradient
        return probs.new_zeros(places.shape) + probs.sum()
    return torch.where(places < 0, 0.0, probs.index_select(0, places.clamp(min=0)))


def _taken(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a plain matrix; zeros for -1."""
    if x.shape[0] == 0:
        return x.new_zeros(rows.shape[0], x.shape[1])
    return torch.where((rows < 0)[:, None], 0.0, x.index_select(0, rows.clamp(min=0)))


def _summed(rows: torch.Tensor, tokens: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Sum FP32 rows [N, H] by token, one by one, to [count, H], rounded to `dtype`; rows of token -1 are dropped."""
    made = rows.new_zeros(count + 1, rows.shape[1])
    made.index_add_(0, torch.where(tokens < 0, count, tokens), rows)
    # This copies in FP32, too: torch 2.11 loses the gradients of a traced function that returns a view of what it made.
    return made[:count].to(dtype, copy=True)


class _Take(torch.autograd.Function):
    """This function takes rows of x, with zeros for -1; its gradient adds them up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
        ctx.save_for_backward(rows)
        ctx.count, ctx.dtype = x.shape[0], x.dtype
        if isinstance(x, QuantizedTensor):
            made = x.take_rows(rows)
            return _taken(x.dequantize(), rows) if made is None else made
        return _taken(x, rows)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return _summed(dy.float(), rows, ctx.count, ctx.dtype), None


class _Reorder(torch.autograd.Function):
    """This function takes every row of x once; its gradient orders them back. It does not read how many there are,
    because a graph may not know."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
        ctx.save_for_backward(rows)
        if isinstance(x, QuantizedTensor):
            made = x.take_rows(rows)
            return x.dequantize().index_select(0, rows) if made is None else made
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        back = torch.empty_like(rows).scatter(0, rows, torch.arange(rows.shape[0], device=rows.device))
        return dy.index_select(0, back), None


class _Sum(torch.autograd.Function):
    """This function sums the rows of each token; its gradient copies."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        return _summed(y.float(), tokens, count, y.dtype)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        return _taken(dx, tokens), None, None


class _WeightedSum(torch.autograd.Function):
    """This function sums the rows of each token, each times its probability [T, C]."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, probs: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, probs, sources)
        tokens, choices = probs.shape
        weights = _permute_probs(probs.float().reshape(-1), sources)
        return _summed(y.float() * weights[:, None], sources // choices, tokens, y.dtype)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        y, probs, sources = ctx.saved_tensors
        rows = _taken(dx, sources // probs.shape[1]).float()
        weights = _permute_probs(probs.float().reshape(-1), sources)
        slopes = (rows * y.float()).sum(-1)  # the gradient of each row's probability
        count = probs.numel()
        dprobs = slopes.new_zeros(count + 1).scatter(0, torch.where(sources < 0, count, sources), slopes)[:count]
        return (rows * weights[:, None]).to(y.dtype), dprobs.view(probs.shape).to(probs.dtype), None


# Checks


def _check_map_type(map_type: str) -> None:
    if map_type not in MAP_TYPES:
        raise ValueError(f"map_type is {map_type!r}: give 'mask' or 'index'")


def _check_input(inp: torch.Tensor, routing_map: torch.Tensor, map_type: str) -> None:
    _check_map_type(map_type)
    if inp.dim() != 2 or routing_map.dim() != 2 or inp.shape[0] != routing_map.shape[0] or routing_map.shape[1] == 0:
        raise ValueError(
            f"inp has shape {tuple(inp.shape)}, routing_map {tuple(routing_map.shape)}: give [tokens, hidden] and "
            f"[tokens, {'experts' if map_type == 'mask' else 'choices'}]"
        )
    if routing_map.is_floating_point():
        raise TypeError(f"routing_map is {routing_map.dtype}: give integers or bools")


def _check_probs(name: str, probs: torch.Tensor, shape: Any) -> None:
    if probs.shape != shape:
        raise ValueError(f"{name} has shape {tuple(probs.shape)}: it must be {tuple(shape)}, one for each place")
    if not probs.is_floating_point():
        raise TypeError(f"{name} is {probs.dtype}: give floats")


def _check_chunks(inp: torch.Tensor, split_sizes: Any, sorted_index: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as int64 tensors on inp's device; raise ValueError if they do not fit it."""
    sizes, order = (torch.as_tensor(x, dtype=torch.int64, device=inp.device) for x in (split_sizes, sorted_index))
    if inp.dim() != 2 or sizes.dim() != 1 or sizes.shape != order.shape:
        raise ValueError(
            f"inp has shape {tuple(inp.shape)}, split_sizes {tuple(sizes.shape)}, sorted_index {tuple(order.shape)}: "
            "give a matrix, the rows of each chunk, and the chunks in their new order"
        )
    if has_values_at_hand(sizes):
        if int(sizes.sum()) != inp.shape[0] or bool((sizes < 0).any()):
            raise ValueError(f"split_sizes is {sizes.tolist()}, inp has {inp.shape[0]} rows: it must add up to them")
        if order.sort().values.tolist() != list(range(order.shape[0])):
            raise ValueError(f"sorted_index is {order.tolist()}: give each of {order.shape[0]} chunks once")
    return sizes, order
