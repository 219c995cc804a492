"""Scales and bias on an FP32 product: each step rounded once, in order; in Triton the same bits."""

from typing import Any

import pytest
import torch

from mezzotint.kernels.finish import finish, finish_reference
from tests.kernels.interpreted import run_interpreted
from tests.values import raw

SHAPES = ((64, 96), (3, 5), (1, 1), (1, 300), (300, 1), (70, 1100), (0, 4), (4, 0))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def draw(*shape: int) -> torch.Tensor:
    """Many magnitudes, so that an order of factors or a rounding more shows."""
    return torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape).float())


def cases(M: int, N: int) -> list[list[Any]]:
    one, rows, columns = draw(1), draw(M, 1), draw(1, N)
    return [[], [one], [rows], [columns], [0.3], [rows, columns], [one.view(1, 1), columns], [1 / 3, rows, columns]]


def check(device: str, launch: Any) -> None:
    """Every shape with every kind of scales, and these with a bias of each kind in turn."""
    torch.manual_seed(0)
    for number, (M, N) in enumerate(SHAPES):
        for turn, scales in enumerate(cases(M, N)):
            bias = (None, draw(N), draw(N).bfloat16())[(number + turn) % 3]
            if not scales and bias is None:
                continue
            dtype = DTYPES[number % 3]
            product = draw(M, N + 3)[:, :N] if number % 2 else draw(M, N)
            want = torch.empty(M, N, dtype=dtype)
            finish_reference(want, product.clone(), scales, bias)
            on = [s.to(device) if isinstance(s, torch.Tensor) else s for s in scales]
            got = torch.empty(M, N, dtype=dtype, device=device)
            wide = torch.zeros(M, N + 3, device=device)[:, :N] if number % 2 else torch.empty(M, N, device=device)
            launch(got, wide.copy_(product), on, None if bias is None else bias.to(device))
            assert torch.equal(raw(got.cpu()), raw(want)), (M, N, dtype, scales, bias)
            if dtype == torch.float32 and not number % 2:
                launch(wide, wide.copy_(product), on, None if bias is None else bias.to(device))
                assert torch.equal(raw(wide.cpu()), raw(want))


def test_each_step_rounds_once() -> None:
    product, rows, columns, bias = draw(8, 16), draw(8, 1), draw(1, 16), draw(16)
    want = ((product.double() * rows.double()).float().double() * columns.double()).float()
    want = (want.double() + bias.double()).float().bfloat16()
    out = torch.empty(8, 16, dtype=torch.bfloat16)
    finish(out, product, [rows, columns], bias)
    assert torch.equal(out, want)


def test_interpreted() -> None:
    run_interpreted(main)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check("cuda", finish)


def main() -> None:
    from triton.runtime import interpreter

    from mezzotint.kernels.triton.finish import finish as launched
    from tests.kernels.test_pointwise_interpreted import convert

    interpreter._convert_float = convert
    check("cpu", launched)
