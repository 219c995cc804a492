"""FP8 with one FP32 scale per row, and one per column for the column-wise copy: quantization and product.

    row-wise:     s_r = scale_from_amax(max_k |x[r, k]|)     q[r, k] = RNE_fp8(fl32(x · s_r))    scale_inv [M]
    column-wise:  the same on xᵀ, one scale per column, data transposed (K, d0, …, dn-1)         scale_inv [K]

The column-wise copy is quantized from x, not from the row-wise codes. Scales may be cut to powers of two. There is no
padding. If both directions are wanted, x is read twice: first for the row and column amaxes, then for one cast that
writes both copies.

The column amaxes are given if x is a shard of a tensor by rows, so that its columns get the scales of the whole tensor.
The row amaxes are given if x is a shard by columns.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mezzotint.constants import E4M3, FP8_MAX, FP8_TORCH, rup
from mezzotint.formats import CC, Backend, OperandKind, QuantizedFormat, register_format
from mezzotint.hw import ADA, GEFORCE_BLACKWELL, HOPPER, UNTRIED
from mezzotint.kernels import operand, scaled_mm
from mezzotint.kernels._lib import Buffers, as_columns, as_matrix, leaf, matrix_shape
from mezzotint.kernels.elements import amax, cast_fp8, decode_fp8, div, scale_from_amax, scaled
from mezzotint.kernels.finish import finish
from mezzotint.kernels.grouped_gemm import group_ends, join_rows
from mezzotint.kernels.operand import Operand, codes_alone
from mezzotint.kernels.quantize_ops import quantize_ops


def check_amaxes(row_amax: torch.Tensor | None, col_amax: torch.Tensor | None, shape: Sequence[int]) -> None:
    """Raise ValueError unless the given amaxes are FP32, one for each row [M] and one for each column [K]."""
    rows, cols = matrix_shape(tuple(shape))
    for name, given, count in (("row", row_amax, rows), ("col", col_amax, cols)):
        if given is not None and (tuple(given.shape) != (count,) or given.dtype != torch.float32):
            raise ValueError(
                f"{name}_amax is {given.dtype} of shape {tuple(given.shape)}: expected torch.float32 of shape "
                f"({count},), the amax of each {'row' if name == 'row' else 'column'}"
            )


def float8_rowwise_buffers(shape: tuple[int, ...], rowwise: bool, columnwise: bool) -> Buffers:
    """Return the buffers of the copies: data in the logical shape and transposed, each with one FP32 scale per row."""
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
    """Return max |x| of each row, FP32 [M], or if `columnwise` of each column, FP32 [K]; NaN is ignored."""
    matrix = as_matrix(x)
    return amax(matrix.t() if columnwise else matrix, 1)


def _quantize_rows(
    x: torch.Tensor, tops: torch.Tensor, dtype: int, pow2: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (R, C), whose row amaxes `tops` are [R], and return codes (R, C) and scale_inv [R]."""
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
    """Quantize in the wanted directions. Amaxes, FP32 [M] and [K], are given if they were reduced over a process group,
    else computed here."""
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
    """Return dtype(fl32(code · scale_inv)) in the logical shape; `data` is the column-wise copy if `transposed`."""
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
    in_graphs="fp8",
)

float8_rowwise_dequantize = leaf(
    "float8_rowwise_dequantize(Tensor data, Tensor scale_inv, int dtype, bool transposed, ScalarType out_dtype)"
    " -> Tensor",
    fake=_dequantize_fake,
    cpu=float8_rowwise_dequantize_reference,
    cuda="float8_rowwise:dequantize",
)


