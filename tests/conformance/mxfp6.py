"""MXFP6, which has no vectors: against `ml_dtypes`."""

from collections.abc import Iterator
from functools import partial

import torch

from mezzotint.kernels.mxfp6 import E2M3, E3M2, mxfp6_dequantize, mxfp6_quantize
from tests.conformance import Row
from tests.packed_mx import conformance_rows


def _quantize(dtype: int, x: torch.Tensor) -> list[torch.Tensor]:
    return mxfp6_quantize(x, dtype, True, False, False, True, True)


def _dequantize(dtype: int, data: torch.Tensor, scale_inv: torch.Tensor, cols: int) -> torch.Tensor:
    return mxfp6_dequantize(data, scale_inv, dtype, False, False, cols, torch.float32)


def rows(device: str) -> Iterator[Row]:
    for elem, dtype in (("e3m2", E3M2), ("e2m3", E2M3)):
        yield from conformance_rows(device, "mxfp6", elem, partial(_quantize, dtype), partial(_dequantize, dtype))
