"""The 16-point Hadamard transform: it spreads outliers before NVFP4 rounds the operands of a weight gradient.

    y_j = 0.25 · Σ_i s_i · x_i · (-1)^popcount(i & j)

The order is Sylvester's. It is computed as a butterfly: four stages of FP32 sums and differences, in the same order on
every device, so that the bits agree, and one rounding to the input's dtype at the end. `sign_mask` has bit i set where
s_i = -1. The transform is its own inverse up to the signs and both operands of a product carry it, so no inverse is
ever applied.
"""

import torch

RANDOM_SIGN_MASK = 0xD7E8  # the fixed signs + + + - + - - - - - - + - + - -


def hadamard16(x: torch.Tensor, sign_mask: int) -> torch.Tensor:
    """Transform each run of 16 along the last dimension (..., n), n a multiple of 16; shape and dtype stay the same."""
    signs = [-1.0 if sign_mask >> i & 1 else 1.0 for i in range(16)]
    # The factors are 2^-4 first and 2^2 last, both exact: no partial sum overflows unless the result does.
    y = x.float().reshape(-1, 16) * (torch.tensor(signs, dtype=torch.float32, device=x.device) * 0.0625)
    for stage in (1, 2, 4, 8):
        y = y.view(-1, 8 // stage, 2, stage)
        low, high = y[:, :, 0], y[:, :, 1]
        y = torch.stack((low + high, low - high), dim=2)
    return (y.reshape(x.shape) * 4.0).to(x.dtype)
