"""This module has helpers of Transformer Engine's attention: sequence lengths from masks, and conversions
between packed and padded layouts.

`cu_seqlens` has the beginnings of the sequences of a packed batch, and its end: int32 [batch + 1]. Masks are
True where a token is left out.
"""

import torch

from mezzotint.compat.constants import QKVLayouts


def check_set_window_size(attn_mask_type: str, window_size: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the window of a mask: a causal one sees nothing to the right, others see both sides."""
    is_causal = "causal" in attn_mask_type
    if window_size is None or tuple(window_size) in ((-1, -1), (-1, 0)):
        return (-1, 0) if is_causal else (-1, -1)
    left, right = window_size
    if left < 0 or right < 0:
        raise ValueError(f"window_size is {window_size}: give two sizes from 0 on, or (-1, -1) for none")
    return (left, 0) if is_causal else (left, right)


def get_cu_seqlens(mask: torch.Tensor) -> torch.Tensor:
    """Return `cu_seqlens` of a padding mask (batch, 1, 1, sequence)."""
    lengths = mask.squeeze(1).squeeze(1).logical_not().sum(dim=1)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def get_full_cu_seqlens(batch_size: int, max_seqlen: int, device: torch.device | str) -> torch.Tensor:
    """Return `cu_seqlens` of sequences that are all `max_seqlen` long."""
    return torch.arange(0, (batch_size + 1) * max_seqlen, max_seqlen, dtype=torch.int32, device=device)


def get_indices(max_seqlen: int, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return where the tokens of a packed batch lie in the padded one of batch · max_seqlen tokens, int64."""
    lengths = cu_seqlens.diff()
    starts = torch.arange(len(lengths), device=cu_seqlens.device) * max_seqlen
    return torch.cat(
        [start + torch.arange(n, device=start.device) for start, n in zip(starts, lengths.tolist(), strict=True)]
    )


def get_cu_seqlens_and_indices(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `cu_seqlens` and the indices of `get_indices` for a padding mask (batch, 1, 1, sequence)."""
    kept = mask.squeeze(1).squeeze(1).logical_not()
    return get_cu_seqlens(mask), kept.reshape(-1).nonzero().squeeze(1)


def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """Return a packed batch (tokens, …) padded with zeros, (batch, sequence, …)."""
    padded = tensor.new_zeros((b * max_seq_len, *tensor.shape[1:]))
    places = get_indices(max_seq_len, cu_seqlens)
    return padded.index_copy(0, places, tensor[: len(places)]).view(b, max_seq_len, *tensor.shape[1:])


def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """Return a padded batch (batch, sequence, …) packed into `t` tokens, with zeros behind the last sequence."""
    places = get_indices(tensor.shape[1], cu_seqlens)
    packed = tensor.new_zeros((t, *tensor.shape[2:]))
    return packed.index_copy(0, torch.arange(len(places), device=places.device), tensor.flatten(0, 1)[places])


def get_padding_mask(
    batch_size: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attention_type: str = "self",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the padding mask (batch, 1, 1, sequence) of `cu_seqlens`; for cross attention, one for each side."""
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q is None: give the begins of the sequences")
    if attention_type == "self":
        return _mask(batch_size, cu_seqlens_q, max_seqlen_q)
    if cu_seqlens_kv is None:
        raise ValueError("cu_seqlens_kv is None: cross attention has lengths of its own for keys and values")
    return _mask(batch_size, cu_seqlens_q, max_seqlen_q), _mask(batch_size, cu_seqlens_kv, max_seqlen_kv)


def _mask(batch_size: int, cu_seqlens: torch.Tensor, size: int | None) -> torch.Tensor:
    lengths = cu_seqlens.diff()[:batch_size]
    longest = int(lengths.max()) if size is None else size
    return (torch.arange(longest, device=lengths.device) >= lengths[:, None]).view(batch_size, 1, 1, longest)


def get_qkv_format(qkv_layout: str = "bshd_bshd_bshd", inference_params: object = None) -> tuple[str, str, str]:
    """Return the formats in a layout: of query, key and value together, of the query, and of key and value.

    Only with a cache (`inference_params`) can keys and values have another format than the query.
    """
    if qkv_layout not in QKVLayouts:
        raise ValueError(f"qkv_layout is {qkv_layout!r}: give one of {', '.join(QKVLayouts)}")
    parts = ["".join(c for c in part if c.isalpha()) for part in qkv_layout.removeprefix("paged_kv_").split("_")]
    query, key = parts[0], parts[0] if inference_params is None else parts[-1]
    return (query if query == key else f"{query}_2{key}"), query, key
