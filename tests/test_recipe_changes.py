"""Recipes that are changed: assignments are checked, and seen by the next region, in eager and compiled code."""

import copy
import dataclasses
import pickle
import warnings
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    QuantizerRole,
    Recipe,
)
from mezzotint.region import recipe_in_force

ROLES = [QuantizerRole("linear", kind, "") for kind in ("input", "weight", "grad_output")]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Float8CurrentScaling, "use_power_2_scales", True),
        (Float8CurrentScaling, "fp8_gemm_fprop", MMParams(True)),
        (Float8CurrentScaling, "fp8_quant_bwd_grad", QParams(amax_epsilon=0.5)),
        (Float8BlockScaling, "use_f32_scales", True),
        (MXFP8BlockScaling, "fp8_format", Format.HYBRID),
        (MXFP4BlockScaling, "scale_rule", "roundup"),
        (NVFP4BlockScaling, "disable_rht", True),
        (NVFP4BlockScaling, "fp4_quant_fwd_weight", QParams()),
        (DelayedScaling, "margin", 2),
    ],
)
def test_it_is_as_if_made_so(kind: Any, name: str, value: Any) -> None:
    recipe, made = kind(), kind(**{name: value})
    first = recipe.frozen()
    setattr(recipe, name, value)
    assert recipe == made == recipe.frozen()
    assert recipe != first == kind()
    assert [recipe.quantizer(role) for role in ROLES] == [made.quantizer(role) for role in ROLES]
    assert recipe.products() == made.products()
    assert repr(recipe) == repr(made)
    setattr(recipe, name, None if name.startswith("fp") and name != "fp8_format" else getattr(kind(), name))
    assert recipe == kind()  # None: filled in again


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Float8CurrentScaling, "fp8_format", Format.E2M1),
        (Float8CurrentScaling, "fp8_gemm_fprop", True),
        (Float8CurrentScaling, "fp8_quant_fwd_inp", QParams(stochastic_rounding=True)),
        (Float8BlockScaling, "w_block_scaling_dim", 3),
        (MXFP8BlockScaling, "margin", 1),
        (MXFP8BlockScaling, "backward_override", "no such"),
        (NVFP4BlockScaling, "nvfp4_4over6", "some"),
        (DelayedScaling, "amax_history_len", 0),
    ],
)
def test_a_wrong_assignment_changes_nothing(kind: Any, name: str, value: Any) -> None:
    recipe = kind()
    with pytest.raises((ValueError, TypeError)) as made:
        kind(**{name: value})
    with pytest.raises(type(made.value)) as assigned:
        setattr(recipe, name, value)
    assert str(assigned.value) == str(made.value)
    assert recipe == kind()
    assert recipe.frozen() == kind().frozen()


def test_options_that_exclude_each_other_on_the_way() -> None:
    """Each is assigned by itself; together they are judged where a region takes them."""
    recipe = NVFP4BlockScaling()
    recipe.fp4_quant_fwd_inp = QParams()
    with pytest.raises(ValueError, match="the weight gradient multiplies both") as made:
        NVFP4BlockScaling(fp4_quant_fwd_inp=QParams())
    for _ in range(2):
        with (
            pytest.raises(ValueError, match="the weight gradient multiplies both") as entered,
            mz.autocast(recipe=recipe),
        ):
            pass
        assert str(entered.value) == str(made.value)
    assert recipe_in_force() is None
    recipe.fp4_quant_bwd_grad = QParams()
    with mz.autocast(recipe=recipe):
        assert recipe_in_force() == NVFP4BlockScaling(fp4_quant_fwd_inp=QParams(), fp4_quant_bwd_grad=QParams())


def test_names_that_are_no_options() -> None:
    recipe = DelayedScaling()
    with pytest.raises(AttributeError, match="DelayedScaling has no option marign: it has margin, fp8_format"):
        recipe.marign = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="cannot delete margin"):
        del recipe.margin
    assert recipe == DelayedScaling()


def test_a_key_of_a_dictionary() -> None:
    recipe = MXFP8BlockScaling()
    found = {recipe: "this"}
    recipe.fp8_format = Format.HYBRID
    assert found[recipe] == found[MXFP8BlockScaling(fp8_format=Format.HYBRID)] == "this"
    assert MXFP8BlockScaling() not in found
    assert found[recipe.frozen()] == "this"


def test_copies_are_apart() -> None:
    recipe = Float8CurrentScaling()
    recipe.frozen()
    for other in (
        copy.copy(recipe),
        copy.deepcopy(recipe),
        pickle.loads(pickle.dumps(recipe)),
        dataclasses.replace(recipe),
    ):
        other.use_power_2_scales = True
        assert other == Float8CurrentScaling(use_power_2_scales=True) != recipe
        assert recipe.frozen() == Float8CurrentScaling()
    loaded = pickle.loads(pickle.dumps(recipe.frozen()))
    assert loaded == recipe
    loaded.use_power_2_scales = True
    assert loaded != recipe


