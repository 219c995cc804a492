"""newton_schulz: it makes a matrix orthogonal, as Muon does with its momentum.

    X = x / ‖x‖,  then  X = a X + (b A + c A²) X  with A = X Xᵀ,  again and again

This takes each singular value s to a s + b s³ + c s⁵ and leaves the vectors. With coefficients for a few rounds the
values come near 1, but do not reach it.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch

MUON = (3.4445, -4.7750, 2.0315)  # for every round
# These are for one round after the other, steeper at 0 first (leloykun.github.io/ponder/muon-opt-coeffs). They are the
# default.
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@torch.no_grad()
def newton_schulz(
    x: torch.Tensor,
    ctx: None = None,
    num_iterations: int = 5,
    coefficients: Sequence[Any] | None = None,
    eps: float = 1e-7,
) -> torch.Tensor:
    """Turn a matrix roughly into U Vᵀ of its singular value decomposition, in place, by Newton-Schulz iteration, as the
    optimizer Muon does.

    Args:
        x: The matrix (…, m, n), FP32 or BF16, or a stack of matrices.
        ctx: It must be None: Transformer Engine has matrices here that are spread over ranks.
        num_iterations: The number of rounds. The default is 5.
        coefficients: The numbers a, b, c for all rounds, or such triples, one for each round (flat or nested). None
            means a built-in list.
        eps: A small number that is added to the norm that x is divided by first. The default is 1e-7.

    Returns:
        x, which has been changed.

    Raises:
        ValueError: If `x` is no matrix, or the numbers do not fit.
        TypeError: If `x` is neither FP32 nor BF16.
        NotImplementedError: If `ctx` is given.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = torch.randn(8, 16)
        >>> mz.newton_schulz(x) is x
        True
    """
    if ctx is not None:
        raise NotImplementedError(
            f"ctx is {type(ctx).__name__}: there is no matrix that is spread over ranks here; gather it first "
            "(DTensor.full_tensor()), and leave ctx out"
        )
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        given = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"x is {given}: give a matrix, or a stack of them")
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"x has dtype {x.dtype}: give float32 or bfloat16")
    rounds = _rounds(num_iterations, coefficients)
    # The norm is taken in FP32: over many numbers in BF16 it would be off.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    value = (x / (norm + eps)).to(x.dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    value = value.mT if is_tall else value  # then the product with itself is small
    for a, b, c in rounds:
        gram = value @ value.mT
        value = a * value + (b * gram + c * (gram @ gram)) @ value
    return x.copy_(value.mT if is_tall else value)


def _rounds(num_iterations: int, coefficients: Sequence[Any] | None) -> list[tuple[float, float, float]]:
    if not isinstance(num_iterations, int) or num_iterations < 1:
        raise ValueError(f"num_iterations is {num_iterations!r}: give a positive int")
    if coefficients is None:
        return list(islice(cycle(QUINTIC), num_iterations))
    numbers: list[float] = []
    for entry in coefficients:
        numbers += [float(entry)] if isinstance(entry, int | float) else [float(number) for number in entry]
    if len(numbers) == 3:
        numbers = numbers * num_iterations
    if len(numbers) != 3 * num_iterations:
        raise ValueError(
            f"coefficients has {len(numbers)} numbers: give 3, or 3 for each of {num_iterations} iterations"
        )
    return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]
