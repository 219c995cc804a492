"""`transformer_engine_torch` is Transformer Engine's C++ extension: this module has the functions of it
that programs call themselves.

Each takes a `quantizer`, or None for a result that is not quantized. Tensors on the CPU are accepted too. What only
serves the extension's own callers (partial casts, swizzles, the parts of attention) is not here.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from mezzotint.compat.constants import TE_DType_To_Torch
from mezzotint.compat.context_parallel import (
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_sequence_order_to_cp_rank_order,
)
from mezzotint.compat.cpp_extensions import general_gemm
from mezzotint.constants import FP8_MAX, DType
from mezzotint.kernels.activation import activation_backward, activation_forward, column_sum
from mezzotint.kernels.norm import norm_apply, norm_backward, norm_stats
from mezzotint.quantization import _amax_and_scale_update
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage

__all__ = [
    "CommOverlapAlgo",
    "CommOverlapType",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "FP8TensorMeta",
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "fused_amax_and_scale_update_after_reduction",
    "generic_gemm",
    "get_cublasLt_version",
    "get_cudnn_version",
    "layernorm_bwd",
    "layernorm_fwd",
    "multi_tensor_quantize",
    "nvte_built_with_cublasmp",
    "quantize",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "split_quantize",
    "splits_to_offsets",
    "swap_first_dims",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_sequence_order_to_cp_rank_order",
    "ubuf_built_with_mpi",
]

# Enumerations and state


class FP8FwdTensors(IntEnum):
    """These are the numbers of the quantizers' slots in forward."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(IntEnum):
    """These are the numbers of the quantizers' slots in backward."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class CommOverlapType(IntEnum):
    """This enumeration names the collective that userbuffers would overlap with a product."""

    RS = 0
    AG = 1


class CommOverlapAlgo(IntEnum):
    """This enumeration names how userbuffers would overlap it; there are none here."""

    BULK_OVERLAP_AG = 0
    BULK_OVERLAP_RS = 1
    SPLIT_PIPELINED_AG_P2P = 2
    SPLIT_PIPELINED_RS = 3
    SPLIT_PIPELINED_RS_P2P = 4
    ATOMIC_GEMM_RS = 5
    ATOMIC_GEMM_AG_P2P = 6
    ATOMIC_GEMM_RS_P2P = 7
    EXTERNAL_BULK_OVERLAP_AG = 8


class FP8TensorMeta:
    """An `FP8TensorMeta` holds scales and amax histories of delayed scaling, as plain attributes."""

    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax_history: torch.Tensor


# Quantizing


def quantize(tensor: torch.Tensor, quantizer: Quantizer, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """Return the tensor quantized, in `output` if that is given; nothing is written if `noop` is 1."""
    return quantizer(tensor) if output is None else quantizer.update_quantized(tensor, output, noop_flag=noop)


def dequantize(input: QuantizedTensorStorage, otype: DType) -> torch.Tensor:
    """Return the values in the high-precision dtype `otype`."""
    return input.dequantize(dtype=TE_DType_To_Torch[DType(otype)])


def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Quantizer]) -> list[Any]:
    """Return each tensor quantized by its quantizer."""
    return [quantizer(tensor) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Quantizer],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Return the rows split into `split_sections`, each quantized by its quantizer."""
    return multi_tensor_quantize(tensor.split(list(split_sections)), quantizer_list)


def bgrad_quantize(input: torch.Tensor, quantizer: Quantizer | None) -> tuple[torch.Tensor, Any]:
    """Return the sum over rows, which is a bias's gradient, and the tensor quantized."""
    return column_sum(input, input.dtype), _made(input, quantizer)


