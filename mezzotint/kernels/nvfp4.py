"""NVFP4: 16 E2M1 elements share one E4M3 scale, under one FP32 amax per tensor and direction.

    S_enc = min(fl32(6·E / amax), FLT_MAX)   1 when amax is 0 or infinite;   S_dec = fl32(1 / S_enc)
    sf    = RNE_e4m3(min(fl32(block_amax · fl32(S_enc · fl32(1/6))), FLT_MAX))
    enc   = min(fl32(1 / fl32(sf · S_dec)), FLT_MAX)
    q     = RNE_e2m1(fl32(x · enc))                               value back: q · fl32(fl32(sf · amax) · fl32(1/(6·E)))

E is `e4m3_max` (448, or 256 in some recipes), sf is the scale of a block. Data holds two codes a byte, the even index
in the low nibble. Row-wise blocks run along K: data is (d0, …, ceil(K/2)), sf (rup(M, 128), rup(ceil(K/16), 4)).
Column-wise is the same on xᵀ: data is (K, ceil(M/2)), sf (rup(K, 128), rup(ceil(M/16), 4)). The amax of each direction
is FP32 [1]. Padding is 0.

These options all belong to one function that quantizes rows:
- `two_d`: one sf serves a 16x16 tile and is repeated for its 16 rows; both directions hold the same values.
- `rht`: the column-wise copy is of the Hadamard-transformed xᵀ (`hadamard.py`), and so is its amax. A ragged M is
  filled with zeros up to a multiple of 16 first, and the column-wise data keeps that size, because the transform mixes.
- `rng` (seed, offset): the codes are rounded stochastically; sf is still rounded to nearest.
- `row_scaled`: there is one amax per row, [M] and [K], and one S_enc for each.
- `four_over_six`: each block also tries to map its amax to 4 instead of 6 and keeps what has the smaller error
  (1: sum |d|, 2: sum d²).
- `swizzled`: scale bytes are in the GEMM's order (`swizzle.py`).

x is read twice: for the amax, then for one cast that writes both directions.
"""

from typing import Any

import torch

from mezzotint import hw
from mezzotint.constants import E2M1, E4M3, FP4_MAX, FP32_MAX, NVFP4_BLOCK, cdiv, rup
from mezzotint.formats import Backend, OperandKind, QuantizedFormat, register_format
from mezzotint.kernels import operand, scaled_mm
from mezzotint.kernels._lib import Buffers, as_matrix, callee, leaf, matrix_shape
from mezzotint.kernels.elements import (
    amax,
    cast_e2m1,
    cast_fp8,
    decode_e2m1,
    decode_fp8,
    div,
    pack_fp4,
    round_e2m1_stochastic,
    unpack_fp4,
)
from mezzotint.kernels.finish import finish
from mezzotint.kernels.hadamard import hadamard16
from mezzotint.kernels.operand import Operand
from mezzotint.kernels.philox import philox_bytes
from mezzotint.kernels.quantize_ops import Unpacking, quantize_ops
from mezzotint.kernels.swizzle import swizzle, unswizzle

MAE, MSE = 1, 2


def nvfp4_scale_shape(rows: int, cols: int) -> tuple[int, int]:
    """Return the shape of the scale bytes of a (rows, cols) matrix that is quantized along its columns."""
    return rup(rows, 128), rup(cdiv(cols, NVFP4_BLOCK), 4)


def nvfp4_buffers(shape: tuple[int, ...], rht: bool, row_scaled: bool, rowwise: bool, columnwise: bool) -> Buffers:
    """Return the buffers of the copies: packed codes, scale bytes and amax of each direction."""
    rows, cols = matrix_shape(shape)
    buffers: Buffers = {}
    if rowwise:
        buffers["rowwise_data"] = ((*shape[:-1], cdiv(cols, 2)), torch.uint8)
        buffers["rowwise_scale_inv"] = (nvfp4_scale_shape(rows, cols), torch.uint8)
    if columnwise:
        buffers["columnwise_data"] = ((cols, cdiv(rup(rows, NVFP4_BLOCK) if rht else rows, 2)), torch.uint8)
        buffers["columnwise_scale_inv"] = (nvfp4_scale_shape(cols, rows), torch.uint8)
    if rowwise:
        buffers["amax_rowwise"] = ((rows if row_scaled else 1,), torch.float32)
    if columnwise:
        buffers["amax_columnwise"] = ((cols if row_scaled else 1,), torch.float32)
    return buffers


