"""newton_schulz: by singular values, in both dtypes, by given coefficients, in place."""

from typing import Any

import pytest
import torch

from mezzotint import newton_schulz
from mezzotint.optimizers.newton_schulz import MUON, QUINTIC

CUBIC = (1.5, -0.5, 0.0)  # goes to 1 for every singular value between 0 and √3


def sample(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16), (3, 8, 10), (2, 2, 9, 4)])
@pytest.mark.parametrize("coefficients", [None, MUON])
def test_singular_values_go_through_the_polynomials(shape: tuple[int, ...], coefficients: Any) -> None:
    """In FP64: U p(…p(S)) Vᵀ."""
    x = sample(shape)
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / x.double().norm(dim=(-2, -1))[..., None]
    for a, b, c in QUINTIC if coefficients is None else (MUON,) * 5:
        s = a * s + b * s**3 + c * s**5
    wanted = u @ torch.diag_embed(s) @ v
    assert (newton_schulz(x.clone(), None, 5, coefficients) - wanted).abs().max() < 1e-4
    low = newton_schulz(x.bfloat16(), coefficients=coefficients)
    assert low.dtype == torch.bfloat16
    assert (low.float() - wanted).norm() < 0.05 * wanted.norm()


def test_in_place() -> None:
    """Also in a matrix of any strides, or one that needs gradients."""
    x, expected = sample((6, 9)), newton_schulz(sample((6, 9)))
    assert newton_schulz(x) is x
    assert torch.equal(x, expected)
    strided = sample((6, 9)).t().contiguous().t()
    newton_schulz(strided)
    assert torch.allclose(strided, expected, atol=1e-5)
    leaf = sample((6, 9)).requires_grad_()
    assert torch.equal(newton_schulz(leaf), expected)


def test_converges_where_the_coefficients_do() -> None:
    x = sample((10, 24))
    made = newton_schulz(x.clone(), num_iterations=30, coefficients=CUBIC)
    assert (made @ made.T - torch.eye(10)).abs().max() < 1e-5
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert (made - u @ v).abs().max() < 1e-4


def test_coefficients_for_each_round() -> None:
    x = sample((6, 7))
    flat = newton_schulz(x.clone(), None, 2, [*MUON, *CUBIC])
    assert torch.equal(flat, newton_schulz(x.clone(), None, 2, [MUON, CUBIC]))
    value = x / x.norm()
    for a, b, c in (MUON, CUBIC):
        gram = value @ value.T
        value = a * value + b * gram @ value + c * gram @ gram @ value
    assert torch.allclose(flat, value, atol=1e-5)
    seven = newton_schulz(x.clone(), num_iterations=7)  # they begin again
    assert torch.equal(seven, newton_schulz(x.clone(), None, 7, [*QUINTIC, *QUINTIC[:2]]))


def test_zeros_stay() -> None:
    assert not newton_schulz(torch.zeros(3, 4)).any()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.zeros(3),), ValueError, r"x is \(3,\)"),
        (([1.0],), ValueError, "x is list"),
        ((torch.zeros(2, 2, dtype=torch.float16),), TypeError, "float16"),
        ((torch.zeros(2, 2), object()), NotImplementedError, "full_tensor"),
        ((torch.zeros(2, 2), None, 0), ValueError, "num_iterations is 0"),
        ((torch.zeros(2, 2), None, 2, (1.0, 2.0)), ValueError, "coefficients has 2 numbers"),
    ],
)
def test_bad_input(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        newton_schulz(*arguments)
