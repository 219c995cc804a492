"""What each option of a recipe does to the quantizer of each role, down to the numbers of a module."""

import dataclasses
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import DType, custom_recipes
from mezzotint.functional import linear as linear_core
from mezzotint.functional.gemm import multiply
from mezzotint.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    QuantizerRole,
    Recipe,
)
from tests.recipe_cases import KINDS, ROLES, by_role, of_all
from tests.recipes import assert_equal, gradient, make, sample, step

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
# Those that take QParams for each tensor, and how.
WITH_PARAMS = (Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling)


# Options, role by role


@pytest.mark.parametrize("cls", [Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling, MXFP8BlockScaling])
@pytest.mark.parametrize(("fp8_format", "backward"), [(Format.E4M3, E4M3), (Format.HYBRID, E5M2)])
def test_format_of_every_role(cls: type, fp8_format: Format, backward: DType) -> None:
    assert of_all(cls(fp8_format=fp8_format), "dtype") == by_role(E4M3, E4M3, backward)


def test_default_format_of_every_role() -> None:
    """Gradients: E5M2 with one scale per tensor, E4M3 with scales per row or block."""
    for cls in (Float8RowwiseScaling, Float8BlockScaling, MXFP8BlockScaling):
        assert of_all(cls(), "dtype") == by_role(E4M3, E4M3, E4M3)
    assert of_all(Float8CurrentScaling(), "dtype") == by_role(E4M3, E4M3, E5M2)
    assert of_all(NVFP4BlockScaling(), "dtype") == by_role(*[DType.kFloat4E2M1] * 3)


def test_delayed_scaling_asks_for_state() -> None:
    def algorithm(history: torch.Tensor) -> torch.Tensor:
        return history[0]

    def factor(*args: Any) -> torch.Tensor:
        return args[1]

    recipe = DelayedScaling(
        margin=2,
        fp8_format=Format.E4M3,
        amax_history_len=7,
        amax_compute_algo=algorithm,
        scaling_factor_compute_algo=factor,
        reduce_amax=False,
    )
    for role in ROLES.values():
        request = recipe.quantizer(role)
        assert request == DelayedScalingRequest(Format.E4M3, 2, 7, algorithm, factor, False)
        assert DelayedScaling().quantizer(role) == DelayedScalingRequest()


@pytest.mark.parametrize("power_2", [True, False])
def test_power_2_scales_of_every_role(power_2: bool) -> None:
    for recipe in (
        Float8CurrentScaling(use_power_2_scales=power_2),
        Float8RowwiseScaling(use_power_2_scales=power_2),
        Float8BlockScaling(use_f32_scales=not power_2),
    ):
        assert of_all(recipe, "force_pow_2_scales") == by_role(power_2, power_2, power_2)
        assert of_all(recipe, "amax_epsilon") == by_role(0.0, 0.0, 0.0)


@pytest.mark.parametrize("cls", WITH_PARAMS)
def test_params_of_each_tensor(cls: type) -> None:
    recipe = cls(
        fp8_quant_fwd_inp=QParams(power_2_scale=True, amax_epsilon=0.25),
        fp8_quant_fwd_weight=QParams(power_2_scale=False, amax_epsilon=0.5),
        fp8_quant_bwd_grad=QParams(power_2_scale=True, amax_epsilon=0.75),
    )
    assert of_all(recipe, "force_pow_2_scales") == by_role(True, False, True)
    assert of_all(recipe, "amax_epsilon") == by_role(0.25, 0.5, 0.75)
    only_grad = cls(fp8_quant_bwd_grad=QParams(amax_epsilon=2.0))
    default = by_role(*[cls is not Float8CurrentScaling] * 2, False)
    assert of_all(only_grad, "force_pow_2_scales") == default
    assert of_all(only_grad, "amax_epsilon") == by_role(0.0, 0.0, 2.0)


@pytest.mark.parametrize("dims", [(1, 2, 1), (1, 1, 1), (2, 1, 1), (1, 1, 2)])
def test_block_dims_of_every_role(dims: tuple[int, int, int]) -> None:
    x, w, grad = dims
    recipe = Float8BlockScaling(x_block_scaling_dim=x, w_block_scaling_dim=w, grad_block_scaling_dim=grad)
    assert of_all(recipe, "block_scaling_dim") == by_role(x, w, grad)