def _transposed(x: torch.Tensor, rht: bool, sign_mask: int) -> torch.Tensor:
    """Return xᵀ: (M, K) becomes (K, M), or with `rht` the transformed (K, rup(M, 16))."""
    if not rht:
        return x.t().contiguous()
    rows = torch.nn.functional.pad(x, (0, 0, 0, rup(x.shape[0], NVFP4_BLOCK) - x.shape[0]))
    return hadamard16(rows.t().contiguous(), sign_mask)


def nvfp4_amax_reference(
    x: torch.Tensor, rht: bool, sign_mask: int, row_scaled: bool, rowwise: bool, columnwise: bool
) -> list[torch.Tensor]:
    """Return the FP32 amax of each wanted direction: [1], or [M] and [K] when `row_scaled`."""
    matrix, out = as_matrix(x), []
    if rowwise:
        out.append(amax(matrix, 1) if row_scaled else amax(matrix).reshape(1))
    if columnwise:
        columns = _transposed(matrix, rht, sign_mask) if rht else matrix.t()
        out.append(amax(columns, 1) if row_scaled else amax(columns).reshape(1))
    return out


def _encode_scale(tensor_amax: torch.Tensor, e4m3_max: int) -> torch.Tensor:
    scale = div(e4m3_max * FP4_MAX, tensor_amax).clamp_max_(FP32_MAX)
    return torch.where((tensor_amax == 0) | (scale == 0), 1.0, scale)


def _block_factor(sf: torch.Tensor, decode_scale: torch.Tensor) -> torch.Tensor:
    """Return the FP32 factor by which a block's elements are multiplied, from its scale byte."""
    return div(1.0, decode_fp8(sf, E4M3) * decode_scale).clamp_max_(FP32_MAX)


def _sixth(device: torch.device) -> torch.Tensor:
    return torch.tensor(1.0 / 6.0, dtype=torch.float32, device=device)


