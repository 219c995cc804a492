"""Recipes: constructors, what each option does to the quantizer of each role, and what is refused."""

import copy
import dataclasses
import hashlib
import inspect
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
    QuantizerRequest,
    QuantizerRole,
    Recipe,
    check_recipe,
    element,
    slot,
)
from tests.recipes import MODULES, RECIPES, VARIANTS, assert_equal, gradient, make, sample, step

ROOT = Path(__file__).resolve().parents[1]
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
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
# Those that take QParams for each tensor, and how.
WITH_PARAMS = (Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling)


def of_all(recipe: Recipe, attribute: str) -> dict[str, Any]:
    """An attribute of the quantizer of every role."""
    return {kind: getattr(recipe.quantizer(role), attribute) for kind, role in ROLES.items()}


def by_role(x: Any, weight: Any, grad: Any) -> dict[str, Any]:
    return {"input": x, "weight": weight, "output": x, "grad_output": grad, "grad_input": grad}


# Constructors: names, order and defaults. What upstream does not have comes last.

FP8_GEMMS = [("fp8_gemm_fprop", None), ("fp8_gemm_dgrad", None), ("fp8_gemm_wgrad", None)]
FP8_PARAMS = [("fp8_quant_fwd_inp", None), ("fp8_quant_fwd_weight", None), ("fp8_quant_bwd_grad", None)]
ATTENTION = [("fp8_dpa", False), ("fp8_mha", False), ("backward_override", None)]
CONSTRUCTORS: dict[type, list[tuple[str, Any]]] = {
    MMParams: [("use_split_accumulator", True)],
    QParams: [
        ("power_2_scale", False),
        ("amax_epsilon", 0.0),
        ("random_hadamard_transform", False),
        ("stochastic_rounding", False),
        ("fp4_2d_quantization", False),
    ],
    QuantizerRole: [("module_type", ""), ("tensor_type", ""), ("name", "")],
    QuantizerRequest: [],
    DelayedScalingRequest: [
        ("fp8_format", Format.HYBRID),
        ("margin", 0),
        ("amax_history_len", 1024),
        ("amax_compute_algo", "max"),
        ("scaling_factor_compute_algo", None),
        ("reduce_amax", True),
    ],
    Recipe: [],
    DelayedScaling: [
        ("margin", 0),
        ("fp8_format", Format.HYBRID),
        ("amax_history_len", 1024),
        ("amax_compute_algo", "max"),
        ("scaling_factor_compute_algo", None),
        ("reduce_amax", True),
        *ATTENTION,
    ],
    Float8CurrentScaling: [
        ("use_power_2_scales", False),
        ("fp8_format", Format.HYBRID),
        *FP8_GEMMS,
        *ATTENTION,
        *FP8_PARAMS,
    ],
    MXFP8BlockScaling: [("margin", 0), ("fp8_format", Format.E4M3), *ATTENTION, ("enable_2d_quantization", False)],
    Float8BlockScaling: [
        ("use_f32_scales", False),
        ("fp8_format", Format.E4M3),
        ("x_block_scaling_dim", 1),
        ("w_block_scaling_dim", 2),
        ("grad_block_scaling_dim", 1),
        *FP8_GEMMS,
        *ATTENTION,
        *FP8_PARAMS,
    ],
    NVFP4BlockScaling: [
        ("disable_rht", False),
        ("disable_stochastic_rounding", False),
        ("disable_2d_quantization", False),
        ("row_scaled_activation", False),
        ("nvfp4_4over6", "none"),
        ("nvfp4_4over6_e4m3_use_256", "all"),
        ("nvfp4_4over6_err_mode", "MAE"),
        ("fp4_format", Format.E2M1),
        ("fp8_format", Format.E4M3),
        *ATTENTION,
        ("fp4_quant_fwd_inp", None),
        ("fp4_quant_fwd_weight", None),
        ("fp4_quant_bwd_grad", None),
    ],
    CustomRecipe: [
        ("qfactory", inspect.Parameter.empty),
        ("fp8_format", Format.HYBRID),
        *ATTENTION,
        ("quantization_alignment", 128),
    ],
    Float8RowwiseScaling: [
        ("use_power_2_scales", True),
        ("fp8_format", Format.E4M3),
        *FP8_GEMMS,
        ("high_precision_wgrad", False),
        ("backward_override", None),
        *FP8_PARAMS,
    ],
}


