"""Rotary position embedding on a GPU: the CPU's bytes, given the same cosines."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.kernels.rope import heads_of, rope, rope_join, rope_split
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


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((33, 2, 32, 8, 1, 128), 128),
        ((2, 33, 32, 8, 8, 128), 128),
        ((2, 7, 6, 3, 3, 64), 48),
        ((3, 2, 40, 40, 1, 80), 80),  # more heads than a program takes
        ((5, 3, 3, 1, 1, 10), 6),  # nothing is aligned
        ((1, 1, 1, 1, 1, 2), 2),
        ((0, 2, 4, 2, 2, 16), 16),
    ],
    ids=str,
)
def test_split_and_join(shape: tuple[int, ...], turned: int, dtype: torch.dtype) -> None:
    """Queries, keys and values out of one tensor, and their gradients, as SDPA lays them, into one."""
    a, b, heads, kv_heads, blocks, d = shape
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(a, b, (heads + 2 * kv_heads) * d + 8, generator=generator).to(dtype)
    counts = (heads, kv_heads, kv_heads)
    grads = [torch.randn(a, count, b, d, generator=generator).to(dtype) for count in counts]
    for size in ((a, 1, turned), (1, b, turned), (a, b, turned)):
        angles = [torch.randn(size, generator=generator).cos() for _ in range(4)]
        for given in (angles[:2], angles):
            on_gpu = [angle.cuda() for angle in given]
            for interleaved in (False, True):
                for source in (mixed[..., 8:], mixed[..., 8:].contiguous()):
                    layout = (heads, kv_heads, blocks, interleaved)
                    wanted = rope_split(source, given, *layout)
                    wide = mixed.cuda()[..., 8:] if not source.is_contiguous() else source.cuda()
                    for got, want in zip(rope_split(wide, on_gpu, *layout), wanted, strict=True):
                        assert got.is_contiguous()
                        assert torch.equal(raw(got.cpu()), raw(want))
                want = rope_join(*(grad.transpose(1, 2) for grad in grads), given, blocks, interleaved)
                got = rope_join(*(grad.cuda().transpose(1, 2) for grad in grads), on_gpu, blocks, interleaved)
                assert got.is_contiguous()
                assert torch.equal(raw(got.cpu()), raw(want))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_attention_has_the_bits_of_its_parts(layout: str, interleaved: bool) -> None:
    """Against split, two turns and a concatenation, with the same attention in the middle; eager."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"qkv_format": layout, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    module = mz.MultiheadAttention(
        256, 8, num_gqa_groups=2, fuse_qkv_params=True, qkv_weight_interleaved=interleaved, **options
    )
    x = torch.randn(64, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    freqs = mz.RotaryPositionEmbedding(32)(64).cuda()
    parts = heads_of(module.qkv(x), 8, 2, 2 if interleaved else 1)
    q, k, v = (part.flatten(2, 3) for part in parts)
    q, k = mz.apply_rotary_pos_emb(q, freqs, layout), mz.apply_rotary_pos_emb(k, freqs, layout)
    wanted = module.proj(module.core_attention(q.contiguous(), k.contiguous(), v.contiguous()))
    got = module(x, rotary_pos_emb=freqs)
    assert torch.equal(got, wanted)
    leaves = [x, *module.parameters()]
    both = (torch.autograd.grad(y.float().square().sum(), leaves) for y in (got, wanted))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)  # SDPA adds up dq in no fixed order
