"""The MXFP4 kernels in Triton's interpreter, on the CPU, against the reference byte for byte.

Into buffers full of other bytes: what is to be written as padding is written.
"""

import importlib
from typing import Any

import torch

from tests.kernels.interpreted import run_interpreted

RNG = torch.tensor([0x1234_5678_9ABC_DEF0, 0x7_0000_0007])
ROW, COL, BOTH = (True, False), (False, True), (True, True)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (40, 90)


def test_interpreted() -> None:
    run_interpreted(main)


def compare(
    name: str,
    x: torch.Tensor,
    usage: tuple[bool, bool],
    options: tuple[Any, ...],
    back: tuple[Any, ...],
    tile: int = 128,
) -> None:
    """A quantization by square tiles, and the way back from each direction.

    `options`: what the op takes before the usages; `back`: what dequantization takes before `transposed`.
    """
    reference = importlib.import_module(f"mezzotint.kernels.{name}")
    kernels = importlib.import_module(f"mezzotint.kernels.triton.{name}")
    case = (name, tuple(x.shape), x.dtype, usage, options)
    want = getattr(reference, f"{name}_quantize_reference")(x, *options, *usage)
    got = [torch.full_like(buffer, 0x5A) for buffer in want]
    kernels.quantize(x, got, None, *options, *usage, config={"BM": tile, "BN": tile, "num_warps": 4})
    for index, (buffer, expected) in enumerate(zip(got, want, strict=True)):
        wrong = int((buffer != expected).sum())
        assert not wrong, f"buffer {index} of {case}: {wrong} of {expected.numel()} bytes differ"
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    for way in range(len(want) // 2):
        turned = usage[1] and (way == 1 or not usage[0])
        out_dtype = FP32 if turned else BF16
        side = (*want[2 * way : 2 * way + 2], *back, turned, rows if turned else cols, out_dtype)
        made, expected = kernels.dequantize(*side), getattr(reference, f"{name}_dequantize_reference")(*side)
        assert made.shape == expected.shape, case
        assert torch.equal(made.nan_to_num(nan=7e9), expected.nan_to_num(nan=7e9)), f"back, {turned}: {case}"


def mxfp4(
    x: torch.Tensor,
    usage: tuple[bool, bool] = BOTH,
    *,
    rng: torch.Tensor | None = None,
    sign_mask: int = 0xD7E8,
    floor: bool = True,
    two_d: bool = False,
    swizzled: bool = False,
    rht: bool = False,
    tile: int = 128,
) -> None:
    compare("mxfp4", x, usage, (rng, sign_mask, floor, two_d, swizzled, rht), (swizzled,), tile)


def main() -> None:
    from tests.kernels.test_fused_interpreted import as_on_a_gpu
    from tests.values import CONTENTS, fill

    as_on_a_gpu()
    for index, content in enumerate(CONTENTS):
        x = fill((40, 72), (BF16, FP32)[index % 2], content, index)
        is_tiled = index % 3 == 2
        rng = RNG if index % 4 == 1 else None
        mxfp4(x, rng=rng, floor=index % 2 == 0, two_d=is_tiled, swizzled=index % 4 == 3, rht=not is_tiled)
    for shape, usage, tile in (
        (RAGGED, ROW, 64),
        (RAGGED, COL, 64),
        ((128, 256), BOTH, 128),
        ((3, 5, 33), BOTH, 128),
        ((1, 1), BOTH, 128),
        ((0, 8), BOTH, 128),
    ):
        for two_d in (False, True):
            mxfp4(fill(shape, BF16, "normal", 1), usage, two_d=two_d, swizzled=two_d, tile=tile)
    for dtype, tile in ((BF16, 64), (FP16, 128), (FP32, 128)):
        mxfp4(fill((50, 81), dtype, "normal", 1), rng=RNG, rht=True, tile=tile)
    mxfp4(fill(RAGGED, BF16, "normal", 2), rng=RNG, floor=False, two_d=True)
