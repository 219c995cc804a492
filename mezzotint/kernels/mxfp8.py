"""MXFP8: 32 FP8 elements share one power-of-two scale, an E8M0 byte b that stands for 2^(b-127).

    roundup:  2^(b-127) = the smallest power of two ≥ fl32(amax · fl32(1/fp8_max)): nothing saturates (Blackwell, TE)
    floor:    b = floor(log2 amax) - emax + 127 (emax 8 for E4M3, 15 for E5M2), at least 0: OCP's own rule; the top
              of a block saturates
    q = RNE_fp8(fl32(x · 2^(127-b)));  a zero block has b = 0

Row-wise blocks run along K. Column-wise blocks run along M and are quantized from x; the column-wise data is NOT
transposed. Both copies have the logical shape. Scale bytes are row-wise (rup(M, 128), rup(ceil(K/32), 4)), entry [row,
block]; column-wise (rup(ceil(M/32), 4), rup(K, 128)), entry [block, column]; padding is 0. With `two_d` one b serves a
32x32 tile and is written for each of its rows and columns: both directions then hold the same codes. The amax of a
ragged last block is that of the elements that exist. x is read once.

With `swizzled` the same bytes are in the order that Blackwell's GEMM reads (tiles of 128x4 scales, 512 bytes each; see
`swizzle.py`).
"""

import torch

from mezzotint import hw
from mezzotint.constants import FP8_EMAX, FP8_MAX, FP8_TORCH, MX_BLOCK, cdiv, rup
from mezzotint.formats import Backend, OperandKind, QuantizedFormat, register_format
from mezzotint.kernels import operand, scaled_mm
from mezzotint.kernels._lib import Buffers, as_matrix, callee, leaf, matrix_shape, padded
from mezzotint.kernels.elements import (
    amax,
    cast_fp8,
    decode_fp8,
    e8m0_decode,
    e8m0_inverse,
    e8m0_up,
    mul_blocks_,
    scaled,
)
from mezzotint.kernels.operand import Operand
from mezzotint.kernels.quantize_ops import Unpacking, quantize_ops
from mezzotint.kernels.swizzle import swizzle, unswizzle


def mxfp8_scale_shape(rows: int, cols: int, columnwise: bool) -> tuple[int, int]:
    """Return the shape of the scale bytes of a (rows, cols) matrix in one direction."""
    if columnwise:
        return rup(cdiv(rows, MX_BLOCK), 4), rup(cols, 128)
    return rup(rows, 128), rup(cdiv(cols, MX_BLOCK), 4)


def mxfp8_buffers(shape: tuple[int, ...], rowwise: bool, columnwise: bool) -> Buffers:
    """Return the buffers of the copies: data of each direction in the logical shape, scale bytes padded for the
    GEMM."""
    rows, cols = matrix_shape(shape)
    buffers: Buffers = {}
    if rowwise:
        buffers["rowwise_data"] = (shape, torch.uint8)
        buffers["rowwise_scale_inv"] = (mxfp8_scale_shape(rows, cols, False), torch.uint8)
    if columnwise:
        buffers["columnwise_data"] = (shape, torch.uint8)
        buffers["columnwise_scale_inv"] = (mxfp8_scale_shape(rows, cols, True), torch.uint8)
    return buffers


def _scale_byte(top: torch.Tensor, dtype: int, floor: bool) -> torch.Tensor:
    """Return the E8M0 byte of a block whose amax is `top` (FP32, no NaN)."""
    if floor:
        return ((top.view(torch.int32) >> 23) - FP8_EMAX[dtype]).clamp_min_(0).to(torch.uint8)
    reciprocal = torch.tensor(1.0 / FP8_MAX[dtype], dtype=torch.float32, device=top.device)
    return e8m0_up(top * reciprocal)


