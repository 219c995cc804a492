"""An FP8 linear in plain PyTorch, without any package: what the compiler makes of the products and casts alone.

Compiled, it is the floor of every FP8 linear at sizes where the host decides: nothing but PyTorch's own functions is
traced, launched and guarded on. `dynamic` takes each scale from its tensor's amax, as current scaling does; without it
all scales are given, and three casts and three products are all that is left. Its numbers are rounded once more than a
recipe's in places, and no option is there: it shows time, not training.
"""

from typing import Any

import torch
from torch import nn

_TOP = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def _quantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.float() * scale).clamp(-_TOP[dtype], _TOP[dtype]).to(dtype)


def _scale(x: torch.Tensor, dtype: torch.dtype, given: torch.Tensor, dynamic: bool) -> torch.Tensor:
    return _TOP[dtype] / x.abs().max().float().clamp(min=1e-12) if dynamic else given


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor, dynamic: bool) -> torch.Tensor:
        dtype = torch.float8_e4m3fn
        x_scale, w_scale = _scale(x, dtype, one, dynamic), _scale(weight, dtype, one, dynamic)
        x_q, w_q = _quantized(x, x_scale, dtype), _quantized(weight, w_scale, dtype)
        x_inv, w_inv = x_scale.reciprocal(), w_scale.reciprocal()
        ctx.save_for_backward(x_q.t().contiguous(), weight, w_scale, x_inv, w_inv, one)
        ctx.dynamic = dynamic
        return torch._scaled_mm(
            x_q, w_q.t(), scale_a=x_inv, scale_b=w_inv, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_columns, weight, w_scale, x_inv, w_inv, one = ctx.saved_tensors
        dy_scale = _scale(dy, torch.float8_e5m2, one, ctx.dynamic)
        dy_q, dy_inv = _quantized(dy, dy_scale, torch.float8_e5m2), dy_scale.reciprocal()
        w_columns = _quantized(weight, w_scale, torch.float8_e4m3fn).t().contiguous()
        dx = torch._scaled_mm(dy_q, w_columns.t(), scale_a=dy_inv, scale_b=w_inv, out_dtype=torch.bfloat16)
        dy_columns = dy_q.t().contiguous()
        dw = torch._scaled_mm(dy_columns, x_columns.t(), scale_a=dy_inv, scale_b=x_inv, out_dtype=torch.bfloat16)
        return dx, dw, None, None


class LinearByHand(nn.Module):
    """A `LinearByHand` computes x · weightᵀ in FP8, in BF16 outside."""

    one: torch.Tensor

    def __init__(self, k: int, n: int, device: str, dynamic: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5)
        self.register_buffer("one", torch.ones((), device=device))
        self.dynamic = dynamic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Linear.apply(x, self.weight, self.one, self.dynamic)  # type: ignore[no-untyped-call]
        return made
