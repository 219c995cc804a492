"""Custom recipes: what a factory of quantizers may give, and the ready ones."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import DType, custom_recipes
from mezzotint.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRequest,
    QuantizerRole,
)
from tests.recipe_cases import BACKWARD, ROLES
from tests.recipes import MODULES, assert_equal, make, sample, step

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


# The same options, down to the numbers of a module: what Linear multiplies is what quantizers made here would make.


CURRENT, ROW, BLOCK = mz.Float8CurrentScalingQuantizer, mz.Float8RowwiseQuantizer, mz.Float8BlockQuantizer
MX, NV = mz.MXFP8Quantizer, mz.NVFP4Quantizer
RHT = {"with_rht": True, "with_post_rht_amax": True}


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
    "mxfp4_factory": lambda role: {
        "weight": mz.MXFP4Quantizer(with_2d_quantization=True),
        "input": mz.MXFP4Quantizer(with_rht=True),
        "output": mz.MXFP4Quantizer(with_rht=True),
    }.get(role.tensor_type, mz.MXFP4Quantizer(with_rht=True, stochastic_rounding=True)),
    "mxfp6_factory": lambda role: mz.MXFP6Quantizer(
        DType.kFloat6E3M2 if role.tensor_type in BACKWARD else DType.kFloat6E2M3
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

    @dataclasses.dataclass
    class Own(MXFP8BlockScaling):
        def quantizer(self, role: QuantizerRole) -> Any:
            asked.append(role)
            return super().quantizer(role)

    module = make("linear")
    for _ in range(2):
        step(module, sample(), Own())
    assert len(asked) == 6
