"""Kernels of plain arithmetic in Triton's interpreter, on the CPU, against the reference: every index and mask.

What is pointwise has the reference's bytes, once the interpreter rounds to BF16 as a GPU does. Sums run in another
order. Every shape has one dtype; its others are slow.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.interpreted import run_interpreted

HIGH = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((5, 7), (3, 4, 33), (24,), (1, 1), (0, 16), (16, 0), (70, 130), (2, 2100))
RNG = torch.tensor([0x1234_5678_9ABC_DEF0, 0x7_0000_0007])


@pytest.mark.parametrize("part", ["one dtype", pytest.param("other dtypes", marks=pytest.mark.slow)])
def test_interpreted(part: str) -> None:
    run_interpreted(main, part)


def cases(part: str) -> Iterator[tuple[int, tuple[int, ...], torch.dtype, str]]:
    """Index and shape, dtype, view."""
    for index, shape in enumerate(SHAPES):
        for number, dtype in enumerate(HIGH):
            if (number == index % len(HIGH)) == (part == "one dtype"):
                for view in ("contiguous", "inner") if index < 4 else ("contiguous",):
                    yield index, shape, dtype, view


def convert(value: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """The interpreter's own conversion between FP32 and BF16 cuts bits off."""
    bits = torch.from_numpy(value.copy())
    if target.name == "bf16":
        return bits.view(torch.float32).to(torch.bfloat16).view(torch.uint16).numpy()
    return bits.view(torch.bfloat16).float().numpy()


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor, case: Any) -> None:
    from tests.values import raw

    assert (got.shape, got.dtype) == (want.shape, want.dtype), case
    assert torch.equal(raw(got), raw(want)), case


def close(got: torch.Tensor, want: torch.Tensor, case: Any) -> None:
    ulp = max(torch.finfo(want.dtype).eps, 1e-5)
    torch.testing.assert_close(got, want, rtol=ulp, atol=1e-4, msg=lambda text: f"{case}: {text}")


def check_pointwise(shape: tuple[int, ...], dtype: torch.dtype, view: str) -> None:
    from mezzotint.kernels import pointwise as reference
    from mezzotint.kernels.triton import pointwise as kernels
    from tests.values import as_view

    case = (shape, dtype, view)
    x = as_view(draw(shape, dtype, 0), view)
    for seed, other in enumerate((torch.float32, dtype)):
        for y in (as_view(draw(shape, other, seed), view), as_view(draw(shape[-1:], other, seed), view)):
            same(kernels.scale_add(x, 0.3, y), reference.scale_add_reference(x, 0.3, y), case)
    for p in (0.0, 0.3, 1.0):
        same(kernels.dropout(x, RNG, p), reference.dropout_reference(x, RNG, p), case)
    y, rs = kernels.l2norm(x, 1e-5)
    close(rs, reference.l2norm_reference(x, 1e-5)[1], case)
    same(y, (x.float() * rs[..., None]).to(dtype), case)
    dy = as_view(draw(shape, dtype, 1), view)
    close(kernels.l2norm_backward(dy, x, rs), reference.l2norm_backward_reference(dy, x, rs), case)


def check_norm(shape: tuple[int, ...], dtype: torch.dtype, view: str, rms: bool) -> None:
    from mezzotint.kernels.norm import norm_stats_reference
    from mezzotint.kernels.pointwise import add_reference
    from mezzotint.kernels.triton import norm
    from tests.values import as_view

    x, dy = draw(shape, dtype, 0), draw(shape, dtype, 1)
    args = (dy, x, *norm_stats_reference(x, 1e-5, rms), draw(shape[-1:], torch.float32, 2), True, rms, not rms)
    dx, *rest = norm.backward(*args)
    for other in (torch.float32, dtype, torch.bfloat16):
        residual = as_view(draw(shape, other, 3), view)
        got = norm.backward(*args, residual)
        for a, b in zip(got, (add_reference(dx, residual), *rest), strict=True):
            same(a, b, (shape, dtype, view, other))


