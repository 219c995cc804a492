"""Rotary position embedding on CUDA: a program rotates some heads of one token, with one read and one write.

Heads lie side by side, as a projection writes them, or in up to three tensors of their own: one kernel goes from the
former to the latter, or back with the inverse rotation. Heads of one kind alone are the case without keys and values.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.triton._jit import ahead
from mezzotint.kernels.triton._launch import Fast


def rope_config(heads: int, pairs: int, interleaved: bool) -> dict[str, int]:
    """Return heads and pairs of a program: about 8192 elements, so that the heads of a thread share its cosines.

    There are more threads than a head has cosines: only then does the compiler let each thread load those that it
    needs, and not move what it rotates through shared memory.
    """
    BP = max(triton.next_power_of_2(pairs), 16)
    BH = min(triton.next_power_of_2(heads), max(1, 4096 // BP))
    return {"BH": BH, "BP": BP, "num_warps": min(BP // 8 if interleaved else BP // 16, 16)}


@triton.jit
def _load_pairs(at, rows, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BP: tl.constexpr):
    """Return both elements of each pair (R, BP), in the rows that `rows` marks. A thread reads neighbours in one piece,
    which are separated afterwards."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * BP)[None, :]
        x = tl.load(at + c, mask=rows & (c < 2 * PAIRS), other=0.0)
        return tl.split(tl.reshape(x, [x.shape[0], BP, 2]))
    else:
        p = tl.arange(0, BP)[None, :]
        mask = rows & (p < PAIRS)
        return tl.load(at + p, mask=mask, other=0.0), tl.load(at + PAIRS + p, mask=mask, other=0.0)


@triton.jit
def _store_pairs(at, first, second, rows, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BP: tl.constexpr):
    if INTERLEAVED:
        c = tl.arange(0, 2 * BP)[None, :]
        both = tl.reshape(tl.join(first, second), [first.shape[0], 2 * BP])
        tl.store(at + c, both, mask=rows & (c < 2 * PAIRS))
    else:
        p = tl.arange(0, BP)[None, :]
        mask = rows & (p < PAIRS)
        tl.store(at + p, first, mask=mask)
        tl.store(at + PAIRS + p, second, mask=mask)


