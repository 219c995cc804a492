"""FP8 with one scale per tensor: current scaling takes the scale from this tensor's amax, delayed scaling is given it.

    q         = RNE_fp8(fl32(x * scale))                 uint8 codes, saturating
    scale     = scale_from_amax(max |x|)  or given       FP32
    scale_inv = fl32(1 / scale)                          FP32 [1], what dequantize multiplies by

RNE rounds to nearest even, fl32 to FP32. The row-wise copy `data` has the logical shape. The column-wise copy
`transpose` is (K, d0, …, dn-1), the same bytes with the last dimension first; it exists because Hopper's FP8 GEMM takes
only operands that are contiguous along the contraction. There is no padding: any size can be quantized, and the GEMM
pads. Both copies come from one read of x; current scaling reads it once more, before, for the amax.
"""

from functools import partial

import torch

from mezzotint.constants import FP8_MAX, FP8_TORCH
from mezzotint.formats import Backend, OperandKind, QuantizedFormat, register_format
from mezzotint.hw import ADA
from mezzotint.kernels._lib import Buffers, as_columns, as_matrix, leaf
from mezzotint.kernels.elements import amax as reduce_amax
from mezzotint.kernels.elements import cast_fp8, decode_fp8, div, scale_from_amax, scaled
from mezzotint.kernels.operand import Operand, codes_alone
from mezzotint.kernels.quantize_ops import quantize_ops
from mezzotint.kernels.scaled_mm import FP8_PAIRS, as_one_call, multiply_fp8


def float8_buffers(shape: tuple[int, ...], rowwise: bool, columnwise: bool) -> Buffers:
    """Return the buffers of the copies: data (shape), transpose (K, *leading), scale_inv [1]. If the shape has no
    dimensions, neither copy has any."""
    buffers: Buffers = {}
    if rowwise:
        buffers["data"] = (shape, torch.uint8)
    if columnwise:
        buffers["transpose"] = ((*shape[-1:], *shape[:-1]), torch.uint8)
    buffers["scale_inv"] = ((1,), torch.float32)
    return buffers


def float8_amax_reference(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| as FP32 [1]; NaN is ignored."""
    return reduce_amax(x).reshape(1)


def _cast(x: torch.Tensor, scale: torch.Tensor, dtype: int, rowwise: bool, columnwise: bool) -> list[torch.Tensor]:
    codes = cast_fp8(scaled(x, scale), dtype)
    out = [codes.contiguous()] if rowwise else []
    if columnwise:
        # contiguous() would return the same memory for the transpose of a single row or column, so this is a clone.
        transpose = as_matrix(codes).t().clone(memory_format=torch.contiguous_format)
        out.append(transpose.view(x.shape[-1], *x.shape[:-1]))
    return [*out, div(1.0, scale)]


def float8_quantize_reference(
    x: torch.Tensor,
    amax: torch.Tensor | None,
    dtype: int,
    pow2: bool,
    eps: float,
    rowwise: bool,
    columnwise: bool,
) -> list[torch.Tensor]:
    """Quantize with current scaling. `amax` FP32 [1] is given if a process group has reduced it, else computed."""
    amax = float8_amax_reference(x) if amax is None else amax
    scale = scale_from_amax(amax, FP8_MAX[dtype], pow2=pow2, eps=eps)
    return _cast(x, scale, dtype, rowwise, columnwise)


def float8_quantize_scaled_reference(
    x: torch.Tensor, scale: torch.Tensor, dtype: int, rowwise: bool, columnwise: bool
) -> list[torch.Tensor]:
    """Quantize with delayed scaling, by a given `scale` FP32 [1]. The last output is the tensor's amax, FP32 [1]."""
    return [*_cast(x, scale.reshape(1), dtype, rowwise, columnwise), float8_amax_reference(x)]


def float8_dequantize_reference(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: int, transposed: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return dtype(fl32(code · scale_inv)) in the logical shape; `data` is the column-wise copy if `transposed`."""
    if transposed:
        data = as_columns(data).t().reshape(*data.shape[1:], data.shape[0])
    codes = torch.arange(256, dtype=torch.uint8, device=data.device)
    table = decode_fp8(codes, dtype).mul_(scale_inv).to(out_dtype)  # there are only 256 results
    return table.index_select(0, data.reshape(-1).int()).view(data.shape)


def _dequantize_fake(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: int, transposed: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    shape = (*data.shape[1:], data.shape[0]) if transposed else data.shape
    return data.new_empty(shape, dtype=out_dtype)


float8_amax = leaf(
    "float8_amax(Tensor x) -> Tensor",
    fake=lambda x: x.new_empty((1,), dtype=torch.float32),
    cpu=float8_amax_reference,
    cuda="float8:amax",
)

float8_quantize, float8_quantize_ = quantize_ops(
    "float8_quantize",
    "Tensor? amax, int dtype, bool pow2, float eps, bool rowwise, bool columnwise",
    geometry=lambda shape, *options: float8_buffers(shape, *options[-2:]),
    reference=float8_quantize_reference,
    cuda="float8:quantize",
    cuda_groups="float8:quantize_groups",
    in_graphs="fp8",
)

float8_quantize_scaled, float8_quantize_scaled_ = quantize_ops(
    "float8_quantize_scaled",
    "Tensor scale, int dtype, bool rowwise, bool columnwise",
    geometry=lambda shape, *options: {
        **float8_buffers(shape, *options[-2:]),
        "amax": ((1,), torch.float32),
    },
    reference=float8_quantize_scaled_reference,
    cuda="float8:quantize_scaled",
    cuda_enter="float8:enter_scaled",
    cuda_groups="float8:quantize_scaled_groups",
    in_graphs="fp8",
)

float8_dequantize = leaf(
    "float8_dequantize(Tensor data, Tensor scale_inv, int dtype, bool transposed, ScalarType out_dtype) -> Tensor",
    fake=_dequantize_fake,
    cpu=float8_dequantize_reference,
    cuda="float8:dequantize",
)


def _dequantize_operand(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    assert op.scale is not None
    return float8_dequantize(op.data.contiguous(), op.scale, op.dtype, False, dtype)


def _scales(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    assert a.scale is not None
    assert b.scale is not None
    return a.scale, b.scale


def _product(out: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, fast_accum: bool) -> None:
    """Write the product by `torch._scaled_mm`, with one scale per tensor."""
    multiply_fp8(out, a, b, *_scales(a, b), bias, fast_accum)


_KIND = "tensor"  # data: codes (R, C); scale: FP32 [1]
FLOAT8 = register_format(
    QuantizedFormat(
        name="float8",
        title="FP8",
        kinds=(
            OperandKind(
                name=_KIND,
                elements=tuple(FP8_TORCH),
                scale_shape=lambda rows, size, transposed: (1,),
                dequantize=_dequantize_operand,
                exact=codes_alone,
                factor=lambda op: op.scale,
            ),
        ),
        products=((_KIND, _KIND),) * 3,
        backends=(
            Backend(
                kind_a=_KIND,
                kind_b=_KIND,
                cc=ADA,
                name="tensor",
                why="torch._scaled_mm, a scale per tensor",
                product=_product,
                pairs=FP8_PAIRS,
                one_call=partial(as_one_call, _scales),
            ),
        ),
    )
)
