"""`convert` and `unconvert`: what is converted, what stays, what the report says, and back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, prune

import mezzotint as mz
from mezzotint import recipe as recipes
from tests.convert.models import Model, linear, tokens
from tests.recipes import RECIPES

over_some = pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
MXFP8 = RECIPES["mxfp8"]


# What is converted


def names(model: nn.Module) -> set[str]:
    return {entry.fqn for entry in mz.convert_report(model).converted}


def test_defaults_keep_the_head() -> None:
    blocks = {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}
    for tied, why in ((False, "its name is lm_head"), (True, "its weight is an embedding's")):
        model = mz.convert(Model(tied=tied))
        assert names(model) == blocks
        embedding, kept = mz.convert_report(model).kept
        assert "rows are looked up" in embedding.why
        assert why in kept.why
        assert (model.lm_head.weight is model.embedding.weight) == tied
    model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128), nn.Linear(128, 128))
    assert names(mz.convert(model)) == {"1"}
    assert "128 outputs" in mz.convert_report(model).kept[1].why
    stack = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"output": nn.Linear(64, 64)})])})
    assert names(mz.convert(stack)) == {"layers.0.output"}


def quantized_weight() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(mz.MXFP8Quantizer(mz.DType.kFloat8E4M3).quantize(layer.weight.detach()))
    return layer


def patched() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.forward = lambda x: x
    return layer


def with_attribute() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.register_buffer("scale_fwd", torch.ones(1))
    layer.recipe = "mine"
    return layer


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: nn.Linear(64, 32), "small: out_features is 32, below 64"),
        (lambda: nn.Linear(72, 64), "in_features is 72, no multiple of 16"),
    ],
)
def test_small_layers_stay_unless_the_filter_says_so(layer: Callable[[], nn.Module], why: str) -> None:
    model = mz.convert(layer())
    assert [entry.why for entry in mz.convert_report(model).kept] == [why]
    assert isinstance(mz.convert(model, filter=lambda module, name: True), mz.Linear)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: OwnLinear(64, 64), "has a forward of its own"),
        (patched, "has a forward of its own"),
        (lambda: nn.LazyLinear(64), "sizes are not known yet"),
        (lambda: parametrizations.orthogonal(nn.Linear(64, 64)), "weight is computed"),
        (lambda: prune.l1_unstructured(nn.Linear(64, 64), "bias", 0.5), "bias is computed"),
        (quantized_weight, "weight is a MXFP8Tensor: convert first"),
        (lambda: nn.Linear(64, 64, dtype=torch.float64), "weight is torch.float64"),
        (lambda: nn.MultiheadAttention(64, 4), "nn.MultiheadAttention reads its weight"),
        (with_attribute, "has attributes that ours need: recipe, scale_fwd"),
    ],
)
def test_what_cannot_be_converted(layer: Callable[[], nn.Module], why: str) -> None:
    model = nn.ModuleDict({"inner": layer()})
    kind = type(model["inner"])
    mz.convert(model, MXFP8, filter=lambda module, name: True)
    report = mz.convert_report(model)
    assert not report.converted
    assert any(entry.why.startswith(why) for entry in report.entries)
    assert report.num_weights == sum(p.numel() for p in model.parameters() if not is_lazy(p) and p.dim() > 1)
    assert type(model["inner"]) is kind


def test_filters() -> None:
    asked = []

    def second(module: nn.Module, name: str) -> bool:
        asked.append((type(module), name))
        return name.startswith("blocks.1")

    model = mz.convert(Model(), filter=second)
    assert names(model) == {"blocks.1.up", "blocks.1.down"}
    assert asked == [(nn.Linear, name) for name, module in Model().named_modules() if isinstance(module, nn.Linear)]
    kept = [entry for entry in mz.convert_report(model).kept if entry.before == "Linear"]
    assert {entry.why for entry in kept} == {"left out by the filter"}
    model = mz.convert(Model(), filter=lambda module, name: False if name.endswith("up") else None)
    assert names(model) == {"blocks.0.down", "blocks.1.down"}


def test_recipes_by_layer() -> None:
    model = mz.convert(Model(), MXFP8, filter=lambda module, name: name.startswith("blocks.0"))
    mz.convert(model, RECIPES["delayed"])
    first, second = (block.up.recipe for block in model.blocks)
    assert (first, second) == (MXFP8, RECIPES["delayed"])
    with mz.autocast(enabled=False):
        model(tokens()).sum().backward()
    assert model.blocks[0].up.scale_fwd[0] == 1
    assert model.blocks[1].up.scale_fwd[0] != 1


def test_twice_is_once() -> None:
    model = mz.convert(Model(), MXFP8)
    before, report = [type(module) for module in model.modules()], str(mz.convert_report(model))
    mz.convert(model, MXFP8)
    assert [type(module) for module in model.modules()] == before
    assert str(mz.convert_report(model)) == report


def test_shared_layers_stay_shared() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model["c"], model["b"].weight = model["a"], model["a"].weight
    mz.convert(model, MXFP8)
    assert model["c"] is model["a"]
    assert isinstance(model["c"], mz.Linear)
    assert model["b"].weight is model["a"].weight
    assert names(model) == {"a", "b"}


def test_a_copy() -> None:
    model = Model()
    got = mz.convert(model, MXFP8, inplace=False)
    assert type(model) is Model
    assert not any(isinstance(module, mz.Linear) for module in model.modules())
    assert names(got)
    assert got.blocks[0].up.weight is not model.blocks[0].up.weight
    with pytest.raises(ValueError, match="that was not converted"):
        mz.convert_report(model)


def test_the_report_is_a_table() -> None:
    assert str(mz.convert_report(mz.convert(Model(), MXFP8))).splitlines() == [
        "weight         number  share  in         is      why",
        "embedding      1       13.6%  Embedding  kept    embedding: rows are looked up, nothing is multiplied",
        "blocks.*.up    2       36.4%  Linear     Linear  MXFP8BlockScaling",
        "blocks.*.down  2       36.4%  Linear     Linear  MXFP8BlockScaling",
        "lm_head        1       13.6%  Linear     kept    output head: its name is lm_head",
        "4 of 6 weights converted, 72.7% of the parameters with two or more dimensions",
    ]
    assert "(the model)  1       100.0%  Linear  Linear  as autocast says" in str(
        mz.convert_report(mz.convert(linear()))
    )
    assert str(mz.convert_report(mz.convert(nn.GELU()))).endswith(
        "0 of 0 weights converted, 0.0% of the parameters with two or more dimensions"
    )


class Strange(nn.Module):
    """Weights of many kinds, beside one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv1d(64, 64, 3)
        self.attention = nn.MultiheadAttention(64, 4)
        self.recurrent = nn.GRU(64, 64)
        self.norm = nn.LayerNorm((2, 64))
        self.bank, self.table = nn.Parameter(torch.randn(4, 64, 64)), nn.Parameter(torch.randn(8, 64))
        self.ours = mz.LayerNormMLP(64, 128)
        self.groups = mz.GroupedLinear(2, 64, 64, single_grouped_weight=True, single_grouped_bias=True)
        self.normed = parametrizations.weight_norm(nn.Linear(64, 64))


