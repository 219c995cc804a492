"""Many groups in one launch, in Triton's interpreter, on the CPU: the bytes of the reference, group by group.

The cast itself is PTX on a GPU and torch's here.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.interpreted import run_interpreted
from tests.kernels.test_fused_interpreted import as_on_a_gpu
from tests.kernels.test_pointwise_interpreted import draw

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Rows of each group, and columns: whole tiles, multiples of 16, ragged, empty ones at either end, all empty, more than
# a launch takes.
CASES = (
    ([128, 256], 128, BF16),
    ([16, 144, 32], 80, BF16),
    ([0, 33, 1, 0, 130, 0], 90, FP32),
    ([0, 0], 32, FP16),
    ([3, 0] * 9, 40, BF16),
)
USAGES = ((True, False), (False, True), (True, True))


@pytest.mark.parametrize("part", ["both ways", pytest.param("the rest", marks=pytest.mark.slow)])
def test_interpreted(part: str) -> None:
    run_interpreted(main, part)


def cases(part: str) -> Iterator[tuple[list[int], int, torch.dtype, tuple[tuple[bool, bool], ...]]]:
    """Both directions of all but the largest; the rest is that one, and each direction alone."""
    if part == "both ways":
        yield from ((*case, USAGES[2:]) for case in CASES[1:])
    else:
        yield *CASES[0], USAGES[2:]
        yield *CASES[2], USAGES[:2]


def compare(launch: Any, op: Any, xs: list[torch.Tensor], tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    want = [op(x, *[each[i] if each else None for each in tensors], *options) for i, x in enumerate(xs)]
    got = [[torch.full_like(buffer, 0x5A) for buffer in own] for own in want]
    launch(xs, got, *tensors, *options)
    for group, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            where = (op.name(), [tuple(x.shape) for x in xs], options, group, index)
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), where


def main(part: str) -> None:
    from mezzotint.constants import E4M3, E5M2
    from mezzotint.kernels.float8 import float8_quantize, float8_quantize_scaled
    from mezzotint.kernels.float8_block import float8_block_quantize
    from mezzotint.kernels.float8_rowwise import float8_rowwise_quantize
    from mezzotint.kernels.triton import _launch, float8, float8_amax, float8_block, float8_rowwise

    as_on_a_gpu()
    float8.PARTIALS_EACH = float8_amax.PARTIALS_EACH = 4  # programs, which run one after another here
    launches: Counter[str] = Counter()
    launch = _launch.Fast.launch

    def counted(self: Any, grid: Any, *args: Any, **constants: Any) -> None:
        launches[self.kernel.fn.__name__] += 1
        launch(self, grid, *args, **constants)

    _launch.Fast.launch = counted  # type: ignore[method-assign]
    for sizes, K, dtype, usages in cases(part):
        launches.clear()
        xs = list(draw((sum(sizes), K), dtype, 7).split(sizes))
        scales = [torch.tensor([2.0 ** (i % 5) + 0.5]) for i in range(len(xs))]
        for usage in usages:
            compare(float8.quantize_groups, float8_quantize, xs, ([],), (E4M3, False, 0.0, *usage))
            compare(float8.quantize_scaled_groups, float8_quantize_scaled, xs, (scales,), (E5M2, *usage))
            compare(float8_rowwise.quantize_groups, float8_rowwise_quantize, xs, ([], []), (E4M3, True, 1e-3, *usage))
            for two_d in (False, True):
                options = (E4M3, True, 0.0, two_d, *usage)
                compare(float8_block.quantize_groups, float8_block_quantize, xs, (), options)
        parts = -(-len(sizes) // 16)
        times = len(usages) * parts
        assert launches["_amax_kernel"] == times, launches
        assert launches["cast_tile_kernel"] == 2 * times, launches
        assert launches["finish_kernel"] == sum(columnwise for _, columnwise in usages) * parts, launches
        assert launches["rows_kernel"] == usages.count((True, False)) * parts * (sum(sizes) > 0), launches
        assert launches["_block_kernel"] == launches["_square_kernel"] == times * (sum(sizes) > 0), launches
    # Given amaxes, what is not dense, rows of another length: one after another.
    xs = [draw((24, 64), BF16, 8), draw((64, 24), BF16, 9).t()]
    for given in ([], [torch.tensor([9.0]), torch.tensor([5.0])]):
        compare(float8.quantize_groups, float8_quantize, xs, (given,), (E4M3, True, 0.0, True, True))
    xs = [draw((24, 64), BF16, 8), draw((24, 32), BF16, 9)]
    compare(float8_block.quantize_groups, float8_block_quantize, xs, (), (E4M3, True, 0.0, False, True, True))
    cols = [x.float().abs().amax(0) * 2 for x in xs]
    compare(float8_rowwise.quantize_groups, float8_rowwise_quantize, xs, ([], cols), (E4M3, True, 0.0, True, True))
