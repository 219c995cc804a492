"""MXFP8: every 16-bit pattern as a block's amax, every scale by every code back."""

from collections.abc import Iterator

import numpy as np
import torch

from mezzotint.constants import FP8_MAX
from mezzotint.kernels.mxfp8 import mxfp8_dequantize, mxfp8_quantize
from tests import exact
from tests.conformance import FP8, Row, count, patterns


def rows(device: str) -> Iterator[Row]:
    for inputs, x, value in patterns(device):
        for elem, dtype in FP8.items():
            blocks = torch.zeros(1 << 16, 32, dtype=value.dtype, device=device)
            blocks[:, 0] = value
            scale_inv = mxfp8_quantize(blocks, dtype, False, False, False, True, False)[1]
            want = exact.encode_e8m0_up(exact.dropped_amax(x[:, None], 1) * np.float32(1 / FP8_MAX[dtype]))
            yield Row(f"mxfp8 {elem} scale", f"{inputs} as amax", "integers", *count(scale_inv[:, 0], want))
    codes = np.arange(256, dtype=np.uint8)
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    powers = exact.decode_e8m0(codes)
    for elem, dtype in FP8.items():
        want = exact.fl32(powers[:, None] * exact.decode(codes, elem)[None, :]).astype(np.float32)
        scales = byte[:, None].expand(256, 8).contiguous()
        got = mxfp8_dequantize(byte.expand(256, 256).contiguous(), scales, dtype, False, False, torch.float32)
        yield Row(f"mxfp8 {elem} dequantize", "256 scales × 256 codes", "float64", *count(got, want))
