"""`convert`: converted layers are our modules, bit for bit, eager and compiled."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import mezzotint as mz
from mezzotint import recipe as recipes
from tests.convert.models import Model, linear, tokens, train
from tests.recipes import RECIPES, STATE, assert_equal, sample, step

over_recipes = pytest.mark.parametrize("recipe", RECIPES)
over_some = pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
MXFP8 = RECIPES["mxfp8"]


def ours_of(module: nn.Linear) -> mz.Linear:
    """A `Linear` with the parameters of a layer."""
    made = mz.Linear(
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        device=module.weight.device,
        params_dtype=module.weight.dtype,
    )
    made.load_state_dict(module.state_dict())
    return made


def compiled(module: Any, backend: str = "aot_eager") -> tuple[Any, Any]:
    counter = CompileCounterWithBackend(backend)
    counters.clear()
    return torch.compile(module, fullgraph=True, backend=counter), counter


# What a converted layer computes


@pytest.mark.cover(2)
@over_recipes
@pytest.mark.parametrize("bias", [True, False])
def test_a_converted_layer_is_our_module(recipe: str, bias: bool) -> None:
    theirs = linear(bias)
    expected, got = ours_of(theirs), mz.convert(theirs)
    for seed in range(3):
        x = sample(seed=seed) * (seed + 1)
        assert_equal(step(got, x, RECIPES[recipe]), step(expected, x, RECIPES[recipe]))


@pytest.mark.gpu
@over_recipes
def test_a_converted_layer_on_a_gpu(recipe: str) -> None:
    theirs = linear().cuda()
    expected, got = ours_of(theirs), mz.convert(theirs)
    for seed in range(3):
        x = sample(seed=seed).cuda()
        assert_equal(step(got, x, RECIPES[recipe]), step(expected, x, RECIPES[recipe]))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "none"])
def test_a_given_recipe_wins(recipe: str) -> None:
    """Over regions that are switched off or have another one (`step` opens one), and without any."""
    theirs = linear()
    expected, got = ours_of(theirs), mz.convert(theirs, RECIPES[recipe])
    for seed, around in enumerate((None, recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3))):
        x = sample(seed=seed)
        assert_equal(step(got, x, around), step(expected, x, RECIPES[recipe]))
    torch.manual_seed(1)
    alone = got(x)
    torch.manual_seed(1)
    with mz.autocast(recipe=RECIPES[recipe]):
        assert torch.equal(alone, expected(x))
    for name in STATE:
        assert torch.equal(getattr(got, name), getattr(expected, name))


def check_compiled(recipe: str, backend: str, is_given: bool) -> None:
    theirs = linear()
    expected, got = ours_of(theirs), mz.convert(theirs, RECIPES[recipe] if is_given else None)
    call, counter = compiled(got, backend)
    for seed in range(3):
        x = sample(seed=seed)
        around = None if is_given else RECIPES[recipe]
        assert_equal(step(got, x, around, call), step(expected, x, RECIPES[recipe]))
    assert counter.frame_count == 1
    assert not counters["graph_break"]


@pytest.mark.cover(0)
@pytest.mark.compile
@over_recipes
def test_compiled(recipe: str) -> None:
    check_compiled(recipe, "aot_eager", False)


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["delayed", "current", "nvfp4"])
def test_compiled_with_its_own_recipe(recipe: str) -> None:
    check_compiled(recipe, "aot_eager", True)


@pytest.mark.compile
def test_compiled_by_inductor() -> None:
    check_compiled("mxfp8", "inductor", True)


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize(("recipe", "is_given"), [("delayed", True), ("mxfp8", False)])
def test_training_a_compiled_model(recipe: str, is_given: bool) -> None:
    model = mz.convert(Model(1), RECIPES[recipe] if is_given else None)
    eager = copy.deepcopy(model)
    whole, counter = compiled(model)

    def within(call: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            with mz.autocast(enabled=not is_given, recipe=None if is_given else RECIPES[recipe]):
                return call(x)

        return run

    losses = train(model, within(whole), 4)
    assert losses == train(eager, within(eager), 4)
    assert losses[-1] < 0.9 * losses[0]
    assert counter.frame_count == 1
    assert not counters["graph_break"]


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@over_some
def test_layers_compiled_one_by_one_share_their_graph(recipe: str) -> None:
    model = mz.convert(Model(), RECIPES[recipe])
    eager = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    assert train(model, model, 2) == train(eager, eager, 2)
    assert counter.frame_count <= 2


@pytest.mark.compile
def test_a_model_that_was_compiled_before() -> None:
    model = Model(1)
    call, counter = compiled(model)
    call(tokens())
    mz.convert(model, MXFP8)
    assert torch.equal(call(tokens()), model(tokens()))
    mz.unconvert(model)
    assert torch.equal(call(tokens()), Model(1)(tokens()))
    assert counter.frame_count <= 3


# Recomputation


def recomputing(model: Any, again: Callable[..., Any]) -> Any:
    """The model's forward with each block in a checkpoint."""

    def call(x: torch.Tensor) -> torch.Tensor:
        x = model.embedding(x)
        for block in model.blocks:
            x = again(block, x, use_reentrant=False)
        return model.lm_head(x)

    return call


