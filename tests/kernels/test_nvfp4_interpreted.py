"""The NVFP4 kernels in Triton's interpreter, on the CPU, against the reference byte for byte.

What is PTX on a GPU is plain Triton here; `test_nvfp4_ptx.py` tests the former. The rest is the same: the transform and
its shortcuts, the order of tiles, every index.
"""

from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.kernels.interpreted import run_interpreted

RNG = torch.tensor([0x1234_5678_9ABC_DEF0, 0x7_0000_0007])
PLAIN = {"rng": None, "e4m3_max": 448, "four_over_six": 0, "sign_mask": 0xD7E8}
PLAIN |= dict.fromkeys(("two_d", "swizzled", "rht", "row_scaled"), False)
ROW, COL, BOTH = (True, False), (False, True), (True, True)
QUICK = ("decades", "zero_block", "mixed")  # what numbers of every kind have
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_interpreted() -> None:
    run_interpreted(main)


@pytest.mark.parametrize("part", ["some", pytest.param("others", marks=pytest.mark.slow)])
def test_contents_interpreted(part: str) -> None:
    run_interpreted(check_contents, part)


@pytest.mark.parametrize("shape", [(33, 70), (17, 1), (32, 0)], ids=str)
def test_four_over_six_in_2d_reads_aligned_rows(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """The kernel takes half a minute to compile for rows that are not aligned, which no value shows."""
    from mezzotint.kernels.triton import nvfp4

    launched: list[tuple[Any, ...]] = []
    grid = defaultdict(lambda: lambda *args, **_: launched.append(args))
    names = nvfp4._quantize_kernel.arg_names
    monkeypatch.setattr(nvfp4, "_quantize_kernel", grid)
    amax = torch.ones(1)
    options = PLAIN | {"two_d": True, "four_over_six": 1}
    out = [torch.empty(0)] * 3
    nvfp4.quantize(torch.ones(shape, dtype=BF16), out, None, amax, amax, *options.values(), *ROW)
    (args,) = launched
    call = dict(zip(names, args, strict=False))
    assert call["stride"] % 16 == 0
    assert call["x"].data_ptr() % 16 == 0
    assert call["x"].equal(torch.ones(shape, dtype=BF16))


def small_tiles(BM: int, BN: int, TILES: int) -> dict[str, int]:
    return {"BM": BM, "BN": BN, "num_warps": 4, "TILES": TILES}


def compare(x: torch.Tensor, usage: tuple[bool, bool], config: dict[str, int], amax: Any = (None, None), **given: Any):
    from mezzotint.kernels.nvfp4 import nvfp4_quantize_reference
    from mezzotint.kernels.triton.nvfp4 import quantize

    options = PLAIN | given
    want = nvfp4_quantize_reference(x, *amax, *options.values(), *usage)
    got = [torch.full_like(buffer, 0x5A) for buffer in want]
    quantize(x, got, None, *amax, *options.values(), *usage, config=config)
    for index, (expected, buffer) in enumerate(zip(want, got, strict=True)):
        wrong = int((buffer.view(torch.uint8) != expected.view(torch.uint8)).sum())
        assert not wrong, f"buffer {index} of {tuple(x.shape)}, {x.dtype}, {given}: {wrong} bytes differ"


def as_on_a_gpu() -> None:
    """There the maximum of NaN and a number is the number."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def check_contents(part: str) -> None:
    from mezzotint.kernels.nvfp4 import nvfp4_amax_reference
    from mezzotint.kernels.triton.nvfp4 import amax
    from tests.values import CONTENTS, fill

    as_on_a_gpu()
    for index, content in enumerate(CONTENTS):
        if (content in QUICK) != (part == "some"):
            continue
        x = fill((64, 64), BF16, content, index)
        tiles = small_tiles(128, 64, 1 + 2 * (index % 2))
        compare(x, BOTH, tiles, rng=RNG, rht=True, swizzled=True)
        for row_scaled in (False, True):
            args = (True, 0xD7E8, row_scaled, True, True)
            for top, expected in zip(amax(x, *args), nvfp4_amax_reference(x, *args), strict=True):
                assert torch.equal(top, expected), f"amax of {content}, row-scaled {row_scaled}"


def main() -> None:
    from tests.values import fill

    as_on_a_gpu()

    def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return fill(shape, dtype, "normal", 1)

    for dtype in (BF16, FP16, FP32):
        compare(normal(50, 81, dtype=dtype), BOTH, small_tiles(64, 64, 3), rng=RNG, rht=True)
    compare(normal(50, 81), BOTH, small_tiles(64, 64, 2), rng=RNG)
    compare(normal(270, 40), BOTH, small_tiles(256, 64, 2), swizzled=True)
    compare(normal(24, 560), ROW, small_tiles(64, 512, 2), rng=RNG, swizzled=True)
    compare(normal(64, 96, dtype=FP16), BOTH, small_tiles(128, 64, 1), rht=True, row_scaled=True)
    compare(normal(64, 96), COL, small_tiles(128, 64, 1), rht=True, four_over_six=2, e4m3_max=256)
    for shape in ((33, 70), (32, 0)):
        compare(normal(*shape), BOTH, small_tiles(128, 64, 1), two_d=True, four_over_six=1, e4m3_max=256)
    given = torch.tensor([3.0]), torch.tensor([2.0])
    compare(fill((64, 96), BF16, "dtype_max", 1), BOTH, small_tiles(128, 64, 1), given, rht=True)
    check_dequantize(normal(20, 48))


def check_dequantize(x: torch.Tensor) -> None:
    """Column-wise codes of cut rows: as many as there are rows, and filled up where they are transformed."""
    from mezzotint.kernels.nvfp4 import nvfp4_dequantize_reference, nvfp4_quantize_reference
    from mezzotint.kernels.triton.nvfp4 import dequantize

    for rht in (False, True):
        made = nvfp4_quantize_reference(x, None, None, *(PLAIN | {"rht": rht}).values(), *COL)
        args = (*made, 448, False, True, x.shape[0], FP32)
        assert torch.equal(dequantize(*args), nvfp4_dequantize_reference(*args)), f"dequantize, transformed {rht}"
