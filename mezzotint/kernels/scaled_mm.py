"""PyTorch's scaled GEMMs: this module calls them for the formats, padded with zero codes to the sizes they require.

All take A (Ra, C) and B (Rb, C), row-major along the contraction, and write D = A·Bᵀ into `out`. `torch._scaled_mm`
requires C and Rb to be multiples of 16. Some scales go through `_scaled_mm_v2`, which is told what they are;
`_scaled_mm` guesses it from their shapes.

The GEMM adds the bias if that has the output's 16-bit dtype; else the product is FP32 first. Accumulation is in FP32;
with `fast_accum` Hopper's tensor cores keep fewer bits (with scales per tensor and per row only).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from mezzotint.constants import E4M3, E5M2, FP8_TORCH, rup
from mezzotint.kernels.finish import finish
from mezzotint.kernels.operand import Operand, codes, rows

ALIGN = 16  # elements along the contraction, rows of B; bytes where codes and scales start

# These are torch.nn.functional.ScalingType and SwizzleType as the op takes them.
PER_TENSOR, BLOCK_1X16, BLOCK_1X128, BLOCK_128X128 = 0, 2, 4, 5
NO_SWIZZLE, SWIZZLE_32_4_4 = 0, 1

# These are the element types of A and B: no GPU multiplies E5M2 by E5M2.
FP8_PAIRS = frozenset({(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)})

OptionalTensor = torch.Tensor | None


def scaled_mm(*args: Any, out: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
    """Call `torch._scaled_mm`, which writes into `out` if given."""
    if out is None:
        return torch._scaled_mm(*args, **kwargs)
    return torch._scaled_mm(*args, **kwargs, out=out)


def scaled_mm_v2(*args: Any, out: torch.Tensor | None) -> torch.Tensor:
    """Call `aten::_scaled_mm_v2`, which writes into `out` if given. (`torch.nn.functional.scaled_mm` has no `out`.)"""
    if out is None:
        return torch.ops.aten._scaled_mm_v2.default(*args)
    return torch.ops.aten._scaled_mm_v2.out(*args, out=out)


def as_one_call(
    scales: Callable[[Operand, Operand], tuple[torch.Tensor, torch.Tensor]],
    a: Operand,
    b: Operand,
    bias: OptionalTensor,
    dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor | None:
    """Return the product that `multiply_fp8` writes by one call of `torch._scaled_mm`; None if it takes more than
    one."""
    if not (adds_bias_inside(bias, dtype) and is_as_stored(a, 1, ALIGN) and is_as_stored(b, ALIGN, ALIGN)):
        return None
    x, y = a.data.view(FP8_TORCH[a.dtype]), b.data.view(FP8_TORCH[b.dtype])
    return torch._scaled_mm(x, y.t(), *scales(a, b), bias=bias, out_dtype=dtype, use_fast_accum=fast_accum)


def adds_bias_inside(bias: OptionalTensor, dtype: torch.dtype) -> bool:
    """Return whether the GEMM writes a 16-bit dtype and adds the bias, if there is one, itself."""
    return dtype != torch.float32 and (bias is None or (bias.dtype == dtype and bias.is_contiguous()))


def is_as_stored(op: Operand, rows_multiple: int, size_multiple: int) -> bool:
    """Return whether a GEMM takes an operand as it is stored. It is False if a size that decides this is unknown while
    a graph is made."""
    height, width = op.data.shape
    if type(height) is not int or type(width) is not int or height == 0 or width == 0:
        return False
    if height % rows_multiple or width % size_multiple:
        return False
    if not op.data.is_contiguous() or op.data.storage_offset() % ALIGN or op.scale is None:
        return False
    return op.scale.storage_offset() * op.scale.itemsize % ALIGN == 0


def multiply_fp8(
    out: torch.Tensor,
    a: Operand,
    b: Operand,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: OptionalTensor,
    fast_accum: bool,
) -> None:
    """Multiply FP8 codes by `torch._scaled_mm`, with scales that stand outside of the sum, as it takes them."""
    size = rup(codes(a), ALIGN)
    x, y = fp8_codes(a, rows(a), size), fp8_codes(b, rup(rows(b), ALIGN), size)
    target, dtype, inside, after = plan_output(out, x, y, bias)
    product = scaled_mm(x, y.t(), scale_a, scale_b, bias=inside, out_dtype=dtype, use_fast_accum=fast_accum, out=target)
    cut_to(out, product, after)


def plan_output(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, bias: OptionalTensor
) -> tuple[torch.Tensor | None, torch.dtype, OptionalTensor, OptionalTensor]:
    """Return what the GEMM writes into (None: a new tensor), its dtype, the bias that it adds, and the bias left to
    add."""
    is_inside = bias is not None and out.dtype != torch.float32 and bias.dtype == out.dtype
    after = None if is_inside else bias
    dtype = torch.float32 if after is not None else out.dtype
    is_direct = dtype == out.dtype and out.shape[0] == x.shape[0] and out.shape[1] == y.shape[0]
    inside = None
    if is_inside and bias is not None:
        inside = bias.contiguous() if bias.shape[0] == y.shape[0] else pad(bias, (0, y.shape[0] - bias.shape[0]))
    return (out if is_direct else None), dtype, inside, after


def cut_to(out: torch.Tensor, product: torch.Tensor, bias: OptionalTensor) -> None:
    """Write the product into `out` without its padding, plus the bias that the GEMM did not add."""
    if product is not out or bias is not None:
        finish(out, product[: out.shape[0], : out.shape[1]], [], bias)


def filled(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return x as a contiguous (height, width) at a multiple of 16 bytes, with zeros where x has no elements."""
    if x.shape[0] == height and x.shape[1] == width:
        x = x.contiguous()
        return x if x.data_ptr() % ALIGN == 0 else x.clone()
    return pad(x, (0, width - x.shape[1], 0, height - x.shape[0]))


def fp8_codes(op: Operand, height: int, width: int) -> torch.Tensor:
    """Return the codes as they are stored, padded to (height, width)."""
    return filled(op.data, height, width).view(FP8_TORCH[op.dtype])
