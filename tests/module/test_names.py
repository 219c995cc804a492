"""The name in a role is the module's path: of convert's root, of `name_modules`' root, or in the module of ours."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint.recipe import CustomRecipe, Float8CurrentScaling, QuantizerRole

LAYER = (
    "self_attention.layernorm_qkv",
    "self_attention.proj",
    "layernorm_mlp.fc1",
    "layernorm_mlp.fc2",
)


def watch() -> tuple[set[str], CustomRecipe]:
    """The names that a factory is asked for, and a recipe of it."""
    seen: set[str] = set()

    def factory(role: QuantizerRole) -> Any:
        seen.add(role.name)
        return mz.IdentityQuantizer()

    return seen, CustomRecipe(factory)


def names_of(model: nn.Module, *extra: Any, width: int = 16) -> set[str]:
    seen, recipe = watch()
    with mz.autocast(recipe=recipe):
        model(torch.randn(4, 1, width), *extra)
    return seen


def layer(**options: Any) -> mz.TransformerLayer:
    return mz.TransformerLayer(16, 32, 2, **options)


class Model(nn.Module):
    """Layers in a stack, torch's linears around it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList([layer(**options) for _ in range(2)])
        self.head = nn.Sequential(mz.Linear(16, 16), mz.LayerNormLinear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for each in self.layers:
            x = each(x)
        return self.head(x)


OURS = {f"layers.{i}.{part}" for i in range(2) for part in LAYER} | {"head.0", "head.1"}


def test_convert_names_every_layer() -> None:
    seen, recipe = watch()
    model = mz.convert(Model(), recipe, filter=lambda module, name: True)
    model(torch.randn(4, 1, 16))
    assert seen == OURS | {"first"}


def test_a_rule_by_name_reaches_converted_layers() -> None:
    def factory(role: QuantizerRole) -> Any:
        return Float8CurrentScaling().quantizer(role) if role.name == "1" else mz.IdentityQuantizer()

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mz.convert(model, CustomRecipe(factory))
    x = torch.randn(8, 64)
    plain = mz.unconvert(copy.deepcopy(model))
    assert torch.equal(model[0](x), plain[0](x))
    assert not torch.equal(model[1](x), plain[1](x))


def test_a_converted_layer_keeps_the_name_that_its_recipe_knows() -> None:
    seen, recipe = watch()
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)))
    mz.convert(model[0], recipe)
    mz.convert(model, recipe)
    model(torch.randn(1, 64))
    assert seen == {"0"}
    mz.name_modules(model)
    model(torch.randn(1, 64))
    assert seen == {"0", "0.0"}


def test_a_layer_without_a_name_names_its_parts() -> None:
    assert names_of(layer()) == set(LAYER)
    decoder = layer(layer_type="decoder", output_layernorm=True)
    seen, recipe = watch()
    with mz.autocast(recipe=recipe):
        decoder(torch.randn(4, 1, 16), encoder_output=torch.randn(4, 1, 16))
    cross = {f"inter_attention.{part}" for part in ("layernorm_query", "key_value", "proj")}
    assert seen == {"self_attention.qkv", "self_attention.proj", *LAYER[2:]} | cross


def test_a_name_is_a_prefix_of_submodules_paths() -> None:
    module = layer(name="layers.0")
    assert names_of(module) == {f"layers.0.{part}" for part in LAYER}
    for path, part in module.named_modules():
        assert getattr(part, "name", f"layers.0.{path}") == (f"layers.0.{path}" if path else "layers.0")


def test_name_modules() -> None:
    model = Model()
    model.first = nn.Identity()  # type: ignore[assignment]
    assert mz.name_modules(model) is model
    assert names_of(model) == OURS
    mz.name_modules(model, "stage1")
    assert names_of(model) == {f"stage1.{name}" for name in OURS}


