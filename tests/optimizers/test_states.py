"""Values of an optimizer in fewer bits: scales, loss, remainders."""

import numpy as np
import pytest
import torch

from mezzotint.optimizers.states import RANGES, decode_state, join_remainder, pack_, split_
from tests.exact import decode, encode


def packed(value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale = torch.full(value.shape, 7, dtype=dtype), torch.ones(1)
    pack_(data, scale, value)
    return data, scale


@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize("factor", [1.0, 2.0**-130, 2.0**-40, 3e37])
def test_scale_and_codes(dtype: torch.dtype, factor: float) -> None:
    """The scale is the least power of two that fits, the codes are nearest."""
    torch.manual_seed(0)
    value = torch.randn(500) * torch.rand(500).pow(6) * factor
    data, scale = packed(value, dtype)
    top = max(float(value.abs().max()), 2.0**-126 * RANGES[dtype])  # a scale is a normal number
    exponent = np.log2(float(scale))
    assert exponent == round(exponent)
    assert top / float(scale) <= RANGES[dtype] * (1 + 1e-6)
    assert top / (float(scale) / 2) > RANGES[dtype] * (1 - 1e-6) or float(scale) == 2.0**-126
    ratio = value.double() / float(scale)
    if dtype == torch.uint8:
        assert np.array_equal(data.numpy(), encode(ratio.float().numpy(), "e4m3"))
        assert np.array_equal(
            decode_state(data, scale).numpy(), (decode(data.numpy(), "e4m3") * float(scale)).astype("f4")
        )
    else:
        assert torch.equal(data, ratio.half())


@pytest.mark.parametrize("dtype", RANGES)
def test_stored_again_without_loss(dtype: torch.dtype) -> None:
    """Also where rounding takes the largest magnitude across a power of two."""
    torch.manual_seed(0)
    for spread in torch.cat([torch.rand(200), torch.tensor([1.0, 1.0001, 0.5001, 2.0])]).tolist():
        value = torch.randn(64)
        value[0] = RANGES[dtype] * spread
        once = decode_state(*packed(value, dtype))
        assert torch.equal(decode_state(*packed(once, dtype)), once)


@pytest.mark.parametrize("dtype", RANGES)
def test_nothing_and_not_a_number(dtype: torch.dtype) -> None:
    data, scale = packed(torch.zeros(4), dtype)
    assert float(scale) == 1.0
    assert not decode_state(data, scale).any()
    packed(torch.zeros(0), dtype)
    data, scale = packed(torch.tensor(3.0), dtype)
    assert data.shape == ()
    assert torch.equal(decode_state(data, scale), torch.tensor(3.0))
    value = decode_state(*packed(torch.tensor([torch.nan, 1.0]), dtype))
    assert value[0].isnan()
    huge = decode_state(*packed(torch.tensor([torch.inf, -torch.inf]), dtype))
    assert (huge.abs() > 1e35).all()


def test_remainders_are_the_rest_of_the_bits() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    special = [0, -(2**31), 0x7F800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1, 0xFFFF, 0x8000, 0xFF800000 - 2**32]
    master = torch.cat([bits, torch.tensor(special, dtype=torch.int32)]).view(torch.float32)
    master = master[~master.isnan()]
    param, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split_(param, remainder, master)
    assert torch.equal(join_remainder(param, remainder).view(torch.int32), master.view(torch.int32))
    is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(param[~is_tie], master.bfloat16()[~is_tie])
    away = (master.view(torch.int32)[is_tie] >> 16) + 1
    assert torch.equal(param[is_tie].view(torch.int16).int(), away)


def test_a_nan_stays_one() -> None:
    """Also that whose bits are all ones."""
    master = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    param, remainder = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16)
    split_(param, remainder, master)
    assert param.isnan().all()
    assert join_remainder(param, remainder).isnan().all()
