"""Names and numbers that the whole package shares: element types, the largest values of formats, block sizes."""

from enum import IntEnum

import torch


class DType(IntEnum):
    """These are the element types, with Transformer Engine's numbers. FP8 and narrower types are stored as torch.uint8,
    and so are scale bytes.

    Example:
        >>> import mezzotint as mz
        >>> int(mz.DType.kFloat8E4M3)
        7
    """

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10
    kFloat6E3M2 = 32  # Transformer Engine has none
    kFloat6E2M3 = 33

    @classmethod
    def cast(cls, dtype: int) -> "DType":
        """Return the member that a number, or a member of another enumeration, stands for."""
        return cls(int(dtype))


def mantissa_bits(dtype: DType) -> int:
    """Return the mantissa bits of an FP8 or narrower type, with which its name ends: 3 for E4M3."""
    return int(dtype.name[-1])


# These are plain ints for traced code: an enum member is one more guard, an int is a constant.
E4M3 = int(DType.kFloat8E4M3)
E5M2 = int(DType.kFloat8E5M2)
E2M1 = int(DType.kFloat4E2M1)

FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
FP8_EMAX = {E4M3: 8, E5M2: 15}
FP8_TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
FP4_MAX = 6.0
FP32_MAX = torch.finfo(torch.float32).max

FP8_BLOCK = 128  # FP8 block scaling: 1x128 and 128x128
MX_BLOCK = 32
NVFP4_BLOCK = 16

HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)

TE_DType = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}


def cdiv(a: int, b: int) -> int:
    """Divide and round up; symbolic ints work as well."""
    return (a + b - 1) // b


def rup(a: int, b: int) -> int:
    """Round `a` up to a multiple of `b`."""
    return cdiv(a, b) * b
