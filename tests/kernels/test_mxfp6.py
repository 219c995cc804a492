"""MXFP6's ops against numpy and `ml_dtypes` (`tests/packed_mx.py`): every option set, both directions, padding."""

import pytest

from mezzotint.kernels.mxfp6 import E2M3, E3M2, mxfp6_dequantize
from tests import packed_mx
from tests.formats import Variant, variants_of
from tests.kernels.test_mxfp4 import check_back_on_a_gpu, check_side
from tests.values import CONTENTS, fill


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("variant", variants_of("mxfp6"), ids=str)
def test_bytes(variant: Variant, content: str) -> None:
    _, floor, two_d, _ = variant.options
    for dtype in variant.dtypes:
        x = fill((37, 78), dtype, content, 4)
        both = variant.buffers(x)
        for way, side in (("rowwise", x), ("columnwise", x.t().contiguous())):
            made = packed_mx.quantize_rows(side.float().numpy(), variant.elem, floor=floor, two_d=two_d)
            check_side(*made, variant, both[f"{way}_data"], both[f"{way}_scale_inv"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E3M2, E2M3])
def test_back_on_a_gpu(dtype: int) -> None:
    check_back_on_a_gpu(mxfp6_dequantize, (16, 3), dtype)