def _quantize(x: torch.Tensor, dtype: int, floor: bool, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (M, K) by blocks of height x width; return codes (M, K) and bytes (ceil(M/height), ceil(K/width))."""
    rows, cols = x.shape
    full = rup(rows, height), rup(cols, width)
    tiles = padded(x, *full).view(full[0] // height, height, full[1] // width, width)
    byte = _scale_byte(amax(tiles, (1, 3)), dtype, floor)
    codes = cast_fp8(scaled(tiles, e8m0_inverse(byte)[:, None, :, None]), dtype).reshape(full)
    return codes[:rows, :cols].contiguous(), byte


def mxfp8_quantize_reference(
    x: torch.Tensor, dtype: int, floor: bool, two_d: bool, swizzled: bool, rowwise: bool, columnwise: bool
) -> list[torch.Tensor]:
    matrix, out = as_matrix(x), []
    rows, cols = matrix.shape
    tile = _quantize(matrix, dtype, floor, MX_BLOCK, MX_BLOCK) if two_d else None
    for wanted, columns in ((rowwise, False), (columnwise, True)):
        if not wanted:
            continue
        if tile is not None:
            codes, byte = tile[0].clone(), tile[1].repeat_interleave(MX_BLOCK, 1 if columns else 0)
            byte = byte[:, :cols] if columns else byte[:rows]
        elif columns:
            codes, byte = _quantize(matrix, dtype, floor, MX_BLOCK, 1)
        else:
            codes, byte = _quantize(matrix, dtype, floor, 1, MX_BLOCK)
        byte = padded(byte, *mxfp8_scale_shape(rows, cols, columns)).contiguous()
        out += [codes.reshape(x.shape), swizzle(byte, columns) if swizzled else byte]
    return out


def mxfp8_dequantize_reference(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: int,
    swizzled: bool,
    columnwise: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype(fl32(2^(b-127) · code)) in the logical shape, from either direction."""
    matrix = as_matrix(data)
    scale = e8m0_decode(unswizzle(scale_inv, columnwise) if swizzled else scale_inv)
    height, width = (MX_BLOCK, 1) if columnwise else (1, MX_BLOCK)
    # A power of two rounds nothing but the result: BF16, which has FP32's exponents, needs no FP32 in between.
    work = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    value = mul_blocks_(decode_fp8(matrix, dtype, work), scale.to(work), height, width)
    return value.to(out_dtype).reshape(data.shape)


_KIND = "mx"  # data: codes (R, C), or `transposed` (C, R); scale: E8M0 bytes of `_operand_scale_shape`


def _values(buffers: dict[str, torch.Tensor], direction: str, dtype: int, *options: bool) -> torch.Tensor:
    data, scale_inv, swizzled = buffers[f"{direction}_data"], buffers[f"{direction}_scale_inv"], options[2]
    columnwise = direction == "columnwise"
    return mxfp8_dequantize_reference(data, scale_inv, dtype, swizzled, columnwise, torch.bfloat16)


mxfp8_quantize, mxfp8_quantize_ = quantize_ops(
    "mxfp8_quantize",
    "int dtype, bool floor, bool two_d, bool swizzled, bool rowwise, bool columnwise",
    geometry=lambda shape, *options: mxfp8_buffers(shape, *options[-2:]),
    reference=mxfp8_quantize_reference,
    cuda="mxfp8:quantize",
    in_graphs="bytes",
    unpacking=Unpacking(_KIND, _values),
)

mxfp8_dequantize = leaf(
    "mxfp8_dequantize(Tensor data, Tensor scale_inv, int dtype, bool swizzled, bool columnwise, ScalarType out_dtype)"
    " -> Tensor",
    fake=lambda data, scale_inv, dtype, swizzled, columnwise, out_dtype: data.new_empty(data.shape, dtype=out_dtype),
    cpu=mxfp8_dequantize_reference,
    cuda="mxfp8:dequantize",
)


def _dequantize_operand(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize an operand; the result is exact in BF16, except below 2^-133."""
    assert op.scale is not None
    data, scale = op.data.contiguous(), op.scale.contiguous()
    value = callee(mxfp8_dequantize, data)(data, scale, op.dtype, op.swizzled, op.transposed, dtype)
    return value.t() if op.transposed else value


def _product(out: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, fast_accum: bool) -> None:
    """Write the product by `torch._scaled_mm`. It has not run on real hardware; tests on the CPU read its layouts."""
    x, scale_x = _side(a)
    y, scale_y = _side(b)
    target, dtype, inside, after = scaled_mm.plan_output(out, x, y, bias)
    product = scaled_mm.scaled_mm(x, y.t(), scale_x, scale_y, bias=inside, out_dtype=dtype, out=target)
    scaled_mm.cut_to(out, product, after)


def _side(op: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (R, C) and swizzled scale bytes. GPUs of cc 10.x read either order of codes, those of 12.x do
    not."""
    assert op.scale is not None
    height, width = rup(operand.rows(op), scaled_mm.ALIGN), rup(operand.codes(op), MX_BLOCK)
    if op.transposed:
        x = scaled_mm.fp8_codes(op, width, height).t()
        if (hw.capability(op.data.device.index) or (0, 0)) >= (12, 0):
            x = x.contiguous()
    else:
        x = scaled_mm.fp8_codes(op, height, width)
    scale = op.scale.contiguous()
    return x, (scale if op.swizzled else swizzle(scale, op.transposed)).view(torch.float8_e8m0fnu)


def _operand_scale_shape(rows: int, size: int, transposed: bool) -> tuple[int, int]:
    return mxfp8_scale_shape(size, rows, True) if transposed else mxfp8_scale_shape(rows, size, False)


MXFP8 = register_format(
    QuantizedFormat(
        name="mxfp8",
        title="MXFP8",
        kinds=(
            OperandKind(
                name=_KIND,
                elements=tuple(FP8_TORCH),
                scale_shape=_operand_scale_shape,
                dequantize=_dequantize_operand,
                may_transpose=True,
            ),
        ),
        products=((_KIND, _KIND),) * 3,
        backends=(
            Backend(
                kind_a=_KIND,
                kind_b=_KIND,
                cc=hw.BLACKWELL,
                name="mx",
                why=f"cuBLAS 1x32 E8M0; {hw.UNTRIED}",
                cuda=(12, 8),
                product=_product,
                pairs=scaled_mm.FP8_PAIRS,
            ),
        ),
    )
)
