"""What Megatron-LM, Accelerate and Lightning take from Transformer Engine is here, and is no placeholder.

The lists are the imports and attributes that stand in the sources of these programs, without their tests (Megatron-LM,
Accelerate and Lightning as of 2026); names that they take from older versions only, and try for, are left out.
"""

from typing import Any

import pytest

from mezzotint.as_transformer_engine import modules
from mezzotint.as_transformer_engine.absent import Absent
from mezzotint.as_transformer_engine.paths import VERSION

IMPORTED = {
    "transformer_engine.common.recipe": "DelayedScaling Format NVFP4BlockScaling",
    "transformer_engine.pytorch": (
        "DotProductAttention Fp8Padding Fp8Unpadding cpu_offload fp8_autocast fp8_model_init module "
        "quantized_model_init"
    ),
    "transformer_engine.pytorch.attention": "apply_rotary_pos_emb",
    "transformer_engine.pytorch.attention.rope": "apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb",
    "transformer_engine.pytorch.constants": "MXFP8_BLOCK_SCALING_SIZE NVFP4_BLOCK_SCALING_SIZE TE_DType",
    "transformer_engine.pytorch.cpp_extensions": "general_gemm",
    "transformer_engine.pytorch.cpu_offload": "get_cpu_offload_context",
    "transformer_engine.pytorch.cross_entropy": "parallel_cross_entropy",
    "transformer_engine.pytorch.distributed": (
        "activation_recompute_forward checkpoint gather_along_first_dim get_all_rng_states "
        "in_fp8_activation_recompute_phase is_fp8_activation_recompute_enabled "
        "reduce_scatter_along_first_dim"
    ),
    "transformer_engine.pytorch.float8_tensor": "Float8Tensor",
    "transformer_engine.pytorch.fp8": "FP8GlobalStateManager check_mxfp8_support fp8_autocast fp8_model_init",
    "transformer_engine.pytorch.graph": (
        "make_graphed_callables restore_fp8_tensors save_fp8_tensors set_capture_end set_capture_start"
    ),
    "transformer_engine.pytorch.module.base": "TransformerEngineBaseModule get_dummy_wgrad get_workspace",
    "transformer_engine.pytorch.ops": "GroupedLinear ScaledClampedQGeGLU ScaledSReLU ScaledSwiGLU",
    "transformer_engine.pytorch.optimizers": (
        "FusedAdam FusedSGD multi_tensor_applier multi_tensor_l2norm multi_tensor_scale multi_tensor_scale_tensor"
    ),
    "transformer_engine.pytorch.permutation": (
        "moe_permute moe_permute_and_pad_with_probs moe_permute_with_probs moe_sort_chunks_by_index "
        "moe_sort_chunks_by_index_with_probs moe_unpermute"
    ),
    "transformer_engine.pytorch.quantized_tensor": "QuantizedTensor",
    "transformer_engine.pytorch.router": (
        "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_topk_with_score_function"
    ),
    "transformer_engine.pytorch.tensor": "MXFP8TensorStorage NVFP4TensorStorage QuantizedTensor",
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor": "Float8BlockwiseQTensor",
    "transformer_engine.pytorch.tensor.float8_tensor": "Float8Tensor",
    "transformer_engine.pytorch.tensor.grouped_tensor": "GroupedTensor",
    "transformer_engine.pytorch.tensor.mxfp8_tensor": "MXFP8Quantizer MXFP8Tensor",
    "transformer_engine.pytorch.tensor.nvfp4_tensor": "NVFP4Tensor",
    "transformer_engine.pytorch.tensor.utils": (
        "cast_master_weights_to_fp8 post_all_gather_processing quantize_master_weights replace_raw_data"
    ),
    "transformer_engine.pytorch.utils": "make_weak_ref nvtx_range_pop nvtx_range_push round_up_to_nearest_multiple",
}
USED = (
    "transformer_engine.__version__",
    "transformer_engine.common.recipe",
    "transformer_engine.common.recipe.CustomRecipe",
    "transformer_engine.common.recipe.DelayedScaling",
    "transformer_engine.common.recipe.Float8BlockScaling",
    "transformer_engine.common.recipe.Float8CurrentScaling",
    "transformer_engine.common.recipe.Format",
    "transformer_engine.common.recipe.Format.E4M3",
    "transformer_engine.common.recipe.Format.HYBRID",
    "transformer_engine.common.recipe.MXFP8BlockScaling",
    "transformer_engine.common.recipe.NVFP4BlockScaling",
    "transformer_engine.pytorch.DotProductAttention",
    "transformer_engine.pytorch.GroupedLinear",
    "transformer_engine.pytorch.LayerNorm",
    "transformer_engine.pytorch.LayerNormLinear",
    "transformer_engine.pytorch.Linear",
    "transformer_engine.pytorch.RMSNorm",
    "transformer_engine.pytorch.TransformerLayer",
    "transformer_engine.pytorch.autocast",
    "transformer_engine.pytorch.cpp_extensions.gemm.get_cublas_workspace",
    "transformer_engine.pytorch.cpp_extensions.gemm.get_cublas_workspace.cache_clear",
    "transformer_engine.pytorch.cpp_extensions.gemm.get_cublas_workspace_size_bytes",
    "transformer_engine.pytorch.cpp_extensions.general_gemm",
    "transformer_engine.pytorch.cpp_extensions.general_grouped_gemm",
    "transformer_engine.pytorch.cpp_extensions.rmsnorm_fwd",
    "transformer_engine.pytorch.distributed",
    "transformer_engine.pytorch.distributed.CudaRNGStatesTracker",
    "transformer_engine.pytorch.float8_tensor.Float8Tensor.make_like",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.get_fp8_group",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.get_fp8_recipe",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.is_fp8_enabled",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.reduce_and_update_fp8_tensors",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.set_skip_fp8_weight_update_tensor",
    "transformer_engine.pytorch.fp8_autocast",
    "transformer_engine.pytorch.fp8_model_init",
    "transformer_engine.pytorch.module.base",
    "transformer_engine.pytorch.module.base.UserBufferQuantizationMode",
    "transformer_engine.pytorch.module.base.initialize_ub",
    "transformer_engine.pytorch.ops",
    "transformer_engine.pytorch.ops.AllReduce",
    "transformer_engine.pytorch.ops.BasicLinear",
    "transformer_engine.pytorch.ops.Bias",
    "transformer_engine.pytorch.ops.FusibleOperation",
    "transformer_engine.pytorch.ops.GEGLU",
    "transformer_engine.pytorch.ops.GELU",
    "transformer_engine.pytorch.ops.GroupedLinear",
    "transformer_engine.pytorch.ops.LayerNorm",
    "transformer_engine.pytorch.ops.MakeExtraOutput",
    "transformer_engine.pytorch.ops.RMSNorm",
    "transformer_engine.pytorch.ops.ReGLU",
    "transformer_engine.pytorch.ops.ReLU",
    "transformer_engine.pytorch.ops.ReduceScatter",
    "transformer_engine.pytorch.ops.ScaledClampedQGeGLU",
    "transformer_engine.pytorch.ops.ScaledSReLU",
    "transformer_engine.pytorch.ops.ScaledSwiGLU",
    "transformer_engine.pytorch.ops.Sequential",
    "transformer_engine.pytorch.ops.SiLU",
    "transformer_engine.pytorch.ops.SwiGLU",
    "transformer_engine.pytorch.quantized_model_init",
    "transformer_engine_torch.DType",
    "transformer_engine_torch.DType.kFloat4E2M1",
    "transformer_engine_torch.DType.kFloat8E4M3",
    "transformer_engine_torch.DType.kFloat8E5M2",
    "transformer_engine_torch.thd_get_partitioned_indices",
)
# Megatron-LM takes the absence of these as an answer: an ImportError.
NOT_IMPORTABLE = (
    "transformer_engine.pytorch.ep",
    "transformer_engine.pytorch.cpu_offload_v1",
    "transformer_engine.jax",
)


@pytest.mark.parametrize("path", IMPORTED)
def test_imported(path: str) -> None:
    for name in IMPORTED[path].split():
        is_module = f"{path}.{name}" in modules.all_paths()
        assert is_module or not isinstance(modules.find(path, name), Absent), name


def resolved(path: str) -> Any:
    """What a dotted name is: the longest module in front, and attributes of it."""
    if path == "transformer_engine.__version__":
        return VERSION
    parts = path.split(".")
    known = next(i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in modules.all_paths())
    if known == len(parts):
        return path
    found = modules.find(".".join(parts[:known]), parts[known])
    for name in parts[known + 1 :]:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", USED)
def test_used(path: str) -> None:
    assert not isinstance(resolved(path), Absent)


def test_what_is_told_by_an_import_error() -> None:
    assert not set(NOT_IMPORTABLE) & set(modules.all_paths())
    with pytest.raises(AttributeError):
        modules.find("transformer_engine.pytorch", "ep")
