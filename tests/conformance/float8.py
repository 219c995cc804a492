"""FP8 with one scale per tensor: every 16-bit pattern by a scale of 1, every code back."""

from collections.abc import Iterator

import numpy as np
import torch

from mezzotint.kernels.float8 import float8_dequantize, float8_quantize_scaled
from tests import exact
from tests.conformance import FP8, Row, count, patterns


def rows(device: str) -> Iterator[Row]:
    for inputs, x, value in patterns(device):
        for elem, dtype in FP8.items():
            data = float8_quantize_scaled(value.view(256, 256), torch.ones(1, device=device), dtype, True, True)
            codes = torch.stack((data[0], data[1].t()))
            both = np.broadcast_to(exact.encode(x, elem).reshape(256, 256), (2, 256, 256))
            yield Row(f"fp8_tensor {elem}", f"{inputs}, scale 1", "integers", *count(codes, both))
    byte, scale = torch.arange(256, dtype=torch.uint8, device=device), torch.tensor([0.3], device=device)
    for elem, dtype in FP8.items():
        value = exact.decode(np.arange(256, dtype=np.uint8), elem)
        want = exact.fl32(value * scale.double().item()).astype(np.float32)
        got = float8_dequantize(byte, scale, dtype, False, torch.float32)
        yield Row(f"fp8_tensor {elem} dequantize", "256 codes", "float64", *count(got, want))
