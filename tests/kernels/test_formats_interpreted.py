"""Kernels that other interpreted tests leave out, in Triton's interpreter, on the CPU, against the reference.

Activations with exponentials (the interpreter's are numpy's, so that values are close, not equal), the way back from
FP8 in both directions, and quantizations of sizes that no block divides, into buffers full of other bytes: what is to
be written as padding is written.
"""

from typing import Any

import numpy as np
import torch

from tests.kernels.interpreted import run_interpreted
from tests.kernels.test_fused_interpreted import as_on_a_gpu
from tests.kernels.test_pointwise_interpreted import convert, draw

BF16, FP32 = torch.bfloat16, torch.float32
RAGGED = (40, 90)  # no block divides it, along rows or columns


def test_interpreted() -> None:
    run_interpreted(main)


def decode(value: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """FP8 to FP32 as torch does; all else as there."""
    kinds = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    if source.name not in kinds:
        return convert(value, source, target, rounding)
    return torch.from_numpy(value.copy()).view(kinds[source.name]).float().numpy()


def same(got: Any, want: Any, *case: Any) -> None:
    from tests.values import raw

    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), case
        assert torch.equal(raw(a), raw(b)), case


def check_activation(name: str, dtype: torch.dtype) -> None:
    """Value and gradient, from far below 0 to far above."""
    from mezzotint.kernels import activation as reference
    from mezzotint.kernels.triton import activation as kernels

    params = list(reference.PARAMETERS.get(name, {}).values())
    shape = (7, 30)
    wide = (7, 60) if reference.is_gated(name) else shape
    x, dy = (draw(wide, FP32, 0) * 3).to(dtype), draw(shape, dtype, 1)
    for got, want in (
        (kernels.forward(x, None, name, params), reference.activation_forward_reference(x, None, name, params)),
        (
            kernels.backward(dy, x, None, name, params),
            reference.activation_backward_reference(dy, x, None, name, params),
        ),
    ):
        within = {"rtol": torch.finfo(dtype).eps if dtype == BF16 else 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got, want, **within, msg=lambda text: f"{name} {dtype}: {text}")


def check_padding(shape: tuple[int, ...]) -> None:
    """Formats whose kernels pad, in each direction and both, over other bytes; and back."""
    from mezzotint.constants import E4M3
    from mezzotint.kernels import float8_block, mxfp8
    from mezzotint.kernels.triton import float8_block as blocks
    from mezzotint.kernels.triton import mxfp8 as mx

    x = draw(shape, BF16, 0)
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        usage = rowwise, columnwise
        for options in ((False, False), (True, False), (True, True), (False, True)):  # two_d, swizzled
            want = mxfp8.mxfp8_quantize_reference(x, E4M3, False, *options, *usage)
            got = [torch.full_like(buffer, 0x5A) for buffer in want]
            mx.quantize(x, got, None, E4M3, False, *options, *usage)
            same(got, want, "mxfp8", shape, options, usage)
            for way in range(len(want) // 2):
                side = (*want[2 * way : 2 * way + 2], E4M3, options[1], columnwise and (way == 1 or not rowwise), BF16)
                same([mx.dequantize(*side)], [mxfp8.mxfp8_dequantize_reference(*side)], "mxfp8 back", shape, options)
        for two_d in (False, True):
            want = float8_block.float8_block_quantize_reference(x, E4M3, True, 0.0, two_d, *usage)
            got = [torch.full_like(buffer, 0x5A) for buffer in want]
            blocks.quantize(x, got, None, E4M3, True, 0.0, two_d, *usage)
            same(got, want, "block", shape, two_d, usage)
            for way in range(len(want) // 2):
                side = (*want[2 * way : 2 * way + 2], E4M3, two_d, columnwise and (way == 1 or not rowwise), FP32)
                back = float8_block.float8_block_dequantize_reference(*side)
                same([blocks.dequantize(*side)], [back], "block back", shape, two_d)


def check_back(shape: tuple[int, ...]) -> None:
    """Those that do not: the way back, from either direction."""
    from mezzotint.constants import E4M3, E5M2
    from mezzotint.kernels import float8, float8_rowwise
    from mezzotint.kernels.triton import float8 as tensors
    from mezzotint.kernels.triton import float8_rowwise as rows

    x = draw(shape, BF16, 0)
    codes, transposed, scale_inv = float8.float8_quantize(x, None, E5M2, False, 0.0, True, True)
    for data, turned in ((codes, False), (transposed, True)):
        back = float8.float8_dequantize(data, scale_inv, E5M2, turned, BF16)
        same([tensors.dequantize(data, scale_inv, E5M2, turned, BF16)], [back], "tensor back", shape, turned)
    made = float8_rowwise.float8_rowwise_quantize(x, None, None, E4M3, False, 0.0, True, True)
    for data, scale, turned in ((*made[:2], False), (*made[2:], True)):
        back = float8_rowwise.float8_rowwise_dequantize(data, scale, E4M3, turned, BF16)
        same([rows.dequantize(data, scale, E4M3, turned, BF16)], [back], "row back", shape, turned)


def main() -> None:
    from triton.runtime import interpreter

    from mezzotint.kernels.activation import ACTIVATIONS

    as_on_a_gpu()
    interpreter._convert_float = decode
    for name in ACTIVATIONS:
        for dtype in (FP32, BF16):
            check_activation(name, dtype)
    check_padding(RAGGED)
    check_back(RAGGED)
    check_back((3, 5, 33))