def test_a_name_that_was_given_stays() -> None:
    model = nn.Sequential(mz.Linear(16, 16, name="mine"), layer(name="layers.7"), mz.Linear(16, 16))
    model[2].name = "late"
    assert names_of(mz.name_modules(model)) == {"mine", "late"} | {f"layers.7.{part}" for part in LAYER}
    mz.convert(model)
    assert names_of(model) == {"mine", "late"} | {f"layers.7.{part}" for part in LAYER}


def test_a_new_name_is_seen_by_a_module_that_ran() -> None:
    module = mz.Linear(16, 16)
    assert names_of(module) == {""}
    _, recipe = watch()
    seen: list[str] = []

    def factory(role: QuantizerRole) -> Any:
        seen.append(role.name)
        return mz.IdentityQuantizer()

    recipe = CustomRecipe(factory)
    for name in ("a", "b"):
        module.name = name
        with mz.autocast(recipe=recipe):
            module(torch.randn(4, 16))
    assert set(seen) == {"a", "b"}


@pytest.mark.compile
def test_a_new_name_is_seen_by_a_graph() -> None:
    def factory(role: QuantizerRole) -> Any:
        return Float8CurrentScaling().quantizer(role) if role.name == "1" else mz.IdentityQuantizer()

    module, recipe, x = mz.Linear(16, 16), CustomRecipe(factory), torch.randn(16, 16)

    @torch.compile(fullgraph=True, backend="eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        with mz.autocast(recipe=recipe):
            return module(x)

    plain = run(x)
    mz.name_modules(nn.Sequential(nn.Identity(), module))
    assert not torch.equal(run(x), plain)
    with mz.autocast(recipe=recipe):
        assert torch.equal(run(x), module(x))


def test_operations() -> None:
    """An operation is named by its place; `ops.Linear` by its own, not by that of the part that has the weight."""
    inner = mz.ops.Sequential(mz.ops.Linear(16, 16), mz.ops.GELU())
    model = mz.ops.Sequential(mz.ops.BasicLinear(16, 16), inner, mz.Linear(16, 16, name="mine"))
    model.append(nn.Sequential(mz.ops.Linear(16, 16)))
    assert names_of(model) == {"0", "1.0", "mine", "3.0"}
    assert names_of(model[1:]) == {"1.0", "mine", "3.0"}
    model.insert(0, nn.Identity())
    assert names_of(model) == {"1", "2.0", "mine", "4.0"}
    mz.name_modules(nn.ModuleDict({"mlp": model}))
    assert names_of(model) == {"mlp.1", "mlp.2.0", "mine", "mlp.4.0"}
    grouped = mz.ops.Sequential(mz.ops.GroupedLinear(2, 16, 16))
    seen, recipe = watch()
    with mz.autocast(recipe=recipe):
        grouped(torch.randn(4, 16), [1, 3])
    assert seen == {"0.0", "0.1"}


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: mz.GroupedLinear(2, 16, 16), {"experts.0", "experts.1"}),
        (lambda: mz.LayerNormMLP(16, 32), {"experts.fc1", "experts.fc2"}),
        (lambda: mz.MultiheadAttention(16, 2), {"experts.qkv", "experts.proj"}),
    ],
)
def test_names_of_gemms(build: Callable[[], nn.Module], names: set[str]) -> None:
    module = build()
    mz.name_modules(nn.ModuleDict({"experts": module}))
    extra = ([1, 3],) if isinstance(module, mz.GroupedLinear) else ()
    assert names_of(module, *extra) == names


def test_quantized_weights_ask_by_their_name_when_they_are_made() -> None:
    seen, recipe = watch()
    with mz.quantized_model_init(recipe=recipe):
        mz.MultiheadAttention(16, 2, fuse_qkv_params=True)
    assert seen == {"qkv", "proj"}


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"root is list: give an nn\.Module"):
        mz.name_modules([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prefix is int: give a string"):
        mz.name_modules(nn.Identity(), 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name is int: give a string, or None"):
        mz.Linear(16, 16, name=3)  # type: ignore[arg-type]
