"""newton_schulz: by singular values, in both dtypes, by given coefficients."""

from typing import Any

import pytest
import torch

from mezzotint import newton_schulz
from mezzotint.optimizers.newton_schulz import MUON

CUBIC = (1.5, -0.5, 0.0)  # goes to 1 for every singular value between 0 and √3


def sample(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16), (3, 8, 10), (2, 2, 9, 4)])
def test_singular_values_go_through_the_polynomial(shape: tuple[int, ...]) -> None:
    """In FP64: U p(…p(S)) Vᵀ."""
    x = sample(shape)
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / x.double().norm(dim=(-2, -1))[..., None]
    for _ in range(5):
        s = MUON[0] * s + MUON[1] * s**3 + MUON[2] * s**5
    wanted = u @ torch.diag_embed(s) @ v
    assert (newton_schulz(x) - wanted).abs().max() < 1e-4
    assert newton_schulz(x).is_contiguous()
    assert (newton_schulz(x.bfloat16()).float() - wanted).norm() < 0.05 * wanted.norm()
    assert newton_schulz(x.bfloat16()).dtype == torch.bfloat16


def test_converges_where_the_coefficients_do() -> None:
    x = sample((10, 24))
    made = newton_schulz(x, 30, CUBIC)
    assert (made @ made.T - torch.eye(10)).abs().max() < 1e-5
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert (made - u @ v).abs().max() < 1e-4


def test_coefficients_for_each_round() -> None:
    x = sample((6, 7))
    one = newton_schulz(newton_schulz_once(x, MUON), 1, CUBIC, eps=0.0)
    flat = newton_schulz(x, 2, [*MUON, *CUBIC])
    assert torch.equal(flat, newton_schulz(x, 2, [MUON, CUBIC]))
    assert not torch.equal(flat, one)  # it does not divide by the norm in between
    value = x / x.norm()
    for a, b, c in (MUON, CUBIC):
        gram = value @ value.T
        value = a * value + b * gram @ value + c * gram @ gram @ value
    assert torch.allclose(flat, value, atol=1e-5)


def newton_schulz_once(x: torch.Tensor, coefficients: tuple[float, float, float]) -> torch.Tensor:
    return newton_schulz(x, 1, coefficients)


def test_zeros_and_gradients() -> None:
    assert not newton_schulz(torch.zeros(3, 4)).any()
    assert not newton_schulz(sample((3, 4)).requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.zeros(3),), ValueError, r"x is \(3,\)"),
        (([1.0],), ValueError, "x is list"),
        ((torch.zeros(2, 2, dtype=torch.float16),), TypeError, "float16"),
        ((torch.zeros(2, 2), 0), ValueError, "num_iterations is 0"),
        ((torch.zeros(2, 2), 2, (1.0, 2.0)), ValueError, "coefficients has 2 numbers"),
    ],
)
def test_bad_input(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        newton_schulz(*arguments)