@pytest.mark.parametrize("recipe", [None, MXFP8])
def test_the_report_has_every_parameter_of_two_dimensions(recipe: Any) -> None:
    model = Strange()
    report = mz.convert_report(mz.convert(model, recipe))
    assert report.num_weights == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    converted = {entry.fqn: entry.why for entry in report.converted}
    by = "as autocast says" if recipe is None else "MXFP8BlockScaling"
    own = dict.fromkeys(("ours.fc1_weight", "ours.fc2_weight", "groups"), f"{by}; Mezzotint's own")
    assert converted == {"first": by, "tied": by, **own}
    quantized = [model.first.weight, model.ours.fc1_weight, model.ours.fc2_weight, model.groups.weight]
    assert report.share == sum(p.numel() for p in quantized) / report.num_weights
    why = {entry.fqn: entry.why for entry in report.kept}
    for fqn, reason in {
        "bank": "Strange reads it in a forward of its own; where it multiplies groups of rows, use mezzotint.group",
        "table": "Strange reads it in a forward of its own",
        "conv": "convolution",
        "attention.in_proj_weight": "nn.MultiheadAttention multiplies it itself",
        "attention.out_proj": "nn.MultiheadAttention reads its weight",
        "recurrent.weight_hh_l0": "recurrent",
        "norm": "norm: it scales element by element",
        "groups.bias": "bias",
        "normed": "weight is computed",
        "normed.parametrizations.weight.original1": "ParametrizationList reads it",
    }.items():
        assert why[fqn].startswith(reason)
    tied = next(entry for entry in report.entries if entry.fqn == "tied")
    assert tied.num_weights == 0


