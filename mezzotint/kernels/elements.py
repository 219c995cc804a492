"""One element at a time: FP8, FP4 and E8M0 casts, decoding, amax and the scale that an amax asks for.

Plain torch, bit-exact on CPU and CUDA, in eager and compiled code. Everything is FP32 inside; one rounding per written
operation; FP32 subnormals are kept.
"""

import torch

from mezzotint.constants import E4M3, FP8_MAX, FP8_TORCH, FP32_MAX, cdiv

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_INF_BITS = 0x7F800000


def div(a: float, b: torch.Tensor) -> torch.Tensor:
    """fl32(a / b). `a / b` would be `b.reciprocal() * a`, one ulp off."""
    return torch.full_like(b, a).div_(b)


def amax(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """FP32 max |x| over `dim` (all: None), NaN dropped, infinity kept; 0 where there is nothing."""
    if x.numel() == 0:
        return x.abs().sum(dim=dim).float()
    top = _magnitude(x, dim)
    if bool(top.isnan().any()):
        top = _magnitude(x.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf")), dim)
    return top.float()


def _magnitude(x: torch.Tensor, dim: int | tuple[int, ...] | None) -> torch.Tensor:
    """max |x| over `dim`, or NaN. Magnitudes are ordered as their bits are, and integers reduce faster."""
    if dim is None:
        low, high = x.aminmax()
        return torch.maximum(-low, high).abs()
    bits, mask = (torch.int32, 0x7FFFFFFF) if x.dtype == torch.float32 else (torch.int16, 0x7FFF)
    top = x.view(bits) & mask
    for d in sorted([dim] if isinstance(dim, int) else dim):  # the outer first: it leaves the inner one little
        top = top.amax(d, keepdim=True) if top.shape[d] > 1 else top
    return top.squeeze(dim).view(x.dtype)


def scale_from_amax(
    amax: torch.Tensor, fp8_max: float, *, pow2: bool, eps: float, value_for_inf: float = FP32_MAX
) -> torch.Tensor:
    """The FP32 factor that brings `amax` to `fp8_max`: 1 for 0 and infinity, mantissa dropped when `pow2`."""
    floor = torch.where(amax < eps, eps, amax) if eps > 0 else amax
    scale = div(fp8_max, floor)
    scale = torch.where(scale.isinf(), value_for_inf, scale)
    scale = torch.where((floor == 0) | ~floor.isfinite(), 1.0, scale)
    return (scale.view(torch.int32) & -0x800000).view(torch.float32) if pow2 else scale


def cast_fp8(value: torch.Tensor, dtype: int) -> torch.Tensor:
    """FP32 → uint8 codes: round to nearest even, saturate, NaN → 0x7F. Overwrites `value`.

    The clamp comes first because torch 2.11 turns an overflow into NaN and E5M2 has infinities. NaN loses its sign, as
    the hardware's conversion makes it do.
    """
    top = FP8_MAX[dtype]
    codes = value.clamp_(-top, top).to(FP8_TORCH[dtype]).view(torch.uint8)
    if codes.numel() and int(codes.max()) == 0xFF:  # a look costs a fiftieth of the fill
        codes.masked_fill_(codes == 0xFF, 0x7F)
    return codes


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """fl32(x · factor), a new FP32 tensor of x's shape; no second one where x is converted."""
    return x * factor if x.dtype == torch.float32 else x.float().mul_(factor)


def cast_fp8_overflowing(value: torch.Tensor, dtype: int) -> torch.Tensor:
    """As `cast_fp8`, but what rounds past the largest value becomes NaN (E4M3) or infinity (E5M2)."""
    over = value.abs() > 464.0 if dtype == E4M3 else value.abs() >= 61440.0
    infinity = torch.where(value < 0, 0xFC, 0x7C).to(torch.uint8)
    codes = cast_fp8(value.clone(), dtype)
    return torch.where(over, 0x7F if dtype == E4M3 else infinity, codes)


def decode_fp8(codes: torch.Tensor, dtype: int, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 codes → FP32 (or another that holds them), exact. By table: PyTorch on a CPU converts them one by one."""
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(FP8_TORCH[dtype]).float().to(out_dtype)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def mul_blocks_(value: torch.Tensor, scale: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """value[r, c] *= scale[r // height, c // width], in place; what `scale` has beyond is padding."""
    rows, cols = value.shape
    scale = scale[: cdiv(rows, height), : cdiv(cols, width)]
    if rows % height == 0 and cols % width == 0:
        value.view(rows // height, height, cols // width, width).mul_(scale[:, None, :, None])
        return value
    return value.mul_(scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols])


def e8m0_up(value: torch.Tensor) -> torch.Tensor:
    """FP32 ≥ 0 → E8M0 byte of the smallest power of two that is not less, saturating; NaN → 255."""
    bits = value.view(torch.int32) & 0x7FFFFFFF
    byte = (bits + 0x7FFFFF >> 23).clamp_max_(254)  # any mantissa carries into the exponent; infinity saturates
    byte *= bits > 0x400000  # up to the subnormal 2^-127
    return torch.where(bits > _INF_BITS, 255, byte).to(torch.uint8)


def e8m0_down(value: torch.Tensor) -> torch.Tensor:
    """FP32 → E8M0 byte of the largest power of two that is not greater in magnitude, saturating; NaN → 255."""
    bits = value.view(torch.int32) & 0x7FFFFFFF
    byte = torch.where(bits == _INF_BITS, 254, bits >> 23)
    return torch.where(bits > _INF_BITS, 255, byte).to(torch.uint8)


def e8m0_nearest(value: torch.Tensor) -> torch.Tensor:
    """FP32 → E8M0 byte of the nearest power of two, 1.5·2^k up; NaN, zero, negative and overflow → 255."""
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below 2^-126 there is no hidden bit and 0x400000 is 2^-127 itself; ml_dtypes rounds all above it up.
    byte = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa >= 0x400000).int()
    return torch.where((bits <= 0) | (byte > 254), 255, byte).to(torch.uint8)


def e8m0_decode(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 byte → FP32 2^(b-127); 0 is the subnormal 2^-127, 255 is NaN."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 0, 0x00400000, b << 23)
    return torch.where(b == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_inverse(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 byte → FP32 2^(127-b), the factor that divides by the scale; 255 is NaN."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 254, 0x00400000, (254 - b) << 23)
    return torch.where(b == 255, 0x7FC00000, bits).view(torch.float32)


def cast_e2m1(value: torch.Tensor) -> torch.Tensor:
    """FP32 → uint8 E2M1 codes 0..15, nearest even, saturating; the sign of zero is kept, NaN → 7 (+6)."""
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
    """uint8 codes 0..15 → FP32, exact."""
    values = E2M1_VALUES + tuple(-v for v in E2M1_VALUES)
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def round_e2m1_stochastic(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """FP32 → E2M1 codes, up or down with the probability that keeps the mean; `random` is one byte per element."""
    a = value.abs()
    t = a + random.float() * (_step(a) / 256)  # exact product: the sum is the only rounding, as in an FMA
    step = _step(t)
    magnitude = ((t / step).floor() * step).clamp_max(6.0)
    code = cast_e2m1(magnitude) + value.signbit().to(torch.uint8) * 8
    return code.masked_fill_(value.isnan(), 7)


def _step(a: torch.Tensor) -> torch.Tensor:
    """The distance from `a` to the next E2M1 value above."""
    return torch.where(a >= 4, 2.0, torch.where(a >= 2, 1.0, 0.5))


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """(..., n) codes → (..., ceil(n/2)) bytes: even index in the low nibble; an odd last byte has 0 above."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: torch.Tensor, size: int) -> torch.Tensor:
    """(..., ceil(size/2)) bytes → (..., size) codes."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return codes[..., :size]
