"""Stochastic rounding of NVFP4: where its bits come from, that they come back, and that they keep the mean."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from mezzotint.kernels.elements import E2M1_VALUES, decode_e2m1, unpack_fp4
from mezzotint.kernels.nvfp4 import nvfp4_quantize
from mezzotint.kernels.philox import philox_bytes
from tests import exact

# Of Random123's list for philox4x32, 10 rounds: counter, key, what comes out.
KNOWN = (
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
NAMES = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax_row", "amax_column")
DRAWS = 1 << 15
UNIT_AMAX = torch.tensor([6.0])  # S_enc is 448, and a block with amax 6 has the scale 448: elements keep their values


def quantize(
    x: torch.Tensor,
    rng: torch.Tensor | None,
    *,
    amax: torch.Tensor | None = None,
    rht: bool = False,
    two_d: bool = False,
    rowwise: bool = True,
    columnwise: bool = True,
) -> dict[str, torch.Tensor]:
    out = nvfp4_quantize(x, amax, amax, rng, 448, 0, 0xD7E8, two_d, False, rht, False, rowwise, columnwise)
    return dict(zip((n for n in NAMES if (rowwise if "row" in n else columnwise)), out, strict=True))


def codes(x: torch.Tensor, seed: int, columnwise: bool) -> torch.Tensor:
    """(R, C), amax 6 in every block → its codes; column-wise: as the transposed copy of the transposed."""
    out = quantize(x.t() if columnwise else x, torch.tensor([seed, 0]), amax=UNIT_AMAX)
    return unpack_fp4(out["columnwise_data" if columnwise else "rowwise_data"], x.shape[1])


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_model_gives_the_known_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    assert exact.philox4x32(counter, key) == expected


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-1, -1), (0x299F31D0_A4093822, 0x03707344), (2**63 - 1, 2**40)])
@pytest.mark.parametrize("direction", [0, 1])
def test_bytes_are_the_models(seed: int, offset: int, direction: int) -> None:
    got = philox_bytes(torch.tensor([seed, offset]), 300, direction).numpy()
    np.testing.assert_array_equal(got, exact.philox_noise(seed, offset, 300, direction))


def test_the_same_seed_and_offset_give_the_same_bytes_again() -> None:
    x, rng = torch.randn(48, 80), torch.tensor([7, 9])
    first = quantize(x, rng)
    assert rng.tolist() == [7, 9]
    for name, again in quantize(x, torch.tensor([7, 9])).items():
        assert torch.equal(first[name], again), name


@pytest.mark.parametrize("other", [(8, 9), (7, 10), (7 + (1 << 32), 9)])
def test_another_seed_or_offset_gives_other_codes_of_the_same_scales(other: tuple[int, int]) -> None:
    x = torch.randn(48, 80)
    first, second, nearest = quantize(x, torch.tensor([7, 9])), quantize(x, torch.tensor(other)), quantize(x, None)
    for name in NAMES:
        same = torch.equal(first[name], second[name])
        assert same != name.endswith("data"), name
        assert name.endswith("data") or torch.equal(first[name], nearest[name]), name


@pytest.mark.parametrize("rht", [False, True])
@pytest.mark.parametrize("two_d", [False, True])
def test_a_direction_does_not_depend_on_the_other(rht: bool, two_d: bool) -> None:
    x, rng = torch.randn(40, 72), torch.tensor([3, 5])
    both = quantize(x, rng, rht=rht, two_d=two_d)
    for usage in ({"columnwise": False}, {"rowwise": False}):
        for name, alone in quantize(x, rng, rht=rht, two_d=two_d, **usage).items():
            assert torch.equal(alone, both[name]), name


def test_directions_draw_different_bytes() -> None:
    x = torch.full((16, 16), 1.3)
    x[0, :], x[:, 0] = 6.0, 6.0
    assert not torch.equal(codes(x, 1, False), codes(x, 1, True))


def test_a_row_does_not_depend_on_the_rows_below() -> None:
    x = torch.randn(64, 80)
    few, many = (quantize(x[:n], torch.tensor([3, 5]), amax=UNIT_AMAX)["rowwise_data"] for n in (16, 64))
    assert torch.equal(few, many[:16])


@pytest.mark.parametrize("columnwise", [False, True])
def test_only_the_neighbours_and_never_off_the_grid(columnwise: bool) -> None:
    grid = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    exactly = decode_e2m1(codes(torch.tensor(grid).repeat(500, 1), 11, columnwise))
    assert torch.equal(exactly, torch.tensor(grid).repeat(500, 1))
    for low, high in pairwise(E2M1_VALUES):
        x = torch.full((2000, 16), low + (high - low) * 0.4)
        x[:, 0] = 6.0
        drawn = decode_e2m1(codes(x, 12, columnwise))[:, 1:]
        assert set(drawn.unique().tolist()) == {low, high}


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_is_kept(columnwise: bool, sign: float) -> None:
    """|mean of n draws - v| ≤ step/256 + 5·step/(2·√n).

    v lies f of a step above a code, 0 ≤ f < 1. A byte b takes it up where f + b/256 ≥ 1, as floor(256·f) of 256 do:
    the expectation is low by less than step/256. A draw takes two values one step apart, so its deviation is at most
    step/2, that of the mean at most step/(2·√n); five of these are passed once in two million tries.
    """
    values = torch.tensor([6.0, 0.01, 0.1, 0.24, 0.37, 0.49, 0.6, 0.9, 1.2, 1.45, 1.9, 2.3, 2.99, 3.6, 4.4, 5.7])
    mean = decode_e2m1(codes((sign * values).repeat(DRAWS, 1), 99, columnwise)).double().mean(0)
    step = torch.where(values >= 4, 2.0, torch.where(values >= 2, 1.0, 0.5)).double()
    bound = step / 256 + 5 * step / (2 * math.sqrt(DRAWS))
    assert ((mean - sign * values.double()).abs() <= bound).all(), (mean - sign * values).tolist()


def test_bytes_are_uniform_and_uncorrelated() -> None:
    """Chi-squared of 256 bins, 255 degrees: 255 ± 5·√510. Neighbouring bytes: |correlation| ≤ 5/√n."""
    noise = philox_bytes(torch.tensor([5, 6]), DRAWS, 0).double()
    counts = torch.bincount(noise.view(-1).long(), minlength=256).double()
    expected = noise.numel() / 256
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) <= 5 * math.sqrt(510)
    flat = (noise.view(-1) - noise.mean()) / noise.std()
    for distance in (1, 4, 16):
        assert abs((flat[distance:] * flat[:-distance]).mean().item()) <= 5 / math.sqrt(flat.numel())
