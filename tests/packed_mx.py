"""MX formats under a byte once more, in numpy and `ml_dtypes`, written apart from the package's own code."""

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tests import exact
from tests.conformance import DTYPES, Row, count, patterns
from tests.values import CONTENTS, fill

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


def conformance_rows(
    device: str,
    name: str,
    elem: str,
    quantize: Callable[[torch.Tensor], list[torch.Tensor]],
    dequantize: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
) -> Iterator[Row]:
    """Every 16-bit pattern, every code under every scale, and every kind of content, in both directions.

    `quantize(x)`: both directions, by the floor rule. `dequantize(data, scales, columns)`: FP32 from the row-wise copy.
    """
    title = f"{name} {elem}"
    for inputs, x, value in patterns(device):
        blocks = torch.zeros(len(x), 32, dtype=value.dtype, device=device)
        blocks[:, 0] = value
        data, scale_inv, *_ = quantize(blocks)
        codes, byte = quantize_rows(x[:, None], elem)
        padded = np.where(byte == 255, largest_code(elem), np.zeros((len(x), 32), np.uint8)).astype(np.uint8)
        padded[:, 0] = codes[:, 0]
        got = data.reshape(len(x), -1)
        yield Row(title, f"{inputs}, alone in its block", "ml_dtypes", *count(got, pack(padded, elem)))
        yield Row(f"{title} scale", f"{inputs} as amax", "ml_dtypes", *count(scale_inv[:, :1], byte))
    width = ml_dtypes.finfo(ELEMENTS[elem]).bits
    codes = np.arange(1 << width, dtype=np.uint8)
    powers = exact.decode_e8m0(np.arange(256, dtype=np.uint8))
    shape = (256, *quantize(torch.zeros(1, len(codes), device=device))[0].shape[1:])
    packed = torch.from_numpy(pack(codes[None, :], elem)).to(device).expand(256, -1).reshape(shape)
    scale_inv = torch.arange(256, dtype=torch.uint8, device=device)[:, None].expand(256, 4).contiguous()
    with np.errstate(over="ignore"):
        want = (powers[:, None] * decode(codes, elem)[None, :]).astype(np.float32)
    got = dequantize(packed, scale_inv, len(codes))
    yield Row(f"{title} dequantize", f"256 scales × {len(codes)} codes", "float64", *count(got, want))
    for content in CONTENTS:
        items = mismatches = 0
        for x in (fill((37, 53), dtype, content, 0) for dtype in DTYPES.values()):
            made = quantize(x.to(device))
            for side, (data, scale_inv) in ((x, made[:2]), (x.t(), made[2:])):
                codes, byte = quantize_rows(side.float().contiguous().numpy(), elem)
                full = np.zeros(tuple(scale_inv.shape), np.uint8)
                full[: byte.shape[0], : byte.shape[1]] = byte
                for pair in ((data.reshape(len(codes), -1), pack(codes, elem)), (scale_inv, full)):
                    compared, wrong = count(*pair)
                    items, mismatches = items + compared, mismatches + wrong
        yield Row(title, f"{content}, 6 cases", "ml_dtypes", items, mismatches)
