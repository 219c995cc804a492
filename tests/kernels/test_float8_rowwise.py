"""Row-wise FP8 of some of a tensor's rows, or columns: with the amaxes of the whole given, the bytes of the whole."""

import pytest
import torch

from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels.float8_rowwise import float8_rowwise_amax, float8_rowwise_quantize, float8_rowwise_quantize_
from mezzotint.kernels.quantize_ops import fused
from tests.values import CONTENTS, fill, raw

BOTH = (True, True)
OPTIONS = ((E4M3, True, 0.0), (E5M2, False, 2.0**-10))
FAST = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("options", OPTIONS, ids=["pow2", "exact"])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_with_the_amax_of_the_whole(content: str, options: tuple[int, bool, float], dim: int) -> None:
    """New buffers and given ones; each direction alone."""
    x = fill((50, 41), torch.bfloat16, content, 3)
    parts = x.split([17, 0, x.shape[dim] - 17], dim)
    top = torch.stack([float8_rowwise_amax(part, dim == 0) for part in parts]).amax(0)
    assert torch.equal(top, x.float().nan_to_num(nan=0.0, posinf=torch.inf, neginf=torch.inf).abs().amax(dim))
    tops = (None, top) if dim == 0 else (top, None)
    want = float8_rowwise_quantize(x, None, None, *options, *BOTH)
    for usage in (BOTH, (False, True), (True, False)):
        made = [float8_rowwise_quantize(part, *tops, *options, *usage) for part in parts]
        for part, buffers in zip(parts, made, strict=True):
            again = [torch.empty_like(buffer) for buffer in buffers]
            float8_rowwise_quantize_(part, again, None, *tops, *options, *usage)
            assert all(torch.equal(raw(a), raw(b)) for a, b in zip(again, buffers, strict=True))
        got = list(zip(*made, strict=True))
        for is_held, codes, scales, expected, cut in (
            (usage[0], got[0], got[1], want[:2], dim),
            (usage[1], got[-2], got[-1], want[2:], 1 - dim),  # transposed
        ):
            if is_held:
                assert torch.equal(raw(torch.cat(codes, cut)), raw(expected[0]))
                each = scales if cut == 1 else (torch.cat(scales),)
                assert all(torch.equal(raw(scale), raw(expected[1])) for scale in each)


def test_of_a_source() -> None:
    x, y = fill((2, 24, 64), torch.bfloat16, "normal", 0), torch.empty(2, 24, 32)
    op, source = fused(float8_rowwise_quantize, "activation"), (x, None, "swiglu", [], None)
    top = torch.linspace(0.5, 8, y.shape[-1])
    made = op(*source, None, top, *OPTIONS[0], *BOTH)
    y = torch.ops.mezzotint.activation_forward(*source)
    want = float8_rowwise_quantize(y, None, top, *OPTIONS[0], *BOTH)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(made, want, strict=True))
    assert not torch.equal(made[3], float8_rowwise_quantize(y, None, None, *OPTIONS[0], *BOTH)[3])


@pytest.mark.parametrize("usage", [BOTH, (False, True), (True, False)], ids=["both", "column", "row"])
def test_opcheck(usage: tuple[bool, bool]) -> None:
    x = fill((2, 8, 24), torch.bfloat16, "normal", 1)
    arguments = (float8_rowwise_amax(x, False), float8_rowwise_amax(x, True), *OPTIONS[0], *usage)
    torch.library.opcheck(float8_rowwise_quantize, (x, *arguments), test_utils=FAST)
    out = [torch.empty_like(buffer) for buffer in float8_rowwise_quantize(x, *arguments)]
    torch.library.opcheck(float8_rowwise_quantize_, (x, out, None, *arguments), test_utils=FAST)


@pytest.mark.parametrize(
    ("tops", "message"),
    [
        ((None, torch.ones(1)), r"col_amax is torch.float32 of shape \(1,\): expected torch.float32 of shape \(24,\)"),
        ((None, torch.ones(24, dtype=torch.bfloat16)), "col_amax is torch.bfloat16 of shape"),
        ((None, torch.ones(24, 1)), r"col_amax is torch.float32 of shape \(24, 1\)"),
        ((torch.ones(24), None), r"row_amax is torch.float32 of shape \(24,\): expected torch.float32 of shape \(8,\)"),
    ],
)
def test_what_is_no_amax(tops: tuple[torch.Tensor | None, torch.Tensor | None], message: str) -> None:
    x = torch.ones(8, 24)
    with pytest.raises(ValueError, match=message):
        float8_rowwise_quantize(x, *tops, *OPTIONS[0], *BOTH)
