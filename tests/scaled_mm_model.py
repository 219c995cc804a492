"""A model of `torch._scaled_mm` and `aten::_scaled_mm_v2` on a GPU, in FP64: refuses what they refuse, and reads scales
from memory at the addresses that cuBLAS reads (https://docs.nvidia.com/cuda/cublas/#scaling-factors-layouts)."""

import torch

from tests.operands import E2M1_TABLE, swizzled_address

F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
TENSOR, ROW, NV, MX, B1, B2 = range(6)


def flat(scale: torch.Tensor) -> torch.Tensor:
    """The memory that starts where the scale does, in FP64."""
    size = scale.untyped_storage().nbytes() // scale.element_size() - scale.storage_offset()
    memory = scale.as_strided((size,), (1,))
    if memory.dtype == torch.float8_e8m0fnu:
        return torch.exp2(memory.view(torch.uint8).double() - 127)
    return memory.double()


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise RuntimeError(why)


def _values(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float4_e2m1fn_x2:
        byte = x.view(torch.uint8)
        return E2M1_TABLE[torch.stack((byte & 15, byte >> 4), -1).flatten(1).long()]
    return x.contiguous().double()


def _factor(scale: torch.Tensor, recipe: int, rows: int, size: int) -> torch.Tensor:
    """(rows, size): what each element of an operand is multiplied by."""
    memory = flat(scale)
    i, k = torch.arange(rows)[:, None], torch.arange(size)[None, :]
    blocks = -(-size // 128)
    if recipe == TENSOR:
        _require(scale.numel() == 1 and scale.dtype == torch.float32, "one FP32 scale")
        return memory[0].expand(rows, size)
    if recipe == ROW:
        _require(scale.numel() == rows and scale.is_contiguous(), "a scale per row")
        return memory[i].expand(rows, size)
    if recipe == B1:
        _require(tuple(scale.shape) == (rows, blocks), f"1x128 shape {tuple(scale.shape)}")
        _require(scale.stride(0) == 1 and scale.stride(1) in (rows, 1 if blocks == 1 else rows), "1x128 strides")
        _require(rows % 4 == 0, "16-byte rows of scales")
        return memory[(k // 128) * rows + i]
    if recipe == B2:
        padded = -(-blocks // 4) * 4
        _require(tuple(scale.shape) == (padded, -(-rows // 128)), f"128x128 shape {tuple(scale.shape)}")
        _require(scale.stride(0) == 1 and scale.stride(1) in (padded, 1 if rows <= 128 else padded), "strides")
        return memory[(i // 128) * padded + k // 128]
    width = 16 if recipe == NV else 32
    padded = -(-size // (4 * width)) * 4
    _require(scale.numel() == -(-rows // 128) * 128 * padded and scale.is_contiguous(), "swizzled size")
    return memory[swizzled_address(i, k // width, padded)]


def _product(x, yt, scale_a, recipe_a, scale_b, recipe_b, bias, out_dtype, out):  # type: ignore[no-untyped-def]
    y = yt.t()
    _require(x.dtype in F8 or x.dtype == torch.float4_e2m1fn_x2, "FP8 or FP4")
    _require(not x.dtype == y.dtype == torch.float8_e5m2, "E5M2 by E5M2")
    row_major = x.stride(1) == 1 and y.stride(1) == 1
    _require(row_major or recipe_a == MX, "row-major by column-major")
    _require(x.shape[1] % 16 == 0 and y.shape[0] % 16 == 0 and x.shape[1] == y.shape[1], "multiples of 16")
    _require(recipe_a not in (MX,) or x.shape[1] % 32 == 0, "whole blocks of 32")
    if bias is not None:
        _require(out_dtype != torch.float32 and bias.dtype == out_dtype, "bias of the output's 16-bit dtype")
        _require(bias.shape == (y.shape[0],) and bias.is_contiguous(), "a bias per column")
    one, other = _values(x), _values(y)
    one = one * _factor(scale_a, recipe_a, *one.shape)
    other = other * _factor(scale_b, recipe_b, *other.shape)
    product = one @ other.t() + (0 if bias is None else bias.double())
    result = product.to(torch.float32).to(out_dtype)
    if out is None:
        return result
    _require(out.shape == result.shape and out.dtype == out_dtype and out.is_contiguous(), "out as it must be")
    return out.copy_(result)


def _blocks(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Scales as `aten::_scaled_mm_v2` takes them, and of which blocks: `torch._scaled_mm` tells that by shapes."""
    rows, blocks = x.shape[0], -(-x.shape[1] // 128)
    tiles = -(-rows // 128)
    if scale.shape == (tiles, blocks) and scale.is_contiguous():
        padded = -(-blocks // 4) * 4
        return scale.as_strided((padded, tiles), (1, padded)), B2
    _require(scale.shape == (rows, blocks) and scale.t().is_contiguous(), f"no such scales {tuple(scale.shape)}")
    return scale, B1


def scaled_mm(x, yt, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False, out=None):  # type: ignore[no-untyped-def]
    """`torch._scaled_mm`: what the scales are is told by their shapes and dtype."""
    if scale_a.dtype == torch.float8_e8m0fnu:
        recipe_a = recipe_b = MX
    elif scale_a.numel() == scale_b.numel() == 1:
        recipe_a = recipe_b = TENSOR
    elif scale_a.shape == (x.shape[0], 1) and scale_b.shape == (1, yt.shape[1]):
        recipe_a = recipe_b = ROW
    else:
        _require(not use_fast_accum, "partial sums of blocks are promoted")
        (scale_a, recipe_a), (scale_b, recipe_b) = _blocks(x, scale_a), _blocks(yt.t(), scale_b.t())
        _require((recipe_a, recipe_b) != (B2, B2), "128x128 by 128x128")
    return _product(x, yt, scale_a, recipe_a, scale_b, recipe_b, bias, out_dtype, out)


def scaled_mm_v2(x, yt, sa, recipe_a, swizzle_a, sb, recipe_b, swizzle_b, bias, out_dtype, out=None):  # type: ignore[no-untyped-def]
    """`aten::_scaled_mm_v2`, recipes as in torch.nn.functional.ScalingType."""
    numbers = {0: TENSOR, 1: ROW, 2: NV, 3: MX, 4: B1, 5: B2}
    kinds = [tuple(numbers[r] for r in recipe) for recipe in (recipe_a, recipe_b)]
    if kinds == [(NV, TENSOR)] * 2:
        _require(swizzle_a == swizzle_b == [1, 0] and out_dtype != torch.float16, "NVFP4 asks for swizzled scales")
        alpha = sa[1] * sb[1]
        assert alpha.numel() == 1
        product = _product(x, yt, sa[0], NV, sb[0], NV, None, torch.float32, None) * alpha
        product = product if bias is None else product + bias.float()
        result = product.to(out_dtype)
        return result if out is None else out.copy_(result)
    _require(kinds in ([(B1,), (B1,)], [(B1,), (B2,)], [(B2,), (B1,)]), f"no such pair {kinds}")
    _require(swizzle_a == swizzle_b == [0], "no swizzle")
    return _product(x, yt, sa[0], kinds[0][0], sb[0], kinds[1][0], bias, out_dtype, out)