def _dequantize_operand(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    assert op.scale is not None
    return float8_rowwise_dequantize(op.data.contiguous(), op.scale, op.dtype, False, dtype)


def _scales(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    assert a.scale is not None
    assert b.scale is not None
    return a.scale.view(-1, 1), b.scale.view(1, -1)


def _product(out: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, fast_accum: bool) -> None:
    """Write the product by `torch._scaled_mm`, with one scale per row of each operand."""
    scale_a, scale_b = _scales(a, b)
    scale_a = scaled_mm.filled(scale_a.view(1, -1), 1, operand.rows(a)).view(-1, 1)
    scale_b = scaled_mm.filled(scale_b, 1, rup(operand.rows(b), scaled_mm.ALIGN))
    scaled_mm.multiply_fp8(out, a, b, scale_a, scale_b, bias, fast_accum)


def _product_16(out: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, fast_accum: bool) -> None:
    """Write the product on GPUs whose kernel for row scales writes 16-bit outputs only."""
    fits = out.dtype != torch.float32 and (bias is None or bias.dtype == out.dtype)
    (_product if fits else _product_unit)(out, a, b, bias, fast_accum)


def _product_unit(out: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, fast_accum: bool) -> None:
    """Write the product on GPUs without a kernel for row scales: multiply codes to FP32, then apply the scales."""
    one = torch.ones(1, dtype=torch.float32, device=out.device)
    product = torch.empty_like(out, dtype=torch.float32)
    scaled_mm.multiply_fp8(product, a, b, one, one, None, fast_accum)
    finish(out, product, operand.factors(a, b), bias)


def _grouped(a: list[Operand], b: list[Operand], cc: CC, may_copy: bool, fast_accum: bool) -> torch.Tensor | None:
    """Return all groups' products by `torch._scaled_grouped_mm`, or None if it does not fit. It takes E4M3 on Hopper,
    and groups that differ in the rows of A, which are multiples of 16. Groups that differ in the contraction, as in a
    weight gradient, are refused, because it is slower for these than one GEMM after another."""
    if not a[0].dtype == b[0].dtype == E4M3 or cc >= (10, 0):
        return None
    sizes, width = [operand.rows(op) for op in a], operand.codes(a[0])
    if any(operand.codes(op) != width for op in a) or any(n % 16 for n in (width, operand.rows(b[0]), *sizes)):
        return None
    x, y = join_rows([op.data for op in a], may_copy), join_rows([op.data for op in b], may_copy)
    if x is None or y is None:
        return None
    scale_x, scale_y = (torch.cat([op.scale for op in side if op.scale is not None]) for side in (a, b))
    return torch._scaled_grouped_mm(
        x.view(torch.float8_e4m3fn),
        y.view(torch.float8_e4m3fn).view(len(b), operand.rows(b[0]), -1).transpose(1, 2),
        scale_x,
        scale_y.view(len(b), -1),
        offs=group_ends(sizes, x.device),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )


_KIND = "row"  # data: codes (R, C); scale: FP32 [R]


def _backend(cc: tuple[CC, CC], name: str, why: str, product: Any, cuda: CC = (0, 0)) -> Backend:
    return Backend(
        kind_a=_KIND,
        kind_b=_KIND,
        cc=cc,
        name=name,
        why=why,
        cuda=cuda,
        product=product,
        pairs=scaled_mm.FP8_PAIRS,
        one_call=None if product is _product_unit else partial(scaled_mm.as_one_call, _scales),
    )


FLOAT8_ROWWISE = register_format(
    QuantizedFormat(
        name="float8_rowwise",
        title="row-wise FP8",
        kinds=(
            OperandKind(
                name=_KIND,
                elements=tuple(FP8_TORCH),
                scale_shape=lambda rows, size, transposed: (rows,),
                dequantize=_dequantize_operand,
                exact=codes_alone,
                factor=lambda op: op.scale,
                grouped=_grouped,
            ),
        ),
        products=((_KIND, _KIND),) * 3,
        backends=(
            _backend(HOPPER, "row", "torch._scaled_mm, cuBLAS outer-vector scales", _product, (12, 9)),
            _backend(GEFORCE_BLACKWELL, "row_unit", f"scales after an FP32 product; {UNTRIED}", _product_unit),
            _backend(ADA, "row16", f"torch._scaled_mm, CUTLASS, 16-bit outputs; {UNTRIED}", _product_16),
        ),
    )
)
