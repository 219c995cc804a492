"""Rotary position embedding on a GPU: the CPU's bytes, given the same cosines."""

import pytest
import torch

from mezzotint.kernels.rope import rope
from tests.formats import HIGH
from tests.values import raw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize(
    ("shape", "turned"), [((33, 2, 32, 128), 128), ((2, 7, 5, 64), 48), ((1, 1, 1, 2), 2), ((0, 2, 4, 16), 16)]
)
def test_same_bytes(shape: tuple[int, ...], turned: int, dtype: torch.dtype) -> None:
    a, b, h, d = shape
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(a, b, 3 * h, d, generator=generator).to(dtype)
    for angles in (torch.randn(a, 1, turned, generator=generator), torch.randn(1, b, turned, generator=generator)):
        for interleaved in (False, True):
            for inverse in (False, True):
                cos, sin = angles.cos(), angles.sin()
                want = rope(packed[:, :, h : 2 * h], cos, sin, interleaved, inverse)
                on_gpu = packed.cuda()[:, :, h : 2 * h]
                got = rope(on_gpu, cos.cuda(), sin.cuda(), interleaved, inverse)
                assert got.is_contiguous()
                assert torch.equal(raw(got.cpu()), raw(want))
