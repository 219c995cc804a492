"""Rotary positions against complex numbers, in every layout."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint.attention.rope import apply_fused_qkv_rotary_pos_emb

SIZE, BATCH, HEADS, CHANNELS = 6, 2, 3, 8


def angles(turned: int, interleaved: bool = False, positions: int = 32) -> torch.Tensor:
    return mz.RotaryPositionEmbedding(turned, interleaved=interleaved).cpu()(positions)


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, CHANNELS, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def turn(x: torch.Tensor, place: int, turned: int, interleaved: bool) -> torch.Tensor:
    """One vector [d] at a position, each pair a complex number."""
    half = turned // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    y = [*x.double()]
    for i, (first, second) in enumerate(pairs):
        angle = torch.tensor(place * 10000.0 ** (-2 * i / turned), dtype=torch.float64)
        z = torch.complex(x[first].double(), x[second].double()) * torch.polar(torch.ones_like(angle), angle)
        y[first], y[second] = z.real, z.imag
    return torch.stack(y)


def check(got: torch.Tensor, x: torch.Tensor, places: list[int], turned: int, interleaved: bool = False) -> None:
    """Rows [n, h, d] of x at their places, output and gradient."""
    rows = x.reshape(-1, x.shape[-2], CHANNELS)
    expected = torch.stack(
        [
            torch.stack([turn(head, place, turned, interleaved) for head in row])
            for row, place in zip(rows, places, strict=True)
        ]
    )
    torch.testing.assert_close(got.double().reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (actual,) = torch.autograd.grad((got.reshape(expected.shape) * weights).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [CHANNELS, 4])
def test_layouts(turned: int, interleaved: bool) -> None:
    freqs = angles(turned, interleaved)
    assert freqs.shape == (32, 1, 1, turned)
    assert freqs.dtype == torch.float32
    x = sample(SIZE, BATCH, HEADS)
    y = mz.apply_rotary_pos_emb(x, freqs, "sbhd", interleaved=interleaved)
    check(y, x, [s for s in range(SIZE) for _ in range(BATCH)], turned, interleaved)
    x = sample(BATCH, SIZE, HEADS)
    y = mz.apply_rotary_pos_emb(x, freqs, "bshd", interleaved=interleaved)
    check(y, x, [*range(SIZE)] * BATCH, turned, interleaved)
    x = sample(9, HEADS)
    cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    y = mz.apply_rotary_pos_emb(x, freqs, "thd", interleaved=interleaved, cu_seqlens=cu)
    check(y, x, [0, 1, 2, 3, 0, 1, 2, 3, 4], turned, interleaved)


def test_start_positions() -> None:
    freqs, starts = angles(CHANNELS), torch.tensor([3, 10, 99], dtype=torch.int32)
    x = sample(SIZE, BATCH, HEADS)
    places = [s + start for s in range(SIZE) for start in (3, 10)]
    check(mz.apply_rotary_pos_emb(x, freqs, "sbhd", starts), x, places, CHANNELS)
    x = sample(BATCH, SIZE, HEADS)
    places = [s + start for start in (3, 10) for s in range(SIZE)]
    check(mz.apply_rotary_pos_emb(x, freqs, "bshd", starts), x, places, CHANNELS)
    x = sample(5, HEADS)
    y = mz.apply_rotary_pos_emb(x, freqs, "thd", starts[:2], cu_seqlens=torch.tensor([0, 2, 5]))
    check(y, x, [3, 4, 10, 11, 12], CHANNELS)


@pytest.mark.parametrize("rank", [0, 1])
def test_chunks_of_a_rank(rank: int) -> None:
    """Of a sequence over two ranks, each has two of four chunks."""
    freqs = angles(CHANNELS)
    x = sample(4, 1, HEADS)
    places = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
    check(mz.apply_rotary_pos_emb(x, freqs, cp_size=2, cp_rank=rank), x, places, CHANNELS)
    x = sample(6, HEADS)
    y = mz.apply_rotary_pos_emb(x, freqs, "thd", cu_seqlens=torch.tensor([0, 8, 12]), cp_size=2, cp_rank=rank)
    check(y, x, places + [[0, 3], [1, 2]][rank], CHANNELS)


def test_frequencies() -> None:
    rope = mz.RotaryPositionEmbedding(16, rotary_percent=0.5, rotary_base=500.0).cpu()
    assert [*rope.state_dict()] == ["inv_freq"]
    expected = torch.tensor([500.0 ** (-2 * i / 8) for i in range(4)])
    torch.testing.assert_close(rope.inv_freq, expected)
    assert torch.equal(rope(5, offset=3), rope(8)[3:])
    for length, factor in ((12, 1 / 4), (64, 8 / 64)):
        squeezed = mz.RotaryPositionEmbedding(16, 0.5, 4, 8, rotary_base=500.0).cpu()(length)
        torch.testing.assert_close(squeezed, rope(length) * factor)


def test_half_precision_is_rounded_once() -> None:
    x = sample(SIZE, BATCH, HEADS, dtype=torch.bfloat16)
    y = mz.apply_rotary_pos_emb(x, angles(CHANNELS))
    assert torch.equal(y, mz.apply_rotary_pos_emb(x.float(), angles(CHANNELS)).to(torch.bfloat16))


def test_queries_keys_and_values_in_one() -> None:
    freqs = angles(CHANNELS)
    parts = [sample(SIZE, BATCH, heads).detach() for heads in (4, 2, 2)]
    mixed = torch.cat([part.reshape(SIZE, BATCH, 2, -1) for part in parts], -1)
    q, k, v = apply_fused_qkv_rotary_pos_emb(mixed, freqs, 2 * freqs, [2 * CHANNELS, CHANNELS, CHANNELS])
    assert torch.equal(q, mz.apply_rotary_pos_emb(parts[0], freqs))
    assert torch.equal(k, mz.apply_rotary_pos_emb(parts[1], 2 * freqs))
    assert torch.equal(v, parts[2])


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """The same bits on a CPU. A compiler for GPUs may contract a product and a sum: then the last bit of FP32 differs,
    and where that stands on the edge the last one of BF16."""

    def call(x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        freqs = mz.RotaryPositionEmbedding.forward(rope, x.shape[0])
        return mz.apply_rotary_pos_emb(x, freqs, "thd", cu_seqlens=cu)

    rope = mz.RotaryPositionEmbedding(CHANNELS).cpu()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for size in (9, 12, 17):
        x, cu = sample(size, HEADS, dtype=torch.bfloat16), torch.tensor([0, 4, size])
        y, expected = compiled(x, cu), call(x, cu)
        assert torch.equal(y, expected)
        (grad,), (wanted,) = (torch.autograd.grad(out.float().square().sum(), x) for out in (y, expected))
        assert torch.equal(grad, wanted)
    assert counter.frame_count <= 2


def test_bad_input() -> None:
    freqs, x = angles(CHANNELS, positions=4), sample(SIZE, BATCH, HEADS)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("tensor_format is 'hd'", {"tensor_format": "hd"}),
        ("freqs has 4 positions, t 6", {}),
        ("freqs has 16 channels", {"freqs": angles(16)}),
        ("needs cu_seqlens", {"tensor_format": "thd", "t": x[0]}),
        ("'sbhd' needs 4 dimensions", {"t": x[0]}),
        ("'thd' needs 3 dimensions", {"tensor_format": "thd"}),
        ("start_positions with cp_size=2", {"cp_size": 2, "start_positions": torch.zeros(2)}),
    ]
    for message, options in wrong:
        with pytest.raises(ValueError, match=message):
            mz.apply_rotary_pos_emb(**{"t": x, "freqs": freqs, **options})
    with pytest.raises(ValueError, match="make no pairs"):
        mz.RotaryPositionEmbedding(6, rotary_percent=0.5)
    with pytest.raises(ValueError, match="qkv_split_arg_list"):
        apply_fused_qkv_rotary_pos_emb(x, freqs, freqs, [4, 4])
