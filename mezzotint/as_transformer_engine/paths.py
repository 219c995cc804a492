"""The table of aliases: it says which modules of Mezzotint answer for a module of Transformer Engine.

A name is looked up in the modules of its line, in their order. Packages on the way to a path exist without a line of
their own. A path that has no line and leads to none, such as `transformer_engine.jax`, cannot be imported.
"""

VERSION = "2.20.0.dev0"  # Transformer Engine's at the commit in names.json, which programs compare with

_TE = "transformer_engine"
_PT = "transformer_engine.pytorch"
_DPA = f"{_PT}.attention.dot_product_attention"
_TENSORS = ("mezzotint",)

PATHS: dict[str, tuple[str, ...]] = {
    _TE: (),
    f"{_TE}.common.recipe": ("mezzotint.recipe",),
    f"{_TE}.debug.pytorch.debug_state": ("mezzotint.compat.debug_state",),
    f"{_TE}_torch": (
        "mezzotint.compat.extension",
        "mezzotint.compat.attention_shapes",
        "mezzotint.optimizers.multi_tensor",
    ),
    _PT: ("mezzotint",),
    f"{_PT}._extra_state": ("mezzotint.compat.extra_state",),
    f"{_PT}.attention": ("mezzotint",),
    f"{_PT}.attention.custom_ops": ("mezzotint.compat.attention_shapes",),
    _DPA: ("mezzotint.attention.dot_product",),
    f"{_DPA}.backends": (),
    f"{_DPA}.context_parallel": ("mezzotint.compat.context_parallel",),
    f"{_DPA}.dot_product_attention": ("mezzotint.attention.dot_product",),
    f"{_DPA}.flex_attention": (),
    f"{_DPA}.softmax": (),
    f"{_DPA}.utils": ("mezzotint.compat.attention_shapes",),
    f"{_PT}.attention.fused_mla_q_uproj": (),
    f"{_PT}.attention.inference": ("mezzotint.attention.kv_cache",),
    f"{_PT}.attention.multi_head_attention": ("mezzotint.attention.multihead",),
    f"{_PT}.attention.rope": ("mezzotint.attention.rope",),
    f"{_PT}.constants": ("mezzotint.compat.constants",),
    f"{_PT}.cpp_extensions": ("mezzotint.compat.cpp_extensions", "mezzotint.compat.extension"),
    f"{_PT}.cpp_extensions.fused_attn": (),
    f"{_PT}.cpp_extensions.gemm": ("mezzotint.compat.cpp_extensions",),
    f"{_PT}.cpu_offload": ("mezzotint.offload", "mezzotint.compat.cpu_offload"),
    f"{_PT}.cross_entropy": ("mezzotint.cross_entropy",),
    f"{_PT}.custom_recipes.gemm": ("mezzotint.custom_recipes.gemm",),
    f"{_PT}.custom_recipes.quantizer_factories": ("mezzotint.custom_recipes",),
    f"{_PT}.custom_recipes.quantizer_factory_zoo": ("mezzotint.custom_recipes.zoo",),
    f"{_PT}.distributed": (
        "mezzotint.compat.distributed",
        "mezzotint.comm.rng",
        "mezzotint.recomputation",
        "mezzotint.as_transformer_engine.classes",
    ),
    f"{_PT}.dynamo": ("mezzotint.dynamo",),
    f"{_PT}.dynamo.quantizer_opaque": ("mezzotint.dynamo",),
    f"{_PT}.dynamo.tensor_spec": ("mezzotint.dynamo",),
    f"{_PT}.export": ("mezzotint.compat.export",),
    f"{_PT}.float8_tensor": ("mezzotint",),
    f"{_PT}.fp8": (
        "mezzotint.quantization",
        "mezzotint.compat.recipe_state",
        "mezzotint.compat.global_state",
        "mezzotint.recipe",
    ),
    f"{_PT}.graph": ("mezzotint.graph", "mezzotint.compat.graph"),
    f"{_PT}.jit": ("mezzotint.compat.jit",),
    f"{_PT}.module": ("mezzotint", "mezzotint.compat.base_module"),
    f"{_PT}.module._common": (
        "mezzotint.layer.wgrad",
        "mezzotint.compat.utils",
    ),
    f"{_PT}.module.base": ("mezzotint.compat.base_module", "mezzotint.module.base", "mezzotint.compat.userbuffers"),
    f"{_PT}.module.fp8_padding": ("mezzotint.module.padding",),
    f"{_PT}.module.fp8_unpadding": ("mezzotint.module.padding",),
    f"{_PT}.module.grouped_linear": ("mezzotint.module.grouped_linear", "mezzotint.compat.base_module"),
    f"{_PT}.module.layernorm": ("mezzotint.module.norm",),
    f"{_PT}.module.layernorm_linear": ("mezzotint.module.layernorm_linear",),
    f"{_PT}.module.layernorm_mlp": ("mezzotint.module.layernorm_mlp",),
    f"{_PT}.module.linear": ("mezzotint.module.linear",),
    f"{_PT}.module.rmsnorm": ("mezzotint.module.norm",),
    f"{_PT}.newton_schulz": ("mezzotint.optimizers.newton_schulz",),
    f"{_PT}.ops": ("mezzotint.ops",),
    f"{_PT}.ops._common": ("mezzotint.compat.ops_common",),
    f"{_PT}.ops.basic": ("mezzotint.ops",),
    f"{_PT}.ops.basic.grouped_linear": ("mezzotint.ops.basic.grouped_linear", "mezzotint.ops"),
    f"{_PT}.ops.fused": ("mezzotint.ops.fused", "mezzotint.ops"),
    f"{_PT}.ops.fuser": ("mezzotint.ops.fuser", "mezzotint.ops"),
    f"{_PT}.ops.linear": ("mezzotint.ops.linear",),
    f"{_PT}.ops.op": ("mezzotint.ops.op", "mezzotint.ops"),
    f"{_PT}.ops.sequential": ("mezzotint.ops.sequential",),
    f"{_PT}.optimizers": ("mezzotint.optimizers",),
    f"{_PT}.optimizers.fused_adam": ("mezzotint.optimizers",),
    f"{_PT}.optimizers.fused_sgd": ("mezzotint.optimizers",),
    f"{_PT}.optimizers.multi_tensor_apply": ("mezzotint.optimizers",),
    f"{_PT}.permutation": ("mezzotint.moe.permutation",),
    f"{_PT}.quantization": (
        "mezzotint.quantization",
        "mezzotint.compat.recipe_state",
        "mezzotint.compat.global_state",
        "mezzotint",
    ),
    f"{_PT}.quantized_tensor": ("mezzotint",),
    f"{_PT}.router": ("mezzotint.moe.router",),
    f"{_PT}.tensor": (
        *_TENSORS,
        "mezzotint.compat.master_weights",
        "mezzotint.compat.cpp_extensions",
        "mezzotint.as_transformer_engine.classes",
    ),
    f"{_PT}.tensor.float8_blockwise_tensor": _TENSORS,
    f"{_PT}.tensor.float8_tensor": _TENSORS,
    f"{_PT}.tensor.grouped_tensor": _TENSORS,
    f"{_PT}.tensor.hybrid_tensor": _TENSORS,
    f"{_PT}.tensor.identity_tensor": _TENSORS,
    f"{_PT}.tensor.mxfp8_tensor": _TENSORS,
    f"{_PT}.tensor.nvfp4_tensor": _TENSORS,
    f"{_PT}.tensor.storage": _TENSORS,
    f"{_PT}.tensor.storage.float8_blockwise_tensor_storage": _TENSORS,
    f"{_PT}.tensor.storage.float8_tensor_storage": _TENSORS,
    f"{_PT}.tensor.storage.grouped_tensor_storage": _TENSORS,
    f"{_PT}.tensor.storage.hybrid_tensor_storage": _TENSORS,
    f"{_PT}.tensor.storage.identity_tensor_storage": _TENSORS,
    f"{_PT}.tensor.storage.mxfp8_tensor_storage": _TENSORS,
    f"{_PT}.tensor.storage.nvfp4_tensor_storage": _TENSORS,
    f"{_PT}.tensor.utils": ("mezzotint.compat.master_weights", "mezzotint.compat.cpp_extensions"),
    f"{_PT}.torch_version": ("mezzotint.compat.utils",),
    f"{_PT}.transformer": ("mezzotint.transformer",),
    f"{_PT}.utils": ("mezzotint.compat.utils", "mezzotint.availability"),
    **{
        f"{_PT}.ops.basic.{name}": ("mezzotint.ops.basic", "mezzotint.ops")
        for name in (
            *("activation", "add_extra_input", "all_gather", "all_reduce", "basic_linear", "bias", "constant_scale"),
            *(
                "dropout",
                "identity",
                "l2normalization",
                "layer_norm",
                "make_extra_output",
                "quantize",
            ),
            *("reduce_scatter", "reshape", "rmsnorm", "swiglu"),
        )
    },
    **{
        f"{_PT}.ops.fused.{name}": ("mezzotint.ops.fused", "mezzotint.ops")
        for name in (
            *("backward_activation_bias", "backward_add_rmsnorm", "backward_linear_add", "backward_linear_scale"),
            *("forward_linear_bias_activation", "forward_linear_bias_add", "forward_linear_scale_add", "grouped_mlp"),
        )
    },
}

# These names differ here: path of Transformer Engine → module and name.
RENAMED: dict[str, tuple[str, str]] = {
    f"{_PT}.GroupedLinear": ("mezzotint.as_transformer_engine.grouped_linear", "GroupedLinear"),
    f"{_PT}.module.GroupedLinear": ("mezzotint.as_transformer_engine.grouped_linear", "GroupedLinear"),
    f"{_PT}.module.grouped_linear.GroupedLinear": ("mezzotint.as_transformer_engine.grouped_linear", "GroupedLinear"),
    f"{_PT}.fp8.get_default_fp8_recipe": ("mezzotint", "get_default_recipe"),
    f"{_PT}.quantization.get_default_fp8_recipe": ("mezzotint", "get_default_recipe"),
}

# The last part of these paths is also a name in the package above, and the attribute is that name, as in Transformer
# Engine.
BEHIND_A_NAME = {f"{_PT}.newton_schulz"}
