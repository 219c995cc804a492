"""Rules: what a rule gives a module is what a region of its own would, in eager code and in graphs."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import recipe
from mezzotint.module.base import TransformerEngineBaseModule
from mezzotint.recipe import MixedRecipe, QuantizerRole, Recipe, Rules
from mezzotint.tensor.mxfp8 import MXFP8Tensor
from tests.dynamo.test_guards import count_guards
from tests.recipes import GROUPS, assert_equal, gradient, make, sample, splits, step

PLAIN4 = recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
DELAYED = recipe.DelayedScaling(amax_history_len=4)
MX, CURRENT = recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling()
# One recipe for each layer of `Model`, and rules that say the same.
BY_HAND: dict[str, Recipe | None] = {"a": None, "b": PLAIN4, "c": DELAYED, "d": MX}
RULES = Rules([("a", None), ("b.*", PLAIN4), ("c", DELAYED), ("*", MX)])


class Model(nn.Module):
    """One of each kind of module, in regions of `by_hand` where that is given."""

    def __init__(self, by_hand: dict[str, Recipe | None] | None = None, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
        self.a = mz.Linear(64, 64, **options)
        self.b = mz.LayerNormMLP(64, 96, checkpoint=again, **options)
        self.c = mz.LayerNormLinear(64, 64, **options)
        self.d = mz.GroupedLinear(GROUPS, 64, 64, **options)
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("a", "b", "c", "d"):
            more = (splits(x.shape[0]),) if name == "d" else ()
            if self.by_hand is None:
                x = getattr(self, name)(x, *more)
            else:
                with mz.autocast(enabled=self.by_hand[name] is not None, recipe=self.by_hand[name]):
                    x = getattr(self, name)(x, *more)
        return x


def train(model: nn.Module, chosen: Recipe | None, call: Any = None, steps: int = 3) -> dict[str, Any]:
    """Outputs and gradients of a few steps, and what delayed scaling has learnt."""
    found: dict[str, Any] = {}
    for number in range(steps):
        x = sample(seed=number).requires_grad_()
        with mz.autocast(enabled=chosen is not None, recipe=chosen):
            y = (model if call is None else call)(x)
        gradient(y).backward()
        found |= {f"output {number}": y.detach(), f"input {number}": x.grad}
        for name, parameter in model.named_parameters():
            found[f"{name} {number}"], parameter.grad = parameter.grad, None
    return found | {f"state {name}": value.clone() for name, value in model.named_buffers()}


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("again", [False, True])
def test_rules_are_regions_around_each_layer(again: bool) -> None:
    """Three steps, delayed scaling's state included; with a recomputed MLP too; eager code and one graph."""
    want = train(Model(BY_HAND, again), None)
    model = mz.bind_rules(Model(again=again), RULES)
    assert_equal(train(model, RULES), want)
    torch._dynamo.reset()
    model = mz.bind_rules(Model(again=again), RULES)
    backend = CompileCounterWithBackend("aot_eager")
    assert_equal(train(model, RULES, torch.compile(model, fullgraph=True, backend=backend)), want)
    assert backend.frame_count == 1


def test_a_checkpoint_runs_again_as_rules_say() -> None:
    model = mz.bind_rules(Model(), RULES)
    want = train(mz.bind_rules(Model(), RULES), RULES)
    assert_equal(train(model, RULES, lambda x: mz.checkpoint(model, x)), want)


def by_name(chosen: dict[str, Recipe]) -> recipe.CustomRecipe:
    """A factory that goes by the end of "name:tensor"."""

    def choose(role: QuantizerRole) -> Any:
        key = f"{role.name}:{role.tensor_type}"
        return next(each for end, each in chosen.items() if key.endswith(end)).quantizer(role)

    return recipe.CustomRecipe(choose)


MIXED: dict[str, tuple[Rules, dict[str, Recipe]]] = {
    "linears": (
        Rules([("*fc2", PLAIN4), ("*", MX)]),
        {f"fc{n}:{t}": each for n, each in ((1, MX), (2, PLAIN4)) for t in ("input", "weight", "grad_output")},
    ),
    "tensors": (
        Rules([("*fc1:grad_output", CURRENT), ("*:weight", PLAIN4), ("*", MX)]),
        {"fc1:grad_output": CURRENT, ":weight": PLAIN4, "": MX},
    ),
    "delayed": (Rules([("*fc2:grad_output", MX), ("*", DELAYED)]), {"fc2:grad_output": MX, "": DELAYED}),
}


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("name", MIXED)
def test_several_recipes_in_one_module(name: str) -> None:
    """As a factory that chooses by hand; where all products accumulate alike."""
    rules, chosen = MIXED[name]
    want = step(make("layernorm_mlp"), sample(), by_name(chosen))
    module = mz.bind_rules(make("layernorm_mlp"), rules)
    assert_equal(step(module, sample(), rules), want)
    torch._dynamo.reset()
    module = mz.bind_rules(make("layernorm_mlp"), rules)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_equal(step(module, sample(), rules, compiled), want)