@pytest.mark.parametrize("cls", CONSTRUCTORS, ids=lambda cls: cls.__name__)
def test_constructor(cls: type) -> None:
    parameters = inspect.signature(cls).parameters.values()
    assert [(p.name, p.default) for p in parameters] == CONSTRUCTORS[cls]
    assert {p.kind for p in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_element_of_a_format() -> None:
    expected = {Format.E4M3: (E4M3, E4M3), Format.E5M2: (E5M2, E5M2), Format.HYBRID: (E4M3, E5M2)}
    for fp8_format, (forward, backward) in expected.items():
        assert element(fp8_format, True) is forward
        assert element(fp8_format, False) is backward
    # The same wherever state is kept: in a module, in a RecipeState.
    recipe = CustomRecipe(lambda role: DelayedScalingRequest(fp8_format=Format.E5M2))
    module = make("linear")
    module.init_fp8_meta_tensors(recipe)
    state = mz.RecipeState.create(recipe, mode="forward", num_quantizers=3)
    assert {q.dtype for q in (*state.make_quantizers(), *module.quantizers["scaling_fwd"])} == {E5M2}


def test_slots() -> None:
    """In the order of the roles of a module."""
    assert [slot(gemm, kind) for gemm in range(3) for kind in FORWARD] == list(range(9))
    assert [slot(gemm, kind) for gemm in range(3) for kind in BACKWARD] == list(range(6))


@pytest.mark.parametrize("wrong", [None, "mxfp8", MXFP8BlockScaling, 3])
def test_what_is_no_recipe(wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"recipe is {type(wrong).__name__}: give one of mezzotint\.recipe"):
        check_recipe(wrong)


def test_constructors_are_all_there() -> None:
    found = inspect.getmembers(mz.recipe, dataclasses.is_dataclass)
    defined = {cls for name, cls in found if not name.startswith("_")}
    assert defined == set(CONSTRUCTORS)


def test_formats_are_pairs_of_maxima() -> None:
    values = {fmt.name: (fmt.value.max_fwd, fmt.value.max_bwd) for fmt in Format}
    assert values == {"E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344)}


def test_what_is_left_out_is_filled_in() -> None:
    for recipe, splits in (
        (Float8CurrentScaling(), (False, True, True)),
        (Float8RowwiseScaling(), (False, True, True)),
        (Float8BlockScaling(), (True, True, True)),
    ):
        gemms = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
        assert gemms == tuple(MMParams(split) for split in splits)
        power_2 = not isinstance(recipe, Float8CurrentScaling)
        for name, _ in FP8_PARAMS:
            assert getattr(recipe, name) == QParams(power_2_scale=power_2)
    nvfp4 = NVFP4BlockScaling()
    assert nvfp4.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert nvfp4.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert nvfp4.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)


ENVIRONMENT = {
    "NVTE_BACKWARD_OVERRIDE": "high_precision",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
    "NVTE_NVFP4_DISABLE_RHT": "1",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
    "NVTE_NVFP4_4OVER6": "all",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": "none",
    "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE",
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "1",
    "NVTE_USE_FAST_MATH": "1",
    "NVTE_UNFUSED_FP8_UPDATE": "1",
}


def fingerprint() -> str:
    """Every default recipe as text, and a digest of what two steps of a module give under it."""
    digest = hashlib.sha256()
    recipes = [cls() for cls in KINDS]
    for recipe in recipes:
        module = make("layernorm_mlp")
        for seed in range(2):
            for name, value in step(module, sample(seed=seed), recipe).items():
                digest.update(name.encode() + value.float().numpy().tobytes())
    return f"{recipes} {digest.hexdigest()}"


def test_environment_changes_nothing() -> None:
    code = "from tests.test_recipe import fingerprint; print(fingerprint())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == fingerprint()


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


# What is refused

PARAMS_FIELDS = [(cls, name) for cls in WITH_PARAMS for name, _ in FP8_PARAMS] + [
    (NVFP4BlockScaling, f"fp4_quant_{name}") for name in ("fwd_inp", "fwd_weight", "bwd_grad")
]


def dimensionless(**dims: int) -> Callable[[], Recipe]:
    return lambda: Float8BlockScaling(**{f"{name}_block_scaling_dim": dim for name, dim in dims.items()})


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "history": (
        lambda: DelayedScaling(amax_history_len=0),
        ValueError,
        r"amax_history_len is 0: give 1 or more",
    ),
    "request-history": (
        lambda: DelayedScalingRequest(amax_history_len=-1),
        ValueError,
        r"amax_history_len is -1: give 1 or more",
    ),
    "delayed-history-type": (
        lambda: DelayedScaling(amax_history_len=16.0),
        ValueError,
        r"amax_history_len is 16.0: give 1 or more",
    ),
    "delayed-margin": (lambda: DelayedScaling(margin="1"), ValueError, r"margin is '1': give a number"),
    "delayed-margin-nan": (lambda: DelayedScaling(margin=math.nan), ValueError, r"margin is nan: give a number"),
    "delayed-margin-inf": (lambda: DelayedScaling(margin=-math.inf), ValueError, r"margin is -inf: give a number"),
    "request-margin": (lambda: DelayedScalingRequest(margin=math.nan), ValueError, r"margin is nan: give a number"),
    "delayed-history": (lambda: DelayedScaling(amax_history_len=True), ValueError, r"amax_history_len is True: give"),
    "epsilon-text": (lambda: QParams(amax_epsilon="x"), ValueError, r"amax_epsilon is 'x': give 0 or a positive"),
    "epsilon-nan": (lambda: QParams(amax_epsilon=math.nan), ValueError, r"amax_epsilon is nan: give 0 or a positive"),
    "amax-algo": (
        lambda: DelayedScaling(amax_compute_algo="mean"),
        ValueError,
        r"amax_compute_algo is 'mean': give 'max', 'most_recent' or a function",
    ),
    "request-amax-algo": (
        lambda: DelayedScalingRequest(amax_compute_algo="mean"),
        ValueError,
        r"amax_compute_algo is 'mean': give 'max', 'most_recent' or a function",
    ),
    "scaling-algo": (
        lambda: DelayedScaling(scaling_factor_compute_algo="max"),
        ValueError,
        r"scaling_factor_compute_algo is 'max': give None or a function",
    ),
    "delayed-override": (
        lambda: DelayedScaling(backward_override="dequantized"),
        ValueError,
        r"backward_override is 'dequantized': delayed scaling has none.*use Float8CurrentScaling",
    ),
    "block-dim": (
        dimensionless(w=3),
        ValueError,
        r"w_block_scaling_dim is 3: give 1 \(1x128\) or 2 \(128x128\)",
    ),
    "block-dim-x": (dimensionless(x=0), ValueError, r"x_block_scaling_dim is 0: give 1"),
    "block-dim-grad": (dimensionless(grad=0), ValueError, r"grad_block_scaling_dim is 0: give 1"),
    "block-2d-2d": (
        dimensionless(x=2),
        ValueError,
        r"x=2, w=2, grad=1: no GEMM multiplies 128x128 by 128x128; give 2 to one of them",
    ),
    "block-2d-grad": (dimensionless(x=2, w=1, grad=2), ValueError, r"x=2, w=1, grad=2: no GEMM"),
    "block-fast": (
        lambda: Float8BlockScaling(fp8_gemm_dgrad=MMParams(False)),
        ValueError,
        r"use_split_accumulator is False: block scaling always promotes",
    ),
    "mxfp8-margin": (lambda: MXFP8BlockScaling(margin=1), ValueError, r"margin is 1: .*leave it 0"),
    "nvfp4-format": (
        lambda: NVFP4BlockScaling(fp4_format=Format.E4M3),
        ValueError,
        r"fp4_format is Format.E4M3: there is only Format.E2M1",
    ),
    "nvfp4-hybrid": (
        lambda: NVFP4BlockScaling(fp8_format=Format.HYBRID),
        ValueError,
        r"fp8_format is Format.HYBRID: NVFP4BlockScaling takes Format.E4M3",
    ),
    "nvfp4-4over6": (
        lambda: NVFP4BlockScaling(nvfp4_4over6="some"),
        ValueError,
        r"nvfp4_4over6 is 'some': give one of none, weights, activations, all",
    ),
    "nvfp4-256": (
        lambda: NVFP4BlockScaling(nvfp4_4over6_e4m3_use_256="some"),
        ValueError,
        r"nvfp4_4over6_e4m3_use_256 is 'some': give one of none, weights, activations, all",
    ),
    "nvfp4-error": (
        lambda: NVFP4BlockScaling(nvfp4_4over6_err_mode="mae"),
        ValueError,
        r"nvfp4_4over6_err_mode is 'mae': give 'MAE' or 'MSE'",
    ),
    "nvfp4-row-rht": (
        lambda: NVFP4BlockScaling(row_scaled_activation=True),
        ValueError,
        r"row_scaled_activation and nvfp4_4over6 for activations take no Hadamard.*give disable_rht=True",
    ),
    "nvfp4-4over6-rht": (
        lambda: NVFP4BlockScaling(nvfp4_4over6="activations"),
        ValueError,
        r"give disable_rht=True as well",
    ),
    "nvfp4-row-4over6": (
        lambda: NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, nvfp4_4over6="all"),
        ValueError,
        r"row_scaled_activation and nvfp4_4over6 for activations exclude each other: choose one",
    ),
    "nvfp4-one-sided-transform": (
        lambda: NVFP4BlockScaling(fp4_quant_bwd_grad=QParams(stochastic_rounding=True)),
        ValueError,
        r"fp4_quant_fwd_inp has random_hadamard_transform=True, fp4_quant_bwd_grad False: .*both or to none",
    ),
    "nvfp4-transformed-weight": (
        lambda: NVFP4BlockScaling(fp4_quant_fwd_weight=QParams(random_hadamard_transform=True)),
        ValueError,
        r"fp4_quant_fwd_weight has random_hadamard_transform=True: .*leave it False",
    ),
    "nvfp4-params": (
        lambda: NVFP4BlockScaling(fp4_quant_fwd_weight=QParams(amax_epsilon=1.0)),
        ValueError,
        r"fp4_quant_fwd_weight is QParams\(.*amax_epsilon=1.0.*NVFP4 has no power_2_scale and no amax_epsilon",
    ),
    "fp8-params": (
        lambda: Float8CurrentScaling(fp8_quant_bwd_grad=QParams(stochastic_rounding=True)),
        ValueError,
        r"fp8_quant_bwd_grad is QParams\(.*stochastic_rounding=True.*leave the others out",
    ),
    "factory-none": (lambda: CustomRecipe(None), TypeError, r"qfactory is NoneType: give a function"),
    "alignment": (
        lambda: CustomRecipe(custom_recipes.mxfp8_factory, quantization_alignment=0),
        ValueError,
        r"quantization_alignment is 0: give 1 or more",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make_recipe, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make_recipe()


@pytest.mark.parametrize("cls", KINDS)
@pytest.mark.parametrize("fp8_format", [Format.E5M2, Format.E2M1, "E4M3"])
def test_refused_formats(cls: type, fp8_format: Any) -> None:
    with pytest.raises(ValueError, match=rf"fp8_format is {fp8_format}: {cls.__name__} takes Format.E4M3"):
        cls(fp8_format=fp8_format)


@pytest.mark.parametrize("cls", [cls for cls in KINDS if cls is not DelayedScaling])
def test_refused_overrides(cls: type) -> None:
    with pytest.raises(ValueError, match=r"backward_override is 'bf16': give None, 'high_precision' or 'dequantized'"):
        cls(backward_override="bf16")
    with pytest.raises(ValueError, match=r"backward_override is 'bf16'"):
        CustomRecipe(custom_recipes.mxfp8_factory, backward_override="bf16")


@pytest.mark.parametrize(("cls", "name"), PARAMS_FIELDS)
def test_refused_params(cls: type, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} is MMParams: give a mezzotint.recipe.QParams"):
        cls(**{name: MMParams()})


@pytest.mark.parametrize("cls", WITH_PARAMS)
def test_refused_gemms(cls: type) -> None:
    for name, _ in FP8_GEMMS:
        with pytest.raises(TypeError, match=rf"{name} is bool: give a mezzotint.recipe.MMParams"):
            cls(**{name: True})


def test_the_base_says_that_it_is_none() -> None:
    with pytest.raises(NotImplementedError, match="Recipe does not say how tensors are quantized"):
        Recipe().quantizer(ROLES["input"])


# Values

ALL = {**{name: recipe for name, recipe in RECIPES.items() if recipe is not None}, **VARIANTS}


@pytest.mark.parametrize("name", ALL)
def test_recipes_are_frozen_values(name: str) -> None:
    recipe = ALL[name]
    for field in dataclasses.fields(recipe):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recipe, field.name, getattr(recipe, field.name))
    with pytest.raises(AttributeError):
        recipe.no_such_option = 1  # type: ignore[attr-defined]
    for other in (copy.copy(recipe), copy.deepcopy(recipe), dataclasses.replace(recipe)):
        assert other == recipe
        assert hash(other) == hash(recipe)
        assert repr(other) == repr(recipe)
    if not isinstance(recipe, CustomRecipe):
        assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_recipes_are_told_apart() -> None:
    """By value, by hash and by repr, which lists every option."""
    recipes = [*ALL.values(), Float8CurrentScaling(fp8_gemm_fprop=MMParams(True)), MXFP8BlockScaling(fp8_dpa=True)]
    assert len(set(recipes)) == len({repr(recipe) for recipe in recipes}) == len(recipes)
    for recipe in recipes:
        text = repr(recipe)
        assert text.startswith(type(recipe).__name__)
        for field in dataclasses.fields(recipe):
            assert f"{field.name}={getattr(recipe, field.name)!r}" in text


