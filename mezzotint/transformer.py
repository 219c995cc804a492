"""TransformerLayer: attention and an MLP, each of which is added to its input.

    x = x + dropout(self_attention(norm(x)))
    x = x + dropout(inter_attention(norm(x), encoder_output))      layer_type="decoder"
    x = x + dropout(mlp(norm(x)))

`output_layernorm` moves the norm from before the self-attention to behind the layer,
`apply_residual_connection_post_layernorm` adds to the norm's output instead of its input, and `parallel_attention_mlp`
gives attention and MLP the same input: x + dropout(attention(norm(x)) + mlp(norm(x))).

If nothing comes between a sum and the norm behind it, the norm computes the sum as well (`_branch`), and the gradient
of the residual stream is added where that of the norm is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from mezzotint.attention.kv_cache import InferenceParams
from mezzotint.attention.masks import check_choice, check_probability
from mezzotint.attention.multihead import MultiheadAttention
from mezzotint.compat.base_module import PlainAttributes
from mezzotint.layer.boundary import input_of_module
from mezzotint.layer.configured import Configured, config_of
from mezzotint.layer.hooks import is_hooked
from mezzotint.layer.names import Named
from mezzotint.layer.norm import check_normalization
from mezzotint.layer.parallel_module import set_groups
from mezzotint.layer.parameters import PlaceParameter, check_parallel, resolve_dtype
from mezzotint.module.base import TransformerEngineBaseModule
from mezzotint.module.layernorm_linear import LayerNormLinear
from mezzotint.module.layernorm_mlp import LayerNormMLP
from mezzotint.module.norm import LayerNorm, RMSNorm
from mezzotint.tensor.graph_constant import GraphConstant


class DropPath(nn.Module):
    """This module drops samples (along the first dimension) with probability `drop_prob`, and scales up the others."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= drop_prob < 1.0:  # the kept samples are divided by 1 - drop_prob
            raise ValueError(f"drop_path_rate is {drop_prob}: give a probability less than 1")
        self.drop_prob = drop_prob

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return hidden_state
        shape = (hidden_state.shape[0],) + (1,) * (hidden_state.dim() - 1)
        keeps = torch.rand(shape, dtype=torch.float32, device=hidden_state.device) >= self.drop_prob
        return hidden_state * (keeps / (1.0 - self.drop_prob)).to(hidden_state.dtype)


# These arguments of a layer go to its attentions and its MLP as they are, and the second list to its attentions.
_OF_BOTH = (
    "bias",
    "device",
    "fuse_wgrad_accumulation",
    "get_rng_state_tracker",
    "init_method",
    "micro_batch_size",
    "normalization",
    "output_layer_init_method",
    "seq_length",
    "sequence_parallel",
    "set_parallel_mode",
    "tp_group",
    "tp_size",
    "zero_centered_gamma",
)
_OF_ATTENTION = (
    "attention_dropout",
    "fuse_qkv_params",
    "hidden_size",
    "kv_channels",
    "layer_number",
    "layernorm_epsilon",
    "num_attention_heads",
    "num_gqa_groups",
    "qk_norm_before_rope",
    "qk_norm_eps",
    "qk_norm_type",
    "qkv_weight_interleaved",
    "rotary_pos_interleaved",
    "softmax_type",
)


def _check_arguments(given: dict[str, Any]) -> None:
    """Raise an error for arguments of a layer that are wrong, or that do not go together."""
    check_choice("layer_type", given["layer_type"], ("encoder", "decoder"))
    check_probability("hidden_dropout", given["hidden_dropout"])
    # The other ub_ arguments say how to overlap, this one whether to.
    check_parallel(None, ub_tp_comm_overlap=given["ub_tp_comm_overlap"])
    if given["parallel_attention_mlp"] and (
        given["layer_type"] == "decoder"
        or given["apply_residual_connection_post_layernorm"]
        or given["output_layernorm"]
    ):
        raise ValueError(
            "parallel_attention_mlp goes with layer_type='encoder', without output_layernorm and "
            "apply_residual_connection_post_layernorm"
        )
    if given["fuse_wgrad_accumulation"] and not given["fuse_qkv_params"]:
        raise ValueError("fuse_wgrad_accumulation needs one weight for queries, keys and values: fuse_qkv_params=True")


@dataclass(frozen=True)
class TransformerConfig(GraphConstant):
    """This config has what the forward of a `TransformerLayer` reads of its options."""

    hidden_size: int
    hidden_dropout: float
    layer_type: str
    output_layernorm: bool
    parallel_attention_mlp: bool
    apply_residual_connection_post_layernorm: bool


