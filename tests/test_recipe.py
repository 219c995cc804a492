"""Recipes are values with the constructors of upstream."""

import copy
import dataclasses
import hashlib
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mezzotint as mz
from mezzotint import DType, custom_recipes
from mezzotint.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MixedRecipe,
    MMParams,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    QuantizerRequest,
    QuantizerRole,
    Recipe,
    Rules,
    Schedule,
    check_recipe,
    element,
    slot,
)
from tests.recipe_cases import BACKWARD, FORWARD, KINDS, ROLES, by_role, of_all
from tests.recipes import RECIPES, VARIANTS, make, sample, step

ROOT = Path(__file__).resolve().parents[1]
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


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
    MXFP4BlockScaling: [
        ("disable_rht", False),
        ("disable_stochastic_rounding", False),
        ("disable_2d_quantization", False),
        ("scale_rule", "floor"),
        ("backward_override", None),
    ],
    MXFP6BlockScaling: [
        ("fp6_format", "HYBRID"),
        ("scale_rule", "floor"),
        ("backward_override", None),
        ("enable_2d_quantization", False),
    ],
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
    MixedRecipe: [("parts", inspect.Parameter.empty)],
    Schedule: [("phases", inspect.Parameter.empty)],
    Rules: [("rules", inspect.Parameter.empty)],
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
    kind = "type" if isinstance(wrong, type) else type(wrong).__name__
    with pytest.raises(TypeError, match=rf"recipe is {kind}: give one of mezzotint\.recipe"):
        check_recipe(wrong)


def test_constructors_are_all_there() -> None:
    found = inspect.getmembers(mz.recipe, dataclasses.is_dataclass)
    defined = {cls for name, cls in found if not name.startswith("_")}
    assert {*defined, Recipe} == set(CONSTRUCTORS)


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


# Values


ALL = {**{name: recipe for name, recipe in RECIPES.items() if recipe is not None}, **VARIANTS}


@pytest.mark.parametrize("name", ALL)
def test_what_regions_hold_is_frozen(name: str) -> None:
    recipe = ALL[name]
    value = recipe.frozen()
    assert value is not recipe
    assert value is recipe.frozen() is value.frozen() is copy.copy(value) is copy.deepcopy(value)
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign {field.name}"):
            setattr(value, field.name, getattr(value, field.name))
    for other in (copy.copy(recipe), copy.deepcopy(recipe), dataclasses.replace(recipe), value):  # type: ignore[type-var]
        assert other == recipe
        assert hash(other) == hash(recipe)
        assert repr(other) == repr(recipe)
    if not isinstance(recipe, CustomRecipe):
        assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize("cls", [*CONSTRUCTORS, Format, type(Format.E4M3.value)])
def test_files_name_classes_by_the_package(cls: type) -> None:
    """A pickle has `mezzotint.recipe.<name>`, whichever file of the package defines the class: it stays readable, also
    under `weights_only`, where PyTorch compares names."""
    written = f"cmezzotint.recipe\n{cls.__name__}\n".encode()
    assert pickle.loads(written + b".") is cls
    assert pickle.dumps(cls, 0).startswith(written)


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


@pytest.mark.parametrize("cls", mz.recipe.RECIPES.values())
def test_who_answers_once(cls: type[Recipe]) -> None:
    """A recipe of ours, and one derived from it that leaves `quantizer` as it is."""

    class Derived(cls):  # type: ignore[valid-type, misc]
        def alignment(self) -> int:
            return 64

    class Own(cls):  # type: ignore[valid-type, misc]
        def quantizer(self, role: QuantizerRole) -> Any:
            return super().quantizer(role)

    assert cls().answers_once()
    assert Derived().answers_once()
    assert not Own().answers_once()


def test_a_factory_is_asked_again() -> None:
    assert not CustomRecipe(custom_recipes.mxfp8_factory).answers_once()
    assert not Recipe().answers_once()


def test_roles_as_text() -> None:
    assert str(QuantizerRole("linear", "input", "proj")) == "proj.linear.input"
    assert str(QuantizerRole(tensor_type="weight")) == "weight"
    assert str(QuantizerRole()) == ""
