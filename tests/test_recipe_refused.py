"""What recipes refuse."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from mezzotint import custom_recipes
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
    Recipe,
)
from tests.recipe_cases import KINDS, ROLES

# Those that take QParams for each tensor, and how.
WITH_PARAMS = (Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling)


# Constructors: names, order and defaults. What upstream does not have comes last.


FP8_GEMMS = [("fp8_gemm_fprop", None), ("fp8_gemm_dgrad", None), ("fp8_gemm_wgrad", None)]
FP8_PARAMS = [("fp8_quant_fwd_inp", None), ("fp8_quant_fwd_weight", None), ("fp8_quant_bwd_grad", None)]


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
