"""PyTorch's scaled GEMMs and what they ask for: sizes filled up with zero codes, scales as views of our layouts.

All take A (Ra, C) and B (Rb, C) row-major along the contraction and write D = A·Bᵀ into `out`.
`torch._scaled_mm` asks for C and Rb in multiples of 16. cuBLAS's 1x128 and 128x128 scales go through
`_scaled_mm_v2`, whose layouts are ours transposed: 1x128 (rows, ceil(C/128)) with strides (1, rows), 128x128
(L, ceil(rows/128)) with strides (1, L), L = rup(ceil(C/128), 4). `_scaled_mm` would take the latter without the
padding to 4 and misread it (pytorch/pytorch#166752).

Bias is added by the GEMM where it has the output's 16-bit dtype; else the product is FP32 first. FP32
accumulation; with `fast_accum` Hopper's tensor cores keep fewer bits (per-tensor and per-row scales only).

`mx` and `nv` need compute capability 10.0 and were not run on real hardware; tests on the CPU read their layouts.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from mezzotint import hw
from mezzotint.constants import FP4_MAX, FP8_BLOCK, FP8_TORCH, MX_BLOCK, rup
from mezzotint.kernels.finish import finish
from mezzotint.kernels.operand import Operand, codes, factors, rows
from mezzotint.kernels.swizzle import swizzle

ALIGN = 16  # elements along the contraction, rows of B; bytes where codes and scales start
BLOCK_ROWS = 8  # rows of A under 1x128 scales

# torch.nn.functional.ScalingType and SwizzleType, as the op takes them
_TENSOR, _BLOCK_1X16, _BLOCK_1X128, _BLOCK_128X128 = 0, 2, 4, 5
_NO_SWIZZLE, _SWIZZLE_32_4_4 = 0, 1

Bias = torch.Tensor | None


def scaled_mm(*args: Any, out: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
    """`torch._scaled_mm`, into `out` where given."""
    if out is None:
        return torch._scaled_mm(*args, **kwargs)
    return torch._scaled_mm(*args, **kwargs, out=out)


def scaled_mm_v2(*args: Any, out: torch.Tensor | None) -> torch.Tensor:
    """`aten::_scaled_mm_v2`, into `out` where given. (`torch.nn.functional.scaled_mm` takes no `out`.)"""
    if out is None:
        return torch.ops.aten._scaled_mm_v2.default(*args)
    return torch.ops.aten._scaled_mm_v2.out(*args, out=out)


def tensor(out: torch.Tensor, a: Operand, b: Operand, bias: Bias, fast_accum: bool) -> None:
    """One scale per tensor."""
    assert a.scale is not None
    assert b.scale is not None
    _fp8(out, a, b, a.scale, b.scale, bias, fast_accum)


def row(out: torch.Tensor, a: Operand, b: Operand, bias: Bias, fast_accum: bool) -> None:
    """One scale per row of each operand."""
    assert a.scale is not None
    assert b.scale is not None
    scale_a, scale_b = _filled(a.scale.view(1, -1), 1, rows(a)), _filled(b.scale.view(1, -1), 1, rup(rows(b), ALIGN))
    _fp8(out, a, b, scale_a.view(-1, 1), scale_b, bias, fast_accum)


def row16(out: torch.Tensor, a: Operand, b: Operand, bias: Bias, fast_accum: bool) -> None:
    """As `row` where the kernel writes 16-bit outputs only."""
    fits = out.dtype != torch.float32 and (bias is None or bias.dtype == out.dtype)
    (row if fits else row_unit)(out, a, b, bias, fast_accum)


def row_unit(out: torch.Tensor, a: Operand, b: Operand, bias: Bias, fast_accum: bool) -> None:
    """As `row` where no kernel takes a scale per row: codes alone, to FP32, and the scales on the product."""
    one = torch.ones(1, dtype=torch.float32, device=out.device)
    product = torch.empty_like(out, dtype=torch.float32)
    _fp8(product, a, b, one, one, None, fast_accum)
    finish(out, product, factors(a, b), bias)


def block(out: torch.Tensor, a: Operand, b: Operand, bias: Bias, fast_accum: bool) -> None:
    """1x128 and 128x128 scales on Hopper, promoted to FP32 every 128: `fast_accum` does not apply."""
    x, scale_x, recipe_x = _block_side(a, BLOCK_ROWS)
    y, scale_y, recipe_y = _block_side(b, ALIGN)
    target, dtype, inside, after = _plan(out, x, y, bias)
    scales = [scale_x], [recipe_x], [_NO_SWIZZLE], [scale_y], [recipe_y], [_NO_SWIZZLE]
    _cut(out, scaled_mm_v2(x, y.t(), *scales, inside, dtype, out=target), after)


def mx(out: torch.Tensor, a: Operand, b: Operand, bias: Bias, fast_accum: bool) -> None:
    """One E8M0 scale per 32 codes. Not run on real hardware."""
    x, scale_x = _mx_side(a)
    y, scale_y = _mx_side(b)
    target, dtype, inside, after = _plan(out, x, y, bias)
    _cut(out, scaled_mm(x, y.t(), scale_x, scale_y, bias=inside, out_dtype=dtype, out=target), after)


def nv(out: torch.Tensor, a: Operand, b: Operand, bias: Bias, fast_accum: bool) -> None:
    """One E4M3 scale per 16 FP4 codes and one factor on the product. Not run on real hardware.

    cuBLAS's factor is the product of the two given ones: (amax_a · amax_b) and the unit, so that it rounds as
    the format says. Row-scaled operands and FP16 outputs go through FP32.
    """
    assert a.amax is not None
    assert b.amax is not None
    size = rup(max(a.data.shape[1], b.data.shape[1]), ALIGN)
    x, scale_x = _nv_side(a, rows(a), size)
    y, scale_y = _nv_side(b, rup(rows(b), ALIGN), size)
    row_scaled = a.amax.numel() > 1 or b.amax.numel() > 1
    factor = 1.0 / (FP4_MAX * FP4_MAX * a.e4m3_max * b.e4m3_max)
    unit = torch.full((1,), factor, dtype=torch.float32, device=x.device)
    top = torch.ones_like(unit) if row_scaled else a.amax * b.amax
    direct = out if out.dtype != torch.float16 and not row_scaled else torch.empty_like(out, dtype=torch.float32)
    target, dtype, inside, after = _plan(direct, x, y, None if direct is not out else bias)
    recipes, order = [_BLOCK_1X16, _TENSOR], [_SWIZZLE_32_4_4, _NO_SWIZZLE]
    scales = [scale_x, top], recipes, order, [scale_y, unit], recipes, order
    _cut(direct, scaled_mm_v2(x, y.t(), *scales, inside, dtype, out=target), after)
    if direct is not out:
        finish(out, direct, factors(a, b)[1:] if row_scaled else [], bias)


def as_one_call(backend: Any, a: Operand, b: Operand, bias: Bias, dtype: torch.dtype, fast_accum: bool) -> Any:
    """What `backend` writes, as one call of `torch._scaled_mm` that a compiler can take in; None where it is more than
    one, or where a size that decides about it is not known while a graph is made."""
    if backend not in (tensor, row, row16) or (bias is not None and bias.dtype != dtype) or dtype == torch.float32:
        return None
    for op, multiple in ((a, 1), (b, ALIGN)):
        height, width = op.data.shape
        if type(height) is not int or type(width) is not int or height == 0 or width == 0:
            return None
        if height % multiple or width % ALIGN or not op.data.is_contiguous() or op.data.storage_offset() % ALIGN:
            return None
        if op.scale is None or op.scale.storage_offset() * op.scale.itemsize % ALIGN:
            return None
    assert a.scale is not None
    assert b.scale is not None
    scale_a, scale_b = (a.scale, b.scale) if backend is tensor else (a.scale.view(-1, 1), b.scale.view(1, -1))
    x, y = a.data.view(FP8_TORCH[a.dtype]), b.data.view(FP8_TORCH[b.dtype])
    return torch._scaled_mm(x, y.t(), scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast_accum)


def _fp8(
    out: torch.Tensor,
    a: Operand,
    b: Operand,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: Bias,
    fast_accum: bool,
) -> None:
    size = rup(codes(a), ALIGN)
    x, y = _fp8_codes(a, rows(a), size), _fp8_codes(b, rup(rows(b), ALIGN), size)
    target, dtype, inside, after = _plan(out, x, y, bias)
    product = scaled_mm(x, y.t(), scale_a, scale_b, bias=inside, out_dtype=dtype, use_fast_accum=fast_accum, out=target)
    _cut(out, product, after)


def _plan(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, bias: Bias
) -> tuple[torch.Tensor | None, torch.dtype, Bias, Bias]:
    """What the GEMM writes into (None: a new tensor), its dtype, the bias that it adds, the bias left to add."""
    is_inside = bias is not None and out.dtype != torch.float32 and bias.dtype == out.dtype
    after = None if is_inside else bias
    dtype = torch.float32 if after is not None else out.dtype
    is_direct = dtype == out.dtype and out.shape[0] == x.shape[0] and out.shape[1] == y.shape[0]
    inside = None
    if is_inside and bias is not None:
        inside = bias.contiguous() if bias.shape[0] == y.shape[0] else pad(bias, (0, y.shape[0] - bias.shape[0]))
    return (out if is_direct else None), dtype, inside, after


def _cut(out: torch.Tensor, product: torch.Tensor, bias: Bias) -> None:
    """What was filled up is cut off, the bias that the GEMM did not add is added."""
    if product is not out or bias is not None:
        finish(out, product[: out.shape[0], : out.shape[1]], [], bias)


def _filled(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """A contiguous (height, width) that starts at a multiple of 16 bytes, with zeros where x has nothing."""
    if x.shape[0] == height and x.shape[1] == width:
        x = x.contiguous()
        return x if x.data_ptr() % ALIGN == 0 else x.clone()
    return pad(x, (0, width - x.shape[1], 0, height - x.shape[0]))


def _fp8_codes(op: Operand, height: int, width: int) -> torch.Tensor:
    return _filled(op.data, height, width).view(FP8_TORCH[op.dtype])


def _block_side(op: Operand, multiple: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Codes, the scale as the op reads it, and its recipe."""
    assert op.scale is not None
    is_tile = op.kind == "block2d"
    height = rup(rows(op), FP8_BLOCK if is_tile else multiple)
    x = _fp8_codes(op, height, rup(codes(op), FP8_BLOCK))
    if is_tile:
        return x, op.scale.contiguous().t(), _BLOCK_128X128
    return x, _filled(op.scale, op.scale.shape[0], height).t(), _BLOCK_1X128


def _mx_side(op: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (R, C) and swizzled scale bytes. cc 10.x reads either order of the codes, 12.x does not."""
    assert op.scale is not None
    height, width = rup(rows(op), ALIGN), rup(codes(op), MX_BLOCK)
    x = _fp8_codes(op, width, height).t() if op.transposed else _fp8_codes(op, height, width)
    if op.transposed and (hw.capability(op.data.device.index) or (0, 0)) >= (12, 0):
        x = x.contiguous()
    scale = op.scale.contiguous()
    return x, (scale if op.swizzled else swizzle(scale, op.transposed)).view(torch.float8_e8m0fnu)


def _nv_side(op: Operand, height: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes (height, size bytes) and swizzled scale bytes."""
    assert op.scale is not None
    x = _filled(op.data, height, size).view(torch.float4_e2m1fn_x2)
    scale = op.scale.contiguous()
    return x, (scale if op.swizzled else swizzle(scale)).view(torch.float8_e4m3fn)
