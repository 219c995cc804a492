"""The public names: this module has what `import mezzotint` provides, and registers with PyTorch what it must know."""

import torch as _torch

from mezzotint import custom_recipes, dynamo, moe, ops, optimizers, recipe
from mezzotint.attention.dot_product import DotProductAttention
from mezzotint.attention.kv_cache import InferenceParams
from mezzotint.attention.multihead import MultiheadAttention
from mezzotint.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from mezzotint.comm.rng import CudaRNGStatesTracker
from mezzotint.compat import cpp_extensions
from mezzotint.compat.export import onnx_export
from mezzotint.compat.global_state import FP8GlobalStateManager
from mezzotint.compat.recipe_state import RecipeState
from mezzotint.compat.userbuffers import UserBufferQuantizationMode, destroy_ub, initialize_ub
from mezzotint.compat.utils import deinterleave_glu_tensor, interleave_glu_tensor
from mezzotint.constants import DType
from mezzotint.convert.model import convert, convert_report, unconvert
from mezzotint.cross_entropy import parallel_cross_entropy
from mezzotint.dynamo import (
    TensorProto,
    is_value_opaque_quantizer,
    register_value_opaque_quantizer,
    to_tensor_proto,
)
from mezzotint.graph import make_graphed_callables
from mezzotint.hw import EmulationWarning
from mezzotint.inspect.error import quantization_error
from mezzotint.inspect.region import inspect
from mezzotint.layer.bind import bind_rules
from mezzotint.layer.names import name_modules
from mezzotint.module.grouped_linear import GroupedLinear
from mezzotint.module.grouped_mm import grouped_mm
from mezzotint.module.layernorm_linear import LayerNormLinear
from mezzotint.module.layernorm_mlp import LayerNormMLP
from mezzotint.module.linear import Linear
from mezzotint.module.norm import LayerNorm, RMSNorm
from mezzotint.module.padding import Fp8Padding, Fp8Unpadding
from mezzotint.moe import router
from mezzotint.moe.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from mezzotint.offload import ManualOffloadSynchronizer, get_cpu_offload_context, mark_not_offload
from mezzotint.optimizers.newton_schulz import newton_schulz
from mezzotint.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_align_size_for_quantization,
    get_cudnn_version,
    get_default_recipe,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_fp8_rowwise_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from mezzotint.recipe import DelayedScalingRequest, QuantizerRequest, QuantizerRole
from mezzotint.recomputation import checkpoint
from mezzotint.serving.cache import quantize_cache
from mezzotint.serving.export import export
from mezzotint.serving.load import load_quantized
from mezzotint.tensor.float8 import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from mezzotint.tensor.float8_block import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from mezzotint.tensor.float8_rowwise import (
    Float8RowwiseQuantizer,
    Float8RowwiseTensor,
    Float8RowwiseTensorStorage,
)
from mezzotint.tensor.grouped import GroupedTensor, GroupedTensorStorage
from mezzotint.tensor.hybrid import HybridQuantizedTensor, HybridQuantizedTensorStorage, HybridQuantizer
from mezzotint.tensor.identity import IdentityQuantizer, IdentityTensor, IdentityTensorStorage
from mezzotint.tensor.mxfp4 import MXFP4Quantizer, MXFP4Tensor, MXFP4TensorStorage
from mezzotint.tensor.mxfp6 import MXFP6Quantizer, MXFP6Tensor, MXFP6TensorStorage
from mezzotint.tensor.mxfp8 import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from mezzotint.tensor.nvfp4 import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage
from mezzotint.tensor.quantized_tensor import QuantizedTensor, rebuild_quantized_tensor
from mezzotint.tensor.quantizer import Quantizer, rebuild_quantizer
from mezzotint.tensor.saving import prepare_for_saving, restore_from_func_ctx, restore_from_saved
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.transformer import TransformerLayer

# Pickles of quantized tensors call these two and nothing else, so torch.load(weights_only=True) reads them.
_torch.serialization.add_safe_globals([rebuild_quantized_tensor, rebuild_quantizer])

__all__ = [
    "CudaRNGStatesTracker",
    "DType",
    "DelayedScalingRequest",
    "DotProductAttention",
    "EmulationWarning",
    "FP8GlobalStateManager",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8RowwiseQuantizer",
    "Float8RowwiseTensor",
    "Float8RowwiseTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "GroupedTensor",
    "GroupedTensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP4Quantizer",
    "MXFP4Tensor",
    "MXFP4TensorStorage",
    "MXFP6Quantizer",
    "MXFP6Tensor",
    "MXFP6TensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "ManualOffloadSynchronizer",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "RecipeState",
    "RotaryPositionEmbedding",
    "TensorProto",
    "TransformerLayer",
    "UserBufferQuantizationMode",
    "apply_rotary_pos_emb",
    "autocast",
    "bind_rules",
    "checkpoint",
    "convert",
    "convert_report",
    "cpp_extensions",
    "custom_recipes",
    "deinterleave_glu_tensor",
    "destroy_ub",
    "dynamo",
    "export",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "grouped_mm",
    "initialize_ub",
    "inspect",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_fp8_rowwise_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "is_value_opaque_quantizer",
    "load_quantized",
    "make_graphed_callables",
    "mark_not_offload",
    "moe",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "name_modules",
    "newton_schulz",
    "onnx_export",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "prepare_for_saving",
    "quantization_error",
    "quantize_cache",
    "quantized_model_init",
    "recipe",
    "register_value_opaque_quantizer",
    "restore_from_func_ctx",
    "restore_from_saved",
    "router",
    "to_tensor_proto",
    "unconvert",
]