def create_empty_quantized_tensor(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """Return a quantized tensor with uninitialized buffers."""
    return quantizer.make_empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the amax of `input`, its largest absolute value, into `amax`; NaN does not count."""
    values = input.detach().float().abs().nan_to_num(0.0, torch.inf)
    amax.copy_((values.amax() if values.numel() else values.new_zeros(())).view(amax.shape))


def fp8_transpose(input: torch.Tensor, dtype: DType, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return codes (…, K), uint8, transposed to (K, …)."""
    made = input.reshape(-1, input.shape[-1]).t().contiguous().view(input.shape[-1], *input.shape[:-1])
    return made if out is None else out.copy_(made)


def swap_first_dims(tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor with its first two dimensions swapped, contiguous."""
    made = tensor.transpose(0, 1).contiguous()
    return made if out is None else out.copy_(made)


def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """Return where groups of `first_dims` rows begin in a flat buffer, and its end: int64 [groups + 1]."""
    return torch.nn.functional.pad(first_dims.long().cumsum(0), (1, 0)) * logical_last_dim


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: DType,
    margin: float,
) -> None:
    """Enter reduced amaxes into the histories of delayed scaling, and update the scales from them."""
    rule = SimpleNamespace(amax_compute_algo=amax_compute_algo, scaling_factor_compute_algo=None, margin=margin)
    sizes = [history.shape[1] for history in amax_histories]
    parts = amax_reduction_buffer.split(sizes)
    for amaxes, history, scale in zip(parts, amax_histories, scales, strict=True):
        history[0].copy_(amaxes)
        _amax_and_scale_update(history, scale, FP8_MAX[int(fp8_dtype)], rule)


def _made(x: torch.Tensor, quantizer: Quantizer | None) -> Any:
    return x if quantizer is None else quantizer(x)


# Products


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Quantizer | None,
    output_dtype: DType | None,
    bias: torch.Tensor | None,
    bias_type: DType | None,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor | None,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, None]:
    """Call `general_gemm` with the extension's own arguments; the workspace is not used."""
    return general_gemm(
        A,
        B,
        None if output_dtype is None else TE_DType_To_Torch[DType(output_dtype)],
        quantizer,
        gelu,
        gelu_in,
        alpha,
        beta,
        accumulate,
        f"{'NT'[transA]}{'NT'[transB]}",
        D,
        bias,
        use_split_accumulator,
        grad,
        comm_overlap,
        comm_type,
        extra_output,
        bulk_overlap,
    )


# Norms


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Quantizer | None,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return LayerNorm of the rows, their means, and the reciprocals of their standard deviations."""
    mean, rstd = norm_stats(input, eps, False)
    made = norm_apply(input, mean, rstd, weight, bias, zero_centered_gamma, False)
    return _written(made, ln_out, quantizer, otype), mean, rstd


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Quantizer | None,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, torch.Tensor]:
    """Return RMSNorm of the rows, None, and the reciprocals of their root mean squares."""
    empty, rstd = norm_stats(input, eps, True)
    made = norm_apply(input, empty, rstd, weight, None, zero_centered_gamma, True)
    return _written(made, ln_out, quantizer, otype), None, rstd


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of LayerNorm's input, weight and bias."""
    return norm_backward(dz, x, mu, rsigma, gamma, zero_centered_gamma, False, True)


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of RMSNorm's input and weight."""
    dx, dgamma, _ = norm_backward(dz, x, rsigma.new_empty(0), rsigma, gamma, zero_centered_gamma, True, False)
    return dx, dgamma


def _written(made: torch.Tensor, out: Any, quantizer: Quantizer | None, otype: DType) -> Any:
    if quantizer is None:
        made = made.to(TE_DType_To_Torch[DType(otype)])
        return made if out is None else out.copy_(made)
    return quantize(made, quantizer, out)


# Activations: gelu(input, quantizer), dgelu(grad, fwd_input, quantizer), dbias_dgelu(grad, fwd_input, quantizer)


def _forward(name: str, params: Sequence[float] = ()) -> Callable[..., Any]:
    def forward(input: torch.Tensor, quantizer: Quantizer | None) -> Any:
        return _made(activation_forward(input, None, name, tuple(params)), quantizer)

    forward.__name__, forward.__doc__ = name, f"Return {name} of the input, quantized if a quantizer is given."
    return forward


def _backward(name: str) -> Callable[..., Any]:
    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Quantizer | None) -> Any:
        return _made(activation_backward(grad, fwd_input, None, name, ()), quantizer)

    backward.__name__, backward.__doc__ = f"d{name}", f"Return the gradient of the input of {name}."
    return backward


def _biased_backward(name: str) -> Callable[..., Any]:
    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Quantizer) -> tuple[torch.Tensor, Any]:
        made = activation_backward(grad, fwd_input, None, name, ())
        return column_sum(made, made.dtype), _made(made, quantizer)

    backward.__name__, backward.__doc__ = (
        f"dbias_d{name}",
        f"Return its sum over rows, and the gradient of {name}'s input.",
    )
    return backward


gelu, qgelu, relu, srelu, silu = map(_forward, ("gelu", "qgelu", "relu", "srelu", "silu"))
dgelu, dqgelu, drelu, dsrelu, dsilu = map(_backward, ("gelu", "qgelu", "relu", "srelu", "silu"))
geglu, qgeglu, reglu, sreglu, swiglu, glu = map(_forward, ("geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu"))
dgeglu, dqgeglu, dreglu, dsreglu, dswiglu, dglu = map(
    _backward, ("geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu")
)
dbias_dgelu, dbias_dqgelu, dbias_drelu, dbias_dsrelu, dbias_dsilu = map(
    _biased_backward, ("gelu", "qgelu", "relu", "srelu", "silu")
)


def clamped_swiglu(
    input: torch.Tensor,
    quantizer: Quantizer | None,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Return the clamped SwiGLU of the input, quantized if a quantizer is given."""
    return _made(activation_forward(input, None, "clamped_swiglu", (limit, alpha, glu_linear_offset)), quantizer)


def clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Quantizer | None,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Return the gradient of the input of `clamped_swiglu`."""
    made = activation_backward(grad, fwd_input, None, "clamped_swiglu", (limit, alpha, glu_linear_offset))
    return _made(made, quantizer)


# How the extension was built


def get_cudnn_version() -> int:
    """Return cuDNN's version as one number, 91002 for 9.10.2; 0 without cuDNN."""
    return (torch.backends.cudnn.version() or 0) if torch.backends.cudnn.is_available() else 0


def get_cublasLt_version() -> int:
    """Return 0, because products run by PyTorch and Triton."""
    return 0


def ubuf_built_with_mpi() -> bool:
    """Return False, because there are no userbuffers."""
    return False


def nvte_built_with_cublasmp() -> bool:
    """Return False, because there is no cuBLASMp."""
    return False


def device_supports_multicast(device_id: int = -1) -> bool:
    """Return False, because nothing here multicasts."""
    return False
