"""Statistics of a tensor in Triton's interpreter, on the CPU: every index and mask, against the reference."""

import pytest
import torch

from tests.kernels.interpreted import run_interpreted

SHAPES = {"plain": (17, 40, torch.bfloat16), "scaled": (100, 300, torch.float32)}


@pytest.mark.parametrize("part", ["plain", pytest.param("scaled", marks=pytest.mark.slow)])
def test_interpreted(part: str) -> None:
    run_interpreted(main, part)


def check(x: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Counts and maxima to the bit; sums of squares, which are added in another order, to FP64's rounding."""
    from mezzotint.kernels.statistics import SUMS, statistics_add_reference, tensor_statistics_reference
    from mezzotint.kernels.triton.statistics import statistics_add_, tensor_statistics

    made, want = tensor_statistics(x, quantized, scale, 464.0), tensor_statistics_reference(x, quantized, scale, 464.0)
    squares = [SUMS.index("signal"), SUMS.index("noise")]
    torch.testing.assert_close(made[squares], want[squares], rtol=1e-13, atol=0)
    made[squares] = want[squares]
    assert torch.equal(made, want), tuple(x.shape)
    seen = made.flip(1)
    statistics_add_(made, seen)
    statistics_add_reference(want, seen)
    assert torch.equal(made, want)


def main(part: str) -> None:
    torch.manual_seed(0)
    rows, cols, dtype = SHAPES[part]
    lowest = -130 if dtype == torch.float32 else -110  # the interpreter takes subnormal BF16 for 0
    x = torch.randn(rows, cols + 3) * 2.0 ** torch.randint(lowest, 12, (rows, cols + 3))
    x = x.to(dtype)[:, :cols]
    quantized = (x.float() * (1 + torch.randint(-1, 2, x.shape) / 16)).where(torch.rand(x.shape) > 0.1, 0.0)
    scale = torch.rand(rows, cols)
    for value in (float("nan"), float("inf"), -float("inf"), 0.0):
        for tensor in (x, quantized, scale):
            tensor[torch.rand(rows, cols) < 0.03] = value
    check(x, quantized, scale if part == "scaled" else None)
