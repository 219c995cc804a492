"""Rotary position embedding: it rotates pairs of a head's channels by an angle that grows with the position.

    y[i]       = x[i] · cos(a) - x[i + D/2] · sin(a)        a = position · base^(-2i / D)
    y[i + D/2] = x[i + D/2] · cos(a) + x[i] · sin(a)        i < D/2

If it is interleaved, the pairs are (2i, 2i + 1). D channels are rotated, those behind them pass unchanged. All is
computed in FP32 and rounded once.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from mezzotint.attention.masks import check_counts, check_qkv_format, packed_positions
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.rope import rope, rope_join, rope_split
from mezzotint.layer.parameters import check_features, resolve_device


class RotaryPositionEmbedding(nn.Module):
    """This module makes the angles for `apply_rotary_pos_emb`. Call it with the number of positions.

    Args:
        dim: The number of channels of a head.
        rotary_percent: The fraction of the channels that is rotated. The default is 1.0.
        seq_len_interpolation_factor: How much longer sequences are than those that a model was trained on; with it and
            `pretrained_max_position_embeddings`, positions are squeezed into the range of training. None (the default)
            squeezes nothing.
        pretrained_max_position_embeddings: The number of positions that a model was trained on, or None.
        rotary_base: The base of the frequencies. The default is 10000.
        interleaved: Whether angles are laid out for pairs of channels (2i, 2i + 1), instead of pairs of the two halves.
            The default is False.

    Raises:
        ValueError: If the channels make no pairs.

    Example:
        >>> import mezzotint as mz
        >>> mz.RotaryPositionEmbedding(64)(128).shape
        torch.Size([128, 1, 1, 64])
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        check_features(dim=dim)
        turned = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if turned < 2 or turned % 2:
            raise ValueError(f"dim is {dim} and rotary_percent {rotary_percent}: {turned} channels make no pairs")
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved
        exponent = torch.arange(0, turned, 2, dtype=torch.float32, device=resolve_device(None)) / turned
        self.register_buffer("inv_freq", torch.div(1.0, rotary_base**exponent))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the module, but keep the frequencies in FP32 if a model is cast to 16 bits: their rounding grows
        with the position."""
        before = self.inv_freq
        made = super()._apply(fn, recurse)
        if self.inv_freq.dtype != before.dtype:
            self.inv_freq = before.to(self.inv_freq.device)
        return made

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Return the angles of positions `offset` to `offset + max_seq_len`, FP32 [max_seq_len, 1, 1, rotated
        channels]."""
        place = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            place = place * (trained / max_seq_len if max_seq_len > trained * factor else 1.0 / factor)
        angles = place[:, None] * self.inv_freq.float()
        both = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return both[:, None, None, :]


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate queries or keys by angles that depend on their positions.

    In "thd", and with `start_positions`, tokens past the last angle are taken for padding: they get the last one.

    Args:
        t: The queries or keys, [s, b, h, d], [b, s, h, d] or [t, h, d].
        freqs: The angles [positions, 1, 1, d2], with d2 at most d, that a `RotaryPositionEmbedding` made.
        tensor_format: The order of dimensions of `t`, "sbhd" (the default), "bshd" or "thd".
        start_positions: The position at which each sequence begins, or None for 0; more entries than sequences are not
            read.
        interleaved: Whether pairs are channels (2i, 2i + 1). The default is False.
        fused: It is accepted and has no effect: there is one implementation.
        cu_seqlens: The bounds of sequences [b + 1], which "thd" needs.
        cp_size: The number of ranks of context parallelism: if there are several, `t` holds this rank's two chunks of
            each sequence, and `cu_seqlens` counts all tokens. The default is 1.
        cp_rank: This rank among them. The default is 0.

    Returns:
        The rotated tensor, of the shape and dtype of `t`.

    Raises:
        ValueError: If `t` has not the dimensions of its format.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> q = torch.randn(16, 2, 4, 64)  # sequence, batch, head, channel
        >>> freqs = mz.RotaryPositionEmbedding(64).to("cpu")(16)
        >>> mz.apply_rotary_pos_emb(q, freqs).shape
        torch.Size([16, 2, 4, 64])
    """
    check_qkv_format("tensor_format", tensor_format)
    if t.dim() != len(tensor_format):
        raise ValueError(f"t has shape {tuple(t.shape)}: {tensor_format!r} needs {len(tensor_format)} dimensions")
    angles = _cos_sin(t, freqs, t.shape[-1], tensor_format, start_positions, cu_seqlens, cp_size, cp_rank)
    return _turn(t, angles, interleaved)


def turn_both(
    q: torch.Tensor,
    k: torch.Tensor,
    freqs: tuple[torch.Tensor, torch.Tensor],
    tensor_format: str,
    start_positions: torch.Tensor | None,
    interleaved: bool,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys as `apply_rotary_pos_emb` does; if they belong to the same tokens, their angles are made
    once."""
    of_q = of_k = _cos_sin(q, freqs[0], q.shape[-1], tensor_format, start_positions, cu_seqlens[0])
    if q.shape[:-2] != k.shape[:-2] or freqs[1] is not freqs[0] or cu_seqlens[1] is not cu_seqlens[0]:
        of_k = _cos_sin(k, freqs[1], k.shape[-1], tensor_format, start_positions, cu_seqlens[1])
    return _turn(q, of_q, interleaved), _turn(k, of_k, interleaved)


