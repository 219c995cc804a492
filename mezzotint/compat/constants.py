"""This module has Transformer Engine's constants: names of masks, layouts and modes, numbers
of tensors, sizes of blocks."""

from types import SimpleNamespace

import torch.distributed

from mezzotint.constants import MX_BLOCK, NVFP4_BLOCK, DType, TE_DType

__all__ = [
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "AttnBiasTypes",
    "AttnMaskTypes",
    "AttnTypes",
    "DType",
    "FP8BwdTensorIdx",
    "FP8FwdTensorIdx",
    "GemmParallelModes",
    "LayerTypes",
    "QKVLayouts",
    "TE_DType",
    "TE_DType_To_Torch",
    "dist_group_type",
]

TE_DType_To_Torch = {number: dtype for dtype, number in TE_DType.items()}

MXFP8_BLOCK_SCALING_SIZE = MX_BLOCK
NVFP4_BLOCK_SCALING_SIZE = NVFP4_BLOCK

# These are the slots of a module's quantizers: three for each of its GEMMs in forward, two in backward.
FP8FwdTensorIdx = SimpleNamespace(
    **{
        f"GEMM{gemm}_{role}": 3 * (gemm - 1) + i
        for gemm in (1, 2, 3)
        for i, role in enumerate(("INPUT", "WEIGHT", "OUTPUT"))
    }
)
FP8BwdTensorIdx = SimpleNamespace(
    **{
        f"{role}{gemm}": 2 * (gemm - 1) + i
        for gemm in (1, 2, 3)
        for i, role in enumerate(("GRAD_OUTPUT", "GRAD_INPUT"))
    }
)

_CAUSAL = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
AttnMaskTypes = ("no_mask", "padding", *_CAUSAL, "arbitrary")
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)

QKVLayouts = (
    *("sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd"),
    *("bs3hd", "bsh3d", "bshd_bs2hd", "bshd_bsh2d", "bshd_bshd_bshd"),
    *("t3hd", "th3d", "thd_t2hd", "thd_th2d", "thd_thd_thd"),
    *("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd"),
    *(f"paged_kv_{q}_{kv}_{kv}" for q in ("bshd", "sbhd", "thd") for kv in ("bshd", "sbhd")),
)

dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else None
