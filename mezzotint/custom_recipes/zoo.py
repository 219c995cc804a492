"""Factories for `CustomRecipe` that mix formats, to have more precision in one of the passes. They have Transformer
Engine's names.

A product reads one direction of each operand: forward reads the rows of input and weight; the input gradient the
columns of the weight and the rows of the output gradient; the weight gradient the columns of input and output gradient.
A `HybridQuantizer` holds another format in each direction. With `columnwise_source="rowwise_dequantized"` the
column-wise copy is made from the values that forward has multiplied, so that backward is the derivative of that.

    factory                                            forward             backward
    high_precision_fwd_mxfp8_bwd_factory               as it is            MXFP8
    mxfp8_fwd_nvfp4_bwd_factory                        MXFP8               NVFP4
    mxfp8_fwd_high_precision_bwd_factory               MXFP8               as it is, of the MXFP8 values
    nvfp4_1d_weight_factory                            NVFP4, weights 1x16 the same, weights of the forward's values
    nvfp4_row_scaled_fwd_mxfp8_bwd_factory             experts: NVFP4      MXFP8
    nvfp4_row_scaled_fwd_high_precision_bwd_factory    NVFP4               as it is, of the NVFP4 values
    nvfp4_linear_fp8_dpa_factory                       NVFP4               NVFP4; FP8 for the tensors of attention
"""

from typing import Any

from mezzotint.constants import DType
from mezzotint.custom_recipes.factories import mxfp8_factory, nvfp4_factory
from mezzotint.recipe import DelayedScalingRequest, Format, QuantizerRole
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer
from mezzotint.tensor.hybrid import HybridQuantizer
from mezzotint.tensor.identity import IdentityQuantizer
from mezzotint.tensor.nvfp4 import NVFP4Quantizer

_LINEAR = ("linear", "grouped_linear")
_BACKWARD_OF_ATTENTION = ("do", "dp", "dqkv")


def _tensor_of(role: QuantizerRole | None, module_types: tuple[str, ...] = _LINEAR) -> str:
    """Return the type of tensor that a role is of, or an empty string if it belongs to none of these modules."""
    return role.tensor_type if role is not None and role.module_type in module_types else ""


def _plain_nvfp4(*, row_scaled: bool = False) -> NVFP4Quantizer:
    """Return an NVFP4 quantizer with blocks of 1x16, without transform and stochastic rounding."""
    return NVFP4Quantizer(row_scaled_nvfp4=row_scaled)


def _of_forward(rowwise: Any, columnwise: Any) -> HybridQuantizer:
    """Return a quantizer of both formats, whose column-wise copy is made from the row-wise values."""
    return HybridQuantizer(
        rowwise_quantizer=rowwise, columnwise_quantizer=columnwise, columnwise_source="rowwise_dequantized"
    )


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Any:
    """Return quantizers with which forward multiplies unquantized tensors, and backward MXFP8."""
    role_or_any = role or QuantizerRole()
    if _tensor_of(role) == "grad_output":
        return mxfp8_factory(role_or_any)
    return HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=mxfp8_factory(role_or_any))


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Any:
    """Return quantizers with which forward multiplies MXFP8, and backward NVFP4.

    The NVFP4 weight is made from the MXFP8 values, the NVFP4 input from the original input.
    """
    role_or_any = role or QuantizerRole()
    match _tensor_of(role):
        case "input":
            return HybridQuantizer(
                rowwise_quantizer=mxfp8_factory(role_or_any), columnwise_quantizer=nvfp4_factory(role_or_any)
            )
        case "weight":
            return _of_forward(mxfp8_factory(role_or_any), _plain_nvfp4())
        case "grad_output":
            return nvfp4_factory(role_or_any)
    return mxfp8_factory(role_or_any)


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Any:
    """Return quantizers with which forward multiplies MXFP8, and backward the same values, nothing more quantized."""
    match _tensor_of(role):
        case "input" | "weight":
            return _of_forward(mxfp8_factory(role or QuantizerRole()), IdentityQuantizer())
        case "grad_output":
            return IdentityQuantizer()
    return mxfp8_factory(role or QuantizerRole())


def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Any:
    """Return NVFP4 quantizers, for weights with blocks of 1x16 in both directions.

    The column-wise copy of a weight is made from the row-wise one.
    """
    if _tensor_of(role) == "weight":
        return _of_forward(_plain_nvfp4(), _plain_nvfp4())
    return nvfp4_factory(role or QuantizerRole())


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Any:
    """Return quantizers with which the forward of experts (GroupedLinear) multiplies NVFP4; all else is MXFP8.

    Inputs have an amax per row.
    """
    columnwise = mxfp8_factory(role or QuantizerRole())
    match _tensor_of(role, ("grouped_linear",)):
        case "input":
            return _of_forward(_plain_nvfp4(row_scaled=True), columnwise)
        case "weight":
            return _of_forward(_plain_nvfp4(), columnwise)
    return columnwise


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Any:
    """Return quantizers with which forward multiplies NVFP4, and backward the same values, nothing more quantized.

    Inputs have an amax per row.
    """
    match _tensor_of(role):
        case "input":
            return _of_forward(_plain_nvfp4(row_scaled=True), IdentityQuantizer())
        case "weight":
            return _of_forward(_plain_nvfp4(), IdentityQuantizer())
        case "grad_output":
            return IdentityQuantizer()
    return _plain_nvfp4()


def nvfp4_linear_fp8_dpa_factory(role: QuantizerRole | None) -> Any:
    """Return NVFP4 quantizers for linears, and FP8 ones for the tensors of attention.

    The softmax and its gradient get a request for delayed scaling.
    """
    tensor = _tensor_of(role, ("dpa",))
    if tensor in ("s", "dp"):
        return DelayedScalingRequest(Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent")
    name = role.name if role is not None and not role.module_type else ""
    is_boundary = "dpa_output" in name or "dpa_grad_input" in name
    if tensor or is_boundary or (role is not None and role.module_type == "dpa"):
        is_backward = tensor in _BACKWARD_OF_ATTENTION or "dpa_grad_input" in name
        return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if is_backward else DType.kFloat8E4M3)
    return nvfp4_factory(role or QuantizerRole())
