"""FP8 with one FP32 scale per row, and one per column for the column-wise copy.

    row-wise:     s_r = scale_from_amax(max_k |x[r, k]|)     q[r, k] = RNE_fp8(fl32(x · s_r))    scale_inv [M]
    column-wise:  the same on xᵀ, one scale per column, data transposed (K, d0, …, dn-1)         scale_inv [K]

The column-wise copy is quantized from x, not from the row-wise codes. Scales may be cut to powers of two. No padding.
Two reads of x where both directions are asked for: row and column amax first, then one cast that writes both. The
column amax is given where x is some of the rows of a tensor: its columns then have the scales of the whole. So is the
row amax where x is some of the columns.
"""

from collections.abc import Sequence

import torch

from mezzotint.constants import FP8_MAX
from mezzotint.kernels._lib import Buffers, as_columns, as_matrix, leaf, matrix_shape
from mezzotint.kernels.elements import amax, cast_fp8, decode_fp8, div, scale_from_amax, scaled
from mezzotint.kernels.quantize_ops import quantize_ops


def check_amaxes(row_amax: torch.Tensor | None, col_amax: torch.Tensor | None, shape: Sequence[int]) -> None:
    """One for each row, and for each column, in FP32."""
    rows, cols = matrix_shape(tuple(shape))
    for name, given, count in (("row", row_amax, rows), ("col", col_amax, cols)):
        if given is not None and (tuple(given.shape) != (count,) or given.dtype != torch.float32):
            raise ValueError(
                f"{name}_amax is {given.dtype} of shape {tuple(given.shape)}: expected torch.float32 of shape "
                f"({count},), the amax of each {'row' if name == 'row' else 'column'}"
            )


def float8_rowwise_buffers(shape: tuple[int, ...], rowwise: bool, columnwise: bool) -> Buffers:
    """Geometry: data in the logical shape and transposed, one FP32 scale per row of each."""
    rows, cols = matrix_shape(shape)
    buffers: Buffers = {}
    if rowwise:
        buffers["rowwise_data"] = (shape, torch.uint8)
        buffers["rowwise_scale_inv"] = ((rows,), torch.float32)
    if columnwise:
        buffers["columnwise_data"] = ((cols, *shape[:-1]), torch.uint8)
        buffers["columnwise_scale_inv"] = ((cols,), torch.float32)
    return buffers


def float8_rowwise_amax_reference(x: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """FP32 [M], or [K] `columnwise`: max |x| of each row, or column, NaN dropped."""
    matrix = as_matrix(x)
    return amax(matrix.t() if columnwise else matrix, 1)


def _quantize_rows(
    x: torch.Tensor, tops: torch.Tensor, dtype: int, pow2: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(R, C) and the amax of each row [R] → codes (R, C) and scale_inv [R]."""
    scale = scale_from_amax(tops, FP8_MAX[dtype], pow2=pow2, eps=eps)
    return cast_fp8(scaled(x, scale[:, None]), dtype).contiguous(), div(1.0, scale)


def float8_rowwise_quantize_reference(
    x: torch.Tensor,
    row_amax: torch.Tensor | None,
    col_amax: torch.Tensor | None,
    dtype: int,
    pow2: bool,
    eps: float,
    rowwise: bool,
    columnwise: bool,
) -> list[torch.Tensor]:
    """Both directions; amaxes FP32 [M], [K] are given where they were reduced over a group, else taken here."""
    check_amaxes(row_amax, col_amax, x.shape)
    matrix, out = as_matrix(x), []
    if rowwise:
        tops = amax(matrix, 1) if row_amax is None else row_amax
        codes, scale_inv = _quantize_rows(matrix, tops, dtype, pow2, eps)
        out += [codes.reshape(x.shape), scale_inv]
    if columnwise:
        columns = matrix.t().contiguous()
        tops = amax(columns, 1) if col_amax is None else col_amax
        codes, scale_inv = _quantize_rows(columns, tops, dtype, pow2, eps)
        out += [codes.reshape(x.shape[-1], *x.shape[:-1]), scale_inv]
    return out


def float8_rowwise_dequantize_reference(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: int, transposed: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """dtype(fl32(code · scale_inv)) in the logical shape; `transposed`: the column-wise copy is given."""
    rows = as_columns(data) if transposed else as_matrix(data)
    value = decode_fp8(rows, dtype).mul_(scale_inv[:, None]).to(out_dtype)
    if transposed:
        return value.t().reshape(*data.shape[1:], data.shape[0]).contiguous()
    return value.reshape(data.shape)


def _dequantize_fake(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: int, transposed: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    shape = (*data.shape[1:], data.shape[0]) if transposed else data.shape
    return data.new_empty(shape, dtype=out_dtype)


float8_rowwise_amax = leaf(
    "float8_rowwise_amax(Tensor x, bool columnwise) -> Tensor",
    fake=lambda x, columnwise: x.new_empty((matrix_shape(tuple(x.shape))[columnwise],), dtype=torch.float32),
    cpu=float8_rowwise_amax_reference,
    cuda="float8_rowwise:amax",
)

float8_rowwise_quantize, float8_rowwise_quantize_ = quantize_ops(
    "float8_rowwise_quantize",
    "Tensor? row_amax, Tensor? col_amax, int dtype, bool pow2, float eps, bool rowwise, bool columnwise",
    geometry=lambda shape, *options: float8_rowwise_buffers(shape, *options[-2:]),
    reference=float8_rowwise_quantize_reference,
    cuda="float8_rowwise:quantize",
    cuda_groups="float8_rowwise:quantize_groups",
)

float8_rowwise_dequantize = leaf(
    "float8_rowwise_dequantize(Tensor data, Tensor scale_inv, int dtype, bool transposed, ScalarType out_dtype)"
    " -> Tensor",
    fake=_dequantize_fake,
    cpu=float8_rowwise_dequantize_reference,
    cuda="float8_rowwise:dequantize",
)
