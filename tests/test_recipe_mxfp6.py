"""The MXFP6 recipe: what each tensor is quantized by, and what it refuses."""

import pytest

import mezzotint as mz
from mezzotint.custom_recipes import mxfp6_factory
from mezzotint.recipe import MXFP6BlockScaling, as_recipe
from tests.recipe_cases import ROLES

MX, E2M3, E3M2 = mz.MXFP6Quantizer, mz.DType.kFloat6E2M3, mz.DType.kFloat6E3M2


def test_roles() -> None:
    """Input, weight and gradient: the finer element forward, the wider one backward, or one for all."""
    for options, wanted in (
        ({}, (MX(E2M3), MX(E2M3), MX(E3M2))),
        ({"fp6_format": "E2M3"}, (MX(E2M3), MX(E2M3), MX(E2M3))),
        ({"fp6_format": "E3M2"}, (MX(E3M2), MX(E3M2), MX(E3M2))),
        ({"enable_2d_quantization": True}, (MX(E2M3), MX(E2M3, with_2d_quantization=True), MX(E3M2))),
    ):
        recipe = MXFP6BlockScaling(**options)
        assert tuple(recipe.quantizer(ROLES[name]) for name in ("input", "weight", "grad_output")) == wanted
    assert MXFP6BlockScaling(scale_rule="roundup").quantizer(ROLES["weight"]) == MX(E2M3, scale_rule="roundup")
    assert all(mxfp6_factory(role) == as_recipe("mxfp6").quantizer(role) for role in ROLES.values())
    assert MXFP6BlockScaling().alignment() == 32


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="fp6_format is 'E4M3': give one of 'HYBRID', 'E2M3', 'E3M2'"):
        MXFP6BlockScaling(fp6_format="E4M3")
    with pytest.raises(ValueError, match="scale_rule is 'up': give one of 'floor', 'roundup'"):
        MXFP6BlockScaling(scale_rule="up")
    with pytest.raises(ValueError, match=r"fp6_dtype is .*: give one of .*kFloat6E2M3.*kFloat6E3M2"):
        MX(mz.DType.kFloat8E4M3)
