"""The norm's statistics with the sum before them, in Triton's interpreter, on the CPU: every index and mask.

The sum has the reference's bytes, statistics are those of the kernel that is given the sum.
"""

import pytest
import torch

from tests.kernels.interpreted import run_interpreted
from tests.kernels.test_pointwise_interpreted import HIGH, cases, close, convert, draw, same


@pytest.mark.parametrize("part", ["one dtype", pytest.param("other dtypes", marks=pytest.mark.slow)])
def test_interpreted(part: str) -> None:
    run_interpreted(main, part)


def check(shape: tuple[int, ...], dtype: torch.dtype, view: str, rms: bool) -> None:
    from mezzotint.kernels.norm import norm_add_stats_reference
    from mezzotint.kernels.triton import norm
    from tests.values import as_view

    x = as_view(draw(shape, dtype, 0), view)
    for other in {dtype, torch.float32}:
        branch = as_view(draw(shape, other, 1), view)
        for bias in (None, as_view(draw(shape[-1:], other, 2), view)):
            case = (shape, dtype, view, other, bias is None)
            total, mu, rs = norm.add_stats(x, branch, bias, 1e-5, rms)
            want = norm_add_stats_reference(x, branch, bias, 1e-5, rms)
            same(total, want[0], case)
            for got, apart, near in zip((mu, rs), norm.stats(total, 1e-5, rms), want[1:], strict=True):
                same(got, apart, case)
                close(got, near, case)


def main(part: str) -> None:
    from triton.runtime import interpreter

    from mezzotint.kernels.triton import norm

    interpreter._convert_float = convert
    for index, shape, dtype, view in cases(part):
        check(shape, dtype, view, index % 2 == 0)
    norm.WHOLE_STATS = 128  # longer rows are walked in pieces
    for dtype in HIGH[2:] if part == "one dtype" else HIGH[:2]:
        for rms in (False, True):
            check((3, 300), dtype, "inner", rms)
