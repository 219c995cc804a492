"""Roles and kinds of recipes that several files of tests need."""

from typing import Any

from mezzotint.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)

FORWARD, BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")
ROLES = {kind: QuantizerRole("linear", kind, "proj") for kind in (*FORWARD, *BACKWARD)}
KINDS = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)


def of_all(recipe: Recipe, attribute: str) -> dict[str, Any]:
    """An attribute of the quantizer of every role."""
    return {kind: getattr(recipe.quantizer(role), attribute) for kind, role in ROLES.items()}


def by_role(x: Any, weight: Any, grad: Any) -> dict[str, Any]:
    return {"input": x, "weight": weight, "output": x, "grad_output": grad, "grad_input": grad}