def test_the_report_in_a_notebook() -> None:
    model = nn.ModuleDict({"<b>": nn.Linear(64, 64), "up": nn.Linear(64, 32)})
    report = mz.convert_report(mz.convert(model, MXFP8))
    assert repr(report) == str(report)
    page = report._repr_html_()
    assert page.count("<tr>") == 3
    assert "<td>&lt;b&gt;</td><td>1</td><td>66.7%</td><td>Linear</td><td>Linear</td>" in page
    assert "1 of 2 weights converted, 66.7%" in page


# And back


@over_some
def test_unconvert(recipe: str) -> None:
    for original in (Model(), nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), nn.Linear(64, 64)):
        x = tokens() if isinstance(original, Model) else torch.randn(8, 64)
        model = mz.convert(original, RECIPES[recipe], inplace=False)
        model(x).sum().backward()
        assert mz.unconvert(model) is model
        for got, expected in zip(model.modules(), original.modules(), strict=True):
            assert type(got) is type(expected)
            assert vars(got).keys() == vars(expected).keys()
            assert got._buffers.keys() == expected._buffers.keys()
            assert got._non_persistent_buffers_set == expected._non_persistent_buffers_set
        assert torch.equal(model(x), original(x))
    mz.unconvert(model)
    assert isinstance(mz.convert(model, MXFP8), mz.Linear)


def test_unconvert_refuses_what_was_made_of_a_converted_layer() -> None:
    model = mz.convert(Model(), MXFP8)
    model.blocks[0].up.__class__ = type("Sharded", (type(model.blocks[0].up),), {})
    with pytest.raises(ValueError, match=r"'blocks\.0\.up' is a Sharded"):
        mz.unconvert(model)
    assert isinstance(model.blocks[0].down, mz.Linear)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Model(), "mxfp8"), {}, "recipe is str: give one of"),
        ((Model(), recipes.MXFP8BlockScaling), {}, "recipe is type: give one of"),
        ((Model(),), {"filter": "up"}, "filter is str: give a function"),
        ((Model(),), {"filter": lambda module, name: name}, "filter gave 'blocks.0.up' for 'blocks.0.up': return True"),
    ],
)
def test_errors_name_the_argument(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        mz.convert(*arguments, **options)
    assert not any(isinstance(module, mz.Linear) for module in arguments[0].modules())


@pytest.mark.parametrize("function", [mz.convert, mz.convert_report, mz.unconvert])
def test_a_model_is_asked_for(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="model is list: give an"):
        function([nn.Linear(64, 64)])


def test_keys_where_the_recipe_around_decides() -> None:
    """Those of the original, until delayed scaling has learnt something."""
    model = mz.convert(Model())
    assert model.state_dict().keys() == Model().state_dict().keys()
    with mz.autocast(recipe=RECIPES["delayed"]):
        loss = model(tokens()).square().mean()
    loss.backward()
    learnt = model.state_dict().keys() - Model().state_dict().keys()
    assert len(learnt) == 4
    assert all(key.endswith("_extra_state") for key in learnt)
