"""MXFP4's ops against numpy and `ml_dtypes` (`tests/packed_mx.py`): every option set, both directions, padding."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from mezzotint.kernels.hadamard import hadamard16
from mezzotint.kernels.mxfp4 import mxfp4_dequantize
from mezzotint.kernels.swizzle import unswizzle
from tests import exact, packed_mx
from tests.formats import HIGH, Variant, variants_of
from tests.values import CONTENTS, fill, raw


def check_side(codes: np.ndarray, byte: np.ndarray, variant: Variant, data: torch.Tensor, scale: torch.Tensor) -> None:
    """Packed bytes, and scale bytes with zeros around them."""
    np.testing.assert_array_equal(data.numpy().reshape(len(codes), -1), packed_mx.pack(codes, variant.elem))
    got = (unswizzle(scale) if "swizzled" in variant.traits else scale).numpy()
    np.testing.assert_array_equal(got[: byte.shape[0], : byte.shape[1]], byte)
    assert not got[byte.shape[0] :].any()
    assert not got[:, byte.shape[1] :].any()


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("variant", variants_of("mxfp4"), ids=str)
def test_bytes(variant: Variant, content: str) -> None:
    rng, sign_mask, floor, two_d, _, rht = variant.options
    for dtype in variant.dtypes:
        x = fill((37, 78), dtype, content, 4)
        both = variant.buffers(x)
        for direction, way in enumerate(("rowwise", "columnwise")):
            side = x.t().contiguous() if direction else x
            if rht and direction:
                side = hadamard16(torch.nn.functional.pad(side, (0, -side.shape[1] % 16)), sign_mask)

            def stochastic(scaled: np.ndarray, direction: int = direction) -> np.ndarray:
                noise = exact.philox_noise(*rng.tolist(), scaled.size // 16, direction).reshape(scaled.shape)
                return exact.stochastic_e2m1(scaled, noise)

            cast = None if rng is None else stochastic
            made = packed_mx.quantize_rows(side.float().numpy(), "e2m1", floor=floor, two_d=two_d, cast=cast)
            check_side(*made, variant, both[f"{way}_data"], both[f"{way}_scale_inv"])


def test_stochastic_rounding_keeps_the_mean() -> None:
    """Under the rule that saturates nothing: the mean over many draws is x, within a few deviations."""
    x = torch.linspace(-1, 1, 256).view(8, 32)
    variant = next(v for v in variants_of("mxfp4") if v.traits == {"stochastic", "nan_blocks"})
    total = torch.zeros_like(x)
    for seed in range(256):
        options = (torch.tensor([seed, 0]), *variant.options[1:], True, False)
        data, scale = variant.quantize(x, *options)
        total += variant.dequantize({"rowwise_data": data, "rowwise_scale_inv": scale}, "rowwise", x.shape)
    # A step is at most 2 · 2^-2 here: half of it, over the root of the draws, five times.
    assert ((total / 256 - x).abs() < 0.25 / 16 * 5).all()


def check_back_on_a_gpu(dequantize: Callable[..., torch.Tensor], packed: tuple[int, ...], *element: int) -> None:
    """Every code under every scale byte, NaN included, from both directions; whole tiles, and cut ones.

    `packed`: the shape of the bytes of 64 codes."""
    generator = torch.Generator().manual_seed(0)
    for rows, groups in ((128, 4), (131, 5)):
        cols = 64 * groups - (rows - 128)
        blocks = -(-cols // 128) * 4
        data = torch.randint(0, 256, (rows, packed[0] * groups, *packed[1:]), dtype=torch.uint8, generator=generator)
        scale = torch.randint(0, 256, (-(-rows // 128) * 128, blocks), dtype=torch.uint8, generator=generator)
        for swizzled, transposed, out_dtype in product((False, True), (False, True), HIGH):
            args = (*element, swizzled, transposed, cols, out_dtype)
            got, want = dequantize(data.cuda(), scale.cuda(), *args), dequantize(data, scale, *args)
            assert torch.equal(raw(got.cpu()), raw(want)), (rows, *args)


@pytest.mark.gpu
def test_back_on_a_gpu() -> None:
    check_back_on_a_gpu(mxfp4_dequantize, (32,))