def test_equal_by_what_they_mean() -> None:
    assert Float8CurrentScaling() == Float8CurrentScaling(fp8_gemm_fprop=MMParams(False), fp8_quant_fwd_inp=QParams())
    assert Float8CurrentScaling() != Float8RowwiseScaling()
    assert QParams() != QParams(amax_epsilon=1.0)
    assert hash(QuantizerRole("linear", "input", "a")) == hash(QuantizerRole("linear", "input", "a"))
    assert CustomRecipe(custom_recipes.mxfp8_factory) == CustomRecipe(custom_recipes.mxfp8_factory)
    assert CustomRecipe(custom_recipes.mxfp8_factory) != CustomRecipe(custom_recipes.nvfp4_factory)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (Float8CurrentScaling(), {"use_power_2_scales": True}),
        (Float8RowwiseScaling(), {"use_power_2_scales": False}),
        (Float8BlockScaling(), {"use_f32_scales": True}),
        (NVFP4BlockScaling(), {"disable_rht": True}),
        (NVFP4BlockScaling(), {"disable_stochastic_rounding": True}),
        (NVFP4BlockScaling(), {"disable_2d_quantization": True}),
        (MXFP8BlockScaling(), {"enable_2d_quantization": True}),
    ],
)
def test_a_changed_copy_is_as_if_made_so(recipe: Recipe, changes: dict[str, Any]) -> None:
    """What a recipe filled in follows its switches."""
    made = type(recipe)(**changes)
    for source in (recipe, copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        changed = dataclasses.replace(source, **changes)
        assert changed == made
        for role in ROLES.values():
            assert changed.quantizer(role) == made.quantizer(role)
        assert any(changed.quantizer(role) != recipe.quantizer(role) for role in ROLES.values())
        assert dataclasses.replace(changed, **{name: getattr(recipe, name) for name in changes}) == recipe


def test_a_changed_copy_keeps_what_was_given() -> None:
    given = QParams(amax_epsilon=0.5)
    recipe = dataclasses.replace(Float8CurrentScaling(fp8_quant_bwd_grad=given), use_power_2_scales=True)
    assert of_all(recipe, "force_pow_2_scales") == by_role(True, True, False)
    assert of_all(recipe, "amax_epsilon") == by_role(0.0, 0.0, 0.5)


PREDICATES = {
    "delayed": {DelayedScaling},
    "float8_current_scaling": {Float8CurrentScaling},
    "float8_per_tensor_scaling": {DelayedScaling, Float8CurrentScaling},
    "float8_rowwise_scaling": {Float8RowwiseScaling},
    "float8_block_scaling": {Float8BlockScaling},
    "mxfp8": {MXFP8BlockScaling},
    "nvfp4": {NVFP4BlockScaling},
    "custom": {CustomRecipe},
}


@pytest.mark.parametrize("predicate", PREDICATES)
def test_predicates(predicate: str) -> None:
    for cls in (Recipe, *KINDS, CustomRecipe):
        expected = cls in PREDICATES[predicate]
        subclass = type("Own", (cls,), {})
        instance = cls(custom_recipes.mxfp8_factory) if cls is CustomRecipe else cls()
        for asked in (cls, subclass, instance):
            assert getattr(asked, predicate)() is expected


def test_roles_as_text() -> None:
    assert str(QuantizerRole("linear", "input", "proj")) == "proj.linear.input"
    assert str(QuantizerRole(tensor_type="weight")) == "weight"
    assert str(QuantizerRole()) == ""


# Custom recipes


@pytest.mark.parametrize(
    "given", [None, "mxfp8", 3, 1.0, MX, (MX(E4M3),), [], {}, object()], ids=lambda v: type(v).__name__
)
def test_what_a_factory_may_not_give(given: Any) -> None:
    recipe = CustomRecipe(lambda role: given)
    message = (
        rf"qfactory gave {type(given).__name__} for proj.linear.weight: give a Quantizer \(IdentityQuantizer to leave "
        "the tensor as it is\\) or a DelayedScalingRequest"
    )
    with pytest.raises(TypeError, match=message):
        recipe.quantizer(ROLES["weight"])
    module = MODULES["linear"](name="proj")
    with pytest.raises(TypeError, match=rf"qfactory gave {type(given).__name__} for proj.linear.input"):
        step(module, sample(), recipe)


def test_requests_of_one_module_must_be_equal() -> None:
    def factory(role: QuantizerRole) -> DelayedScalingRequest:
        return DelayedScalingRequest(margin=1 if role.tensor_type == "weight" else 0)

    with pytest.raises(ValueError, match=r"linear.weight asks for .*margin=1.*the requests of one module must be"):
        step(make("linear"), sample(), CustomRecipe(factory))


def test_an_unknown_request_is_refused() -> None:
    with pytest.raises(TypeError, match="QuantizerRequest: modules keep state for DelayedScalingRequest"):
        step(make("linear"), sample(), CustomRecipe(lambda role: QuantizerRequest()))


def test_a_factory_gets_the_roles_of_the_module() -> None:
    seen: list[QuantizerRole] = []

    def factory(role: QuantizerRole) -> Any:
        seen.append(role)
        return mz.IdentityQuantizer()

    for name, module_type, names in (
        ("linear", "linear", ["me"]),
        ("layernorm_linear", "linear", ["me"]),
        ("layernorm_mlp", "linear", ["me.fc1", "me.fc2"]),
        ("grouped_linear", "grouped_linear", ["me.0", "me.1", "me.2"]),
    ):
        step(MODULES[name](name="me"), sample(), CustomRecipe(factory))
        kinds = ("input", "weight", "grad_output")
        assert set(seen) == {QuantizerRole(module_type, kind, own) for own in names for kind in kinds}
        seen.clear()


READY: dict[str, Callable[[QuantizerRole], Any]] = {
    "high_precision_factory": lambda role: mz.IdentityQuantizer(),
    "delayed_scaling_factory": lambda role: DelayedScalingRequest(),
    "current_scaling_factory": lambda role: CURRENT(E5M2 if role.tensor_type in BACKWARD else E4M3),
    "float8_rowwise_factory": lambda role: ROW(E4M3, force_pow_2_scales=True),
    "float8_block_scaling_factory": lambda role: BLOCK(
        E4M3, block_scaling_dim=2 if role.tensor_type == "weight" else 1
    ),
    "mxfp8_factory": lambda role: MX(E4M3),
    "nvfp4_factory": lambda role: {
        "weight": NV(with_2d_quantization=True),
        "input": NV(**RHT),
        "output": NV(**RHT),
    }.get(role.tensor_type, NV(**RHT, stochastic_rounding=True)),
    "nvfp4_forward_mxfp8_backward_factory": lambda role: (
        MX(E4M3)
        if role.tensor_type in BACKWARD
        else mz.HybridQuantizer(
            rowwise_quantizer=NV(with_2d_quantization=role.tensor_type == "weight"), columnwise_quantizer=MX(E4M3)
        )
    ),
    "nvfp4_weight_mxfp8_factory": lambda role: (
        NV(with_2d_quantization=True) if role.tensor_type == "weight" else MX(E4M3)
    ),
}
SAME_AS = {
    "high_precision_factory": None,
    "delayed_scaling_factory": DelayedScaling(),
    "current_scaling_factory": Float8CurrentScaling(),
    "float8_rowwise_factory": Float8RowwiseScaling(),
    "float8_block_scaling_factory": Float8BlockScaling(),
    "mxfp8_factory": MXFP8BlockScaling(),
    "nvfp4_factory": NVFP4BlockScaling(),
}


def test_every_factory_is_tested() -> None:
    assert set(READY) == {name for name in custom_recipes.__all__ if name.endswith("_factory")}


@pytest.mark.parametrize("name", READY)
def test_ready_factories(name: str) -> None:
    recipe = CustomRecipe(getattr(custom_recipes, name))
    for role in ROLES.values():
        assert recipe.quantizer(role) == READY[name](role)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", SAME_AS)
def test_a_factory_is_its_recipe(name: str, module: str) -> None:
    custom, plain = make(module), make(module)
    for seed in range(2):
        x = sample(seed=seed)
        got = step(custom, x, CustomRecipe(getattr(custom_recipes, name)))
        assert_equal(got, step(plain, x, SAME_AS[name]))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["module", "operation"])