def _turn(t: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], interleaved: bool) -> torch.Tensor:
    """Rotate t [a, b, h, d], or packed [t, h, d]."""
    return _Rope.apply(t, *angles, interleaved) if t.dim() == 4 else _Rope.apply(t[:, None], *angles, interleaved)[:, 0]


class _Rope(torch.autograd.Function):
    """This function rotates t by angles [a or 1, b or 1, D], which get no gradient; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return run_op(rope, t, cos, sin, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return run_op(rope, dy, cos, sin, ctx.interleaved, True), None, None, None


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv into q [.., g · q / k, k], k [.., g, k] and v [.., g, v], and rotate q and k.

    `qkv` is [s, b, g, q + k + v] or [b, s, g, q + k + v], or packed, "thd", [t, g, q + k + v] with `cu_seqlens`; the
    channels of each group are side by side, and `qkv_split_arg_list` says how many there are of each. The other
    arguments are those of `apply_rotary_pos_emb`.
    """
    check_qkv_format("tensor_format", tensor_format)
    if qkv.dim() != len(tensor_format):
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}: give {', '.join(tensor_format[:-2])}, groups, channels")
    if sum(qkv_split_arg_list) != qkv.shape[-1] or len(qkv_split_arg_list) != 3:
        raise ValueError(f"qkv_split_arg_list is {qkv_split_arg_list}: give three that add up to {qkv.shape[-1]}")
    groups, (of_q, of_k, of_v) = qkv.shape[-2], qkv_split_arg_list
    if of_k < 1 or of_q % of_k:
        raise ValueError(f"qkv_split_arg_list is {qkv_split_arg_list}: the first is a multiple of the second, a head's")
    if of_k == of_v:
        return split_turned(
            qkv.flatten(-2),
            groups * (of_q // of_k),
            groups,
            groups,
            (q_freqs, k_freqs),
            tensor_format,
            start_positions,
            interleaved,
            (cu_seqlens, cu_seqlens),
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
    q, k, v = qkv.split(qkv_split_arg_list, -1)
    q = q.reshape(*q.shape[:-2], -1, of_k)
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "cp_size": cp_size, "cp_rank": cp_rank}
    q = apply_rotary_pos_emb(q, q_freqs, tensor_format, start_positions, interleaved, **options)
    k = apply_rotary_pos_emb(k, k_freqs, tensor_format, start_positions, interleaved, **options)
    return q, k, v


def split_turned(
    mixed: torch.Tensor,
    heads: int,
    kv_heads: int,
    blocks: int,
    freqs: tuple[torch.Tensor, torch.Tensor],
    tensor_format: str,
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split mixed [s, b, width], [b, s, width] or [t, width] into q, k and v, dense, with q and k rotated;
    `kernels/rope.py` says how they lie in it.

    The other arguments are those of `apply_rotary_pos_emb`; `freqs` and `cu_seqlens` are pairs for queries and keys.
    `mixed` itself is not kept for backward, and its gradient is written once.
    """
    if mixed.dim() != len(tensor_format) - 1:
        raise ValueError(
            f"the projection of hidden_states has shape {tuple(mixed.shape)}: {tensor_format!r} needs "
            f"{len(tensor_format) - 1} dimensions"
        )
    if freqs[0].shape[-1] != freqs[1].shape[-1]:
        raise ValueError(
            f"freqs turn {freqs[0].shape[-1]} channels of queries and {freqs[1].shape[-1]} of keys: give as many"
        )
    channels = mixed.shape[-1] // (heads + 2 * kv_heads)
    of_q = _cos_sin(mixed, freqs[0], channels, tensor_format, start_positions, cu_seqlens[0], cp_size, cp_rank)
    of_k: tuple[Any, Any] = (None, None)
    if freqs[1] is not freqs[0] or cu_seqlens[1] is not cu_seqlens[0]:
        of_k = _cos_sin(mixed, freqs[1], channels, tensor_format, start_positions, cu_seqlens[1], cp_size, cp_rank)
    if tensor_format == "thd":
        q, k, v = _Split.apply(mixed[:, None], *of_q, *of_k, heads, kv_heads, blocks, interleaved)
        return q.squeeze(1), k.squeeze(1), v.squeeze(1)
    return _Split.apply(mixed, *of_q, *of_k, heads, kv_heads, blocks, interleaved)


class _Split(torch.autograd.Function):
    """This function splits mixed [a, b, width] into rotated queries and keys, and values; keys have angles of their
    own, if those are not None."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cos: torch.Tensor | None,
        k_sin: torch.Tensor | None,
        heads: int,
        kv_heads: int,
        blocks: int,
        interleaved: bool,
    ) -> Any:
        angles = [cos, sin] if k_cos is None or k_sin is None else [cos, sin, k_cos, k_sin]
        ctx.save_for_backward(*angles)
        ctx.blocks, ctx.interleaved = blocks, interleaved
        return run_op(rope_split, mixed, angles, heads, kv_heads, blocks, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        dmixed = run_op(rope_join, dq, dk, dv, list(ctx.saved_tensors), ctx.blocks, ctx.interleaved)
        return dmixed, None, None, None, None, None, None, None, None


def _cos_sin(
    t: torch.Tensor,
    freqs: torch.Tensor,
    channels: int,
    tensor_format: str,
    starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines for the tokens of t [s, b, ..], [b, s, ..] or [t, ..], whose heads have `channels`:
    FP32 [s, 1 or b, D], [1 or b, s, D] or [t, 1, D]."""
    if cp_size > 1 and starts is not None:
        raise ValueError(f"start_positions with cp_size={cp_size}: sequences that are split begin at 0; leave it None")
    positions, turned = freqs.shape[0], freqs.shape[-1]
    if turned > channels:
        raise ValueError(f"freqs has {turned} channels, t {channels}: turn at most as many as there are")
    angles = freqs.reshape(positions, turned).float()
    if tensor_format == "thd":
        places = _packed_places(t, starts, cu_seqlens, cp_size, cp_rank)
        angles = angles[places.clamp(max=positions - 1)][:, None]
        return angles.cos(), angles.sin()
    by_place = tensor_format == "sbhd"
    batch, length = (t.shape[1], t.shape[0]) if by_place else (t.shape[0], t.shape[1])
    if length * cp_size > positions:
        raise ValueError(f"freqs has {positions} positions, t {length * cp_size}: make freqs for the longest sequence")
    if starts is not None:
        places = starts[:batch, None] + torch.arange(length, device=t.device)
        angles = angles[places.clamp(max=positions - 1)]  # [b, s, D]
        angles = angles.transpose(0, 1) if by_place else angles
    else:
        if cp_size > 1:
            angles = angles[_on_rank(torch.arange(length, device=t.device), length, cp_size, cp_rank)]
        angles = angles[:length, None] if by_place else angles[None, :length]
    return angles.cos(), angles.sin()


def _packed_places(
    t: torch.Tensor, starts: torch.Tensor | None, cu_seqlens: torch.Tensor | None, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Return the place of each token of a packed batch in its whole sequence, [t]."""
    if cu_seqlens is None:
        raise ValueError("tensor_format 'thd' needs cu_seqlens, [number of sequences + 1]")
    check_counts(cu_seqlens=cu_seqlens)
    cu_seqlens = cu_seqlens // cp_size
    sequence, place = packed_positions(cu_seqlens, t.shape[0])
    place = _on_rank(place, cu_seqlens.diff()[sequence], cp_size, cp_rank)
    return place if starts is None else place + starts[sequence]


def _on_rank(place: torch.Tensor, length: int | torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Return places in the whole sequence for places in a rank's shard of `length` tokens. Of 2 · `cp_size` chunks the
    rank has number `cp_rank`, and the one that is as far from the end."""
    if cp_size == 1:
        return place
    chunk = length // 2
    behind = length * cp_size - (cp_rank + 2) * chunk
    return place + torch.where(place < chunk, cp_rank * chunk, behind)
