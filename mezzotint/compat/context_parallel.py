"""This module lays packed sequences out for context parallelism as Transformer Engine does. Attention
itself is not parallel here.

Each sequence of a packed batch (`cu_seqlens`, where they begin and end) is cut into 2 · ranks equal chunks, and
rank r has the chunks r and 2 · ranks − 1 − r, so that with a causal mask all ranks have the same amount of
work. Data loaders call these functions.
"""

from itertools import pairwise
from typing import Any

import torch

from mezzotint.comm.groups import rank_in, world_size


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """Return the indices, int32, of the tokens that a rank has of `total_tokens`, sequence by sequence."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}: give one from 0 to world_size - 1, {world_size - 1}")
    chunks = 2 * world_size
    bounds = cu_seqlens.tolist()
    if any(bound % chunks for bound in bounds) or total_tokens % chunks:
        raise ValueError(
            f"cu_seqlens is {bounds}, total_tokens {total_tokens}: every length must be a multiple of 2 · world_size, "
            f"{chunks}; pad_thd_sequences_for_cp pads them"
        )
    ranges = []
    for start, end in pairwise(bounds):
        size = (end - start) // chunks
        for chunk in (rank, chunks - 1 - rank):
            ranges.append(torch.arange(start + chunk * size, start + (chunk + 1) * size, dtype=torch.int32))
    found = torch.cat(ranges).to(cu_seqlens.device)
    if len(found) * world_size != total_tokens:
        raise ValueError(f"total_tokens is {total_tokens}: cu_seqlens ends at {bounds[-1]}; give the same")
    return found


def _rank_order(cu_seqlens: torch.Tensor, cp_size: int, total: int) -> torch.Tensor:
    """Return the indices of the tokens of all ranks, one rank after the other."""
    parts = [thd_get_partitioned_indices(cu_seqlens, total, cp_size, rank) for rank in range(cp_size)]
    return torch.cat(parts).long()


def thd_sequence_order_to_cp_rank_order(
    x: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, seq_dim: int = 0
) -> torch.Tensor:
    """Return the tokens of all sequences in the order in which the ranks have them, one rank after the other."""
    return x.index_select(seq_dim, _rank_order(cu_seqlens, cp_size, x.shape[seq_dim]).to(x.device))


def thd_cp_rank_order_to_sequence_order(
    x: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, seq_dim: int = 0
) -> torch.Tensor:
    """Return tokens in the order of the sequences, from the order of `thd_sequence_order_to_cp_rank_order`."""
    order = _rank_order(cu_seqlens, cp_size, x.shape[seq_dim]).to(x.device)
    return x.index_select(seq_dim, torch.argsort(order))


def _padded_lengths(cu_seqlens: torch.Tensor, divisibility_factor: int) -> torch.Tensor:
    lengths = cu_seqlens.diff()
    return (lengths + divisibility_factor - 1) // divisibility_factor * divisibility_factor


def pad_thd_sequences_for_cp(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad every sequence at its end to a multiple of `divisibility_factor`, and return (input_ids
    [n], labels [n], cu_seqlens).

    `input_ids` and `labels` are [tokens], or (1, tokens).
    """
    lengths, padded = cu_seqlens.diff(), _padded_lengths(cu_seqlens, divisibility_factor)
    bounds = torch.cat([cu_seqlens.new_zeros(1), padded.cumsum(0).to(cu_seqlens.dtype)])
    # Each token goes as far behind the new beginning of its sequence as it was behind the old one.
    shift = torch.repeat_interleave(bounds[:-1] - cu_seqlens[:-1], lengths)
    places = torch.arange(int(cu_seqlens[0]), int(cu_seqlens[-1]), device=cu_seqlens.device) + shift
    made = []
    for given, padding in ((input_ids, padding_token_id), (labels, padding_label_id)):
        flat = given.reshape(-1)
        out = flat.new_full((int(bounds[-1]),), padding)
        out[places.to(flat.device)] = flat[int(cu_seqlens[0]) : int(cu_seqlens[-1])]
        made.append(out)
    return made[0], made[1], bounds


def generate_positional_ids_for_cp(
    cu_seqlens: torch.Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """Return the position of each token in its padded sequence; positions continue through the padding."""
    padded = _padded_lengths(cu_seqlens, divisibility_factor)
    starts = torch.repeat_interleave(padded.cumsum(0) - padded, padded)
    return (torch.arange(len(starts), device=starts.device) - starts).to(dtype)


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: torch.Tensor,
    input_ids_padded: torch.Tensor | None,
    labels_padded: torch.Tensor | None,
    position_ids_padded: torch.Tensor | None,
    cp_group: Any = None,
    qvk_format: str = "thd",
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return this rank's tokens of a packed batch, along the first or the second dimension; None stays None."""
    if qvk_format != "thd":
        raise NotImplementedError(f"qvk_format is {qvk_format!r}: only 'thd', packed sequences, is cut")
    if world_size(cp_group) == 1:
        return input_ids_padded, labels_padded, position_ids_padded
    total = int(cu_seqlens_padded[-1])
    indices = thd_get_partitioned_indices(cu_seqlens_padded, total, world_size(cp_group), rank_in(cp_group))

    def part(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        dims = [dim for dim in (1, 0) if dim < x.dim() and x.shape[dim] == total]
        if not dims:
            raise ValueError(f"a tensor has shape {tuple(x.shape)}: one of its first two dimensions must be {total}")
        return x.index_select(dims[0], indices.to(x.device))

    return part(input_ids_padded), part(labels_padded), part(position_ids_padded)