def test_a_factory_that_changes_its_answer(kind: str, is_compiled: bool) -> None:
    """Eager code asks it at each run, a graph is traced again when what it reads has changed."""
    answers = {"of": "identity"}

    def factory(role: QuantizerRole) -> Any:
        return custom_recipes.mxfp8_factory(role) if answers["of"] == "mxfp8" else mz.IdentityQuantizer()

    torch.manual_seed(0)
    is_module = kind == "module"
    options: dict[str, Any] = {"device": "cpu", "bias": False}
    made = mz.Linear(64, 32, params_dtype=torch.bfloat16, **options) if is_module else None
    layer = mz.ops.Linear(64, 32, dtype=torch.bfloat16, **options) if made is None else made
    call = torch.compile(layer, backend="eager", fullgraph=True) if is_compiled else layer
    recipe = CustomRecipe(factory)
    for answer, plain in (("identity", None), ("mxfp8", MXFP8BlockScaling()), ("identity", None)):
        answers["of"] = answer
        with mz.autocast(recipe=recipe):
            y = call(sample())
        with mz.autocast(enabled=plain is not None, recipe=plain):
            assert torch.equal(y, layer(sample()))


def test_only_answers_that_follow_from_fields_are_kept() -> None:
    """A user's recipe may read what changes, also one that is made of ours."""
    asked = []

    @dataclasses.dataclass(frozen=True)
    class Own(MXFP8BlockScaling):
        def quantizer(self, role: QuantizerRole) -> Any:
            asked.append(role)
            return super().quantizer(role)

    module = make("linear")
    for _ in range(2):
        step(module, sample(), Own())
    assert len(asked) == 6
