"""role → quantizer, for `CustomRecipe`."""

from typing import Any

from mezzotint.constants import DType
from mezzotint.recipe import (
    BACKWARD_TENSORS,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
)
from mezzotint.tensor.hybrid import HybridQuantizer
from mezzotint.tensor.identity import IdentityQuantizer
from mezzotint.tensor.mxfp8 import MXFP8Quantizer
from mezzotint.tensor.nvfp4 import NVFP4Quantizer


def high_precision_factory(role: QuantizerRole) -> Any:
    """Nothing is quantized."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole) -> DelayedScalingRequest:
    """FP8 with a scale from past iterations, which the module keeps."""
    return DelayedScalingRequest(amax_history_len=DelayedScaling().amax_history_len)


def current_scaling_factory(role: QuantizerRole) -> Any:
    """FP8 with one scale per tensor."""
    return Float8CurrentScaling().quantizer(role)


def float8_rowwise_factory(role: QuantizerRole) -> Any:
    """FP8 with one scale per row."""
    return Float8RowwiseScaling().quantizer(role)


def float8_block_scaling_factory(role: QuantizerRole) -> Any:
    """FP8 with one scale per block."""
    return Float8BlockScaling().quantizer(role)


def mxfp4_factory(role: QuantizerRole) -> Any:
    """MXFP4 with its transform, stochastic rounding and 32x32 weights."""
    return MXFP4BlockScaling().quantizer(role)


def mxfp6_factory(role: QuantizerRole) -> Any:
    """MXFP6: E2M3 forward, E3M2 for gradients."""
    return MXFP6BlockScaling().quantizer(role)


def mxfp8_factory(role: QuantizerRole) -> Any:
    """MXFP8."""
    return MXFP8BlockScaling().quantizer(role)


def nvfp4_factory(role: QuantizerRole) -> Any:
    """NVFP4 with its transform, stochastic rounding and 16x16 weights."""
    return NVFP4BlockScaling().quantizer(role)


def nvfp4_forward_mxfp8_backward_factory(role: QuantizerRole) -> Any:
    """Forward multiplies NVFP4; both backward products multiply MXFP8: forward tensors hold one in each direction."""
    if role.tensor_type in BACKWARD_TENSORS:
        return MXFP8Quantizer(DType.kFloat8E4M3)
    forward = NVFP4Quantizer(with_2d_quantization=role.tensor_type == "weight")
    return HybridQuantizer(rowwise_quantizer=forward, columnwise_quantizer=MXFP8Quantizer(DType.kFloat8E4M3))


def nvfp4_weight_mxfp8_factory(role: QuantizerRole) -> Any:
    """Weights in NVFP4, everything else in MXFP8."""
    if role.tensor_type == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return MXFP8Quantizer(DType.kFloat8E4M3)
