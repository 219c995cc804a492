"""newton_schulz: a matrix made orthogonal, as Muon does it with its momentum.

    X = x / ‖x‖,  then  X = a X + (b A + c A²) X  with A = X Xᵀ,  again and again

takes each singular value s to a s + b s³ + c s⁵ and leaves the vectors. With Muon's coefficients five rounds bring all
but the smallest into 0.7 … 1.2: not to 1, for which one would need more rounds.
"""

from collections.abc import Sequence
from typing import Any

import torch

MUON = (3.4445, -4.7750, 2.0315)


@torch.no_grad()
def newton_schulz(
    x: torch.Tensor,
    num_iterations: int = 5,
    coefficients: Sequence[Any] | None = None,
    eps: float = 1e-7,
) -> torch.Tensor:
    """x (…, m, n), FP32 or BF16, → U Vᵀ of its singular value decomposition, roughly, in its dtype; no gradient.

    `coefficients`: a, b, c for all rounds, or such triples, one for each round (flat or nested).
    """
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        given = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"x is {given}: give a matrix, or a stack of them")
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"x has dtype {x.dtype}: give float32 or bfloat16")
    rounds = _rounds(num_iterations, coefficients)
    is_tall = x.shape[-2] > x.shape[-1]
    # In FP32: of many numbers in BF16 the norm would be off.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    value = (x / (norm + eps)).to(x.dtype)
    value = value.mT if is_tall else value  # the product with itself is small then
    for a, b, c in rounds:
        gram = value @ value.mT
        value = a * value + (b * gram + c * (gram @ gram)) @ value
    return value.mT.contiguous() if is_tall else value


def _rounds(num_iterations: int, coefficients: Sequence[Any] | None) -> list[tuple[float, float, float]]:
    if not isinstance(num_iterations, int) or num_iterations < 1:
        raise ValueError(f"num_iterations is {num_iterations!r}: give a positive int")
    numbers: list[float] = []
    for entry in MUON if coefficients is None else coefficients:
        numbers += [float(entry)] if isinstance(entry, int | float) else [float(number) for number in entry]
    if len(numbers) == 3:
        numbers = numbers * num_iterations
    if len(numbers) != 3 * num_iterations:
        raise ValueError(
            f"coefficients has {len(numbers)} numbers: give 3, or 3 for each of {num_iterations} iterations"
        )
    return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]
