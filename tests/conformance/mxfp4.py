"""MXFP4, which has no vectors: against `ml_dtypes`."""

from collections.abc import Iterator

import torch

from mezzotint.kernels.mxfp4 import mxfp4_dequantize, mxfp4_quantize
from tests.conformance import Row
from tests.packed_mx import conformance_rows


def rows(device: str) -> Iterator[Row]:
    def quantize(x: torch.Tensor) -> list[torch.Tensor]:
        return mxfp4_quantize(x, None, 0, True, False, False, False, True, True)

    def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, cols: int) -> torch.Tensor:
        return mxfp4_dequantize(data, scale_inv, False, False, cols, torch.float32)

    yield from conformance_rows(device, "mxfp4", "e2m1", quantize, dequantize)
