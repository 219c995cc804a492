"""Inputs of every kind, in numbers and in strides, for quantization ops."""

import math

import torch

VIEWS = ("contiguous", "transposed", "every_second", "inner", "offset", "expanded")
FINITE = ("normal", "decades", "zeros", "neg_zero", "zero_block", "subnormal", "tiny", "format_max", "dtype_max")
CONTENTS = (*FINITE, "nan", "inf", "all_nan", "mixed")


def fill(shape: tuple[int, ...], dtype: torch.dtype, content: str, seed: int) -> torch.Tensor:
    """Values of one kind."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    x = torch.randn(shape, generator=generator)
    if content == "decades":
        low, high = (-14, 12) if dtype == torch.float16 else (-60, 60)
        x *= torch.exp2(torch.randint(low, high, (*shape[:-1], 1), generator=generator).float())
    elif content in ("zeros", "neg_zero", "all_nan"):
        x = torch.full(shape, {"zeros": 0.0, "neg_zero": -0.0, "all_nan": math.nan}[content])
    elif content == "zero_block":
        x[..., :128] = 0
        x[: x.shape[0] // 2] = 0
    elif content == "subnormal":
        x = x.sign() * info.smallest_normal * torch.rand(shape, generator=generator)
    elif content == "tiny":
        x = x * info.smallest_normal * 4
    elif content == "format_max":
        tops = torch.tensor([448.0, 464.0, 480.0, 57344.0, 61440.0, 6.0, 5.0, 2.5, 2688.0])
        x = x.sign() * tops[torch.randint(0, len(tops), shape, generator=generator)]
    elif content == "dtype_max":
        x = torch.where(x.abs() < 0.5, x, x.sign() * info.max)
    elif content in ("nan", "inf", "mixed"):
        specials = {
            "nan": [math.nan],
            "inf": [math.inf, -math.inf],
            "mixed": [math.nan, math.inf, -math.inf, -0.0, 0.0, info.max, info.smallest_normal / 2, 448.0],
        }[content]
        picked = torch.tensor(specials)[torch.randint(0, len(specials), shape, generator=generator)]
        x = torch.where(torch.rand(shape, generator=generator) < 0.05, picked, x)
    return x.to(dtype)


def as_view(x: torch.Tensor, view: str) -> torch.Tensor:
    """The values of x (for `expanded`, of its first row) in a tensor with other strides."""
    if view == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if view == "every_second":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 7.0)
        wide[..., ::2] = x
        return wide[..., ::2]
    if view == "inner":
        frame = x.new_full([size + 2 for size in x.shape], 7.0)
        inside = frame[tuple(slice(1, size + 1) for size in x.shape)]
        return inside.copy_(x)
    if view == "offset":
        flat = x.new_full((x.numel() + 1,), 7.0)
        return flat[1:].view(x.shape).copy_(x)
    if view == "expanded" and x.dim() > 1 and x.shape[0]:
        return x[:1].expand(x.shape)
    return x


def raw(buffer: torch.Tensor) -> torch.Tensor:
    """The bytes of a buffer: -0 is not 0, and every NaN of a floating-point buffer is the same NaN."""
    dense = buffer.clone(memory_format=torch.contiguous_format).view(-1)
    if dense.is_floating_point():
        dense.masked_fill_(dense.isnan(), math.nan)
    return dense.view(torch.uint8)


def negated(x: torch.Tensor) -> torch.Tensor:
    """The values of x in a tensor that is the negative of what its memory holds, as `z.conj().imag` is."""
    parts = torch.stack((torch.zeros_like(x, dtype=torch.float32), -x.float()), -1)
    made = torch.view_as_complex(parts).conj().imag
    if x.dtype != torch.float32:  # there is no complex BF16: the bit alone
        made = torch._neg_view((-x).contiguous())
    assert made.is_neg()
    return made