def _map_to_six(
    blocks: torch.Tensor, top: torch.Tensor, s_enc: torch.Tensor, rng_bytes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize blocks (R, B, 16) in FP32, with amaxes top (R, B) and s_enc (R or 1, 1), so that each amax maps to 6;
    return codes (R, B, 16) and scale bytes (R, B)."""
    sf = cast_fp8((top * (s_enc * _sixth(top.device))).clamp_max_(FP32_MAX), E4M3)
    scaled = blocks * _block_factor(sf, div(1.0, s_enc))[..., None]
    return cast_e2m1(scaled) if rng_bytes is None else round_e2m1_stochastic(scaled, rng_bytes), sf


def _map_to_four_or_six(
    blocks: torch.Tensor,
    top: torch.Tensor,
    s_enc: torch.Tensor,
    tensor_amax: torch.Tensor,
    e4m3_max: int,
    error: int,
    two_d: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize like `_map_to_six`, but choose for each block (or 16x16 tile) whether its amax maps to 4 or to 6."""
    base = torch.div(top, torch.full_like(top, 6.0)) * s_enc
    tries = []
    for factor in (1.5, 1.0):
        sf = cast_fp8((base * factor).clamp_max_(448.0), E4M3)
        codes = cast_e2m1(blocks * _block_factor(sf, div(1.0, s_enc))[..., None])
        back = decode_e2m1(codes) * decode_fp8(sf, E4M3)[..., None] * tensor_amax[..., None]
        delta = torch.div(back, torch.full_like(back, FP4_MAX * e4m3_max)) - blocks
        delta = delta.abs() if error == MAE else delta * delta
        total = delta[..., 0]
        for i in range(1, NVFP4_BLOCK):
            total = total + delta[..., i]
        tries.append((codes, sf, _tile_sum(total) if two_d else total))
    (codes4, sf4, err4), (codes6, sf6, err6) = tries
    four = err4 < err6
    return torch.where(four[..., None], codes4, codes6), torch.where(four, sf4, sf6)


def _tile_sum(error: torch.Tensor) -> torch.Tensor:
    """Sum the errors (R, B) over each 16 rows, as a tree, and return the sum for each of the rows."""
    rows = error.view(error.shape[0] // NVFP4_BLOCK, NVFP4_BLOCK, error.shape[1])
    for half in (8, 4, 2, 1):
        rows = rows[:, :half] + rows[:, half : 2 * half]
    return rows.expand(-1, NVFP4_BLOCK, -1).reshape(error.shape)


def _quantize_rows(
    x: torch.Tensor,
    tensor_amax: torch.Tensor,
    rng: torch.Tensor | None,
    direction: int,
    two_d: bool,
    four_over_six: int,
    e4m3_max: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (R, C), whose amax is [1] or [R], and return packed codes (R, ceil(C/2)) and scale bytes (R or rup(R,
    16), ceil(C/16))."""
    rows, cols = x.shape
    full = rup(rows, NVFP4_BLOCK) if two_d else rows
    padded = x
    if full > rows or cols % NVFP4_BLOCK:
        padded = torch.nn.functional.pad(x, (0, rup(cols, NVFP4_BLOCK) - cols, 0, full - rows))
    blocks = padded.view(full, cdiv(cols, NVFP4_BLOCK), NVFP4_BLOCK)
    top = amax(blocks, 2)
    if two_d:
        top = top.view(full // NVFP4_BLOCK, NVFP4_BLOCK, top.shape[1]).amax(1).repeat_interleave(NVFP4_BLOCK, 0)
    blocks, tensor_amax = blocks.float(), tensor_amax.view(-1, 1)
    s_enc = _encode_scale(tensor_amax, e4m3_max)
    if four_over_six:
        codes, sf = _map_to_four_or_six(blocks, top, s_enc, tensor_amax, e4m3_max, four_over_six, two_d)
    else:
        noise = None if rng is None else philox_bytes(rng, blocks.shape[0] * blocks.shape[1], direction)
        codes, sf = _map_to_six(blocks, top, s_enc, None if noise is None else noise.view(blocks.shape))
    return pack_fp4(codes.reshape(full, rup(cols, NVFP4_BLOCK))[:rows, :cols].contiguous()), sf


def nvfp4_quantize_reference(
    x: torch.Tensor,
    amax_rowwise: torch.Tensor | None,
    amax_columnwise: torch.Tensor | None,
    rng: torch.Tensor | None,
    e4m3_max: int,
    four_over_six: int,
    sign_mask: int,
    two_d: bool,
    swizzled: bool,
    rht: bool,
    row_scaled: bool,
    rowwise: bool,
    columnwise: bool,
) -> list[torch.Tensor]:
    """Quantize in the wanted directions. The FP32 amaxes are given if they were reduced over a process group, else
    computed here."""
    matrix = as_matrix(x)
    data, top = [], []
    for wanted, columns, given in ((rowwise, False, amax_rowwise), (columnwise, True, amax_columnwise)):
        if not wanted:
            continue
        side = _transposed(matrix, rht, sign_mask) if columns else matrix
        if given is None:
            given = amax(side, 1) if row_scaled else amax(side).reshape(1)
        packed, sf = _quantize_rows(side, given, rng, int(columns), two_d, four_over_six, e4m3_max)
        shape = nvfp4_scale_shape(*(matrix.shape[::-1] if columns else matrix.shape))
        sf = torch.nn.functional.pad(sf, (0, shape[1] - sf.shape[1], 0, shape[0] - sf.shape[0]))
        data += [
            packed if columns else packed.reshape(*x.shape[:-1], packed.shape[1]),
            swizzle(sf) if swizzled else sf.contiguous(),
        ]
        top.append(given.clone())
    return data + top


def nvfp4_dequantize_reference(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    tensor_amax: torch.Tensor,
    e4m3_max: int,
    swizzled: bool,
    transposed: bool,
    cols: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype(fl32(code · fl32(fl32(sf · amax) · fl32(1/(6E))))) as (R, cols), or (cols, R) when `transposed`.

    `cols` is the logical size along the packed dimension. A Hadamard transform is not undone.
    """
    codes = unpack_fp4(as_matrix(data), cols)
    rows = codes.shape[0]
    sf = decode_fp8(unswizzle(scale_inv) if swizzled else scale_inv, E4M3)[:rows, : cdiv(cols, NVFP4_BLOCK)]
    unit = torch.tensor(1.0 / (FP4_MAX * e4m3_max), dtype=torch.float32, device=data.device)
    factor = (sf * tensor_amax.view(-1, 1)) * unit
    value = decode_e2m1(codes) * factor.repeat_interleave(NVFP4_BLOCK, 1)[:, :cols]
    if transposed:
        return value.t().to(out_dtype).contiguous()
    return value.to(out_dtype).reshape(*data.shape[:-1], cols)


def _dequantize_fake(data, scale_inv, tensor_amax, e4m3_max, swizzled, transposed, cols, out_dtype):
    shape = (cols, data.shape[0]) if transposed else (*data.shape[:-1], cols)
    return data.new_empty(shape, dtype=out_dtype)


def _amax_fake(x, rht, sign_mask, row_scaled, rowwise, columnwise):
    buffers = nvfp4_buffers(tuple(x.shape), rht, row_scaled, rowwise, columnwise)
    return [x.new_empty(shape, dtype=dtype) for name, (shape, dtype) in buffers.items() if name.startswith("amax")]


nvfp4_amax = leaf(
    "nvfp4_amax(Tensor x, bool rht, int sign_mask, bool row_scaled, bool rowwise, bool columnwise) -> Tensor[]",
    fake=_amax_fake,
    cpu=nvfp4_amax_reference,
    cuda="nvfp4:amax",
)

_KIND = "nv"  # data: two codes a byte (R, ceil(C/2)); scale: E4M3 bytes; amax: FP32 [1] or [R]


def _values(buffers: dict[str, torch.Tensor], direction: str, *options: Any) -> torch.Tensor:
    """Return code · block scale in BF16, as `_exact` does."""
    data, scale_inv = buffers[f"{direction}_data"], buffers[f"{direction}_scale_inv"]
    e4m3_max, swizzled = options[3], options[7]
    top, size = _amax_of_one(e4m3_max, data.device), 2 * data.shape[-1]
    return nvfp4_dequantize_reference(data, scale_inv, top, e4m3_max, swizzled, False, size, torch.bfloat16)


def _amax_of_one(e4m3_max: int, device: torch.device) -> torch.Tensor:
    """Return the amax 6E, FP32 [1]: it cancels the unit 1/(6E), so that code · block scale is left of a value."""
    return torch.full((1,), FP4_MAX * e4m3_max, dtype=torch.float32, device=device)


nvfp4_quantize, nvfp4_quantize_ = quantize_ops(
    "nvfp4_quantize",
    "Tensor? amax_rowwise, Tensor? amax_columnwise, Tensor? rng, int e4m3_max, int four_over_six, int sign_mask,"
    " bool two_d, bool swizzled, bool rht, bool row_scaled, bool rowwise, bool columnwise",
    geometry=lambda shape, *options: nvfp4_buffers(shape, *options[-4:]),
    reference=nvfp4_quantize_reference,
    cuda="nvfp4:quantize",
    unpacking=Unpacking(_KIND, _values),
)

nvfp4_dequantize = leaf(
    "nvfp4_dequantize(Tensor data, Tensor scale_inv, Tensor tensor_amax, int e4m3_max, bool swizzled, bool transposed,"
    " SymInt cols, ScalarType out_dtype) -> Tensor",
    fake=_dequantize_fake,
    cpu=nvfp4_dequantize_reference,
    cuda="nvfp4:dequantize",
)


def _dequantize_operand(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    assert op.scale is not None
    assert op.amax is not None
    data, scale = op.data.contiguous(), op.scale.contiguous()
    dequantize = callee(nvfp4_dequantize, data)
    return dequantize(data, scale, op.amax, op.e4m3_max, op.swizzled, False, operand.codes(op), dtype)[:, :size]


def _exact(op: Operand, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return code · block scale, which has 6 bits and is exact in BF16."""
    assert op.scale is not None
    data, scale, bf16 = op.data.contiguous(), op.scale.contiguous(), torch.bfloat16
    top = _amax_of_one(op.e4m3_max, op.data.device)
    dequantize = callee(nvfp4_dequantize, data)
    value = dequantize(data, scale, top, op.e4m3_max, op.swizzled, False, operand.codes(op), bf16)
    return value[:, :size].to(dtype)


def _factor(op: Operand) -> torch.Tensor:
    assert op.amax is not None
    return op.amax * (1.0 / (FP4_MAX * op.e4m3_max))


def _pair_factors(a: Operand, b: Operand) -> list[torch.Tensor | float]:
    """Return alpha = (amax_a · amax_b) · unit with unit = fl32(1/(36·E_a·E_b)). If an operand is row-scaled, return the
    unit first and then the amaxes, as one product if one of them is a scalar."""
    assert a.amax is not None
    assert b.amax is not None
    unit = 1.0 / (FP4_MAX * FP4_MAX * a.e4m3_max * b.e4m3_max)
    if a.amax.numel() == 1 and b.amax.numel() == 1:
        return [(a.amax * b.amax) * unit]
    column, row = a.amax.view(-1, 1), b.amax.view(1, -1)
    if a.amax.numel() == 1 or b.amax.numel() == 1:
        return [unit, column * row]
    return [unit, column, row]


def _product(out: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, fast_accum: bool) -> None:
    """Write the product by `_scaled_mm_v2`, with one E4M3 scale per 16 codes and one factor on the product. It has not
    run on real hardware; tests on the CPU read its layouts.

    cuBLAS's factor is the product of the two that are given: (amax_a · amax_b) and the unit, so that it rounds as the
    format says. Row-scaled operands and FP16 outputs go through FP32.
    """
    assert a.amax is not None
    assert b.amax is not None
    size = rup(max(a.data.shape[1], b.data.shape[1]), scaled_mm.ALIGN)
    x, scale_x = _side(a, operand.rows(a), size)
    y, scale_y = _side(b, rup(operand.rows(b), scaled_mm.ALIGN), size)
    row_scaled = a.amax.numel() > 1 or b.amax.numel() > 1
    factor = 1.0 / (FP4_MAX * FP4_MAX * a.e4m3_max * b.e4m3_max)
    unit = torch.full((1,), factor, dtype=torch.float32, device=x.device)
    top = torch.ones_like(unit) if row_scaled else a.amax * b.amax
    direct = out if out.dtype != torch.float16 and not row_scaled else torch.empty_like(out, dtype=torch.float32)
    target, dtype, inside, after = scaled_mm.plan_output(direct, x, y, None if direct is not out else bias)
    kinds = [scaled_mm.BLOCK_1X16, scaled_mm.PER_TENSOR]
    order = [scaled_mm.SWIZZLE_32_4_4, scaled_mm.NO_SWIZZLE]
    scales = [scale_x, top], kinds, order, [scale_y, unit], kinds, order
    scaled_mm.cut_to(direct, scaled_mm.scaled_mm_v2(x, y.t(), *scales, inside, dtype, out=target), after)
    if direct is not out:
        finish(out, direct, operand.factors(a, b)[1:] if row_scaled else [], bias)


def _side(op: Operand, height: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes (height, size bytes) and swizzled scale bytes."""
    assert op.scale is not None
    x = scaled_mm.filled(op.data, height, size).view(torch.float4_e2m1fn_x2)
    scale = op.scale.contiguous()
    return x, (scale if op.swizzled else swizzle(scale)).view(torch.float8_e4m3fn)


NVFP4 = register_format(
    QuantizedFormat(
        name="nvfp4",
        title="NVFP4",
        kinds=(
            OperandKind(
                name=_KIND,
                elements=(E2M1,),
                scale_shape=lambda rows, size, transposed: nvfp4_scale_shape(rows, size),
                dequantize=_dequantize_operand,
                exact=_exact,
                factor=_factor,
                pair_factors=_pair_factors,
                packed=(2, 1),
                multiple=NVFP4_BLOCK,
                has_amax=True,
            ),
        ),
        products=((_KIND, _KIND),) * 3,
        backends=(
            Backend(
                kind_a=_KIND,
                kind_b=_KIND,
                cc=hw.BLACKWELL,
                name="nv",
                why=f"cuBLAS 1x16 E4M3 on FP4; {hw.UNTRIED}",
                cuda=(12, 8),
                product=_product,
            ),
        ),
    )
)
