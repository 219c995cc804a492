"""NVFP4: every scale by every code back."""

from collections.abc import Iterator

import numpy as np
import torch

from mezzotint.kernels.elements import pack_fp4
from mezzotint.kernels.nvfp4 import nvfp4_dequantize
from tests import exact
from tests.conformance import Row, count


def rows(device: str) -> Iterator[Row]:
    codes = np.arange(256, dtype=np.uint8)
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    scale_inv = torch.zeros(256, 4, dtype=torch.uint8, device=device)
    scale_inv[:, 0] = byte
    data = pack_fp4(byte[:16]).expand(256, 8).contiguous()
    amax = torch.tensor([0.3], device=device)
    got = nvfp4_dequantize(data, scale_inv, amax, 448, False, False, 16, torch.float32)
    sf = exact.fl32(exact.decode(codes, "e4m3") * amax.double().item())
    factor = exact.fl32(sf * exact.fl32(np.array(1 / 2688)))
    want = exact.fl32(exact.decode(codes[:16], "e2m1")[None, :] * factor[:, None]).astype(np.float32)
    yield Row("nvfp4 dequantize", "256 scales × 16 codes", "float64", *count(got, want))
