"""FP8 with one FP32 scale per 1x128 run or per 128x128 tile, which is DeepSeek's recipe.

    s = scale_from_amax(max |x| over the block; overflow → the input dtype's max)   q = RNE_fp8(fl32(x · s))

RNE rounds to nearest even, fl32 to FP32, and rup(n, m) is n rounded up to a multiple of m.

    1x128, row-wise      blocks along K. data (d0, …, K), scale_inv (ceil(K/128), rup(M, 4)), entry [block, row]
    1x128, column-wise   the same on xᵀ. data (K, d0, …), scale_inv (ceil(M/128), rup(K, 4)), entry [block, column];
                         quantized from x, not from the row-wise codes
    128x128              data as above; the column-wise codes and scales are exact transposes. scale_inv row-wise
                         (ceil(M/128), rup(ceil(K/128), 4)), column-wise (ceil(K/128), rup(ceil(M/128), 4))

These are the layouts that Hopper's block-scaled GEMM reads: 1x128 scales have the block index outermost, and rows of
scales are a multiple of 16 bytes long. The amax of a ragged last block is that of the elements that exist; scale
padding is 0. x is read once.
"""

import torch
from torch.nn.functional import pad

from mezzotint.constants import E4M3, FP8_BLOCK, FP8_MAX, FP8_TORCH, cdiv, rup
from mezzotint.formats import Backend, OperandKind, QuantizedFormat, register_format
from mezzotint.hw import HOPPER
from mezzotint.kernels import operand, scaled_mm
from mezzotint.kernels._lib import Buffers, as_columns, as_matrix, leaf, matrix_shape, padded
from mezzotint.kernels.elements import amax, cast_fp8, decode_fp8, div, mul_blocks_, scale_from_amax, scaled
from mezzotint.kernels.operand import Operand
from mezzotint.kernels.quantize_ops import quantize_ops


def float8_block_scale_shape(rows: int, cols: int, two_d: bool) -> tuple[int, int]:
    """Return the shape of the scales of a (rows, cols) matrix that is quantized along its columns."""
    if two_d:
        return cdiv(rows, FP8_BLOCK), rup(cdiv(cols, FP8_BLOCK), 4)
    return cdiv(cols, FP8_BLOCK), rup(rows, 4)


def float8_block_buffers(shape: tuple[int, ...], two_d: bool, rowwise: bool, columnwise: bool) -> Buffers:
    """Return the buffers of the copies: data in the logical shape and transposed, each with its scales."""
    rows, cols = matrix_shape(shape)
    buffers: Buffers = {}
    if rowwise:
        buffers["rowwise_data"] = (shape, torch.uint8)
        buffers["rowwise_scale_inv"] = (float8_block_scale_shape(rows, cols, two_d), torch.float32)
    if columnwise:
        buffers["columnwise_data"] = ((cols, *shape[:-1]), torch.uint8)
        buffers["columnwise_scale_inv"] = (float8_block_scale_shape(cols, rows, two_d), torch.float32)
    return buffers


