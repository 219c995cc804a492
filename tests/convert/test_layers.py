"""`convert`: in every respect but its numbers a converted layer is the layer that it was."""

import copy
import inspect
import io
from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mezzotint as mz
from tests.convert.models import Model, linear, tokens, train
from tests.recipes import RECIPES, STATE, sample, step

over_some = pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
MXFP8 = RECIPES["mxfp8"]


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
