"""The GEMMs of a linear: this module multiplies two tensors, quantized or not."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from mezzotint.kernels._lib import as_matrix, is_plain
from mezzotint.kernels.gemm import Operand, at_once, gemm, new_output, product_of
from mezzotint.tensor.storage import QuantizedTensorStorage

__all__ = ["CustomGemmParams", "GEMMType", "is_made_by_custom", "multiply", "operand"]


@dataclass(frozen=True)
class CustomGemmParams:
    """These are the options that a user's own `qgemm` is given beside its operands.

    Args:
        out_dtype: The dtype of the result, or None.
        use_split_accumulator: Whether partial sums are to be promoted to FP32. The default is True.

    Example:
        >>> import torch
        >>> from mezzotint.custom_recipes import MMParams
        >>> MMParams(out_dtype=torch.bfloat16).use_split_accumulator
        True
    """

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


def operand(x: Any, columnwise: bool) -> Operand:
    """Return x as one side of a GEMM: the rows of its row-wise copy, or those of its column-wise copy, which is the
    transpose."""
    if isinstance(x, QuantizedTensorStorage):
        return x.gemm_operand(columnwise)
    matrix = as_matrix(x)
    return Operand(matrix.t() if columnwise else matrix)


def multiply(
    a: Any,
    b: Any,
    *,
    a_columnwise: bool = False,
    b_columnwise: bool = False,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    accumulate: torch.Tensor | None = None,
    fast: bool = False,
) -> torch.Tensor:
    """Return A · Bᵀ + bias, of shape (rows of A, rows of B), contracted along the other dimension of both; it is added
    to `accumulate` in place if that is given. `a_columnwise` and `b_columnwise` take a side's column-wise copy, and
    `fast` allows fast accumulation."""
    if is_made_by_custom(a) and is_made_by_custom(b):
        return _custom(a, b, a_columnwise, b_columnwise, out_dtype, bias, accumulate, fast)
    x, y = operand(a, a_columnwise), operand(b, b_columnwise)
    if not is_plain(x.data):
        return gemm(x, y, out_dtype=out_dtype, bias=bias, accumulate=accumulate, fast_accum=fast)
    # As in `gemm`, which would be another frame on the way to each kernel.
    dtype = out_dtype if accumulate is None else accumulate.dtype
    out = at_once(x, y, dtype, bias, fast) if x.data.is_cuda else None
    if out is None:
        out = new_output(x, y, dtype)
        product_of(out, x, y)(out, x, y, bias, fast)
    return out if accumulate is None else accumulate.add_(out)


class GEMMType(Enum):
    """A `GEMMType` names one of a linear's three matrix products: forward (FPROP), input gradient (DGRAD), weight
    gradient (WGRAD).

    Example:
        >>> from mezzotint.custom_recipes import GEMMType
        >>> GEMMType.WGRAD.value
        'wgrad'
    """

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


def is_made_by_custom(x: Any) -> bool:
    """Return whether a user's own quantizer made x."""
    quantizer = getattr(x, "_quantizer", None) if not isinstance(x, torch.Tensor) else None
    return quantizer is not None and quantizer.is_custom()


def _custom(
    a: Any,
    b: Any,
    a_columnwise: bool,
    b_columnwise: bool,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    accumulate: torch.Tensor | None,
    fast: bool,
) -> torch.Tensor:
    """Multiply with the `qgemm` of the user's quantizer that made both sides, which hold `data`, `scale` and, for the
    column-wise direction, `data_t`, `scale_t`."""
    kind = GEMMType.WGRAD if a_columnwise else GEMMType.DGRAD if b_columnwise else GEMMType.FPROP
    x, sx = (a.data_t, a.scale_t) if a_columnwise else (a.data, a.scale)
    w, sw = (b.data_t, b.scale_t) if b_columnwise else (b.data, b.scale)
    params = CustomGemmParams(out_dtype=out_dtype, use_split_accumulator=not fast)
    y = a._quantizer.qgemm(x, w, params, out_dtype, sx, sw, bias, gemm_type=kind, qresult_x=a, qresult_w=b)
    return y if accumulate is None else accumulate.add_(y)