def check_activation(shape: tuple[int, ...], dtype: torch.dtype, view: str, name: str) -> None:
    from mezzotint.kernels import activation as reference
    from mezzotint.kernels.elements import amax as amax_of
    from mezzotint.kernels.quantize_ops import SourceCall
    from mezzotint.kernels.triton import activation as kernels
    from tests.values import as_view

    case = (shape, dtype, view, name)
    gated = reference.is_gated(name)
    x = as_view(draw((*shape[:-1], 2 * shape[-1]) if gated else shape, dtype, 0), view)
    dy = as_view(draw(shape, dtype, 1), view)
    for seed, other in enumerate((torch.float32, dtype)):
        scales = as_view(draw(shape[:-1], other, seed), view) if len(shape) > 1 else draw((), other, seed)
        y = kernels.forward(x, None, name, [], scales)
        same(y, reference.activation_forward_reference(x, None, name, [], scales), case)
        dx = kernels.backward(dy, x, None, name, [], scales)
        same(dx, reference.activation_backward_reference(dy, x, None, name, [], scales), case)
        for made, want in (
            (SourceCall("activation", (x, None, name, [], scales)), y),
            (SourceCall("activation_backward", (dy, x, None, name, [], scales)), dx),
        ):
            got, amax = kernels.write_with_amax(made)
            same(got, want, case)
            same(amax, amax_of(want).view(1), case)
    ds = kernels.scale_gradient(dy, x, name, [])
    close(ds, reference.activation_scale_gradient_reference(dy, x, name, []), case)


def check_rope(shape: tuple[int, ...], turned: int, dtype: torch.dtype, is_packed: bool) -> None:
    from mezzotint.kernels.rope import rope_reference
    from mezzotint.kernels.triton.rope import rope

    a, b, h, d = shape
    t = draw((a, b, 3 * h, d), dtype, 0)[:, :, h : 2 * h] if is_packed else draw(shape, dtype, 0)
    for angles in (draw((a, 1, turned), torch.float32, 1), draw((1, b, turned), torch.float32, 2)):
        for interleaved in (False, True):
            for inverse in (False, True):
                arguments = (t, angles.cos(), angles.sin(), interleaved, inverse)
                same(rope(*arguments), rope_reference(*arguments), (shape, turned, dtype, interleaved, inverse))


def check_split(shape: tuple[int, ...], turned: int, dtype: torch.dtype, is_cut: bool) -> None:
    """Sides of a block: queries, keys, values. `is_cut`: mixed is part of a wider tensor, gradients are transposed."""
    from mezzotint.kernels.rope import rope_join_reference, rope_split_reference
    from mezzotint.kernels.triton.rope import join, split

    a, b, heads, kv_heads, blocks, d = shape
    width = (heads + 2 * kv_heads) * d
    mixed = draw((a, b, width + 3), dtype, 0)[..., 3:] if is_cut else draw((a, b, width), dtype, 0)
    grads = [draw((a, n, b, d), dtype, n).transpose(1, 2) for n in (heads, kv_heads, kv_heads)]
    grads = grads if is_cut else [grad.contiguous() for grad in grads]
    for size, sets in (((a, 1, turned), 4), ((1, b, turned), 2)):
        angles = [draw(size, torch.float32, seed) for seed in range(sets)]
        for interleaved in (False, True):
            case = (shape, turned, dtype, is_cut, size, interleaved)
            arguments = (mixed, angles, heads, kv_heads, blocks, interleaved)
            for got, want in zip(split(*arguments), rope_split_reference(*arguments), strict=True):
                assert got.is_contiguous(), case
                same(got, want, case)
            arguments = (*grads, angles, blocks, interleaved)
            got = join(*arguments)
            assert got.is_contiguous(), case
            same(got, rope_join_reference(*arguments), case)


def main(part: str) -> None:
    from triton.runtime import interpreter

    from mezzotint.kernels.triton import norm, pointwise

    interpreter._convert_float = convert
    for index, shape, dtype, view in cases(part):
        check_pointwise(shape, dtype, view)
        check_norm(shape, dtype, view, index % 2 == 0)
        # Without exponentials: the interpreter's are numpy's.
        check_activation(shape, dtype, view, ("relu", "sreglu")[index % 2])
    dtypes = HIGH[2:] if part == "one dtype" else HIGH[:2]
    for dtype in dtypes:
        check_rope((5, 2, 3, 8), 8, dtype, True)
        check_rope((2, 3, 5, 40), 12, dtype, False)
        check_rope((1, 1, 1, 2), 2, dtype, False)
        check_split((3, 2, 6, 2, 2, 8), 8, dtype, True)
        check_split((1, 3, 6, 3, 1, 40), 12, dtype, False)
    check_split((1, 1, 1, 1, 1, 2), 2, torch.float32, False)
    check_split((0, 2, 2, 1, 1, 4), 4, torch.float32, False)
    check_split((1, 1, 64, 8, 8, 128), 128, torch.bfloat16, True)  # more heads than a program takes
    norm.WHOLE_BACKWARD = pointwise.WHOLE = 128  # longer rows are walked in pieces
    for dtype in dtypes:
        check_pointwise((3, 300), dtype, "inner")
        check_norm((3, 300), dtype, "inner", False)