class TransformerLayer(PlainAttributes, Configured, Named):
    """A `TransformerLayer` is one layer of a transformer: attention and MLP, each with a norm in front and a residual
    sum behind.

    With `layer_type="encoder"`, which is also that of language models, it has self-attention and an MLP; with "decoder"
    there is attention to the output of an encoder between them. The linear layers are quantized as the recipe in force
    says.

    Its submodules are `self_attention`, `inter_attention` (in a decoder), `layernorm_mlp`, and `layernorm` (with
    `output_layernorm`).

    Args:
        hidden_size: The number of features of the input and of the output.
        ffn_hidden_size: The number of features between the two linear layers of the MLP.
        num_attention_heads: The number of heads of queries, over all ranks.
        num_gqa_groups: The number of heads of keys and values (grouped-query attention), a divisor of
            `num_attention_heads`. None means as many as there are heads of queries.
        layernorm_epsilon: A small number that norms add to the variance before they take the square root. The default
            is 1e-5.
        hidden_dropout: The probability with which elements of a branch are set to zero before each residual sum in
            training. The default is 0.1.
        attention_dropout: The probability with which attention weights are set to zero in training. The default is 0.1.
        init_method: A function that fills a weight with its initial values in place, or None for a normal distribution
            with mean 0 and standard deviation 0.023.
        output_layer_init_method: A function that fills the weights of `proj` and fc2, which end the two branches, in
            place. None means that `proj` has the default of `init_method`, and fc2 the same as fc1.
        layer_number: The number of the layer in the model, from 1, by which an `InferenceParams` finds the layer's
            cache. None means 1.
        kv_channels: The number of channels of a head. None means `hidden_size` divided by `num_attention_heads`.
        self_attn_mask_type: Which keys a query of the self-attention may see: "causal" (the default) or another
            `attn_mask_type` of `DotProductAttention`. A call may give another.
        window_size: A pair (left, right): how many keys before and after its own position a query of the self-attention
            may see, with -1 for all. None sets no window.
        bottom_right_diagonal: Whether the causal diagonal and the window of the self-attention are aligned with the
            last query and the last key. None means as the type of mask says.
        enc_dec_attn_mask_type: Which keys a query of the attention to the encoder may see. The default is "no_mask".
        enc_dec_bottom_right_diagonal: As `bottom_right_diagonal`, for the attention to the encoder.
        enc_dec_window_size: As `window_size`, for the attention to the encoder.
        tp_group: The process group whose ranks share the weights (tensor parallelism), or None for a module that is not
            split.
        tp_size: The number of ranks that share the weights. Without a `tp_group` it says how large the group will be
            that `set_tensor_parallel_group` sets later. The default is 1.
        params_dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        get_rng_state_tracker: A function without arguments that returns a `CudaRNGStatesTracker`, from whose random
            numbers initial values and dropout are drawn, or None for PyTorch's own.
        fuse_wgrad_accumulation: Whether backward adds the weight gradients to the parameters' `main_grad`, tensors that
            the training program puts there, instead of returning them to autograd. It needs `fuse_qkv_params`. The
            default is False.
        seq_length: The length of sequences. Transformer Engine warms its kernels up with it; here it is accepted and
            has no effect.
        micro_batch_size: The size of a microbatch. It is accepted and has no effect, as `seq_length`.
        sequence_parallel: Whether the first dimension of the tensors outside of the split weights is divided over the
            ranks of `tp_group` as well. It has no effect when that group has one rank. The default is False.
        apply_residual_connection_post_layernorm: Whether the residual sum takes the output of the norm instead of the
            norm's input. The default is False.
        output_layernorm: Whether the layer ends with a norm, and has none in front of the self-attention. The default
            is False.
        parallel_attention_mlp: Whether the MLP reads the input of the layer instead of the output of the attention, so
            that both branches are added at once. The default is False.
        layer_type: "encoder" (the default) or "decoder".
        drop_path_rate: The probability with which a branch is left out for a sample in training. The default is 0.
        set_parallel_mode: Whether heads and the features of the MLP are divided over the ranks of `tp_group`. The
            default is False.
        fuse_qkv_params: Whether queries, keys and values share one parameter `weight`. Otherwise there are
            `query_weight`, `key_weight` and `value_weight`. The default is False.
        rotary_pos_interleaved: Whether rotary position embeddings rotate neighbouring channels as pairs, instead of
            channels of the two halves. The default is False.
        zero_centered_gamma: Whether the norm's weight is stored minus one, so that its initial value is 0. The default
            is False.
        qkv_weight_interleaved: How rows of that one weight are ordered: group by group, each with its queries, key and
            value (True, the default), or first all queries, then all keys, then all values.
        ub_tp_comm_overlap: It must be False: Transformer Engine's overlap through user buffers does not exist here.
        ub_overlap_ag: A detail of that overlap, which has no effect without it.
        ub_overlap_rs: A detail of that overlap, which has no effect without it.
        ub_overlap_rs_dgrad: A detail of that overlap, which has no effect without it.
        ub_bulk_dgrad: A detail of that overlap, which has no effect without it.
        ub_bulk_wgrad: A detail of that overlap, which has no effect without it.
        bias: Whether the linear layers have biases. The default is True.
        activation: The activation between the two linear layers: "gelu" (the default), "qgelu", "silu", "relu",
            "srelu", or a gated one, "geglu", "qgeglu", "swiglu", "glu", "reglu", "sreglu", "clamped_swiglu", "situglu".
            A gated activation doubles the output of the first linear layer; one half goes through the activation and
            multiplies the other.
        activation_params: The parameters of the activation by name, for "clamped_swiglu" (`limit`, `alpha`,
            `glu_linear_offset`) and "situglu" (`beta1`, `beta2`). None leaves them at their defaults.
        normalization: Which norms there are: "LayerNorm" (the default) or "RMSNorm".
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU; "meta" leaves the parameters without memory.
        attn_input_format: The order of the first dimensions of the input: "sbhd" (sequence, batch; the default),
            "bshd", or "thd" for sequences of several lengths packed one behind the other.
        name: The name of the module, by which a recipe can choose its format and by which messages mention it. None
            means the path that `name_modules` or `convert` gives it.
        qk_norm_type: The norm of queries and keys: "L2Normalization", "RMSNorm", "LayerNorm", or None (the default) for
            none.
        qk_norm_eps: The small number that this norm adds to the variance. The default is 1e-6.
        qk_norm_before_rope: Whether queries and keys are normalized before they are rotated, not after. The default is
            False.
        softmax_type: "vanilla" (the default), "off-by-one", which adds 1 to the denominator of the softmax, or
            "learnable", which adds e to the power of the parameter `softmax_offset`.
        dtype: Another name for `params_dtype`, as PyTorch's own modules call it. Give one of the two.
        memory: How much forward keeps for backward: "default", "lean" (only what backward cannot compute again) or
            "compressed" (lean, and the input of an MLP's activation in FP8). None means what the region says.

    Raises:
        ValueError: If sizes do not divide, a name is unknown, or options do not go together.
        NotImplementedError: If `ub_tp_comm_overlap` is on.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
        >>> x = torch.randn(16, 2, 64)  # sequence, batch, hidden
        >>> with mz.autocast("mxfp8"):
        ...     y = layer(x)
        >>> y.shape
        torch.Size([16, 2, 64])
    """

    _CONFIG = TransformerConfig

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        *,
        dtype: torch.dtype | None = None,
        memory: str | None = None,
    ) -> None:
        super().__init__()
        given: dict[str, Any] = dict(locals())
        _check_arguments(given)
        self.name = name
        params_dtype = resolve_dtype(params_dtype, dtype)
        self.layer_number, self.layer_type = layer_number, layer_type
        self.hidden_size, self.hidden_dropout = hidden_size, hidden_dropout
        self.self_attn_mask_type, self.window_size = self_attn_mask_type, window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.enc_dec_attn_mask_type, self.enc_dec_window_size = enc_dec_attn_mask_type, enc_dec_window_size
        self.enc_dec_bottom_right_diagonal = enc_dec_bottom_right_diagonal
        self.output_layernorm, self.parallel_attention_mlp = output_layernorm, parallel_attention_mlp
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        common: dict[str, Any] = {name: given[name] for name in _OF_BOTH}
        common |= {"params_dtype": params_dtype, "memory": memory, "return_bias": not parallel_attention_mlp}
        common["return_layernorm_output"] = apply_residual_connection_post_layernorm
        attention: dict[str, Any] = {name: given[name] for name in _OF_ATTENTION} | common
        attention["qkv_format"] = attn_input_format
        self._make_attentions(attention)
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            name=self._part("layernorm_mlp"),
            **common,
        )
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate != 0.0 else None
        if output_layernorm:
            made = RMSNorm if check_normalization(normalization) else LayerNorm
            self.layernorm = made(
                hidden_size,
                eps=layernorm_epsilon,
                sequence_parallel=self.layernorm_mlp.sequence_parallel,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )
        self._end_parts()
        self._configure()

    def _make_attentions(self, options: dict[str, Any]) -> None:
        """Make self-attention, and a decoder's attention to the encoder. `options` are those that both have."""
        self.self_attention = MultiheadAttention(
            attn_mask_type=self.self_attn_mask_type,
            window_size=self.window_size,
            bottom_right_diagonal=self.bottom_right_diagonal,
            input_layernorm=not self.output_layernorm,
            attention_type="self",
            name=self._part("self_attention"),
            **options,
        )
        if self.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                attn_mask_type=self.enc_dec_attn_mask_type,
                window_size=self.enc_dec_window_size,
                bottom_right_diagonal=self.enc_dec_bottom_right_diagonal,
                input_layernorm=True,
                attention_type="cross",
                name=self._part("inter_attention"),
                **options,
            )

    def split_over(self, tp_group: Any, sequence_parallel: bool, place: PlaceParameter, *modes: str) -> None:
        """Split the weights of a whole layer over ranks, as `set_parallel_mode` does."""
        if modes:
            raise ValueError("TransformerLayer has several weights: use TensorParallel, which splits each its way")
        for name in ("self_attention", "inter_attention", "layernorm_mlp", "layernorm"):
            if hasattr(self, name):
                getattr(self, name).split_over(tp_group, sequence_parallel, place)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of ranks that share the weights, for every module in this one."""
        set_groups(self, tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the group of context parallelism; a group of one rank changes nothing."""
        self.self_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def reset_fp8_meta_tensors(self) -> None:
        """Reset delayed scaling in every module to its initial state."""
        for module in self.modules():
            if isinstance(module, TransformerEngineBaseModule):
                module.reset_fp8_meta_tensors()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> torch.Tensor:
        """Return the layer's output for hidden_states [s, b, hidden], or as `attn_input_format` says, in that shape.

        Arguments of the self-attention are those of `MultiheadAttention.forward`; those with `enc_dec`, and
        `encoder_output`, are for the cross-attention.
        """
        own = config_of(self)
        x = input_of_module(hidden_states, own.hidden_size, "hidden_states")
        shared: dict[str, Any] = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "fast_zero_fill": fast_zero_fill,
        }
        given: dict[str, Any] = {"_branch": (None, None)} if self._sums_in_norm(own, self.self_attention) else {}
        attended: Any = self.self_attention(
            x,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            pad_between_seqs=pad_between_seqs,
            **shared,
            **given,
        )
        if own.parallel_attention_mlp:
            mlp_out = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
            return self._bias_dropout_add(own, attended, mlp_out, x, self.drop_path)
        if own.layer_type == "decoder":
            x, given = self._enter(own, self.inter_attention, attended, x, self.drop_path)
            attended = self.inter_attention(
                x,
                enc_dec_attn_mask,
                encoder_output,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                **shared,
                **given,
            )
        drop_path = self.drop_path if own.layer_type == "encoder" else None
        x, given = self._enter(own, self.layernorm_mlp, attended, x, drop_path)
        made: Any = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch, **given)
        x = self._add(own, made, x, self.drop_path)
        return self.layernorm(x) if own.output_layernorm else x

    if TYPE_CHECKING:
        __call__ = forward

    def _sums_in_norm(self, own: TransformerConfig, block: nn.Module) -> bool:
        """Return whether the block's norm can add what the block before has made, and return the sum for the next.

        Nothing may change that before, and no hook may look at what blocks are given.
        """
        if own.apply_residual_connection_post_layernorm or own.parallel_attention_mlp or self.drop_path is not None:
            return False
        if own.hidden_dropout > 0.0 and self.training:
            return False
        if type(block) is MultiheadAttention:
            name = "layernorm_qkv" if config_of(block).attention_type == "self" else "layernorm_query"
            norm = getattr(block, name, None)
        else:
            norm = block
        if type(norm) is not LayerNormLinear and type(norm) is not LayerNormMLP:
            return False
        return not is_hooked(block, norm)

    def _enter(
        self,
        own: TransformerConfig,
        block: nn.Module,
        made: tuple[Any, ...],
        x: torch.Tensor,
        drop_path: DropPath | None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return what the next block gets: the sum of x and what the block before has made, or both, for its norm."""
        if self._sums_in_norm(own, block):
            return made[2] if len(made) == 3 else x, {"_branch": made[:2]}
        return self._add(own, made, x, drop_path), {}

    def _add(
        self, own: TransformerConfig, made: tuple[Any, ...], x: torch.Tensor, drop_path: DropPath | None
    ) -> torch.Tensor:
        """Add (output, bias) to x, or to the third of (output, bias, norm's output or residual stream) if there is
        one."""
        return self._bias_dropout_add(own, made[0], made[1], made[2] if len(made) == 3 else x, drop_path)

    def _bias_dropout_add(
        self,
        own: TransformerConfig,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        drop_path: DropPath | None,
    ) -> torch.Tensor:
        """Return residual + dropout(y + bias), in FP32, rounded once: a compiler that fuses it rounds once as well."""
        total = y if bias is None else y + bias.float()
        if own.hidden_dropout > 0.0 and self.training:
            total = functional.dropout(total.float(), own.hidden_dropout)
        if drop_path is not None:
            total = drop_path(total.float())
        return (residual + total).to(residual.dtype)
