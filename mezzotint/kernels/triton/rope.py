"""Rotary position embedding on CUDA. One read, one write; a program turns some heads of one token.

Run in Triton's interpreter and compiled ahead; on a GPU not yet.
"""

import torch
import triton
import triton.language as tl

from mezzotint.constants import cdiv
from mezzotint.kernels.triton._jit import ahead
from mezzotint.kernels.triton._jit_source import load
from mezzotint.kernels.triton._launch import Fast


def rope_config(heads: int, pairs: int) -> dict[str, int]:
    """Heads and pairs of a program: about 2048 elements."""
    BP = max(triton.next_power_of_2(pairs), 16)
    BH = min(triton.next_power_of_2(heads), max(1, 1024 // BP))
    return {"BH": BH, "BP": BP, "num_warps": 4 if BH * BP >= 512 else 1}


@Fast
@triton.jit
def _rope_kernel(
    t,
    cos,
    sin,
    out,
    B,
    H,
    D,
    TURNED,
    stride_a,
    stride_b,
    stride_h,
    angle_a,
    angle_b,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    PASSES: tl.constexpr,
    BH: tl.constexpr,
    BP: tl.constexpr,
):
    """PASSES: there are channels behind the turned ones."""
    token = tl.program_id(0).to(tl.int64)
    a = token // B
    b = token - a * B
    h = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    p = tl.arange(0, BP)[None, :]
    pairs = TURNED // 2
    first = 2 * p if INTERLEAVED else p
    second = first + 1 if INTERLEAVED else p + pairs
    mask = (h < H) & (p < pairs)
    at = t + a * stride_a + b * stride_b + h * stride_h
    x1, x2 = load(at + first, mask), load(at + second, mask)
    angle = a * angle_a + b * angle_b
    c1, c2 = load(cos + angle + first, p < pairs), load(cos + angle + second, p < pairs)
    s1, s2 = load(sin + angle + first, p < pairs), load(sin + angle + second, p < pairs)
    if INVERSE:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    to = out + (token * H + h) * D
    tl.store(to + first, y1.to(out.dtype.element_ty), mask=mask)
    tl.store(to + second, y2.to(out.dtype.element_ty), mask=mask)
    if PASSES:
        for start in range(TURNED, D, BP):
            rest = (h < H) & (start + p < D)
            tl.store(to + start + p, tl.load(at + start + p, mask=rest, other=0.0), mask=rest)


def rope(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool) -> torch.Tensor:
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    if out.numel() == 0:
        return out
    t = t if t.stride(-1) == 1 else t.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    A, B, H, D = t.shape
    turned = cos.shape[-1]
    options = rope_config(H, turned // 2)
    _rope_kernel[(A * B, cdiv(H, options["BH"]))](
        t,
        cos,
        sin,
        out,
        B,
        H,
        D,
        turned,
        t.stride(0),
        t.stride(1),
        t.stride(2),
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1) if cos.shape[1] > 1 else 0,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        PASSES=turned < D,
        **options,
        enable_fp_fusion=False,
    )
    return out


AHEAD = [
    ahead(
        _rope_kernel,
        f"{dtype} fp32 fp32 {dtype}",
        INTERLEAVED=interleaved,
        INVERSE=not interleaved,
        PASSES=passes,
        **rope_config(32, 64),
    )
    for dtype, interleaved, passes in (("bf16", False, False), ("fp16", True, True), ("fp32", True, False))
]
