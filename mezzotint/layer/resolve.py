"""A recipe → what the cores take: a quantizer for each tensor of each GEMM, and how the GEMMs compute."""

from collections.abc import Callable
from typing import Any

import torch

from mezzotint.functional.linear import LinearQuantizers, Numerics
from mezzotint.recipe import (
    FORWARD_TENSORS,
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    Recipe,
)
from mezzotint.tensor.quantizer import Quantizer

NO_QUANTIZERS = LinearQuantizers(None, None, None)


def resolve_quantizers(
    recipe: Recipe,
    role_of: Callable[[int, str], QuantizerRole],
    needs: tuple[tuple[bool, bool], ...],
    saves_original_input: bool,
) -> tuple[tuple[LinearQuantizers, ...], DelayedScalingRequest | None]:
    """Quantizers that make the directions which are read, and the state that they ask for.

    `role_of(gemm, tensor_type)`; `needs`: gradients of (input, weight) of each GEMM.
    """
    override, keeps_wgrad = recipe.override(), recipe.keeps_wgrad()
    saves_input = saves_original_input or keeps_wgrad
    request: DelayedScalingRequest | None = None
    found: list[LinearQuantizers] = []
    for gemm, (needs_input, needs_weight) in enumerate(needs):
        made: list[Quantizer | None] = []
        for tensor_type, rowwise, columnwise in (
            ("input", True, needs_weight and override is None and not saves_input),
            ("weight", True, needs_input and override is None),
            ("grad_output", needs_input, needs_weight and not keeps_wgrad),
        ):
            if tensor_type == "grad_output" and (override is not None or not (rowwise or columnwise)):
                made.append(None)
                continue
            quantizer = recipe.quantizer(role_of(gemm, tensor_type))
            if isinstance(quantizer, QuantizerRequest):
                asked = delayed_request(quantizer)
                if request is not None and asked != request:
                    raise ValueError(
                        f"{role_of(gemm, tensor_type)} asks for {asked}, another tensor of the module for "
                        f"{request}: the requests of one module must be equal"
                    )
                request = asked
                quantizer = asked.scaled_quantizer(tensor_type in FORWARD_TENSORS)
            made.append(quantizer.with_usage(rowwise=rowwise, columnwise=columnwise))
        found.append(LinearQuantizers(made[0], made[1], made[2]))
    return tuple(found), request


def resolve_numerics(recipe: Recipe | None, dtype: torch.dtype) -> Numerics:
    """How the three GEMMs compute; without a recipe, in high precision."""
    if recipe is None:
        return Numerics(
            dtype=dtype, fast_fprop=False, fast_dgrad=False, fast_wgrad=False, override=None, keeps_wgrad=False
        )
    fast_fprop, fast_dgrad, fast_wgrad = recipe.products()
    return Numerics(
        dtype=dtype,
        fast_fprop=fast_fprop,
        fast_dgrad=fast_dgrad,
        fast_wgrad=fast_wgrad,
        override=recipe.override(),
        keeps_wgrad=recipe.keeps_wgrad(),
    )


def delayed_request(request: Any) -> DelayedScalingRequest:
    """What modules can keep state for."""
    if not isinstance(request, DelayedScalingRequest):
        raise TypeError(
            f"a quantizer request is {type(request).__name__}: modules keep state for DelayedScalingRequest"
        )
    return request
