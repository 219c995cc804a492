"""DotProductAttention: it computes softmax(mask(Q · Kᵀ · scale + bias)) · V, always in high precision.

Heads come in as [s, b, h, d], [b, s, h, d] or packed [t, h, d]. The kernel sees [b, h, s, d]; a packed batch is one
sequence to it, whose mask keeps the sequences in it apart.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mezzotint.attention.attend import Scores, attend, largest_logit
from mezzotint.attention.kv_cache import InferenceParams, claim_layer
from mezzotint.attention.masks import (
    Rule,
    Side,
    alibi_slopes,
    align,
    batch_sides,
    cached_side,
    check_bias_type,
    check_probability,
    check_qkv_format,
    checked_mask,
    packed_side,
    packed_sides,
    resolve_rule,
    tokens_of,
)
from mezzotint.comm.groups import check_group, rank_in, resolve_size, shard_size, world_size
from mezzotint.compat.attention import AttentionNames
from mezzotint.layer.boundary import dequantized
from mezzotint.layer.configured import Configured, config_of
from mezzotint.layer.names import Named
from mezzotint.layer.parameters import PlaceParameter, check_features, default_init, resolve_device
from mezzotint.region import recipe_in_force
from mezzotint.tensor.checks import check_choice
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tracing import call_untraced

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True)
class AttentionConfig(GraphConstant):
    """An `AttentionConfig` holds what the forward of a `DotProductAttention` reads of it."""

    num_attention_heads: int
    num_gqa_groups: int
    head_dim_k: int
    head_dim_v: int
    attention_dropout: float
    qkv_format: str
    attn_mask_type: str
    window_size: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    softmax_scale: float
    softmax_type: str
    return_max_logit: bool


class DotProductAttention(AttentionNames, Configured, Named):
    """This module computes scaled dot product attention, softmax(q · kᵀ · scale + mask) · v, for several heads.

    It has no weights, but for `softmax_offset` if that is learnable, and computes in high precision: PyTorch's
    attention does the work. Heads and groups are divided over the `tp_size` ranks of tensor parallelism.

    Args:
        num_attention_heads: The number of heads of queries, over all ranks.
        kv_channels: The number of channels of a head, or a pair: those of keys, those of values.
        num_gqa_groups: The number of heads of keys and values (grouped-query attention), a divisor of
            `num_attention_heads`. None means as many as there are heads of queries.
        attention_dropout: The probability with which attention weights are set to zero in training. The default is 0.
        qkv_format: The order of dimensions: "sbhd" (sequence, batch, head, channel; the default), "bshd", or "thd" for
            sequences of several lengths packed one behind the other.
        attn_mask_type: Which keys a query may see: "causal" (the default), "no_mask", "padding", "padding_causal",
            "causal_bottom_right", "padding_causal_bottom_right" or "arbitrary". A call may give another.
        window_size: A pair (left, right): how many keys before and after its own position a query may see, with -1 for
            all. None sets no window.
        bottom_right_diagonal: Whether the causal diagonal and the window are aligned with the last query and the last
            key instead of the first ones. None means as `attn_mask_type` says.
        sequence_parallel: It is accepted for the signature's sake and has no effect: attention communicates with no
            other rank.
        tp_size: The number of ranks over which the heads are divided. The default is 1.
        get_rng_state_tracker: A function without arguments that returns a `CudaRNGStatesTracker`, from whose random
            numbers dropout is drawn, or None for PyTorch's own.
        tp_group: The process group of these ranks, or None.
        layer_number: The number of the layer in the model, from 1, by which an `InferenceParams` finds the layer's
            cache. None means 1.
        attention_type: "self" (the default) or "cross", for attention to the output of an encoder.
        cp_group: The process group of context parallelism, which is not supported yet: None or a group of one rank.
        cp_global_ranks: The global ranks of that group. It is accepted and has no effect.
        cp_stream: The CUDA stream of that group. It is accepted and has no effect.
        cp_comm_type: The way in which that group would communicate. It is accepted and has no effect.
        softmax_scale: The factor of the scores before the softmax. None means 1 / sqrt(channels of a key).
        softmax_type: "vanilla" (the default), "off-by-one", which adds 1 to the denominator of the softmax, or
            "learnable", which adds e to the power of the parameter `softmax_offset`.
        return_max_logit: Whether the largest score of each head is returned as well. The default is False.
        name: The name of the module, by which a recipe can choose its format and by which messages mention it. None
            means the path that `name_modules` or `convert` gives it.

    Raises:
        ValueError: If a number of heads does not divide over groups or ranks, or a name is unknown.
        NotImplementedError: If `cp_group` has more than one rank.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> attention = mz.DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd")
        >>> q, k, v = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
        >>> attention(q, k, v).shape
        torch.Size([2, 8, 64])
    """

    softmax_offset: torch.Tensor | None

    _CONFIG = AttentionConfig

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_features(num_attention_heads=num_attention_heads, num_gqa_groups=groups)
        check_features(**{"kv_channels of keys": channels[0], "kv_channels of values": channels[1]})
        size = resolve_size(tp_group, tp_size)
        shard_size("num_attention_heads", num_attention_heads, size)
        shard_size("num_gqa_groups", groups, size)
        check_qkv_format("qkv_format", qkv_format)
        check_choice("attention_type", attention_type, ("self", "cross"))
        check_choice("softmax_type", softmax_type, SOFTMAX_TYPES)
        check_probability("attention_dropout", attention_dropout)
        if num_attention_heads % groups:
            raise ValueError(f"num_gqa_groups is {groups}: give a divisor of num_attention_heads={num_attention_heads}")
        resolve_rule(attn_mask_type, window_size, bottom_right_diagonal)
        self.name = name
        self.tp_size, self.tp_rank = size, 0 if tp_group is None else rank_in(tp_group)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads // size, groups // size  # of this rank
        self.head_dim_k, self.head_dim_v = channels
        self.attention_dropout, self.get_rng_state_tracker = attention_dropout, get_rng_state_tracker
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.layer_number = 1 if layer_number is None else layer_number
        self.attention_type = attention_type
        self.softmax_scale = channels[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.softmax_type, self.return_max_logit = softmax_type, return_max_logit
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        offset = None
        if softmax_type == "learnable":
            heads = self.num_attention_heads
            offset = nn.Parameter(torch.empty(heads, dtype=torch.float32, device=resolve_device(None)))
        self.register_parameter("softmax_offset", offset)
        self.reset_parameters()
        self._configure()

    def reset_parameters(self, defer_init: bool = False) -> None:
        if defer_init or self.softmax_offset is None:
            return
        if self.softmax_offset.is_meta:
            self.softmax_offset = nn.Parameter(torch.empty_like(self.softmax_offset, device=resolve_device(None)))
        with torch.no_grad():
            default_init(self.softmax_offset)

    def split_over(self, tp_group: Any, sequence_parallel: bool, place: PlaceParameter, *modes: str) -> None:
        """Reduce the numbers of heads and groups, which are those of all ranks, to those of this rank."""
        if modes:
            raise ValueError("DotProductAttention has no weight: it is split with the MultiheadAttention around it")
        if isinstance(self.softmax_offset, torch.nn.Parameter):
            raise ValueError("softmax_type='learnable' is not split by styles: give tp_group to the constructor")
        size = world_size(tp_group)
        heads = shard_size("num_attention_heads", self.num_attention_heads, size)
        self.num_gqa_groups = shard_size("num_gqa_groups", self.num_gqa_groups, size)
        self.num_attention_heads, self.tp_size, self.tp_rank = heads, size, rank_in(tp_group)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of tensor parallelism. Attention itself communicates with no other rank."""
        if self.tp_size == 1:  # then it has all heads
            return
        check_group(tp_group, self.tp_size)
        self.tp_rank = 0 if tp_group is None else rank_in(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the group of context parallelism. A group of one rank changes nothing; a larger one is refused."""
        groups = cp_group if isinstance(cp_group, list) else [cp_group]
        for group in groups:
            if group is not None and torch.distributed.get_world_size(group) > 1:
                raise NotImplementedError(
                    f"cp_group has {torch.distributed.get_world_size(group)} ranks: context parallelism is not "
                    "there yet; leave cp_group=None and shard with FSDP2"
                )

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> torch.Tensor | Any:
        """Compute attention [s, b, h · d] from queries [s, b, h, d], keys and values [s, b, g, d]; "bshd" and "thd"
        likewise.

        `attention_mask` is bool, and True is masked out. For padding masks it is [b, 1, 1, s], or a pair for queries
        and keys; `cu_seqlens_q` and `cu_seqlens_kv` [b + 1] may be given instead. For "arbitrary" it broadcasts to [b,
        h, s_q, s_k]. "thd" needs both `cu_seqlens`, and the padded ones if there is padding between sequences. They
        begin with 0 and do not fall. That is checked only if they are on the CPU, outside of graphs, because the host
        would have to wait for a GPU.

        `window_size` (l, r) lets a query see keys from l before it to r after it, -1 for all. `core_attention_bias`
        broadcasts to [b, h, s_q, s_k]; ALiBi takes `alibi_slopes` [h] or [b, h], or its own. `qkv_layer` holds queries,
        keys and values side by side in dimension `qkv_interleave_dim`, -3 or -2; with `query_layer`, `kv_layer` holds
        keys and values so.
        """
        if fp8_output or score_mod is not None or score_mod_bprop is not None:
            raise NotImplementedError(
                f"fp8_output={fp8_output}, score_mod={score_mod}, score_mod_bprop={score_mod_bprop}: attention is "
                "PyTorch's, in high precision; leave them off, and give core_attention_bias for scores of your own"
            )
        own = config_of(self)
        check_attention_recipe()
        check_bias_type(core_attention_bias_type)
        q, k, v = unpack_qkv(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        q, k, v = dequantized(q), dequantized(k), dequantized(v)
        layout = own.qkv_format if qkv_format is None else qkv_format
        check_qkv_format("qkv_format", layout)
        check_heads(own, q, k, v, layout)
        rule = resolve_rule(
            own.attn_mask_type if attn_mask_type is None else attn_mask_type,
            own.window_size if window_size is None else window_size,
            own.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
        )
        bias = bias_after_scale(own, core_attention_bias_type, core_attention_bias)
        slopes = None
        if core_attention_bias_type == "alibi" or alibi_slopes is not None:
            slopes = self._slopes(core_attention_bias_type, alibi_slopes, q.device)
        sink = None if own.softmax_type == "vanilla" else self._sink(q.device)
        arbitrary = checked_mask(attention_mask) if rule.is_arbitrary else None
        cu = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        rule, q, k, v, sides = self._batch_first(rule, q, k, v, layout, cu, inference_params)
        is_plain = False
        if sides is None:
            is_plain = rule.is_plain(q.shape[1], k.shape[1]) and bias is None and slopes is None and sink is None
            if not is_plain or own.return_max_logit:
                tokens = tokens_of(rule, q, k, attention_mask, cu_seqlens_q, cu_seqlens_kv)
                sides = batch_sides(rule, q.shape[1], k.shape[1], *tokens, q.device)
        scores = Scores(
            rule=rule,
            is_plain=is_plain,
            sides=sides,
            arbitrary=arbitrary,
            bias=bias,
            slopes=slopes,
            sink=sink,
            scale=own.softmax_scale,
            dropout=own.attention_dropout if own.attention_dropout > 0.0 and self.training else 0.0,
            recomputes=checkpoint_core_attention,
        )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = self._attend(q, k, v, scores)
        y = y.permute(2, 0, 1, 3) if layout == "sbhd" else y.transpose(1, 2)
        y = (y[0] if layout == "thd" else y).flatten(-2)
        return (y, largest_logit(q, k, scores).to(y.dtype)) if own.return_max_logit else y

    if TYPE_CHECKING:
        __call__ = forward

    def _batch_first(
        self,
        rule: Rule,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: str,
        cu_seqlens: tuple[torch.Tensor | None, ...],
        params: InferenceParams | None,
    ) -> tuple[Rule, torch.Tensor, torch.Tensor, torch.Tensor, tuple[Side, Side] | None]:
        """Return queries, keys and values as [b, s, h, d], with the cached ones; the rule for them; and both sides of
        the mask if packed sequences or a cache determine which tokens there are, else None."""
        sides = None
        if params is not None:
            rule, k, v, sides = self._cached(rule, q, k, v, layout, params)
        elif layout == "thd":
            sides = packed_sides(rule, q.shape[0], k.shape[0], *cu_seqlens)
            k, v = k[None], v[None]
        elif layout == "sbhd":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        if layout == "sbhd":
            q = q.transpose(0, 1)
        elif layout == "thd":
            q = q[None]
        return rule, q, k, v, sides

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q, k, v, scores)

        tracker = self.get_rng_state_tracker if scores.dropout > 0.0 else None
        with nullcontext() if tracker is None else tracker().fork():
            return checkpoint(run, q, k, v, use_reentrant=False) if scores.recomputes else run(q, k, v)

    def _cached(
        self, rule: Rule, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, params: InferenceParams
    ) -> tuple[Rule, torch.Tensor, torch.Tensor, tuple[Side, Side]]:
        """Write the new keys and values to the cache, and return the rule, all keys and values, [b, s, g, d], and both
        sides of the mask. The queries are the last tokens of their sequences."""
        if not rule.has_padding:
            raise ValueError(
                "inference_params needs a padding mask, since sequences have their own lengths: give "
                "attn_mask_type='padding_causal' or 'padding'"
            )
        rule = Rule(has_padding=True, is_arbitrary=False, left=rule.left, right=rule.right, is_bottom_right=True)
        q = q.transpose(0, 1) if layout == "sbhd" else q
        batch = params.max_batch_size if layout == "thd" else q.shape[0]
        if batch > params.max_batch_size:
            raise ValueError(f"the batch has {batch} rows: inference_params was made for {params.max_batch_size}")
        call_untraced(claim_layer, params, self.layer_number, self)
        if self.layer_number not in params.cache_manager.cache:
            params.allocate_memory(self.layer_number)
        k, v, cu_new, cu_all, size, _ = params.step(self.layer_number, k, v, layout)
        if params.is_paged:
            k, v = params.convert_paged_to_nonpaged(self.layer_number, batch, q.dtype)
        new, total = cu_new.diff(), cu_all.diff()
        if layout == "thd":
            sides = packed_side(cu_new, None, q.shape[0]), cached_side(total, size)
            align(rule, sides[0], new, total)
            k, v = k.flatten(0, 1)[None], v.flatten(0, 1)[None]
        else:
            q_tokens = torch.arange(q.shape[1], device=q.device) < new[:batch, None]
            k_tokens = torch.arange(size, device=q.device) < total[:batch, None]
            sides = batch_sides(rule, q.shape[1], size, q_tokens, k_tokens, q.device)
        return rule, k.to(q.dtype), v.to(q.dtype), sides

    def _slopes(self, bias_type: str, slopes: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        if bias_type != "alibi":
            if slopes is not None:
                raise ValueError(f"alibi_slopes with core_attention_bias_type={bias_type!r}: give 'alibi'")
            return None
        if slopes is None:
            first = self.num_attention_heads * self.tp_rank
            slopes = alibi_slopes(self.num_attention_heads * self.tp_size, device)
            return slopes[None, first : first + self.num_attention_heads]
        if slopes.dim() not in (1, 2) or slopes.shape[-1] != self.num_attention_heads:
            raise ValueError(
                f"alibi_slopes has shape {tuple(slopes.shape)}: give [{self.num_attention_heads}] or "
                f"[b, {self.num_attention_heads}]"
            )
        return slopes.reshape(-1, self.num_attention_heads)

    def _sink(self, device: torch.device) -> torch.Tensor | None:
        if self.softmax_type == "off-by-one":
            return torch.zeros(self.num_attention_heads, dtype=torch.float32, device=device)
        return self.softmax_offset

    def extra_repr(self) -> str:
        return (
            f"num_attention_heads={self.num_attention_heads}, num_gqa_groups={self.num_gqa_groups}, "
            f"head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}, attn_mask_type={self.attn_mask_type}"
        )


def check_heads(own: AttentionConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Raise ValueError if queries, keys and values do not fit the module, or each other."""
    for label, tensor, heads, channels in (
        ("query_layer", q, own.num_attention_heads, own.head_dim_k),
        ("key_layer", k, own.num_gqa_groups, own.head_dim_k),
        ("value_layer", v, own.num_gqa_groups, own.head_dim_v),
    ):
        if tensor.dim() != len(layout) or tuple(tensor.shape[-2:]) != (heads, channels):
            raise ValueError(
                f"{label} has shape {tuple(tensor.shape)}: {layout!r} needs {len(layout)} dimensions, the last two "
                f"({heads}, {channels})"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"key_layer has shape {tuple(k.shape)}, value_layer {tuple(v.shape)}: give as many tokens")
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise ValueError(f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}: give one dtype")


def bias_after_scale(own: AttentionConfig, bias_type: str, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return the bias as it is added after the scale."""
    if (bias is None) != (bias_type in ("no_bias", "alibi")):
        raise ValueError(
            f"core_attention_bias_type is {bias_type!r} and core_attention_bias "
            f"{'missing' if bias is None else 'given'}: pre_scale_bias and post_scale_bias need it, others do not"
        )
    if bias is None or bias_type == "post_scale_bias":
        return bias
    return (bias.float() * own.softmax_scale).to(bias.dtype)


def check_attention_recipe() -> None:
    """Raise if the recipe asks for quantized attention, which is not there."""
    recipe = recipe_in_force()
    if recipe is not None and recipe.quantizes_attention():
        raise NotImplementedError(
            "the recipe has fp8_dpa or fp8_mha set: attention is PyTorch's, in high precision; leave them False"
        )


def unpack_qkv(
    query: Any, key: Any, value: Any, qkv: Any, kv: Any, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values, which may come in one tensor, or keys and values in one."""
    if dim not in (-3, -2):
        raise ValueError(f"qkv_interleave_dim is {dim}: give -3 for [.., 3, h, d] or -2 for [.., h, 3, d]")
    if qkv is not None and kv is None and query is None and key is None and value is None:
        packed, count = qkv, 3
    elif kv is not None and qkv is None and query is not None and key is None and value is None:
        packed, count = kv, 2
    elif query is not None and key is not None and value is not None and qkv is None and kv is None:
        return query, key, value
    else:
        raise ValueError("give query_layer, key_layer and value_layer, or qkv_layer alone, or query_layer and kv_layer")
    if packed.shape[dim] != count:
        raise ValueError(f"the packed tensor has shape {tuple(packed.shape)}: dimension {dim} must be {count}")
    parts = packed.unbind(dim)
    return parts if count == 3 else (query, *parts)