def _quantize(x: torch.Tensor, dtype: int, pow2: bool, eps: float, two_d: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix (R, C) to codes (R, C) and compact scales (R or ceil(R/128), ceil(C/128))."""
    rows, cols = x.shape
    height = FP8_BLOCK if two_d else 1
    tiles = padded(x, rup(rows, height), rup(cols, FP8_BLOCK))
    tiles = tiles.view(cdiv(rows, height), height, cdiv(cols, FP8_BLOCK), FP8_BLOCK)
    scale = scale_from_amax(
        amax(tiles, (1, 3)), FP8_MAX[dtype], pow2=pow2, eps=eps, value_for_inf=torch.finfo(x.dtype).max
    )
    codes = cast_fp8(scaled(tiles, scale[:, None, :, None]), dtype).reshape(rup(rows, height), rup(cols, FP8_BLOCK))
    return codes[:rows, :cols].contiguous(), div(1.0, scale)


def _layout(scale_inv: torch.Tensor, two_d: bool) -> torch.Tensor:
    """Return compact scales in the GEMM's layout: 1x128 scales are transposed; the inner size is padded with zeros to a
    multiple of 4."""
    scale_inv = scale_inv if two_d else scale_inv.t()
    return padded(scale_inv, scale_inv.shape[0], rup(scale_inv.shape[1], 4)).contiguous()


def float8_block_quantize_reference(
    x: torch.Tensor, dtype: int, pow2: bool, eps: float, two_d: bool, rowwise: bool, columnwise: bool
) -> list[torch.Tensor]:
    matrix, out = as_matrix(x), []
    transposed = (x.shape[-1], *x.shape[:-1])
    if two_d:
        codes, scale_inv = _quantize(matrix, dtype, pow2, eps, True)
        if rowwise:
            out += [codes.reshape(x.shape), _layout(scale_inv, True)]
        if columnwise:
            turned = codes.t().clone(memory_format=torch.contiguous_format)
            out += [turned.view(transposed), _layout(scale_inv.t(), True)]
        return out
    if rowwise:
        codes, scale_inv = _quantize(matrix, dtype, pow2, eps, False)
        out += [codes.reshape(x.shape), _layout(scale_inv, False)]
    if columnwise:
        codes, scale_inv = _quantize(matrix.t().contiguous(), dtype, pow2, eps, False)
        out += [codes.reshape(transposed), _layout(scale_inv, False)]
    return out


def float8_block_dequantize_reference(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: int,
    two_d: bool,
    transposed: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype(fl32(code · scale_inv)) in the logical shape; `data` is the column-wise copy if `transposed`."""
    rows, cols = (as_columns(data) if transposed else as_matrix(data)).shape
    scales = scale_inv if two_d else scale_inv.t()
    value = decode_fp8(data.reshape(rows, cols), dtype)
    value = mul_blocks_(value, scales, FP8_BLOCK if two_d else 1, FP8_BLOCK).to(out_dtype)
    if transposed:
        return value.t().reshape(*data.shape[1:], data.shape[0]).contiguous()
    return value.reshape(data.shape)


def _dequantize_fake(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: int,
    two_d: bool,
    transposed: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    shape = (*data.shape[1:], data.shape[0]) if transposed else data.shape
    return data.new_empty(shape, dtype=out_dtype)


float8_block_quantize, float8_block_quantize_ = quantize_ops(
    "float8_block_quantize",
    "int dtype, bool pow2, float eps, bool two_d, bool rowwise, bool columnwise",
    geometry=lambda shape, *options: float8_block_buffers(shape, *options[-3:]),
    reference=float8_block_quantize_reference,
    cuda="float8_block:quantize",
    cuda_groups="float8_block:quantize_groups",
    in_graphs="fp8",
)

float8_block_dequantize = leaf(
    "float8_block_dequantize(Tensor data, Tensor scale_inv, int dtype, bool two_d, bool transposed,"
    " ScalarType out_dtype) -> Tensor",
    fake=_dequantize_fake,
    cpu=float8_block_dequantize_reference,
    cuda="float8_block:dequantize",
)


_RUNS, _TILES = "block1d", "block2d"  # 1x128 and 128x128: data codes (R, C), scales of the shape above
_BLOCK_ROWS = 8  # with 1x128 scales the GEMM requires a multiple of this many rows of A


def _kind(name: str) -> OperandKind:
    two_d = name == _TILES

    def dequantize_operand(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
        assert op.scale is not None
        return float8_block_dequantize(op.data.contiguous(), op.scale.contiguous(), op.dtype, two_d, False, dtype)

    return OperandKind(
        name=name,
        elements=tuple(FP8_TORCH),
        scale_shape=lambda rows, size, transposed: float8_block_scale_shape(rows, size, two_d),
        dequantize=dequantize_operand,
    )


def _product(out: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, fast_accum: bool) -> None:
    """Write the product on Hopper with 1x128 and 128x128 scales. Partial sums are promoted to FP32 every 128 elements,
    so that `fast_accum` does not apply.

    cuBLAS's layouts are ours transposed: 1x128 (rows, ceil(C/128)) with strides (1, rows), 128x128 (L, ceil(rows/128))
    with strides (1, L), L = rup(ceil(C/128), 4). This calls `_scaled_mm_v2`, because `_scaled_mm` would take the latter
    without the padding to 4 and misread it (pytorch/pytorch#166752).
    """
    x, scale_x, recipe_x = _side(a, _BLOCK_ROWS)
    y, scale_y, recipe_y = _side(b, scaled_mm.ALIGN)
    target, dtype, inside, after = scaled_mm.plan_output(out, x, y, bias)
    none = [scaled_mm.NO_SWIZZLE]
    scales = [scale_x], [recipe_x], none, [scale_y], [recipe_y], none
    product = scaled_mm.scaled_mm_v2(x, y.t(), *scales, inside, dtype, out=target)
    scaled_mm.cut_to(out, product, after)


def _one_call(
    a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor | None:
    """Return the product that `_product` writes by one call of PyTorch's; None if it takes more than that. Codes are
    padded along the contraction first, if it is no multiple of 128.

    `_scaled_mm` costs the host half of `_scaled_mm_v2`, but guesses the kinds of scales from their shapes. It mistakes
    1x128 scales of one block along the contraction for scales of rows, and expects 128x128 scales without the padding
    to 4. Those go to `_scaled_mm_v2`.
    """
    if not scaled_mm.adds_bias_inside(bias, dtype):
        return None
    sides: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
    for op, multiple in ((a, _BLOCK_ROWS), (b, scaled_mm.ALIGN)):
        is_tile = op.kind == _TILES
        if not scaled_mm.is_as_stored(op, FP8_BLOCK if is_tile else multiple, 1):
            return None
        assert op.scale is not None
        if not op.scale.is_contiguous():
            return None
        missing = -op.data.shape[1] % FP8_BLOCK
        data = pad(op.data, (0, missing)) if missing else op.data
        sides.append((data.view(FP8_TORCH[op.dtype]), op.scale, is_tile))
    (x, scale_x, x_is_tile), (y, scale_y, y_is_tile) = sides
    blocks = x.shape[1] // FP8_BLOCK
    if blocks > 1 and all(not is_tile or scale.shape[1] == blocks for _, scale, is_tile in sides):
        scales = scale_x if x_is_tile else scale_x.t(), scale_y.t() if y_is_tile else scale_y
        return scaled_mm.scaled_mm(x, y.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=False, out=None)
    type_x, type_y = (scaled_mm.BLOCK_128X128 if tile else scaled_mm.BLOCK_1X128 for tile in (x_is_tile, y_is_tile))
    none = [scaled_mm.NO_SWIZZLE]
    scaling = [scale_x.t()], [type_x], none, [scale_y.t()], [type_y], none
    return scaled_mm.scaled_mm_v2(x, y.t(), *scaling, bias, dtype, out=None)


def _side(op: Operand, multiple: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the codes, the scale as the op reads it, and the number of its scaling type."""
    assert op.scale is not None
    is_tile = op.kind == _TILES
    height = rup(operand.rows(op), FP8_BLOCK if is_tile else multiple)
    x = scaled_mm.fp8_codes(op, height, rup(operand.codes(op), FP8_BLOCK))
    if is_tile:
        return x, op.scale.contiguous().t(), scaled_mm.BLOCK_128X128
    return x, scaled_mm.filled(op.scale, op.scale.shape[0], height).t(), scaled_mm.BLOCK_1X128


def _backend(kind_a: str, kind_b: str, why: str) -> Backend:
    """Return the backend of two kinds; block scales take E4M3 alone."""
    return Backend(
        kind_a=kind_a,
        kind_b=kind_b,
        cc=HOPPER,
        name="block",
        why=why,
        cuda=(12, 9),
        product=_product,
        pairs=frozenset({(E4M3, E4M3)}),
        one_call=_one_call,
    )


FLOAT8_BLOCK = register_format(
    QuantizedFormat(
        name="float8_block",
        title="FP8 block",
        kinds=(_kind(_RUNS), _kind(_TILES)),
        products=((_RUNS, _TILES), (_RUNS, _TILES), (_RUNS, _RUNS)),
        backends=(
            _backend(_RUNS, _RUNS, "cuBLAS 1x128 by 1x128"),
            _backend(_RUNS, _TILES, "cuBLAS 1x128 by 128x128"),
            _backend(_TILES, _RUNS, "cuBLAS 128x128 by 1x128"),
        ),
    )
)
