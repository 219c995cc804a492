"""Dequantization of MX formats with elements of 4 and 6 bits on CUDA: one kernel serves all of them."""

from typing import Any

import torch

from mezzotint.constants import cdiv
from mezzotint.kernels.packed_mx import Element, packed_dequantized_shape
from mezzotint.kernels.triton._jit import ahead
from mezzotint.kernels.triton._jit_packed_mx import bits_of, dequantize_config, dequantize_kernel


def dequantize_packed(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    element: Element,
    swizzled: bool,
    transposed: bool,
    cols: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype(q · 2^(b-127)) as (…, cols), or (cols, R) when `transposed`."""
    data = data.contiguous()
    out = data.new_empty(packed_dequantized_shape(data, element, transposed, cols), dtype=out_dtype)
    if out.numel() == 0:
        return out
    R = out.numel() // cols
    options = dequantize_config()
    dequantize_kernel[(cdiv(R, options["BM"]) * cdiv(cols, options["BN"]),)](
        data,
        scale_inv.contiguous(),
        out,
        R,
        cols,
        data.shape[-1 if element.group_bytes == 1 else -2],
        **bits_of(element),
        SWIZZLED=swizzled,
        TRANSPOSED=transposed,
        **options,
        enable_fp_fusion=False,
    )
    return out


def ahead_dequantize(pointers: str, element: Element, swizzled: bool, transposed: bool) -> tuple[Any, ...]:
    """Return a case of `AHEAD`, which CI compiles without a GPU."""
    options = {**bits_of(element), "SWIZZLED": swizzled, "TRANSPOSED": transposed}
    return ahead(dequantize_kernel, pointers, **options, **dequantize_config())
