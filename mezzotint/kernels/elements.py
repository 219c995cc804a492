"""Functions of single elements: this module casts to FP8, FP4 and E8M0, decodes them, and computes amaxes and scales.

All of it is plain torch, bit-exact on CPU and CUDA, in eager and compiled code. Arithmetic is in FP32, with one
rounding per written operation; FP32 subnormals are kept. E8M0 is a byte b that stands for the scale 2^(b-127).
"""

import torch

from mezzotint.constants import E4M3, FP8_MAX, FP8_TORCH, FP32_MAX, cdiv

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_INF_BITS = 0x7F800000


def div(a: float, b: torch.Tensor) -> torch.Tensor:
    """Return fl32(a / b), correctly rounded: torch computes `a / b` as `b.reciprocal() * a`, which is one ulp off."""
    return torch.full_like(b, a).div_(b)


def may_hold(condition: torch.Tensor) -> bool:
    """Return whether `condition` holds anywhere, or True without a look where it cannot be known: in a program that is
    being traced (`dynamo/decompositions.py`). The caller saves work where the answer is False, and no bits differ."""
    return type(condition) is not torch.Tensor or bool(condition.any())


def amax(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Return max |x| in FP32 over `dim` (None: all). NaN is ignored, infinity counts, no elements give 0."""
    if x.numel() == 0:
        return x.abs().sum(dim=dim).float()
    top = _magnitude(x, dim)
    if may_hold(top.isnan()):
        top = _magnitude(x.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf")), dim)
    return top.float()


def _magnitude(x: torch.Tensor, dim: int | tuple[int, ...] | None) -> torch.Tensor:
    """Return max |x| over `dim`, or NaN if there is one. Magnitudes are ordered as their bits are, and integers reduce
    faster."""
    if dim is None:
        low, high = x.aminmax()
        return torch.maximum(-low, high).abs()
    bits, mask = (torch.int32, 0x7FFFFFFF) if x.dtype == torch.float32 else (torch.int16, 0x7FFF)
    top = x.view(bits) & mask
    for d in sorted([dim] if isinstance(dim, int) else dim):  # the outer first, so that little is left for the inner
        top = top.amax(d, keepdim=True) if top.shape[d] > 1 else top
    return top.squeeze(dim).view(x.dtype)


def scale_from_amax(
    amax: torch.Tensor, fp8_max: float, *, pow2: bool, eps: float, value_for_inf: float = FP32_MAX
) -> torch.Tensor:
    """Return the FP32 factor that brings `amax` to `fp8_max`.

    An amax below `eps` counts as `eps`. The factor is 1 where the amax is 0 or not finite, and `value_for_inf` where
    the quotient overflows. `pow2` drops its mantissa, which leaves a power of two.
    """
    floor = torch.where(amax < eps, eps, amax) if eps > 0 else amax
    scale = div(fp8_max, floor)
    scale = torch.where(scale.isinf(), value_for_inf, scale)
    scale = torch.where((floor == 0) | ~floor.isfinite(), 1.0, scale)
    return (scale.view(torch.int32) & -0x800000).view(torch.float32) if pow2 else scale


def cast_fp8(value: torch.Tensor, dtype: int) -> torch.Tensor:
    """Cast FP32 to uint8 FP8 codes: round to nearest even, saturate, turn NaN into 0x7F. This overwrites `value`.

    The clamp comes first because torch 2.11 turns an overflow into NaN, and because E5M2 has infinities. NaN loses its
    sign, as it does in the hardware's conversion.
    """
    top = FP8_MAX[dtype]
    codes = value.clamp_(-top, top).to(FP8_TORCH[dtype]).view(torch.uint8)
    if codes.numel() and may_hold(codes.max() == 0xFF):  # this test costs a fiftieth of the fill
        codes.masked_fill_(codes == 0xFF, 0x7F)
    return codes


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return fl32(x · factor) as a new FP32 tensor of x's shape; no second one is allocated to convert x."""
    return x * factor if x.dtype == torch.float32 else x.float().mul_(factor)


def cast_fp8_overflowing(value: torch.Tensor, dtype: int) -> torch.Tensor:
    """Cast like `cast_fp8`, but turn what rounds past the largest value into NaN (E4M3) or infinity (E5M2)."""
    over = value.abs() > 464.0 if dtype == E4M3 else value.abs() >= 61440.0
    infinity = torch.where(value < 0, 0xFC, 0x7C).to(torch.uint8)
    codes = cast_fp8(value.clone(), dtype)
    return torch.where(over, 0x7F if dtype == E4M3 else infinity, codes)


def decode_fp8(codes: torch.Tensor, dtype: int, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode uint8 FP8 codes to FP32, or to another dtype that holds them; this is exact. It reads a table, because
    PyTorch on a CPU converts the codes one by one."""
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(FP8_TORCH[dtype]).float().to(out_dtype)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def mul_blocks_(value: torch.Tensor, scale: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Multiply value[r, c] by scale[r // height, c // width], in place; entries of `scale` beyond that are padding."""
    rows, cols = value.shape
    scale = scale[: cdiv(rows, height), : cdiv(cols, width)]
    if rows % height == 0 and cols % width == 0:
        value.view(rows // height, height, cols // width, width).mul_(scale[:, None, :, None])
        return value
    return value.mul_(scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols])


def e8m0_up(value: torch.Tensor) -> torch.Tensor:
    """Return the E8M0 byte of the smallest power of two ≥ `value` (FP32 ≥ 0), saturating; NaN gives 255."""
    bits = value.view(torch.int32) & 0x7FFFFFFF
    byte = (bits + 0x7FFFFF >> 23).clamp_max_(254)  # any mantissa carries into the exponent; infinity saturates
    byte *= bits > 0x400000  # up to the subnormal 2^-127
    return torch.where(bits > _INF_BITS, 255, byte).to(torch.uint8)


def e8m0_down(value: torch.Tensor) -> torch.Tensor:
    """Return the E8M0 byte of the largest power of two ≤ |value| (FP32), saturating; NaN gives 255."""
    bits = value.view(torch.int32) & 0x7FFFFFFF
    byte = torch.where(bits == _INF_BITS, 254, bits >> 23)
    return torch.where(bits > _INF_BITS, 255, byte).to(torch.uint8)


def e8m0_nearest(value: torch.Tensor) -> torch.Tensor:
    """Return the E8M0 byte of the power of two nearest to `value` (FP32), with 1.5·2^k rounded up. NaN, zero, negative
    numbers and overflow give 255."""
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below 2^-126 there is no hidden bit and 0x400000 is 2^-127 itself; ml_dtypes rounds all above it up.
    byte = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa >= 0x400000).int()
    return torch.where((bits <= 0) | (byte > 254), 255, byte).to(torch.uint8)


def e8m0_decode(byte: torch.Tensor) -> torch.Tensor:
    """Decode an E8M0 byte b to FP32 2^(b-127); byte 0 is the subnormal 2^-127, 255 is NaN."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 0, 0x00400000, b << 23)
    return torch.where(b == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_inverse(byte: torch.Tensor) -> torch.Tensor:
    """Return 2^(127-b) in FP32 for an E8M0 byte b, the factor that divides by the scale; 255 gives NaN."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 254, 0x00400000, (254 - b) << 23)
    return torch.where(b == 255, 0x7FC00000, bits).view(torch.float32)


def cast_e2m1(value: torch.Tensor) -> torch.Tensor:
    """Cast FP32 to uint8 E2M1 codes 0..15: round to nearest even, saturate, keep the sign of zero; NaN gives 7 (+6)."""
    a = value.abs()
    code = (a > 0.25).to(torch.uint8)
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    code += value.signbit().to(torch.uint8) * 8
    return code.masked_fill_(value.isnan(), 7)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Decode uint8 E2M1 codes 0..15 to FP32; this is exact."""
    values = E2M1_VALUES + tuple(-v for v in E2M1_VALUES)
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def round_e2m1_stochastic(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round FP32 to E2M1 codes, up or down with the probability that keeps the mean, by one `random` byte each."""
    a = value.abs()
    t = a + random.float() * (_step(a) / 256)  # exact product: the sum is the only rounding, as in an FMA
    step = _step(t)
    magnitude = ((t / step).floor() * step).clamp_max(6.0)
    code = cast_e2m1(magnitude) + value.signbit().to(torch.uint8) * 8
    return code.masked_fill_(value.isnan(), 7)


def _step(a: torch.Tensor) -> torch.Tensor:
    """Return the distance between neighbouring E2M1 values at the magnitude `a`."""
    return torch.where(a >= 4, 2.0, torch.where(a >= 2, 1.0, 0.5))


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Pack (..., n) codes into (..., ceil(n/2)) bytes, even indices in the low nibble; an odd last byte has 0 above."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Unpack (..., ceil(size/2)) bytes into (..., size) codes."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return codes[..., :size]