def test_torchs_checkpoint_recomputes_under_the_recipe() -> None:
    """Its second run is in backward, outside of any region and of the model's forward."""
    model = mz.convert(Model(), MXFP8)
    other = copy.deepcopy(model)
    assert train(model, recomputing(model, torch_checkpoint), 3) == train(other, other, 3)


def test_torchs_checkpoint_refuses_delayed_scaling() -> None:
    model = mz.convert(Model(), RECIPES["delayed"])
    with pytest.raises(RuntimeError, match=r"mezzotint\.checkpoint"):
        train(model, recomputing(model, torch_checkpoint), 1)
    model = mz.convert(Model(), RECIPES["delayed"])
    other = copy.deepcopy(model)
    assert train(model, recomputing(model, mz.checkpoint), 3) == train(other, other, 3)


# Norm and linear as one


NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(64), lambda: mz.LayerNorm(64, device="cpu")),
    "RMSNorm": (lambda: nn.RMSNorm(64, eps=1e-5), lambda: mz.RMSNorm(64, device="cpu")),
}


def pair(norm: str) -> tuple[nn.Sequential, nn.Sequential]:
    """A converted one, and its norm and linear of ours one after the other."""
    theirs, ours = NORMS[norm]
    torch.manual_seed(0)
    got = nn.Sequential(theirs(), nn.Linear(64, 80)).to(torch.bfloat16)
    with torch.no_grad():
        got[0].weight.add_(torch.randn(64) * 0.1)
    apart = nn.Sequential(ours(), ours_of(got[1])).to(torch.bfloat16)
    apart.load_state_dict(got.state_dict(), strict=True)
    keys = got.state_dict().keys()
    assert mz.convert(got).state_dict().keys() == keys
    return got, apart


def check_pair(got: Any, apart: Any, recipe: str, call: Any = None) -> None:
    for seed in range(2):
        x = sample(seed=seed)
        assert_equal(step(got, x, RECIPES[recipe], call), step(apart, x, RECIPES[recipe]))
        for name in STATE:
            assert torch.equal(getattr(got[1], name), getattr(apart[1], name))


@over_recipes
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_and_a_linear_are_one_step(norm: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got, apart = pair(norm)
    monkeypatch.setattr(got[0], "forward", None)  # nobody calls it
    check_pair(got, apart, recipe)
    assert [entry.after for entry in mz.convert_report(got).converted] == ["LayerNormLinear"]


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_a_compiled_norm_and_linear(recipe: str) -> None:
    got, apart = pair("RMSNorm")
    call, counter = compiled(got)
    check_pair(got, apart, recipe, call)
    assert counter.frame_count == 1


def test_hooks_on_a_norm_or_its_linear_see_everything() -> None:
    model, seen = mz.convert(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), MXFP8), []
    x = torch.randn(8, 64)
    as_one = model(x)
    norm, layer = model
    with norm.register_forward_hook(lambda module, args, out: seen.append(out)):
        model(x)
        assert torch.equal(seen[0], nn.functional.layer_norm(x, (64,)))
    with layer.register_forward_pre_hook(lambda module, args: seen.append(args[0])):
        apart = model(x)
        assert torch.equal(seen[1], seen[0])
    with nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module)):
        model(x)
        assert seen[2:] == [norm, layer, model]
    assert torch.equal(model(x), as_one)
    assert torch.equal(layer(norm(x)), apart)  # each is still what it was
    model[0] = nn.Identity()
    assert torch.equal(model(x), layer(x))


class OwnSequential(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64)), "its eps is None"),
        (lambda: nn.Sequential(nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 64)), "it has no weight"),
        (lambda: nn.Sequential(nn.LayerNorm((2, 64)), nn.Linear(64, 64)), "it normalizes over (2, 64)"),
        (lambda: OwnSequential(nn.LayerNorm(64), nn.Linear(64, 64)), "OwnSequential has a forward of its own"),
    ],
)
def test_a_norm_stays_apart(model: Callable[[], nn.Sequential], why: str) -> None:
    x = torch.randn(3, 2, 64)
    original = model()
    got = mz.convert(original, inplace=False)
    torch.testing.assert_close(got(x), original(x))
    (entry,) = mz.convert_report(got).converted
    assert entry.after == "Linear"
    assert f"apart from the norm before it: {why}" in entry.why


def test_a_linear_that_follows_two_norms() -> None:
    shared = nn.Linear(64, 64)
    model = nn.Sequential(nn.LayerNorm(64), shared, nn.RMSNorm(64, eps=1e-5), shared)
    x, (first, _, second, _) = torch.randn(8, 64), model
    expected = model(x)
    mz.convert(model)
    assert (shared.pair, type(first), type(second)) == ((first,), nn.LayerNorm, nn.RMSNorm)
    torch.testing.assert_close(model(x), expected)