@Fast
@triton.jit
def _rope_kernel(
    mixed,
    q,
    k,
    v,
    cos,
    sin,
    k_cos,
    k_sin,
    B,
    mixed_a,
    mixed_b,
    mixed_h,
    q_a,
    q_b,
    q_h,
    k_a,
    k_b,
    k_h,
    v_a,
    v_b,
    v_h,
    angle_a,
    angle_b,
    Q: tl.constexpr,
    KV: tl.constexpr,
    BLOCKS: tl.constexpr,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BH: tl.constexpr,
    BP: tl.constexpr,
):
    """Rotate from mixed to q, k, v or, if INVERSE, from these to mixed. A block has Q heads of queries, KV of keys, KV
    of values."""
    token = tl.program_id(0).to(tl.int64)
    a = token // B
    b = token - a * B
    SIDE: tl.constexpr = Q + 2 * KV
    PAIRS: tl.constexpr = TURNED // 2
    h = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    rows = h < SIDE * BLOCKS
    block = (h // SIDE).to(tl.int64)  # strides of heads are long where sequences are
    place = h - block * SIDE  # among the heads of its block
    whole = mixed + a * mixed_a + b * mixed_b + h.to(tl.int64) * mixed_h
    part = q + a * q_a + b * q_b + (block * Q + place) * q_h
    if KV > 0:
        is_v = place >= Q + KV
        keys = k + a * k_a + b * k_b + (block * KV + place - Q) * k_h
        values = v + a * v_a + b * v_b + (block * KV + place - Q - KV) * v_h
        part = tl.where(is_v, values, tl.where(place >= Q, keys, part))
    if INVERSE:
        at, to = part, whole
    else:
        at, to = whole, part
    t1, t2 = _load_pairs(at, rows, PAIRS, INTERLEAVED, BP)
    angle = a * angle_a + b * angle_b
    every = tl.full([1, 1], True, tl.int1)
    c1, c2 = _load_pairs(cos + angle, every, PAIRS, INTERLEAVED, BP)
    s1, s2 = _load_pairs(sin + angle, every, PAIRS, INTERLEAVED, BP)
    if k_cos is not None:
        is_k = place >= Q
        k_c1, k_c2 = _load_pairs(k_cos + angle, every, PAIRS, INTERLEAVED, BP)
        k_s1, k_s2 = _load_pairs(k_sin + angle, every, PAIRS, INTERLEAVED, BP)
        c1, c2 = tl.where(is_k, k_c1, c1), tl.where(is_k, k_c2, c2)
        s1, s2 = tl.where(is_k, k_s1, s1), tl.where(is_k, k_s2, s2)
    x1, x2 = t1.to(tl.float32), t2.to(tl.float32)
    if INVERSE:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    y1, y2 = y1.to(mixed.dtype.element_ty), y2.to(mixed.dtype.element_ty)
    if KV > 0:
        y1, y2 = tl.where(is_v, t1, y1), tl.where(is_v, t2, y2)
    _store_pairs(to, y1, y2, rows, PAIRS, INTERLEAVED, BP)
    for start in range(TURNED, D, BP):
        c = start + tl.arange(0, BP)[None, :]
        rest = rows & (c < D)
        tl.store(to + c, tl.load(at + c, mask=rest, other=0.0), mask=rest)


def rope(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool) -> torch.Tensor:
    t = _with_rows(t)
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    whole, part = (out, t) if inverse else (t, out)
    _launch(whole, (part, None, None), [cos, sin], 1, interleaved, inverse)
    return out


def split(
    mixed: torch.Tensor, angles: list[torch.Tensor], heads: int, kv_heads: int, blocks: int, interleaved: bool
) -> tuple[torch.Tensor, ...]:
    a, b, width = mixed.shape
    whole = _with_rows(mixed).unflatten(-1, (heads + 2 * kv_heads, width // (heads + 2 * kv_heads)))
    parts = tuple([whole.new_empty(a, b, count, whole.shape[-1]) for count in (heads, kv_heads, kv_heads)])
    _launch(whole, parts, angles, blocks, interleaved, False)
    return parts


def join(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    angles: list[torch.Tensor],
    blocks: int,
    interleaved: bool,
) -> torch.Tensor:
    a, b, heads, channels = dq.shape
    out = dq.new_empty(a, b, (heads + 2 * dk.shape[2]) * channels)
    parts = tuple([_with_rows(part) for part in (dq, dk, dv)])
    _launch(out.unflatten(-1, (-1, channels)), parts, angles, blocks, interleaved, True)
    return out


def _with_rows(t: torch.Tensor) -> torch.Tensor:
    """Return t, copied only if the channels of a head are not neighbours."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _launch(
    whole: torch.Tensor,
    parts: tuple[Any, ...],
    angles: list[torch.Tensor],
    blocks: int,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Rotate between whole [a, b, h, d] and parts, one or three, [a, b, h of a kind, d]."""
    if whole.numel() == 0:
        return
    A, B, H, D = whole.shape
    dense: list[Any] = [angle.contiguous() for angle in angles]
    cos, sin, k_cos, k_sin = dense if len(dense) == 4 else (*dense, None, None)
    turned = cos.shape[-1]
    options = rope_config(H, turned // 2, interleaved)
    _rope_kernel[(A * B, cdiv(H, options["BH"]))](
        whole,
        *parts,
        cos,
        sin,
        k_cos,
        k_sin,
        B,
        *[stride for part in (whole, *parts) for stride in (part.stride()[:3] if part is not None else (0, 0, 0))],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1) if cos.shape[1] > 1 else 0,
        Q=parts[0].shape[2] // blocks,
        KV=0 if parts[1] is None else parts[1].shape[2] // blocks,
        BLOCKS=blocks,
        D=D,
        TURNED=turned,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        **options,
        enable_fp_fusion=False,
    )


AHEAD = [
    ahead(
        _rope_kernel,
        f"{dtype} {dtype} {'- -' if kv == 0 else f'{dtype} {dtype}'} fp32 fp32 {own}",
        Q=queries,
        KV=kv,
        BLOCKS=blocks,
        D=128,
        TURNED=turned,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        **rope_config((queries + 2 * kv) * blocks, turned // 2, interleaved),
    )
    for dtype, queries, kv, blocks, turned, interleaved, inverse, own in (
        ("bf16", 32, 0, 1, 128, False, True, "- -"),
        ("fp16", 32, 0, 1, 64, True, False, "- -"),
        ("fp32", 32, 0, 1, 128, True, False, "- -"),
        ("bf16", 32, 8, 1, 128, False, False, "- -"),
        ("bf16", 4, 1, 8, 128, False, True, "- -"),
        ("fp16", 4, 1, 8, 96, True, True, "fp32 fp32"),
        ("fp32", 3, 2, 1, 128, False, False, "fp32 fp32"),
    )
]
