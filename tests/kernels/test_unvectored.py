"""What no test vector covers, against numpy from the formulas (`tests/exact.py`): FP8 per row, NVFP4's options."""

import numpy as np
import pytest
import torch

from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels.float8_rowwise import float8_rowwise_quantize
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK, hadamard16
from mezzotint.kernels.nvfp4 import nvfp4_amax
from mezzotint.kernels.swizzle import unswizzle
from tests import exact
from tests.formats import Variant, variants_of
from tests.values import CONTENTS, fill

FP8 = {"e4m3": E4M3, "e5m2": E5M2}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("elem", FP8)
@pytest.mark.parametrize("pow2", [False, True], ids=["exact", "pow2"])
@pytest.mark.parametrize("eps", [0.0, 0.125])
def test_float8_rowwise(content: str, elem: str, pow2: bool, eps: float) -> None:
    for dtype in DTYPES:
        x = fill((37, 53), dtype, content, 3)
        out = float8_rowwise_quantize(x, None, None, FP8[elem], pow2, eps, True, True)
        for side, (data, scale_inv) in zip((x, x.t()), (out[:2], out[2:]), strict=True):
            codes, inverse = exact.quantize_rows_fp8(side.float().contiguous().numpy(), elem, pow2, eps)
            np.testing.assert_array_equal(data.numpy(), codes)
            assert exact.same_bits(scale_inv.numpy(), inverse).all()


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("variant", variants_of("nvfp4"), ids=str)
def test_nvfp4(variant: Variant, content: str) -> None:
    """Every option set, both directions, codes and scale bytes; unlike the vectors, with the sign of zeros."""
    for dtype in variant.dtypes:
        x = fill((48, 80), dtype, content, 4)
        both = variant.buffers(x)
        for way in ("rowwise", "columnwise"):
            codes, sf = expected_nvfp4(variant, way, x, both[f"amax_{way}"].numpy())
            np.testing.assert_array_equal(both[f"{way}_data"].numpy(), exact.pack(codes))
            scale_inv = both[f"{way}_scale_inv"]
            got = (unswizzle(scale_inv) if "swizzled" in variant.traits else scale_inv).numpy()
            np.testing.assert_array_equal(got[: sf.shape[0], : sf.shape[1]], sf)
            assert not got[sf.shape[0] :].any()
            assert not got[:, sf.shape[1] :].any()


def expected_nvfp4(
    variant: Variant, way: str, x: torch.Tensor, tensor_amax: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    side = x.t().contiguous() if way == "columnwise" else x
    sign_mask = variant.options[5]
    if way == "columnwise" and "rht" in variant.traits:
        side = hadamard16(side, sign_mask)
    rng, noise = variant.options[2], None
    if rng is not None:
        noise = exact.philox_noise(*rng.tolist(), side.numel() // 16, int(way == "columnwise"))
    error = {0: None, 1: "mae", 2: "mse"}[variant.options[4]]
    return exact.quantize_rows_nvfp4(
        side.float().numpy(),
        tensor_amax,
        e4m3_max=variant.options[3],
        error=error,
        two_d="two_d" in variant.traits,
        noise=noise,
    )


def test_the_amax_is_that_of_what_is_quantized() -> None:
    """Column-wise of the transposed and transformed tensor, filled up with zeros; row-wise of the tensor itself."""
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows, columns = nvfp4_amax(x, True, RANDOM_SIGN_MASK, False, True, True)
    filled = torch.nn.functional.pad(x, (0, 0, 0, 8)).t().contiguous()
    assert rows.tolist() == [x.abs().max().item()]
    assert columns.tolist() == [hadamard16(filled, RANDOM_SIGN_MASK).abs().max().item()]
    assert rows != columns
