"""MX formats under a byte once more, in numpy and `ml_dtypes`, written apart from the package's own code."""

from typing import Any

import ml_dtypes
import numpy as np

ELEMENTS: dict[str, Any] = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
}


def largest_code(elem: str) -> int:
    return (1 << ml_dtypes.finfo(ELEMENTS[elem]).bits - 1) - 1


def encode(value: np.ndarray, elem: str) -> np.ndarray:
    """FP32 → codes; NaN → the largest."""
    with np.errstate(invalid="ignore", over="ignore"):
        codes = value.astype(ELEMENTS[elem]).view(np.uint8)
    return np.where(np.isnan(value), largest_code(elem), codes).astype(np.uint8)


def scale_bytes(amax: np.ndarray, elem: str, floor: bool) -> np.ndarray:
    """FP32 amaxes, NaN where there is one → E8M0 bytes."""
    top = float(ml_dtypes.finfo(ELEMENTS[elem]).max)
    emax = int(np.frexp(top)[1]) - 1
    finite = np.where(np.isfinite(amax), amax, 0.0).astype(np.float64)
    exponent = np.frexp(finite)[1].astype(np.int64) - 1  # floor(log2 amax)
    if not floor:
        exponent += finite > np.ldexp(top, exponent - emax)
    byte = np.where(finite == 0, 0, np.maximum(exponent - emax + 127, 0))
    byte = np.where(np.isinf(amax), 255 - emax, byte)
    return np.where(np.isnan(amax), 255, byte).astype(np.uint8)


def quantize_rows(
    x: np.ndarray, elem: str, *, floor: bool = True, two_d: bool = False, cast: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """FP32 (R, C) → codes (R, C), bytes (R, ceil(C/32)). `cast`: of scaled values (R', C'), whole blocks, to codes."""
    rows, cols = x.shape
    height = 32 if two_d else 1
    full = np.zeros((-(-rows // height) * height, -(-cols // 32) * 32), np.float32)
    full[:rows, :cols] = x
    amax = np.abs(full).reshape(full.shape[0] // height, height, -1, 32).max((1, 3))
    byte = np.repeat(scale_bytes(amax, elem, floor), height, axis=0)
    exponent = 127 - np.repeat(byte, 32, axis=1).astype(np.int64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = np.ldexp(full.astype(np.float64), exponent).astype(np.float32)
    scaled[exponent == -128] = np.nan
    codes = encode(scaled, elem) if cast is None else cast(scaled)
    return codes[:rows, :cols], byte[:rows]


def pack(codes: np.ndarray, elem: str) -> np.ndarray:
    """(R, C) codes → (R, bytes): a row is a stream of bits, the lowest first, filled up to whole groups."""
    width = ml_dtypes.finfo(ELEMENTS[elem]).bits
    group = 2 if width == 4 else 4
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % group)))
    bits = np.unpackbits(codes[..., None], axis=-1, count=width, bitorder="little")
    return np.packbits(bits.reshape(len(codes), -1), axis=1, bitorder="little")


def decode(codes: np.ndarray, elem: str) -> np.ndarray:
    """Codes → float64."""
    return codes.view(ELEMENTS[elem]).astype(np.float64)
