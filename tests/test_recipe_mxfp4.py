"""The MXFP4 recipe: what each tensor is quantized by, and what it refuses."""

import pytest

import mezzotint as mz
from mezzotint.custom_recipes import mxfp4_factory
from mezzotint.recipe import MXFP4BlockScaling, as_recipe
from tests.recipe_cases import ROLES

MX = mz.MXFP4Quantizer


def test_roles() -> None:
    """Input, weight and gradient, as the NVFP4 recipe has them; each switch turns one thing off."""
    rht, tiles = {"with_rht": True}, {"with_2d_quantization": True}
    random = {"stochastic_rounding": True}
    for options, wanted in (
        ({}, (MX(**rht), MX(**tiles), MX(**rht, **random))),
        ({"disable_rht": True}, (MX(), MX(**tiles), MX(**random))),
        ({"disable_stochastic_rounding": True}, (MX(**rht), MX(**tiles), MX(**rht))),
        ({"disable_2d_quantization": True}, (MX(**rht), MX(), MX(**rht, **random))),
    ):
        recipe = MXFP4BlockScaling(**options)
        assert tuple(recipe.quantizer(ROLES[name]) for name in ("input", "weight", "grad_output")) == wanted
    assert MXFP4BlockScaling(scale_rule="roundup").quantizer(ROLES["weight"]) == MX(**tiles, scale_rule="roundup")
    assert all(mxfp4_factory(role) == as_recipe("mxfp4").quantizer(role) for role in ROLES.values())
    assert MXFP4BlockScaling().alignment() == 32


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="scale_rule is 'up': give one of 'floor', 'roundup'"):
        MXFP4BlockScaling(scale_rule="up")
    with pytest.raises(ValueError, match="backward_override is 'no'"):
        MXFP4BlockScaling(backward_override="no")
    with pytest.raises(ValueError, match="with_rht=True and with_2d_quantization=True do not go together"):
        MX(with_rht=True, with_2d_quantization=True)
    with pytest.raises(ValueError, match=r"fp4_dtype is .*: give one of .*kFloat4E2M1"):
        MX(mz.DType.kFloat8E4M3)
