"""MultiheadAttention: it projects to queries, keys and values, attends, and projects back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mezzotint.attention.dot_product import DotProductAttention
from mezzotint.attention.kv_cache import InferenceParams
from mezzotint.attention.rope import split_turned, turn_both
from mezzotint.comm.groups import resolve_size, shard_size, world_size
from mezzotint.compat.base_module import PlainAttributes
from mezzotint.kernels.rope import heads_of
from mezzotint.layer.configured import Configured, config_of
from mezzotint.layer.names import Named
from mezzotint.layer.norm import Branch
from mezzotint.layer.parallel_module import set_groups
from mezzotint.layer.parameters import (
    PlaceParameter,
    check_features,
    check_module_input,
    check_parallel,
    resolve_device,
    resolve_dtype,
)
from mezzotint.module.layernorm_linear import LayerNormLinear
from mezzotint.module.linear import Linear
from mezzotint.module.norm import LayerNorm, RMSNorm
from mezzotint.ops.basic.l2normalization import L2Normalization
from mezzotint.tensor.checks import check_choice
from mezzotint.tensor.graph_constant import GraphConstant

QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")


@dataclass(frozen=True)
class MultiheadConfig(GraphConstant):
    """A `MultiheadConfig` holds what the forward of a `MultiheadAttention` reads of it."""

    hidden_size: int
    hidden_size_per_attention_head: int
    num_attention_heads: int
    num_gqa_groups: int
    attention_type: str
    attn_mask_type: str
    window_size: tuple[int, int] | None
    qkv_format: str
    qkv_weight_interleaved: bool
    input_layernorm: bool
    return_bias: bool
    rotary_pos_interleaved: bool
    qk_norm_before_rope: bool


class MultiheadAttention(PlainAttributes, Configured, Named):
    """This module computes multi-head attention: linear layers for queries, keys and values, attention, and a linear
    layer for the output.

    In self-attention queries, keys and values all come from the input; in cross-attention keys and values come from
    `encoder_output`, which is an argument of the call. The linear layers are quantized as the recipe in force says; the
    attention between them computes in high precision.

    Its submodules are `layernorm_qkv` (with `input_layernorm`) or `qkv`; for cross-attention `layernorm_query` or
    `query_layer`, and `key_value`; `q_norm` and `k_norm` with `qk_norm_type`; `core_attention`, a
    `DotProductAttention`; and `proj`, a `Linear`.

    Args:
        hidden_size: The number of features of the input and of the output.
        num_attention_heads: The number of heads of queries, over all ranks.
        kv_channels: The number of channels of a head. None means `hidden_size` divided by `num_attention_heads`.
        attention_dropout: The probability with which attention weights are set to zero in training. The default is 0.1.
        layernorm_epsilon: A small number that norms add to the variance before they take the square root. The default
            is 1e-5.
        init_method: A function that fills a weight with its initial values in place, or None for a normal distribution
            with mean 0 and standard deviation 0.023.
        output_layer_init_method: A function that fills the weight of `proj` in place. None means the default of
            `init_method`.
        layer_number: The number of the layer in the model, from 1, by which an `InferenceParams` finds the layer's
            cache. None means 1.
        attn_mask_type: Which keys a query may see: "causal" (the default), "no_mask", "padding", "padding_causal",
            "causal_bottom_right", "padding_causal_bottom_right" or "arbitrary". A call may give another.
        window_size: A pair (left, right): how many keys before and after its own position a query may see, with -1 for
            all. None sets no window.
        bottom_right_diagonal: Whether the causal diagonal and the window are aligned with the last query and the last
            key instead of the first ones. None means as `attn_mask_type` says.
        tp_group: The process group whose ranks share the weights (tensor parallelism), or None for a module that is not
            split.
        tp_size: The number of ranks that share the weights. Without a `tp_group` it says how large the group will be
            that `set_tensor_parallel_group` sets later. The default is 1.
        num_gqa_groups: The number of heads of keys and values (grouped-query attention), a divisor of
            `num_attention_heads`. None means as many as there are heads of queries.
        fuse_wgrad_accumulation: Whether backward adds the weight gradients to the parameters' `main_grad`, tensors that
            the training program puts there, instead of returning them to autograd. The default is False.
        get_rng_state_tracker: A function without arguments that returns a `CudaRNGStatesTracker`, from whose random
            numbers initial values and dropout are drawn, or None for PyTorch's own.
        sequence_parallel: Whether the first dimension of the tensors outside of the split weights is divided over the
            ranks of `tp_group` as well. It has no effect when that group has one rank. The default is False.
        params_dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        return_bias: Whether the bias of `proj` is returned beside the output instead of being added to it. The default
            is False.
        return_layernorm_output: Whether the output of the norm is returned as well. The default is False.
        input_layernorm: Whether a norm stands in front of the first linear layer. The default is False.
        attention_type: "self" (the default) or "cross", for attention to the output of an encoder.
        set_parallel_mode: Whether heads and groups are divided over the ranks of `tp_group`: queries, keys and values
            by output features, `proj` by input features. The default is False.
        fuse_qkv_params: Whether queries, keys and values share one parameter `weight`. Otherwise there are
            `query_weight`, `key_weight` and `value_weight`. The default is False.
        zero_centered_gamma: Whether the norm's weight is stored minus one, so that its initial value is 0. The default
            is False.
        qkv_weight_interleaved: How rows of that one weight are ordered: group by group, each with its queries, key and
            value (True, the default), or first all queries, then all keys, then all values.
        rotary_pos_interleaved: Whether rotary position embeddings rotate neighbouring channels as pairs, instead of
            channels of the two halves. The default is False.
        ub_overlap_ag: It must be False: Transformer Engine's overlap of the all-gather through user buffers does not
            exist here.
        ub_overlap_rs: It must be False: Transformer Engine's overlap of the reduce-scatter through user buffers does
            not exist here.
        ub_overlap_rs_dgrad: It must be False: this overlap for the input gradient does not exist here.
        ub_bulk_dgrad: It must be False: this overlap for the input gradient does not exist here.
        ub_bulk_wgrad: It must be False: this overlap for the weight gradient does not exist here.
        bias: Whether the linear layers have biases. The default is True.
        normalization: Which norm it is: "LayerNorm" (the default) or "RMSNorm".
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU; "meta" leaves the parameters without memory.
        qkv_format: The order of dimensions: "sbhd" (sequence, batch, head, channel; the default), "bshd", or "thd" for
            sequences of several lengths packed one behind the other.
        name: The name of the module, by which a recipe can choose its format and by which messages mention it. None
            means the path that `name_modules` or `convert` gives it.
        qk_norm_type: The norm of queries and keys: "L2Normalization", "RMSNorm", "LayerNorm", or None (the default) for
            none.
        qk_norm_eps: The small number that this norm adds to the variance. The default is 1e-6.
        qk_norm_before_rope: Whether queries and keys are normalized before they are rotated, not after. The default is
            False.
        seq_length: The length of sequences. Transformer Engine warms its kernels up with it; here it is accepted and
            has no effect.
        micro_batch_size: The size of a microbatch. It is accepted and has no effect, as `seq_length`.
        softmax_type: "vanilla" (the default), "off-by-one", which adds 1 to the denominator of the softmax, or
            "learnable", which adds e to the power of the parameter `softmax_offset`.
        dtype: Another name for `params_dtype`, as PyTorch's own modules call it. Give one of the two.
        memory: How much forward keeps for backward: "default", "lean" (only what backward cannot compute again) or
            "compressed" (lean, and the input of an MLP's activation in FP8). None means what the region says.

    Raises:
        ValueError: If a number of heads does not divide over groups or ranks, or a name is unknown.
        NotImplementedError: If an `ub_…` argument asks for user buffers.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> attention = mz.MultiheadAttention(64, 4, fuse_qkv_params=True, attention_dropout=0.0, device="cpu")
        >>> x = torch.randn(16, 2, 64)  # sequence, batch, hidden
        >>> with mz.autocast("mxfp8"):
        ...     y = attention(x)
        >>> y.shape
        torch.Size([16, 2, 64])
        >>> attention.qkv.weight.shape
        torch.Size([192, 64])
    """

    q_norm: Any
    k_norm: Any

    _CONFIG = MultiheadConfig

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        dtype: torch.dtype | None = None,
        memory: str | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(dict(locals()))
        channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        device, params_dtype = resolve_device(device), resolve_dtype(params_dtype, dtype)
        self.name = name
        self.tp_size = resolve_size(tp_group, tp_size)
        shares = self.tp_size if set_parallel_mode else 1
        whole_q, whole_kv = channels * num_attention_heads, channels * groups
        self._set_sizes(hidden_size, channels, num_attention_heads, groups, shares)
        self.layer_number = 1 if layer_number is None else layer_number
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type, self.qkv_format = attention_type, qkv_format
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.is_qkv_fused, self.qkv_weight_interleaved = fuse_qkv_params, qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope

        linear: dict[str, Any] = {
            "init_method": init_method,
            "bias": bias,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "params_dtype": params_dtype,
            "device": device,
            "parallel_mode": "column" if set_parallel_mode else None,
            "tp_group": tp_group,
            "tp_size": self.tp_size,
            "sequence_parallel": sequence_parallel,
            "memory": memory,
        }
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon,
            "return_layernorm_output": return_layernorm_output,
            "zero_centered_gamma": zero_centered_gamma,
            "normalization": normalization,
        }
        self._make_projections(whole_q, whole_kv, linear, norm)
        self.q_norm, self.k_norm = (
            _make_qk_norm(qk_norm_type, channels, qk_norm_eps, params_dtype, device, shares > 1) for _ in range(2)
        )
        core = {"attention_dropout": attention_dropout, "softmax_type": softmax_type}
        core |= {"tp_size": shares, "tp_group": tp_group if shares > 1 else None}
        core["get_rng_state_tracker"] = get_rng_state_tracker
        self._make_core_attention(num_attention_heads, groups, core, device)
        linear |= {"init_method": output_layer_init_method, "parallel_mode": "row" if set_parallel_mode else None}
        self.proj = Linear(whole_q, hidden_size, return_bias=return_bias, name=self._part("proj"), **linear)
        self._end_parts()
        self._configure()

    def _set_sizes(self, hidden_size: int, channels: int, heads: int, groups: int, shares: int) -> None:
        """Set the sizes of this rank, one of `shares` that divide the heads among them."""
        self.hidden_size, self.hidden_size_per_attention_head = hidden_size, channels
        self.num_attention_heads = shard_size("num_attention_heads", heads, shares)
        self.num_gqa_groups = shard_size("num_gqa_groups", groups, shares)
        self.hidden_size_q, self.hidden_size_kv = channels * heads // shares, channels * groups // shares

    def _make_core_attention(self, heads: int, groups: int, options: dict[str, Any], device: torch.device) -> None:
        """Make the attention between the projections. `heads` and `groups` are those of all ranks."""
        self.core_attention = DotProductAttention(
            heads,
            self.hidden_size_per_attention_head,
            num_gqa_groups=groups,
            qkv_format=self.qkv_format,
            attn_mask_type=self.attn_mask_type,
            window_size=self.window_size,
            bottom_right_diagonal=self.bottom_right_diagonal,
            layer_number=self.layer_number,
            attention_type=self.attention_type,
            name=self._part("core_attention"),
            **options,
        ).to(device)

    def _make_projections(self, width_q: int, width_kv: int, linear: dict[str, Any], norm: dict[str, Any]) -> None:
        """Make the linear layers of queries, keys and values, with the norm in front: one in self-attention; in
        cross-attention one for queries and one for keys and values, which take other inputs. The widths are those of
        all ranks."""
        if self.attention_type == "self":
            sizes = {"query": width_q, "key": width_kv, "value": width_kv}
            linear_name = self._part("layernorm_qkv" if self.input_layernorm else "qkv")
            options = {"parameters_split": None if self.is_qkv_fused else sizes, "name": linear_name, **linear}
            if self.input_layernorm:
                self.layernorm_qkv = LayerNormLinear(self.hidden_size, sum(sizes.values()), **options, **norm)
            else:
                self.qkv = Linear(self.hidden_size, sum(sizes.values()), **options)
            return
        if self.input_layernorm:
            self.layernorm_query = LayerNormLinear(
                self.hidden_size,
                width_q,
                parameters_split=None if self.is_qkv_fused else ("query",),
                name=self._part("layernorm_query"),
                **linear,
                **norm,
            )
        else:
            self.query_layer = Linear(self.hidden_size, width_q, name=self._part("query_layer"), **linear)
        self.key_value = Linear(
            self.hidden_size,
            2 * width_kv,
            parameters_split=None if self.is_qkv_fused else ("key", "value"),
            name=self._part("key_value"),
            **linear,
        )

    def split_over(self, tp_group: Any, sequence_parallel: bool, place: PlaceParameter, *modes: str) -> None:
        """Divide the heads over ranks: a whole module becomes what `set_parallel_mode` makes."""
        if modes:
            raise ValueError("MultiheadAttention has several weights: use TensorParallel, which splits each its way")
        if self.is_qkv_fused and not self.qkv_weight_interleaved:
            raise ValueError(
                "queries, keys and values are one weight, one below the other, which has no part with some heads of "
                "each: give fuse_qkv_params=False, or qkv_weight_interleaved=True"
            )
        count = world_size(tp_group)
        self.core_attention.split_over(tp_group, sequence_parallel, place)  # first, since it may raise
        self.num_attention_heads, self.num_gqa_groups = self.num_attention_heads // count, self.num_gqa_groups // count
        self.hidden_size_q, self.hidden_size_kv = self.hidden_size_q // count, self.hidden_size_kv // count
        self.tp_size = count
        for name in ("qkv", "layernorm_qkv", "query_layer", "layernorm_query", "key_value"):
            if hasattr(self, name):
                getattr(self, name).split_over(tp_group, sequence_parallel, place, "column")
        self.proj.split_over(tp_group, sequence_parallel, place, "row")
        for norm in (self.q_norm, self.k_norm):  # they see only this rank's heads: gradients are summed
            if norm is not None and hasattr(norm, "split_over"):
                norm.split_over(tp_group, True, place)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of ranks that share the weights, for every module in this one."""
        set_groups(self, tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the group of context parallelism. A group of one rank changes nothing; a larger one is refused."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        *,
        _branch: Branch | None = None,
    ) -> torch.Tensor | Any:
        """Compute the output from hidden_states (s, b, hidden), or (b, s, hidden), or (t, hidden); it has their shape.

        With `return_bias` proj's bias is a second output, and with `return_layernorm_output` the norm's output is
        another one.

        `rotary_pos_emb` are angles of `RotaryPositionEmbedding`, or a pair for queries and keys. `is_first_microbatch`
        is that of `Linear.forward`, and the other arguments are those of `DotProductAttention.forward`. With `_branch`,
        which the norm adds to hidden_states first, their sum is the last output.
        """
        own = config_of(self)
        check_module_input(hidden_states, own.hidden_size, "hidden_states")
        turns = None
        if rotary_pos_emb is not None:
            cu = (cu_seqlens_q, cu_seqlens_kv)
            if cu_seqlens_q_padded is not None and pad_between_seqs is not False:
                cu = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
            turns = self._turns(rotary_pos_emb, cu, inference_params)
        has_norm = self.q_norm is not None
        norm_first = own.qk_norm_before_rope and has_norm
        if own.attention_type == "self":
            mixed, norm_out = self._project(
                "layernorm_qkv" if own.input_layernorm else "qkv", hidden_states, is_first_microbatch, _branch
            )
            layout = (
                own.num_attention_heads,
                own.num_gqa_groups,
                own.num_gqa_groups if own.qkv_weight_interleaved else 1,
            )
            if turns is None or norm_first:
                q, k, v = (part.flatten(-3, -2) for part in heads_of(mixed, *layout))
            else:
                q, k, v = split_turned(mixed, *layout, *turns)
                turns = None
        else:
            if encoder_output is None:
                raise ValueError("encoder_output is None: cross-attention takes its keys and values from it")
            q, k, v, norm_out = self._cross_heads(hidden_states, encoder_output, is_first_microbatch, _branch)
        if norm_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if turns is not None:
            q, k = turn_both(q, k, *turns)
        if has_norm and not norm_first:
            q, k = self.q_norm(q), self.k_norm(k)
        y = self.core_attention(
            q,
            k,
            v,
            attention_mask,
            qkv_format=own.qkv_format,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=own.attn_mask_type if attn_mask_type is None else attn_mask_type,
            window_size=own.window_size if window_size is None else window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            fast_zero_fill=fast_zero_fill,
            inference_params=inference_params,
            pad_between_seqs=pad_between_seqs,
        )
        projected = self.proj(y, is_first_microbatch=is_first_microbatch)
        outputs = projected if own.return_bias else (projected,)
        if norm_out is not None:
            outputs = (*outputs, norm_out)
        return outputs if len(outputs) > 1 else outputs[0]

    if TYPE_CHECKING:
        __call__ = forward

    def _cross_heads(
        self, x: torch.Tensor, encoder_output: torch.Tensor, is_first: bool | None, branch: Branch | None
    ) -> tuple[torch.Tensor, ...]:
        """Return queries [.., h, d], keys and values [.., g, d] of `encoder_output`, and the norm's output or None."""
        check_module_input(encoder_output, self.hidden_size, "encoder_output")
        channels, groups = self.hidden_size_per_attention_head, self.num_gqa_groups
        mixed, _ = self._project("key_value", encoder_output, is_first)
        if self.qkv_weight_interleaved:
            k, v = mixed.view(*mixed.shape[:-1], groups, 2 * channels).chunk(2, -1)
        else:
            k, v = mixed.view(*mixed.shape[:-1], 2 * groups, channels).chunk(2, -2)
        name = "layernorm_query" if self.input_layernorm else "query_layer"
        q, norm_out = self._project(name, x, is_first, branch)
        return q.view(*q.shape[:-1], -1, channels), k, v, norm_out

    def _project(
        self, name: str, x: torch.Tensor, is_first: bool | None, branch: Branch | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Return the product of the linear `name`, and what it returns besides: the norm's output, the sum with
        `branch`, or None."""
        given = {} if branch is None else {"_branch": branch}
        made = getattr(self, name)(x, is_first_microbatch=is_first, **given)
        return made if isinstance(made, tuple) else (made, None)

    def _turns(self, angles: Any, cu_seqlens: Any, params: InferenceParams | None) -> tuple[Any, ...]:
        """Return the arguments of rotary positions: angles of queries and of keys, layout, starts, whether pairs are
        interleaved, and cu_seqlens. A sequence that is decoded starts behind what the cache holds of it."""
        both = angles if isinstance(angles, tuple) else (angles, angles)
        starts = None
        if params is not None:
            starts = params.get_seqlens_pre_step()
            cu_seqlens = (params.cu_seqlens_q, params.cu_seqlens_q)
            if both[0].shape[0] < params.max_sequence_length:
                raise ValueError(
                    f"rotary_pos_emb has {both[0].shape[0]} positions: inference_params takes sequences of "
                    f"{params.max_sequence_length}, make as many"
                )
        if self.qkv_format != "thd":
            cu_seqlens = (None, None)
        return both, self.qkv_format, starts, self.rotary_pos_interleaved, cu_seqlens


def _check_arguments(given: dict[str, Any]) -> None:
    """Raise if arguments of the module are wrong, or ask for what is not there."""
    hidden_size, num_attention_heads = given["hidden_size"], given["num_attention_heads"]
    check_features(hidden_size=hidden_size, num_attention_heads=num_attention_heads)
    check_choice("attention_type", given["attention_type"], ("self", "cross"))
    if given["qk_norm_type"] is not None:
        check_choice("qk_norm_type", given["qk_norm_type"], QK_NORMS)
    if given["layer_number"] is not None:
        check_features(layer_number=given["layer_number"])
    check_parallel(None, **{name: value for name, value in given.items() if name.startswith("ub_")})
    if given["kv_channels"] is None and hidden_size % num_attention_heads:
        raise ValueError(
            f"hidden_size is {hidden_size}: give a multiple of num_attention_heads={num_attention_heads}, or "
            "kv_channels"
        )


def _make_qk_norm(
    kind: str | None, channels: int, eps: float, dtype: torch.dtype, device: torch.device, is_shared: bool
) -> nn.Module | None:
    """Make the norm of queries or keys, or return None. `is_shared` says that other ranks have other heads, and so
    another share of its gradient."""
    if kind is None:
        return None
    if kind == "L2Normalization":
        return L2Normalization(eps=eps)
    made = RMSNorm if kind == "RMSNorm" else LayerNorm
    sums = True if is_shared else None
    return made(channels, eps=eps, sequence_parallel=sums, params_dtype=dtype, device=device)