def test_mxfp8_tiles_are_of_weights() -> None:
    recipe = MXFP8BlockScaling(enable_2d_quantization=True)
    assert of_all(recipe, "with_2d_quantization") == by_role(False, True, False)
    assert of_all(MXFP8BlockScaling(), "with_2d_quantization") == by_role(False, False, False)
    grouped = QuantizerRole("grouped_linear", "weight", "3")
    assert recipe.quantizer(grouped).with_2d_quantization


NVFP4_PLAIN = {
    "with_rht": by_role(False, False, False),
    "with_post_rht_amax": by_role(False, False, False),
    "with_random_sign_mask": by_role(True, True, True),
    "stochastic_rounding": by_role(False, False, False),
    "with_2d_quantization": by_role(False, False, False),
    "row_scaled_nvfp4": by_role(False, False, False),
    "nvfp4_use_4over6": by_role(False, False, False),
    "nvfp4_e4m3_max": by_role(448, 448, 448),
    "nvfp4_4over6_err_mode": by_role("MAE", "MAE", "MAE"),
}
NVFP4_DEFAULT = {
    **NVFP4_PLAIN,
    "with_rht": by_role(True, False, True),
    "with_post_rht_amax": by_role(True, False, True),
    "stochastic_rounding": by_role(False, False, True),
    "with_2d_quantization": by_role(False, True, False),
}
NO_RHT = {key: NVFP4_PLAIN[key] for key in ("with_rht", "with_post_rht_amax")}
NVFP4_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "rht": ({"disable_rht": True}, NO_RHT),
    "sr": ({"disable_stochastic_rounding": True}, {"stochastic_rounding": by_role(False, False, False)}),
    "2d": ({"disable_2d_quantization": True}, {"with_2d_quantization": by_role(False, False, False)}),
    "row": (
        {"disable_rht": True, "row_scaled_activation": True},
        {**NO_RHT, "row_scaled_nvfp4": by_role(True, False, False)},
    ),
    "row-4over6": (
        {"disable_rht": True, "row_scaled_activation": True, "nvfp4_4over6": "all"},
        {
            **NO_RHT,
            "row_scaled_nvfp4": by_role(True, False, False),
            "nvfp4_use_4over6": by_role(True, True, False),
            "nvfp4_e4m3_max": by_role(256, 256, 448),
        },
    ),
    "4over6-all": (
        {"disable_rht": True, "nvfp4_4over6": "all"},
        {**NO_RHT, "nvfp4_use_4over6": by_role(True, True, False), "nvfp4_e4m3_max": by_role(256, 256, 448)},
    ),
    "4over6-weights": (
        {"nvfp4_4over6": "weights", "nvfp4_4over6_err_mode": "MSE"},
        {
            "nvfp4_use_4over6": by_role(False, True, False),
            "nvfp4_e4m3_max": by_role(448, 256, 448),
            "nvfp4_4over6_err_mode": by_role("MSE", "MSE", "MSE"),
        },
    ),
    "4over6-activations": (
        {"disable_rht": True, "nvfp4_4over6": "activations"},
        {**NO_RHT, "nvfp4_use_4over6": by_role(True, False, False), "nvfp4_e4m3_max": by_role(256, 448, 448)},
    ),
    "256-weights": (
        {"disable_rht": True, "nvfp4_4over6": "all", "nvfp4_4over6_e4m3_use_256": "weights"},
        {**NO_RHT, "nvfp4_use_4over6": by_role(True, True, False), "nvfp4_e4m3_max": by_role(448, 256, 448)},
    ),
    "256-activations": (
        {"disable_rht": True, "nvfp4_4over6": "all", "nvfp4_4over6_e4m3_use_256": "activations"},
        {**NO_RHT, "nvfp4_use_4over6": by_role(True, True, False), "nvfp4_e4m3_max": by_role(256, 448, 448)},
    ),
    "256-none": (
        {"nvfp4_4over6": "weights", "nvfp4_4over6_e4m3_use_256": "none"},
        {"nvfp4_use_4over6": by_role(False, True, False)},
    ),
    "params": (
        {
            "fp4_quant_fwd_inp": QParams(stochastic_rounding=True),
            "fp4_quant_fwd_weight": QParams(),
            "fp4_quant_bwd_grad": QParams(fp4_2d_quantization=True),
        },
        {
            **NO_RHT,
            "stochastic_rounding": by_role(True, False, False),
            "with_2d_quantization": by_role(False, False, True),
        },
    ),
}


