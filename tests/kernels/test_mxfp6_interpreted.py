"""The MXFP6 kernels in Triton's interpreter, on the CPU, against the reference byte for byte."""

import torch

from tests.kernels.interpreted import run_interpreted
from tests.kernels.test_mxfp4_interpreted import BOTH, COL, RAGGED, ROW, compare

BF16, FP32 = torch.bfloat16, torch.float32


def test_interpreted() -> None:
    run_interpreted(main)


def main() -> None:
    from mezzotint.kernels.mxfp6 import E2M3, E3M2
    from tests.kernels.test_fused_interpreted import as_on_a_gpu
    from tests.values import CONTENTS, fill

    as_on_a_gpu()
    for index, content in enumerate(CONTENTS):
        x = fill((40, 72), (BF16, FP32)[index % 2], content, index)
        dtype, swizzled = (E3M2, E2M3)[index // 2 % 2], index % 4 == 1
        compare("mxfp6", x, BOTH, (dtype, index % 2 == 0, index % 3 == 2, swizzled), (dtype, swizzled))
    for shape, usage, tile in ((RAGGED, ROW, 64), (RAGGED, COL, 64), ((128, 256), BOTH, 128), ((3, 5, 33), BOTH, 128)):
        for two_d in (False, True):
            x = fill(shape, BF16, "normal", 1)
            compare("mxfp6", x, usage, (E2M3, True, two_d, two_d), (E2M3, two_d), tile)
