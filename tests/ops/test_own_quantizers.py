"""A user's own quantizer (`custom = True`) in operations: as in the modules that they stand for."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from mezzotint.functional.gemm import GEMMType
from tests.module.test_own_quantizers import own_recipe
from tests.ops.user_ops import OPTIONS, registries, step
from tests.recipes import sample

MODULE: dict[str, Any] = {"device": "cpu", "params_dtype": torch.bfloat16}


def modules() -> dict[str, tuple[Any, Any]]:
    """A module, and operations with the same parameters, in order."""
    torch.manual_seed(0)
    norm = {"normalization": "RMSNorm"}
    return {
        "linear": (mz.Linear(64, 32, **MODULE), ops.Linear(64, 32, **OPTIONS)),
        "norm and linear": (
            mz.LayerNormLinear(64, 32, **norm, **MODULE),
            ops.Sequential(ops.RMSNorm(64, **OPTIONS), ops.Linear(64, 32, **OPTIONS)),
        ),
        "mlp": (
            mz.LayerNormMLP(64, 48, activation="swiglu", **norm, **MODULE),
            ops.Sequential(
                ops.RMSNorm(64, **OPTIONS), ops.Linear(64, 96, **OPTIONS), ops.SwiGLU(), ops.Linear(48, 64, **OPTIONS)
            ),
        ),
    }


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["linear", "norm and linear", "mlp"])
def test_operations_compute_as_modules(name: str, fused: bool) -> None:
    module, model = modules()[name]
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), module.parameters(), strict=True):
            mine.copy_(theirs)
    calls: list[Any] = []
    with registries(empty=not fused):
        got = step(model, sample(8), own_recipe(calls))
    expected = step(module, sample(8), own_recipe([]))
    gemms = 2 if name == "mlp" else 1
    assert [call["gemm_type"] for call in calls] == [
        *[GEMMType.FPROP] * gemms,
        *[GEMMType.DGRAD, GEMMType.WGRAD] * gemms,
    ]
    keys = [[key for key in found if "scale" not in key and "amax" not in key] for found in (got, expected)]
    for mine, theirs in zip(*keys, strict=True):
        if fused:
            assert torch.equal(got[mine], expected[theirs]), mine
        else:  # the bias is added to what was rounded
            torch.testing.assert_close(got[mine], expected[theirs], rtol=0.1, atol=0.1)


def test_a_tensor_that_it_has_made_is_not_made_again() -> None:
    torch.manual_seed(0)
    linear = ops.Linear(64, 32, **OPTIONS)
    plain = step(linear, sample(8), own_recipe([]))
    got = step(ops.Sequential(ops.Quantize(), linear), sample(8), own_recipe([]))
    assert torch.equal(got["output 0"], plain["output 0"])
    with pytest.raises(TypeError, match=r"ends with Int8Storage.*custom=True"):
        step(ops.Quantize(), sample(8), own_recipe([]))


def test_experts() -> None:
    torch.manual_seed(0)
    model = ops.Sequential(
        ops.GroupedLinear(2, 64, 96, **OPTIONS), ops.SwiGLU(), ops.GroupedLinear(2, 48, 64, **OPTIONS)
    )
    splits, calls = [3, 5], []  # type: ignore[var-annotated]
    got = step(model, sample(8), own_recipe(calls), call=lambda x: model(x, splits, splits))
    with registries(empty=True):
        expected = step(model, sample(8), own_recipe([]), call=lambda x: model(x, splits, splits))
    assert len(calls) == 2 * 2 * 3
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