def test_high_precision_in_a_part_of_a_module() -> None:
    """An inspector sees the tensors of the other linear alone."""
    module = mz.bind_rules(make("layernorm_mlp"), Rules([("fc1", None), ("*", MX)]))
    inspector = mz.inspect(module, every=1)
    with inspector:
        step(module, sample(), Rules([("fc1", None), ("*", MX)]))
    assert [each.name for each in inspector.last] == [f"fc2.{t}" for t in ("input", "weight", "grad_output")]


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("make", [lambda: mz.Linear(32, 32), lambda: mz.TransformerLayer(32, 64, 2)])
def test_rules_add_no_guard(make: Callable[[], nn.Module]) -> None:
    model, x = nn.Sequential(make(), make()), torch.randn(16, 2, 32, requires_grad=True)
    with mz.autocast(MX):
        want = count_guards(model, x)
    rules = Rules([("0*", MX), ("*", "current")])
    mz.bind_rules(model, rules)
    with mz.autocast(rules):
        assert count_guards(model, x) == want


@pytest.mark.compile
def test_layers_that_rules_treat_alike_share_a_graph() -> None:
    """Compiled layer by layer: one graph for each recipe, however many layers; an equal `Rules` makes no other."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("eager")
    layers = nn.ModuleList([mz.Linear(32, 32) for _ in range(10)])

    def run(layer: nn.Module, x: torch.Tensor) -> Any:
        return layer(x)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for _ in range(2):
        rules = Rules([("0", None), ("9", "current"), ("*", "mxfp8")])
        mz.bind_rules(layers, rules)
        with mz.autocast(rules):
            for layer in layers:
                compiled(layer, torch.randn(16, 32))
    assert backend.frame_count == 3


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("is_compiled", [False, True])
def test_operations(is_compiled: bool) -> None:
    """Linears of one pipeline: those before and behind hand over what each asks for."""

    def chain() -> Any:
        torch.manual_seed(0)
        linears = [mz.ops.Linear(64, 64, bias=False, device="cpu", dtype=torch.bfloat16) for _ in range(3)]
        return mz.ops.Sequential(linears[0], mz.ops.GELU(), linears[1], mz.ops.GELU(), linears[2], mz.ops.Quantize())

    rules = Rules([("0", MX), ("2", None), ("5", None), ("*", CURRENT)])
    model = mz.bind_rules(chain(), rules)
    x = sample().requires_grad_()
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    with mz.autocast(rules):
        y = call(x)
    gradient(y).backward()
    other, z = chain(), sample().requires_grad_()
    h = z
    for place, each in ((0, MX), (1, None), (2, None), (3, None), (4, CURRENT)):
        with mz.autocast(enabled=each is not None, recipe=each):
            h = other[place](h)
    gradient(h).backward()
    assert torch.equal(y, h)
    assert torch.equal(x.grad, z.grad)  # type: ignore[arg-type]
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_grouped_mm_goes_by_its_name() -> None:
    x, w = sample(), torch.randn(2, 64, 32).bfloat16()
    offs = torch.tensor([16, 40], dtype=torch.int32)
    rules = Rules([("experts.up", MX), ("*", None)])
    with mz.autocast(rules):
        made = [mz.grouped_mm(x, w, offs, name=name) for name in ("experts.up", "experts.down")]
    assert torch.equal(made[0], mz.grouped_mm(x, w, offs, MX))
    assert torch.equal(made[1], mz.grouped_mm(x, w, offs))


def converted(chosen: Recipe | None) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3)]
    return mz.convert(nn.Sequential(*layers, nn.Linear(64, 8, dtype=torch.bfloat16)), chosen)


def test_convert() -> None:
    rules = Rules([("0", None), ("1", "nvfp4"), ("*", "mxfp8")])
    model, plain = converted(rules), converted(None)
    assert model.state_dict().keys() == plain.state_dict().keys()
    x = sample()
    y = x
    for place, each in enumerate((None, recipe.NVFP4BlockScaling(), MX, None)):
        with mz.autocast(enabled=each is not None, recipe=each):
            y = plain[place](y)  # type: ignore[index]
    assert torch.equal(model(x), y)
    whys = {entry.fqn: entry.why for entry in mz.convert_report(model).entries}
    assert whys["0"] == "high precision, by a rule"
    assert whys["1"] == "NVFP4BlockScaling"
    assert whys["2"] == "MXFP8BlockScaling"
    with pytest.raises(ValueError, match="the rule '3' matches nothing in the model: its linears are 0, 1, 2"):
        converted(Rules([("3", "mxfp8"), ("*", None)]))  # too small, so it is no layer of ours


def test_weights_that_are_kept_quantized() -> None:
    """They go by `name=`, or on the meta device by what the model was bound to."""
    rules = Rules([("0", None), ("*", "mxfp8")])
    with mz.quantized_model_init(rules):
        named = nn.Sequential(*[mz.Linear(64, 64, name=str(n), device="cpu") for n in range(2)])
        late = nn.Sequential(*[mz.Linear(64, 64, device="meta") for _ in range(2)])
        with pytest.raises(ValueError, match="makes a Linear that has no name: give it its path in the model as name="):
            mz.Linear(64, 64, device="cpu")
        swapped = nn.Sequential(*[mz.Linear(64, 64, name=str(n), device="cpu") for n in (1, 0)])
    mz.bind_rules(late, rules)
    for layer in late:
        layer.reset_parameters()  # type: ignore[operator]
    for model in (named, late):
        mz.bind_rules(model, rules)
        assert [isinstance(layer.weight, MXFP8Tensor) for layer in model] == [False, True]
        x = torch.randn(32, 64)
        with mz.autocast(rules):
            y = model(x)
        want = torch.nn.functional.linear(x, model[0].weight, model[0].bias)  # type: ignore[arg-type]
        with mz.autocast("mxfp8"):
            assert torch.equal(y, model[1](want))
    with pytest.raises(ValueError, match="the weight of '0' was made in quantized_model_init under the name '1'"):
        mz.bind_rules(swapped, rules)


def test_a_model_that_was_not_bound() -> None:
    model = nn.Sequential(mz.Linear(32, 32))
    with mz.autocast(Rules([("*", "mxfp8")])), pytest.raises(ValueError, match=r"bind_rules\(model, rules\) once"):
        model(torch.randn(16, 32))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: Rules([]), "rules is empty"),
    "text": (lambda: Rules("*"), "rules is str: give pairs"),
    "no pair": (lambda: Rules(["*"]), r"rule 1 is '\*': give a pair"),
    "no pattern": (lambda: Rules([(3, None)]), "the pattern of rule 1 is int"),
    "empty": (lambda: Rules([("*", None), ("", None)]), "the pattern of rule 2 is ''"),
    "role": (lambda: Rules([("*:output", None)]), r"'\*:output': give the name of a linear"),
    "recipe": (lambda: Rules([("*", "mxfp9")]), "there is no recipe 'mxfp9'"),
    "rules": (lambda: Rules([("*", RULES)]), "the recipe of rule 1 is Rules"),
    "unused": (lambda: mz.bind_rules(Model(), Rules([("e.*", MX), ("*", MX)])), r"the rule 'e\.\*' matches nothing"),
    "uncovered": (lambda: mz.bind_rules(Model(), Rules([("a", MX)])), "no rule matches input of 'b.fc1'"),
    "group": (lambda: mz.bind_rules(Model(), Rules([("d.1", MX), ("*", None)])), "groups of 'd' several recipes"),
    "factory": (
        lambda: mz.bind_rules(Model(), Rules([("a:weight", recipe.CustomRecipe(lambda role: None)), ("*", MX)])),
        "one is a CustomRecipe",
    ),
    "backward": (
        lambda: mz.bind_rules(
            Model(), Rules([("a:input", recipe.MXFP8BlockScaling(backward_override="dequantized")), ("*", MX)])
        ),
        "whose backward computes in different ways",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    run, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        run()


def test_a_part_of_a_model() -> None:
    """A stage of a pipeline has not all that rules name."""
    mz.bind_rules(nn.Sequential(mz.Linear(32, 32)), Rules([("7", None), ("*", MX)]), is_whole=False)


def test_rules_are_a_value() -> None:
    other = Rules((("a", None), ("b.*", PLAIN4), ("c", DELAYED), ("*", MX)))
    assert other == RULES
    assert hash(other) == hash(RULES)
    assert repr(other) == repr(RULES)
    assert Rules([("*", MX)]) != Rules([("*", CURRENT)])
    for same in (pickle.loads(pickle.dumps(RULES)), copy.deepcopy(RULES), RULES.frozen()):
        assert same == RULES
    changed = recipe.DelayedScaling()
    rules = Rules([("*", changed)])
    changed.margin = 3
    assert rules == Rules([("*", "delayed")])  # taken as it was


def test_what_rules_give_a_module() -> None:
    assert RULES.resolve("a", ("",)) is None
    assert RULES.resolve("b", ("fc1", "fc2")) == PLAIN4
    mixed = RULES.resolve("b", ("", "fc2"))
    assert mixed == MixedRecipe(((MX, MX, MX), (PLAIN4, PLAIN4, PLAIN4)))
    assert Rules([("layers.[0-3]", None), ("*", MX)]).resolve("layers.3", ("fc1",)) is None  # by the module's path


def test_a_module_of_a_user_has_a_rule() -> None:
    """One that has its own forward asks for its quantizers."""

    class Own(TransformerEngineBaseModule):
        def forward(self, x: torch.Tensor) -> list[Any]:
            self.init_fp8_metadata(num_gemms=1)
            return self.quantizers["scaling_fwd"]

    model = mz.bind_rules(nn.ModuleList([Own(), Own()]), Rules([("0", "mxfp8"), ("1", "current")]))
    with mz.autocast(Rules([("0", "mxfp8"), ("1", "current")])):
        made = [type(layer(torch.zeros(1))[0]).__name__ for layer in model]
    assert made == ["MXFP8Quantizer", "Float8CurrentScalingQuantizer"]


def test_a_copy_of_a_module_knows_its_rule() -> None:
    model = mz.bind_rules(Model(), RULES)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(train(same, RULES, steps=1), train(mz.bind_rules(Model(), RULES), RULES, steps=1))
