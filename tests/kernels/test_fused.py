"""A quantization that takes its producer in: bit for bit what the two ops one after the other give."""

from typing import Any

import pytest
import torch

from mezzotint.kernels.activation import activation_backward, activation_forward, column_sum
from mezzotint.kernels.norm import norm_apply, norm_stats
from mezzotint.kernels.quantize_ops import SOURCES, fused
from tests.formats import HIGH, VARIANTS, Variant
from tests.values import raw

# Name → (the source, what makes its arguments). Each is asked for with x (…, K).
CLAMPED = [7.0, 1.702, 1.0]
SHAPES = ((48, 96), (3, 5, 32), (0, 32))


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def sources(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Case → source and its arguments, for a result in this shape."""
    width = shape[-1]
    x, twice = draw(shape, dtype, 0), draw((*shape[:-1], 2 * width), dtype, 1)
    half = draw((*shape[:-1], width // 2), dtype, 2)
    gamma, beta, bias = draw((width,), torch.float32, 3), draw((width,), torch.float32, 4), draw((width,), dtype, 5)
    scales = draw(shape[:-1], torch.float32, 6)
    cases: dict[str, tuple[str, tuple[Any, ...]]] = {
        "layernorm": ("norm", (x, *norm_stats(x, 1e-5, False), gamma, beta, True, False)),
        "rmsnorm": ("norm", (x, *norm_stats(x, 1e-5, True), gamma, None, False, True)),
        "gelu": ("activation", (x, bias, "gelu", [], None)),
        "swiglu": ("activation", (twice, None, "swiglu", [], None)),
        "dgelu": ("activation_backward", (x, x, bias, "gelu", [], None, torch.float32)),
        "dclamped": ("activation_backward", (half, x, None, "clamped_swiglu", CLAMPED, None, None)),
        "dswiglu": ("activation_backward", (half, x, bias, "swiglu", [], None, torch.bfloat16)),
        "gelu_scaled": ("activation", (x, None, "gelu", [], scales)),
        "swiglu_scaled": ("activation", (twice, None, "swiglu", [], scales.to(dtype))),
        "dgelu_scaled": ("activation_backward", (x, x, None, "gelu", [], scales.to(dtype), None)),
        "dswiglu_scaled": ("activation_backward", (half, x, None, "swiglu", [], scales, torch.float32)),
    }
    return cases


OPS = {"norm": norm_apply, "activation": activation_forward, "activation_backward": activation_backward}


def check(variant: Variant, source: str, args: tuple[Any, ...], usage: tuple[bool, ...]) -> None:
    """Both ways on the device that the arguments are on."""
    options = variant.arguments(args[0].device, usage)
    got = fused(variant.quantize, source)(*args, *options)
    made = OPS[source](*(args[:-1] if source == "activation_backward" else args))
    want = variant.quantize(made, *options)
    if source == "activation_backward":
        sums = args[-1]
        *got, total = got
        assert total.dtype == (sums or torch.float32)
        if sums is None:
            assert total.shape == (0,)
        else:
            close_sums(total, made, sums)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (variant, source, index)
        assert torch.equal(raw(a), raw(b)), (variant, source, tuple(made.shape), usage, index)


def close_sums(total: torch.Tensor, made: torch.Tensor, dtype: torch.dtype) -> None:
    """Exactly so on the CPU; on a GPU another order of the same FP32 sum, then one cast."""
    if total.device.type == "cpu":
        assert torch.equal(total, column_sum(made, dtype))
        return
    rows = made.double().reshape(-1, made.shape[-1]) if made.numel() else made.double().new_zeros(1, made.shape[-1])
    bound = rows.abs().sum(0) * 2.0**-20 + rows.sum(0).abs() * torch.finfo(dtype).eps
    assert ((total.double() - rows.sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_fused_is_one_after_the_other(variant: Variant) -> None:
    for number, shape in enumerate(SHAPES):
        for index, (source, args) in enumerate(sources(shape, variant.dtypes[number % len(variant.dtypes)]).values()):
            usages = variant.usages()
            check(variant, source, args, usages[(index + number) % len(usages)])


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@pytest.mark.parametrize("sums", [None, *HIGH], ids=str)
def test_sums(sums: torch.dtype | None, dtype: torch.dtype) -> None:
    """Nothing, or FP32 sums cast to what is asked for; the rounded gradient is what is summed."""
    variant = VARIANTS[0]
    dy, x = draw((33, 24), dtype, 0), draw((33, 48), dtype, 1)
    check(variant, "activation_backward", (dy, x, None, "geglu", [], None, sums), (True, True))


def test_every_quantization_takes_every_source() -> None:
    for variant in VARIANTS:
        for source in SOURCES:
            name = fused(variant.quantize, source).name()
            assert name == f"{variant.quantize.name()}_of_{source}"
