"""`convert`: converted layers are our modules, bit for bit, and in every other respect the layers that they were."""

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import mezzotint as mz
from mezzotint import recipe as recipes
from tests.recipes import RECIPES, STATE, assert_equal, sample, step

over_recipes = pytest.mark.parametrize("recipe", RECIPES)
over_some = pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
MXFP8 = RECIPES["mxfp8"]


def linear(bias: bool = True, out: int = 80) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, out, bias=bias, dtype=torch.bfloat16)


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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """tokens (…,) → logits (…, vocabulary)."""

    def __init__(self, num_blocks: int = 2, width: int = 64, vocabulary: int = 96, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.embedding(tokens) * scale
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def tokens(vocabulary: int = 96) -> torch.Tensor:
    return torch.randint(0, vocabulary, (4, 16), generator=torch.Generator().manual_seed(0))


def train(model: Any, call: Any, num_steps: int) -> list[float]:
    """Losses of learning one batch by heart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, losses = tokens(), []
    for _ in range(num_steps):
        loss = nn.functional.cross_entropy(call(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(module: Any, backend: str = "aot_eager") -> tuple[Any, Any]:
    counter = CompileCounterWithBackend(backend)
    counters.clear()
    return torch.compile(module, fullgraph=True, backend=counter), counter


# What a converted layer computes


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


@pytest.mark.compile
@over_recipes
def test_compiled(recipe: str) -> None:
    check_compiled(recipe, "aot_eager", False)


@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["delayed", "current", "nvfp4"])
def test_compiled_with_its_own_recipe(recipe: str) -> None:
    check_compiled(recipe, "aot_eager", True)


@pytest.mark.compile
def test_compiled_by_inductor() -> None:
    check_compiled("mxfp8", "inductor", True)


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


# What a converted layer is


def test_class_keys_and_attributes() -> None:
    class Named(nn.Linear):
        """Has no forward of its own."""

    model = nn.Sequential(Named(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False))
    keys = list(model.state_dict())
    model[0].weight.main_grad = "kept"
    model[2].weight.requires_grad_(False)
    model[2].name, model.eval()[2].custom = "mine", 3
    parameters, layers = list(model.parameters()), list(model)
    assert mz.convert(model, MXFP8) is model
    assert list(model) == layers
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model[0], Named)
    assert isinstance(model[2], nn.Linear)
    assert isinstance(model[2], mz.Linear)
    assert list(model.state_dict()) == keys
    assert (model[0].weight.main_grad, model[2].name, model[2].custom) == ("kept", "mine", 3)
    assert not model[0].training
    assert not model[2].weight.requires_grad
    assert str(model[2]) == "ConvertedLinear(in_features=64, out_features=64, bias=False, recipe=MXFP8BlockScaling)"


def test_the_model_keeps_its_name_and_signature() -> None:
    model = mz.convert(Model(), MXFP8)
    assert isinstance(model, Model)
    assert (str(type(model)), inspect.signature(model.forward)) == (str(Model), inspect.signature(Model().forward))
    assert torch.equal(model(tokens(), scale=2.0), model(tokens=tokens(), scale=2.0))


def test_arguments_of_both_classes() -> None:
    layer, x = mz.convert(linear()), sample()
    assert torch.equal(layer(input=x), layer(x))
    with mz.autocast(recipe=MXFP8):
        assert torch.equal(layer(x, is_first_microbatch=True), layer(x, is_first_microbatch=False))
        assert isinstance(layer(x, fp8_output=True), mz.QuantizedTensor)


def test_hooks_stay() -> None:
    layer, seen = linear(), []
    layer.register_forward_hook(lambda module, args, out: seen.append((type(module).__name__, out.shape)))
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0].shape))
    step(mz.convert(layer, MXFP8), sample(), None)
    assert seen == [("ConvertedLinear", (40, 80)), (40, 80)]


def test_an_optimizer_made_before() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mz.convert(model, MXFP8)
    before = model.blocks[0].up.weight.detach().clone()
    model(tokens()).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.blocks[0].up.weight, before)


@over_some
def test_state_dicts_go_both_ways(recipe: str) -> None:
    original = Model()
    model = mz.convert(Model(), RECIPES[recipe])
    model.load_state_dict(original.state_dict(), strict=True)
    learnt = {key for key in model.state_dict() if key.endswith("_extra_state")}
    assert len(learnt) == (4 if recipe == "delayed" else 0)  # from the start: loaders take a fresh model for a template
    if recipe != "delayed":
        original.load_state_dict(model.state_dict(), strict=True)
    train(model, model, 2)
    state = model.state_dict()
    assert {key for key in state if key.endswith("_extra_state")} == learnt
    assert state.keys() - learnt == original.state_dict().keys()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = mz.convert(Model(), RECIPES[recipe])
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    assert torch.equal(other(tokens()), model(tokens()))
    # What delayed scaling learnt has no place in the original: it is left behind with the conversion.
    original.load_state_dict(mz.unconvert(model).state_dict(), strict=True)


@over_some
def test_copies_and_pickles(recipe: str) -> None:
    model = mz.convert(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), RECIPES[recipe])
    x = torch.randn(8, 64)
    model(x).sum().backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    expected = model(x)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(other) is type(model)
        assert type(other[1]) is type(model[1])
        assert other[1].pair[0] is other[0]
        assert other[1].weight is not model[1].weight
        model.load_state_dict(other.state_dict())
        assert torch.equal(other(x), expected)
        assert str(mz.convert_report(other)) == str(mz.convert_report(model))
        mz.unconvert(other)
        assert type(other) is nn.Sequential


def test_moves() -> None:
    layer = mz.convert(nn.Linear(64, 64), RECIPES["delayed"])
    layer.weight.main_grad = torch.zeros(2)
    layer.to(torch.bfloat16)
    assert (layer.weight.dtype, layer.scale_fwd.dtype) == (torch.bfloat16, torch.float32)
    assert layer.weight.main_grad is not None
    assert layer(sample()).dtype == torch.bfloat16


@pytest.mark.parametrize("way", ["to_empty", "assign"])
def test_from_the_meta_device(way: str) -> None:
    """Delayed scaling's buffers, which the model does not know of, are there and filled."""
    state = nn.Linear(64, 64).state_dict()
    with torch.device("meta"):
        layer = mz.convert(nn.Linear(64, 64), RECIPES["delayed"])
    assert layer.scale_fwd.is_meta
    if way == "to_empty":
        layer.to_empty(device="cpu")
    layer.load_state_dict(state, strict=True, assign=way == "assign")
    expected = mz.convert(nn.Linear(64, 64), RECIPES["delayed"])
    expected.load_state_dict(state)
    for name in STATE:
        assert torch.equal(getattr(layer, name), getattr(expected, name))
    assert torch.equal(layer(sample().float()), expected(sample().float()))
    layer.reset_parameters()
    assert layer.weight.std() < 0.1


@pytest.fixture
def _one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_sharded_after_converting() -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = mz.convert(Model(), MXFP8)
    whole = copy.deepcopy(model)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    assert train(model, model, 3) == train(whole, whole, 3)
    with pytest.raises(ValueError, match="is a FSDPModel, made of a converted module"):
        mz.unconvert(model)
    model = fully_shard(Model(), mesh=mesh)
    assert not mz.convert_report(mz.convert(model)).converted
    assert {entry.why for entry in mz.convert_report(model).kept if entry.before == "Linear"} == {
        "weight is a DTensor: convert first, then quantize or shard"
    }


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
