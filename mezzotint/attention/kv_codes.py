"""Keys and values in FP8: this module writes a head of a token as bytes, and reads it.

    bytes [.., d + 4]: d codes of E4M3, then the FP32 scale_inv of the head    value = code · scale_inv,  |code| ≤ 448

The scale is that of `kernels/float8_rowwise.py`, by the amax of the d channels, so what is read of a token does not
depend on other tokens. For finite x of the FP32 range the error is at most |x| / 16 + amax / 2^18, and then what
rounding to the dtype of the queries adds. Bytes of zeros are the value 0.
"""

import torch

from mezzotint.constants import E4M3
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.float8_rowwise import float8_rowwise_dequantize, float8_rowwise_quantize

SCALE_BYTES = 4


def encode_heads(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes, uint8 [.., d + 4], of heads [.., d]."""
    codes, scale_inv = run_op(float8_rowwise_quantize, x.contiguous(), None, None, E4M3, False, 0.0, True, False)
    return torch.cat((codes, scale_inv.view(torch.uint8).view(*x.shape[:-1], SCALE_BYTES)), -1)


def decode_heads(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [.., d] of bytes [.., d + 4]."""
    codes = stored[..., :-SCALE_BYTES].contiguous()
    scale_inv = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32).flatten()
    return run_op(float8_rowwise_dequantize, codes, scale_inv, E4M3, False, dtype)
