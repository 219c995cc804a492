"""FP8 quantizations that take their producer in, in Triton's interpreter, on the CPU, against the reference's bytes.

The cast itself is PTX on a GPU and torch's here. The rest is the same: what a source reads, halves, tiles, every index.
The interpreter is chosen before Triton is imported: another process.
"""

import os
import subprocess
import sys
from typing import Any

import torch

from tests.kernels.test_pointwise_interpreted import convert, draw

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Whole tiles in both directions, cut rows, halves that are no whole tiles.
SHAPES = ((128, 1024), (72, 1024), (40, 90))


def test_interpreted() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.test_fused_interpreted"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def cast_fp8(value: Any, DTYPE: Any) -> Any:
    """Of `_jit.py`, whose PTX the interpreter does not know."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    from mezzotint.kernels.elements import cast_fp8 as cast

    codes = cast(torch.from_numpy(value.handle.data.copy()), int(getattr(DTYPE, "value", DTYPE)))
    return tl.tensor(TensorHandle(codes.view(torch.uint8).numpy(), tl.uint8), tl.block_type(tl.uint8, value.shape))


def cases(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Without exponentials: the interpreter's are numpy's."""
    M, K = shape
    x, bias, scales = draw(shape, dtype, 0), draw((K,), dtype, 1), draw((M,), FP32, 2)
    return {
        "activation": (draw((M, 2 * K), dtype, 3), None, "reglu", [], scales),
        "activation_backward": (draw((M, K // 2), dtype, 4), x, bias, "sreglu", [], scales, FP32),
    }


def compare(launch: Any, op: Any, source: str, args: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    from mezzotint.kernels.quantize_ops import Made, fused
    from tests.values import raw

    want = fused(op, source)(*args, *options)
    got = [torch.full_like(buffer, 0x5A) for buffer in want]
    if source == "activation_backward":
        launch(Made(source, args[:-1], got[-1]), got[:-1], None, *options)
        torch.testing.assert_close(got.pop(), want.pop(), rtol=1e-5, atol=1e-4)
    else:
        launch(Made(source, args), got, None, *options)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(raw(a), raw(b)), (op.name(), source, tuple(args[0].shape), options, index)


def main() -> None:
    import numpy as np
    from triton.runtime import interpreter

    from mezzotint.constants import E4M3, E5M2
    from mezzotint.kernels.float8 import float8_quantize, float8_quantize_scaled
    from mezzotint.kernels.float8_block import float8_block_quantize
    from mezzotint.kernels.float8_rowwise import float8_rowwise_amax, float8_rowwise_quantize
    from mezzotint.kernels.mxfp8 import mxfp8_quantize
    from mezzotint.kernels.triton import float8, float8_block, float8_rowwise, mxfp8

    # On a GPU the maximum of NaN and a number is the number.
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    interpreter._convert_float = convert
    for module in (float8, float8_block, float8_rowwise, mxfp8):
        module.cast_fp8 = cast_fp8
    scale = torch.tensor([3.0])
    for shape, dtype in zip(SHAPES, (BF16, FP32, FP16), strict=True):
        for source, args in cases(shape, dtype).items():
            for usage in ((True, True), (False, True)):
                compare(float8.quantize, float8_quantize, source, args, (None, E4M3, False, 0.0, *usage))
                compare(float8.quantize_scaled, float8_quantize_scaled, source, args, (scale, E5M2, *usage))
                compare(float8_block.quantize, float8_block_quantize, source, args, (E4M3, True, 0.0, False, *usage))
                compare(mxfp8.quantize, mxfp8_quantize, source, args, (E4M3, False, False, False, *usage))
            top = torch.linspace(0.5, 8, shape[1])
            for given, usage in ((None, (True, True)), (top, (True, True)), (top, (False, True))):
                options = (given, E4M3, True, 0.0, *usage)
                compare(float8_rowwise.quantize, float8_rowwise_quantize, source, args, options)
        x = draw((300, 90), dtype, 5)  # of two strips
        x[7, 3] = float("nan")
        assert torch.equal(float8_rowwise.amax(x), float8_rowwise_amax(x)), dtype
    assert torch.equal(float8_rowwise.amax(x[:0]), torch.zeros(90))


if __name__ == "__main__":
    main()
