"""This module has the forward and the backward of a linear layer as functions, under the names of
Transformer Engine's BasicLinear.

    y  = alpha · x · Wᵀ + beta · out + bias
    dx = alpha · dy · W + beta · out        dW = alpha · dyᵀ · x + beta · out

What is given quantized is used as it is; with `with_quantized_compute` the rest is quantized with the quantizers that
are given, in the directions that are read. The functions are for one rank: if several share a weight, `BasicLinear`
itself knows what each of them gathers and sums. There are no fake implementations: a graph traces into these functions.
"""

from typing import Any

import torch

from mezzotint.comm.groups import world_size
from mezzotint.compat.cpp_extensions import general_gemm
from mezzotint.functional.linear import kept
from mezzotint.recipe import OVERRIDES
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


def functional_forward(
    input: Any,
    weight: Any,
    *,
    alpha: float = 1.0,
    bias: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    out: Any = None,
    beta: float | None = None,
    accumulate_into_out: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    backward_override: str | None = None,
    input_quantizer: Quantizer | None = None,
    weight_quantizer: Quantizer | None = None,
    output_quantizer: Quantizer | None = None,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
) -> tuple[Any, Any, Any]:
    """Return y (…, out) of input (…, in) and weight (out, in), and input and weight as
    `functional_backward` takes them.

    Each of the latter two is None if the gradient of the other one is not asked for. With `backward_override`
    "high_precision" they are what was given, with "dequantized" what was multiplied.
    """
    _one_process(tensor_parallel_mode, tensor_parallel_group)
    if backward_override not in OVERRIDES:
        raise ValueError(f"backward_override is {backward_override!r}: give one of {OVERRIDES}")
    dtype = weight.dtype if dtype is None else dtype
    kinds = (device, dtype, with_quantized_compute)
    is_overridden = backward_override is not None
    x = _operand("input", input, input_quantizer, *kinds, True, weight_requires_grad and not is_overridden)
    w = _operand("weight", weight, weight_quantizer, *kinds, True, input_requires_grad and not is_overridden)
    options: dict[str, Any] = {"alpha": alpha, "beta": beta, "accumulate": accumulate_into_out, "out": out}
    y, *_ = general_gemm(w, x, dtype, output_quantizer, layout="TN", bias=bias, **options)
    if backward_override == "high_precision":
        x, w = input, weight
    elif with_quantized_compute:
        x = x if x is input else kept(x, columnwise=not is_overridden)
        w = w if w is weight else kept(w, columnwise=not is_overridden)
    return y, x if weight_requires_grad else None, w if input_requires_grad else None


def functional_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    *,
    grad_input_alpha: float | None = None,
    input_requires_grad: bool = True,
    grad_weight_alpha: float | None = None,
    weight_requires_grad: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    grad_weight: torch.Tensor | None = None,
    grad_weight_beta: float | None = None,
    accumulate_into_grad_weight: bool = False,
    grad_input: torch.Tensor | None = None,
    grad_input_beta: float | None = None,
    accumulate_into_grad_input: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    input_quantizer: Quantizer | None = None,
    weight_quantizer: Quantizer | None = None,
    grad_output_quantizer: Quantizer | None = None,
    grad_input_quantizer: Quantizer | None = None,
) -> tuple[Any, torch.Tensor | None]:
    """Return dx (…, in) and dW (out, in), or None for one that is not asked for; `grad_input`
    and `grad_weight` receive them.

    `input` and `weight` are what `functional_forward` returned. dW has the dtype of `grad_weight` if that is given,
    else `dtype`, whose default is that of `grad_output`.
    """
    _one_process(tensor_parallel_mode, tensor_parallel_group)
    dtype = grad_output.dtype if dtype is None else dtype
    kinds = (device, dtype, with_quantized_compute)
    needs = (input_requires_grad, weight_requires_grad)
    dy = _operand("grad_output", grad_output, grad_output_quantizer, *kinds, *needs) if any(needs) else None
    dx = dw = None
    if input_requires_grad:
        w = _operand("weight", weight, weight_quantizer, *kinds, False, True)
        given: dict[str, Any] = {"beta": grad_input_beta, "accumulate": accumulate_into_grad_input, "out": grad_input}
        dx = _product(w, dy, dtype, "NN", grad_input_alpha, grad_input_quantizer, given)
    if weight_requires_grad:
        x = _operand("input", input, input_quantizer, *kinds, False, True)
        given = {"beta": grad_weight_beta, "accumulate": accumulate_into_grad_weight, "out": grad_weight}
        dw = _product(x, dy, dtype if grad_weight is None else grad_weight.dtype, "NT", grad_weight_alpha, None, given)
    return dx, dw


def _product(
    a: Any, b: Any, dtype: torch.dtype, layout: str, alpha: float | None, quantizer: Any, given: dict[str, Any]
) -> Any:
    alpha = 1.0 if alpha is None else alpha
    return general_gemm(a, b, dtype, quantizer, alpha=alpha, layout=layout, use_split_accumulator=True, **given)[0]


def _operand(
    name: str,
    x: Any,
    quantizer: Quantizer | None,
    device: torch.device | str | None,
    dtype: torch.dtype,
    is_quantized: bool,
    rowwise: bool,
    columnwise: bool,
) -> Any:
    """Return an operand as the product takes it: quantized, in these directions, or in high precision."""
    if x is None:
        raise ValueError(f"{name} is None: give what the forward function gave, with its gradients asked for")
    if not is_quantized:
        x = x.dequantize(dtype=dtype) if isinstance(x, QuantizedTensorStorage) else x
        return x.to(device=device, dtype=dtype)
    if isinstance(x, QuantizedTensorStorage):
        return x
    if quantizer is None:
        raise ValueError(f"{name}_quantizer is None with with_quantized_compute=True, and {name} is not quantized")
    return quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)(x.detach().to(device=device, dtype=dtype))


def _one_process(mode: str | None, group: Any) -> None:
    if mode is not None and world_size(group) > 1:
        raise NotImplementedError(
            f"tensor_parallel_mode is {mode!r} in a group of {world_size(group)} ranks: these functions multiply "
            "what is here. Call op_forward and op_backward of a BasicLinear with that mode"
        )
