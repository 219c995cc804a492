"""Elements of 4 and 6 bits, exhaustively against `ml_dtypes`; packing; scales of every amax."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from mezzotint.kernels.packed_mx import Element, decode, encode, pack, packed_shape, quantize_rows, scale_byte, unpack
from tests import exact

ELEMENTS = {
    "e2m1": (Element(2, 1), ml_dtypes.float4_e2m1fn),
    "e3m2": (Element(3, 2), ml_dtypes.float6_e3m2fn),
    "e2m3": (Element(2, 3), ml_dtypes.float6_e2m3fn),
}
over_elements = pytest.mark.parametrize(("element", "theirs"), ELEMENTS.values(), ids=ELEMENTS)


@over_elements
def test_numbers(element: Element, theirs: type) -> None:
    info = ml_dtypes.finfo(theirs)
    assert element.width == info.bits
    assert element.max == float(info.max)
    assert element.emax == math.floor(math.log2(element.max))


@over_elements
def test_every_code_back(element: Element, theirs: type) -> None:
    codes = np.arange(1 << element.width, dtype=np.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        values = decode(torch.from_numpy(codes), element, dtype).float().numpy()
        assert exact.same_bits(values, codes.view(theirs).astype(np.float32)).all()


@over_elements
@pytest.mark.parametrize("patterns", exact.PATTERNS)
def test_every_16_bit_pattern(element: Element, theirs: type, patterns: str) -> None:
    """Nearest even, saturating, signs of zeros included; ml_dtypes has no rule for NaN, ours is the largest code."""
    x = exact.PATTERNS[patterns]()
    codes = encode(torch.from_numpy(x), element).numpy()
    nan = np.isnan(x)
    np.testing.assert_array_equal(codes[~nan], x[~nan].astype(theirs).view(np.uint8))
    assert (codes[nan] == element.top).all()


@over_elements
def test_fp32_beside_the_middles(element: Element, theirs: type) -> None:
    values = np.unique(np.array(element.values(), dtype=np.float32))
    middles = (values[1:] + values[:-1]) / 2
    up, down = (np.nextafter(middles, np.float32(to)) for to in (np.inf, -np.inf))
    x = np.concatenate((values, middles, up, down, np.float32([1e-45, -1e-45, 1e38, -1e38])))
    np.testing.assert_array_equal(encode(torch.from_numpy(x), element).numpy(), x.astype(theirs).view(np.uint8))


@over_elements
@pytest.mark.parametrize("floor", [True, False], ids=["floor", "roundup"])
def test_scale_of_every_amax(element: Element, theirs: type, floor: bool) -> None:
    """Every BF16 magnitude: OCP's floor(log2 amax) - emax, and the least power of two under which nothing saturates."""
    x = exact.all_bf16()[: 1 << 15]
    byte = scale_byte(torch.from_numpy(x).view(torch.int32), element, floor).numpy()
    assert (byte[np.isnan(x)] == 255).all()
    assert (byte[np.isinf(x)] == 255 - element.emax).all()  # as if it were 2^128
    finite = np.isfinite(x)
    amax, byte = x[finite].astype(np.float64), byte[finite].astype(np.int64)
    if floor:
        with np.errstate(divide="ignore"):
            want = np.floor(np.log2(amax)) - element.emax + 127
        np.testing.assert_array_equal(byte, np.maximum(want, 0))
    else:
        assert (amax <= element.max * np.exp2(byte - 127.0)).all()
        assert ((amax > element.max * np.exp2(byte - 128.0)) | (byte == 0)).all()


@over_elements
def test_packing(element: Element, theirs: type) -> None:
    """A row is a stream of bits, the lowest first; what a group has beyond the row is 0."""
    for shape in ((5, 37), (3, 2, 8), (4, 1), (1,), (0, 4), (4, 0)):
        codes = torch.randint(0, 1 << element.width, shape, dtype=torch.uint8)
        packed = pack(codes, element)
        assert tuple(packed.shape) == packed_shape(shape[:-1], shape[-1], element)
        assert torch.equal(unpack(packed, element, shape[-1]), codes)
        if codes.numel() == 0:
            continue
        rows = codes.reshape(-1, shape[-1]).numpy()
        bits = np.unpackbits(rows[..., None], axis=-1, count=element.width, bitorder="little")
        stream = np.packbits(bits.reshape(len(rows), -1), axis=1, bitorder="little")
        got = packed.numpy().reshape(len(rows), -1)
        np.testing.assert_array_equal(got[:, : stream.shape[1]], stream)
        assert not got[:, stream.shape[1] :].any()


def test_how_four_codes_of_6_bits_lie() -> None:
    packed = pack(torch.tensor([0b000001, 0b000010, 0b000011, 0b100000], dtype=torch.uint8), ELEMENTS["e3m2"][0])
    assert packed.tolist() == [[0b10_000001, 0b0011_0000, 0b100000_00]]


@over_elements
def test_nan_takes_its_block_along(element: Element, theirs: type) -> None:
    """And no other: byte 255, the largest code everywhere. An infinity saturates and comes back."""
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    clean = quantize_rows(x, element, True, False, lambda value: encode(value, element))
    x[0, 40], x[1, 3], x[1, 4] = math.nan, -math.inf, 1.0
    codes, byte = quantize_rows(x, element, True, False, lambda value: encode(value, element))
    assert byte[0, 1] == 255
    assert (codes[0, 32:64] == element.top).all()
    assert byte[1, 0] == 255 - element.emax
    assert codes[1, 3] == element.top | 1 << element.width - 1
    assert codes[1, 4] == 0
    assert element.max * 2.0 ** (int(byte[1, 0]) - 127) > torch.finfo(torch.float32).max
    for got, want in zip((codes, byte), clean, strict=True):
        width = got.shape[1] // 3
        for row, block in ((0, 0), (0, 2), (1, 1), (1, 2)):
            part = slice(block * width, (block + 1) * width)
            assert torch.equal(got[row, part], want[row, part])