def test_own_recipes() -> None:
    """A dataclass as Python makes it, and a class that keeps attributes of its own."""

    @dataclasses.dataclass
    class Own(MXFP8BlockScaling):
        level: int = 1

    class Plain(DelayedScaling):
        def __init__(self, note: str) -> None:
            super().__init__(margin=1)
            self.note = note

    recipe = Own()
    first = recipe.frozen()
    recipe.level = 2
    assert recipe.frozen() == Own(level=2) != first == Own()
    assert len({recipe.frozen(), first, Own()}) == 2
    noted = Plain("a")
    with mz.autocast(recipe=noted):
        assert recipe_in_force() == noted == Plain("a") != Plain("b")
    with pytest.raises(ValueError, match="margin is 1000"):
        noted.margin = 1000


def test_what_transformer_engine_ignores_is_dropped_with_one_warning() -> None:
    ignored: dict[str, Any] = {"interval": 1, "override_linear_precision": (False, False, True), "device": "cpu"}
    for kind in (DelayedScaling, MXFP8BlockScaling, Float8CurrentScaling):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = kind(fp8_dpa=True, **ignored)
        assert made == kind(fp8_dpa=True)
        assert [each.filename for each in caught] == [__file__]
        assert "no interval=1, override_linear_precision=(False, False, True), device='cpu'" in str(caught[0].message)
    with pytest.raises(TypeError, match="unexpected keyword argument 'intervall'"):
        DelayedScaling(intervall=1)  # type: ignore[call-arg]


# Regions


def test_the_next_region_sees_it() -> None:
    recipe = Float8CurrentScaling()
    region = mz.autocast(recipe=recipe)
    with region:
        recipe.use_power_2_scales = True
        assert recipe_in_force() == Float8CurrentScaling()
        with mz.autocast(recipe=recipe):
            assert recipe_in_force() == Float8CurrentScaling(use_power_2_scales=True)
        assert recipe_in_force() == Float8CurrentScaling()
    with region:
        assert recipe_in_force() == Float8CurrentScaling(use_power_2_scales=True)


def sample() -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16()


def make_linear() -> mz.Linear:
    torch.manual_seed(0)
    return mz.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")


@pytest.mark.compile
@pytest.mark.parametrize("where", ["argument", "global", "around", "decorated", "factory"])
def test_compiled_code_sees_it(where: str) -> None:
    """One graph for each value: it is compared with the recipe's value, wherever the recipe comes from."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    layer, x = make_linear(), sample()
    recipe: Any = Float8CurrentScaling()
    if where == "factory":
        recipe = CustomRecipe(Float8CurrentScaling().quantizer)

    def with_argument(x: torch.Tensor, given: Recipe) -> torch.Tensor:
        with mz.autocast(recipe=given):
            return layer(x)

    def with_global(x: torch.Tensor, _: Recipe) -> torch.Tensor:
        with mz.autocast(recipe=recipe):
            return layer(x)

    decorated = mz.autocast(recipe=recipe)(layer.forward)
    run = torch.compile(
        {
            "argument": with_argument,
            "global": with_global,
            "around": lambda x, _: layer(x),
            "decorated": lambda x, _: decorated(x),
            "factory": with_global,
        }[where],
        fullgraph=True,
        backend=backend,
    )
    values = [False, True, False]
    expected = []
    for value in values:
        with mz.autocast(recipe=Float8CurrentScaling(use_power_2_scales=value)):
            expected.append(layer(x))
    assert not torch.equal(expected[0], expected[1])
    for value, y in zip(values, expected, strict=True):
        if where == "factory":
            recipe.qfactory = Float8CurrentScaling(use_power_2_scales=value).quantizer
        else:
            recipe.use_power_2_scales = value
        for _ in range(2):
            with mz.autocast(enabled=where == "around", recipe=recipe):
                assert torch.equal(run(x, recipe), y)
    assert len(graphs) == (3 if where == "factory" else 2)


@pytest.mark.compile
def test_a_recipe_that_is_made_and_changed_inside() -> None:
    layer, x = make_linear(), sample()

    def run(x: torch.Tensor) -> torch.Tensor:
        recipe = NVFP4BlockScaling()
        recipe.fp4_quant_fwd_inp = QParams()
        recipe.fp4_quant_bwd_grad = QParams()
        with mz.autocast(recipe=recipe):
            return layer(x)

    torch._dynamo.reset()
    with mz.autocast(recipe=NVFP4BlockScaling(fp4_quant_fwd_inp=QParams(), fp4_quant_bwd_grad=QParams())):
        expected = layer(x)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(x), expected)


@pytest.mark.compile
def test_one_from_outside_is_not_changed_inside() -> None:
    recipe = Float8CurrentScaling()

    def run(x: torch.Tensor) -> torch.Tensor:
        recipe.use_power_2_scales = True
        return x + 1

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="A recipe that comes into a compiled function"):
        torch.compile(run, fullgraph=True, backend="eager")(sample())
    assert recipe == Float8CurrentScaling()