@pytest.mark.parametrize("option", NVFP4_OPTIONS)
def test_nvfp4_options_of_every_role(option: str) -> None:
    arguments, changed = NVFP4_OPTIONS[option]
    recipe = NVFP4BlockScaling(**arguments)
    for attribute, expected in {**NVFP4_DEFAULT, **changed}.items():
        assert of_all(recipe, attribute) == expected, attribute


# The same options, down to the numbers of a module: what Linear multiplies is what quantizers made here would make.


CURRENT, ROW, BLOCK = mz.Float8CurrentScalingQuantizer, mz.Float8RowwiseQuantizer, mz.Float8BlockQuantizer
MX, NV = mz.MXFP8Quantizer, mz.NVFP4Quantizer
RHT = {"with_rht": True, "with_post_rht_amax": True}
NUMBERS: dict[str, tuple[Recipe, tuple[Any, Any, Any]]] = {
    "current": (Float8CurrentScaling(), (CURRENT(E4M3), CURRENT(E4M3), CURRENT(E5M2))),
    "current-e4m3": (Float8CurrentScaling(fp8_format=Format.E4M3), (CURRENT(E4M3),) * 3),
    "current-pow2": (
        Float8CurrentScaling(use_power_2_scales=True),
        tuple(CURRENT(dtype, force_pow_2_scales=True) for dtype in (E4M3, E4M3, E5M2)),
    ),
    "current-params": (
        Float8CurrentScaling(
            fp8_quant_fwd_inp=QParams(amax_epsilon=100.0),
            fp8_quant_fwd_weight=QParams(power_2_scale=True),
            fp8_quant_bwd_grad=QParams(amax_epsilon=50.0, power_2_scale=True),
        ),
        (
            CURRENT(E4M3, amax_epsilon=100.0),
            CURRENT(E4M3, force_pow_2_scales=True),
            CURRENT(E5M2, amax_epsilon=50.0, force_pow_2_scales=True),
        ),
    ),
    "rowwise": (Float8RowwiseScaling(), (ROW(E4M3, force_pow_2_scales=True),) * 3),
    "rowwise-exact-hybrid": (
        Float8RowwiseScaling(use_power_2_scales=False, fp8_format=Format.HYBRID),
        tuple(ROW(dtype, force_pow_2_scales=False) for dtype in (E4M3, E4M3, E5M2)),
    ),
    "block": (
        Float8BlockScaling(),
        tuple(BLOCK(E4M3, block_scaling_dim=dim) for dim in (1, 2, 1)),
    ),
    "block-f32-dims": (
        Float8BlockScaling(use_f32_scales=True, x_block_scaling_dim=2, w_block_scaling_dim=1),
        tuple(BLOCK(E4M3, force_pow_2_scales=False, block_scaling_dim=dim) for dim in (2, 1, 1)),
    ),
    "mxfp8-hybrid-2d": (
        MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
        (MX(E4M3), MX(E4M3, with_2d_quantization=True), MX(E5M2)),
    ),
    "nvfp4": (
        NVFP4BlockScaling(),
        (NV(**RHT), NV(with_2d_quantization=True), NV(**RHT, stochastic_rounding=True)),
    ),
    "nvfp4-plain": (
        NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
        (NV(), NV(), NV()),
    ),
    "nvfp4-row": (
        NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, disable_stochastic_rounding=True),
        (NV(row_scaled_nvfp4=True), NV(with_2d_quantization=True), NV()),
    ),
    "nvfp4-4over6": (
        NVFP4BlockScaling(
            disable_rht=True,
            disable_stochastic_rounding=True,
            nvfp4_4over6="all",
            nvfp4_4over6_e4m3_use_256="weights",
            nvfp4_4over6_err_mode="MSE",
        ),
        (
            NV(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE"),
            NV(with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"),
            NV(),
        ),
    ),
}


def wide() -> tuple[Any, torch.Tensor]:
    """A module and an input whose rows differ by powers of two, so that it shows where a scale is shared."""
    module, x = make("linear", bias=False), sample()
    with torch.no_grad():
        module.weight.mul_(torch.linspace(-6, 6, module.weight.shape[0]).exp2()[:, None])
    return module, x * torch.linspace(-8, 8, x.shape[0]).exp2()[:, None].to(x.dtype)


@pytest.mark.parametrize("case", NUMBERS)
def test_options_reach_the_products(case: str) -> None:
    recipe, quantizers = NUMBERS[case]
    module, x = wide()
    got = step(module, x, recipe)
    # What backward receives from the loss.
    y = got["output"].clone().requires_grad_()
    gradient(y).backward()
    assert y.grad is not None
    x_q, w_q, dy_q = (q._with_internal(True) for q in quantizers)
    torch.manual_seed(1)  # as `step` does
    operands = x_q.quantize(x), w_q.quantize(module.weight.detach()), dy_q.quantize(y.grad)
    expected = {
        "output": multiply(operands[0], operands[1], out_dtype=torch.bfloat16),
        "input": multiply(operands[2], operands[1], b_columnwise=True, out_dtype=torch.bfloat16),
        "weight": multiply(operands[2], operands[0], a_columnwise=True, b_columnwise=True, out_dtype=torch.bfloat16),
    }
    assert_equal({key: got[key] for key in expected}, expected)


def test_options_change_the_numbers() -> None:
    """So that the test above can fail: no two of its recipes give the same output and gradients."""
    results = [step(*wide(), recipe) for recipe, _ in NUMBERS.values()]
    seen = {tuple(float(got[key].float().norm()) for key in ("output", "input", "weight")) for got in results}
    assert len(seen) == len(results)


# How the products accumulate, and what backward computes on


def test_products() -> None:
    factory = custom_recipes.mxfp8_factory
    for recipe in (DelayedScaling(), MXFP8BlockScaling(), NVFP4BlockScaling(), CustomRecipe(factory)):
        assert recipe.products() == (True, False, False)
    for cls in (Float8CurrentScaling, Float8RowwiseScaling):
        assert cls().products() == (True, False, False)
        assert cls(fp8_gemm_fprop=MMParams(True)).products() == (False, False, False)
        assert cls(fp8_gemm_dgrad=MMParams(False)).products() == (True, True, False)
        assert cls(fp8_gemm_wgrad=MMParams(False)).products() == (True, False, True)
    assert Float8BlockScaling().products() == (False, False, False)


@pytest.mark.parametrize("name", ["linear", "layernorm_linear"])
def test_products_reach_the_gemms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spy(*args: Any, fast: bool = False, **kwargs: Any) -> torch.Tensor:
        seen.append(fast)
        return multiply(*args, fast=fast, **kwargs)

    monkeypatch.setattr(linear_core, "multiply", spy)
    for fprop, dgrad, wgrad in ((True, False, False), (False, True, False), (False, False, True)):
        recipe = Float8CurrentScaling(
            fp8_gemm_fprop=MMParams(not fprop), fp8_gemm_dgrad=MMParams(not dgrad), fp8_gemm_wgrad=MMParams(not wgrad)
        )
        step(make(name), sample(), recipe)
        assert seen == [fprop, dgrad, wgrad]
        seen.clear()


def test_override_and_alignment() -> None:
    for cls in (Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling):
        assert cls().override() is None
        for override in ("high_precision", "dequantized"):
            assert cls(backward_override=override).override() == override
    assert [cls().alignment() for cls in KINDS] == [16, 16, 16, 16, 32, 128]
    custom = CustomRecipe(custom_recipes.mxfp8_factory)
    assert custom.alignment() == 128
    assert dataclasses.replace(custom, quantization_alignment=48).alignment() == 48
    assert [cls().keeps_wgrad() for cls in KINDS] == [False] * len(KINDS)
    assert Float8RowwiseScaling(high_precision_wgrad=True).keeps_wgrad()


@pytest.mark.parametrize("name", ["linear", "layernorm_linear", "grouped_linear"])
def test_high_precision_wgrad(name: str) -> None:
    """The weight gradient is the one without a recipe, of the unquantized input and dy; the rest is as without the
    option."""
    plain, quantized, got = (
        step(make(name), sample(), recipe)
        for recipe in (None, Float8RowwiseScaling(), Float8RowwiseScaling(high_precision_wgrad=True))
    )
    weights = {key for key in got if key.startswith("weight")}
    assert weights
    for key, value in got.items():
        assert torch.equal(value, (plain if key in weights else quantized)[key]), key
    for other in (plain, quantized):
        assert any(not torch.equal(other[key], got[key]) for key in got)
    assert any(not torch.equal(quantized[key], got[key]) for key in weights)
