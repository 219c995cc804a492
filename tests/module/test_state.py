"""State dicts, checkpoints, copies and moves."""

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import recipe as recipes
from mezzotint.layer.parameters import resolve_device
from tests.recipes import IN, MODULES, OPTIONS, OUT, RECIPES, STATE, assert_equal, make, sample, step

over_modules = pytest.mark.parametrize("name", MODULES)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)


class Composed(nn.Module):
    """torch's own modules under the names of LayerNormLinear."""

    def __init__(self) -> None:
        super().__init__()
        norm, linear = nn.LayerNorm(IN, dtype=torch.bfloat16), nn.Linear(IN, OUT, dtype=torch.bfloat16)
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias
        self.weight, self.bias = linear.weight, linear.bias


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "delayed"])
@pytest.mark.parametrize(
    ("name", "other"), [("linear", lambda: nn.Linear(IN, OUT, dtype=torch.bfloat16)), ("layernorm_linear", Composed)]
)
def test_keys_are_torchs(name: str, other: Any, recipe: str) -> None:
    module, plain = make(name), other()
    step(module, sample(), RECIPES[recipe])
    assert module.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(module.state_dict(), strict=True)
    module.load_state_dict(plain.state_dict(), strict=True)
    for key, value in module.state_dict().items():
        assert torch.equal(value, plain.state_dict()[key])


def test_norms_load_torchs() -> None:
    mz.LayerNorm(IN, device="cpu").load_state_dict(nn.LayerNorm(IN).state_dict(), strict=True)
    mz.RMSNorm(IN, device="cpu").load_state_dict(nn.RMSNorm(IN).state_dict(), strict=True)


@over_modules
def test_delayed_scaling_saves_plain_tensors(name: str) -> None:
    module = make(name)
    assert "_extra_state" not in module.state_dict()
    step(module, sample(), RECIPES["delayed"])
    state = module.state_dict()
    assert type(state["_extra_state"]) is torch.Tensor
    assert state["_extra_state"].dtype == torch.float32
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    other = make(name)
    other.load_state_dict(loaded, strict=True)
    for key in STATE:
        assert torch.equal(getattr(other, key), getattr(module, key))


@over_recipes
@over_modules
def test_resumed_training_is_uninterrupted_training(name: str, recipe: str) -> None:
    def train(module: Any, optimizer: Any, seeds: Any) -> None:
        for seed in seeds:
            got = step(module, sample(seed=seed), RECIPES[recipe])
            for key, parameter in module.named_parameters():
                parameter.grad = got[key]
            optimizer.step()
            optimizer.zero_grad()

    module = make(name)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    train(module, optimizer, range(3))
    buffer = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    train(module, optimizer, range(3, 6))
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    resumed = make(name)
    resumed.load_state_dict(loaded["model"])
    other = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    other.load_state_dict(loaded["optimizer"])
    train(resumed, other, range(3, 6))
    for (key, got), expected in zip(resumed.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(got, expected), key
    assert_equal(step(resumed, sample(), RECIPES[recipe]), step(module, sample(), RECIPES[recipe]))


def test_wrong_extra_state_says_what_it_is() -> None:
    state = make("linear").state_dict() | {"_extra_state": torch.zeros(5, 7)}
    with pytest.raises(ValueError, match=r"\(5, 7\).*\(1 \+ history, 5\)"):
        make("linear").load_state_dict(state)


@over_modules
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_loading_drops_kept_weights(name: str, recipe: str) -> None:
    """A kept weight is of the parameters that were there before."""
    module, other = make(name), make(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    step(module, sample(), RECIPES[recipe], is_first_microbatch=True)
    step(other, sample(), RECIPES[recipe])  # delayed scaling has learnt scales that are to be loaded, too
    module.load_state_dict(other.state_dict())
    assert module._workspaces is None
    got = step(module, sample(), RECIPES[recipe], is_first_microbatch=False)
    assert_equal(got, step(other, sample(), RECIPES[recipe]))
    assert module._workspaces is not None


@over_modules
def test_kept_weights_are_let_go(name: str) -> None:
    """Of one optimizer step at a time: the next first micro-batch, and a move, free those before."""
    module = make(name)
    for free in (lambda: step(module, sample(), RECIPES["mxfp8"], is_first_microbatch=True), module.bfloat16):
        step(module, sample(), RECIPES["mxfp8"], is_first_microbatch=True)
        kept = [weakref.ref(workspace) for workspace in module._workspaces]
        assert all(reference() is not None for reference in kept)
        free()
        gc.collect()
        assert all(reference() is None for reference in kept)


@over_modules
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_copies_and_moves(name: str, recipe: str) -> None:
    module = make(name)
    step(module, sample(), RECIPES[recipe], is_first_microbatch=True)
    weight = next(p for p in module.parameters() if p.dim() == 2)
    weight.main_grad = torch.ones(weight.shape, dtype=torch.float32)
    weight.tensor_model_parallel = True
    expected = step(copy.deepcopy(module), sample(seed=1), RECIPES[recipe])
    for moved in (copy.deepcopy(module), copy.deepcopy(module).cpu(), copy.deepcopy(module).to("cpu", torch.bfloat16)):
        assert_equal(step(moved, sample(seed=1), RECIPES[recipe]), expected)
    halved = copy.deepcopy(module).half()
    own = next(p for p in halved.parameters() if p.dim() == 2)
    assert own.dtype == torch.float16
    assert own.main_grad.dtype == torch.float32
    assert own.tensor_model_parallel
    for key in STATE:
        assert getattr(halved, key).dtype == torch.float32
        assert torch.equal(getattr(halved, key), getattr(module, key))
    meta = copy.deepcopy(module).to("meta")
    assert all(p.is_meta for p in meta.parameters())


@over_modules
def test_meta_device(name: str) -> None:
    """Made without memory, filled later: the same as made at once."""
    module = MODULES[name](device="meta")
    assert all(p.is_meta for p in module.parameters())
    assert module.state_dict().keys() == make(name).state_dict().keys()
    torch.manual_seed(0)
    module.to_empty(device="cpu")
    module.reset_parameters()
    torch.manual_seed(0)
    expected = MODULES[name]()
    for (key, got), wanted in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, wanted), key
    assert_equal(step(module, sample(), RECIPES["delayed"]), step(expected, sample(), RECIPES["delayed"]))
    other = MODULES[name](device="meta")
    torch.manual_seed(0)
    other.reset_parameters()
    for got, wanted in zip(other.parameters(), expected.parameters(), strict=True):
        assert got.device.type == resolve_device(None).type
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"])
@over_modules
def test_quantized_weights(name: str, recipe: str) -> None:
    """Primary weights in low precision: the step is that of the high-precision module, and they save and load."""
    with mz.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        torch.manual_seed(0)
        module = MODULES[name]()
    plain = MODULES[name]()
    for (key, parameter), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        if other.dim() == 2:
            assert isinstance(parameter, mz.QuantizedTensor), key
            assert parameter.requires_grad
            high = parameter.get_high_precision_init_val()
            assert high.device.type == "cpu"
            with torch.no_grad():
                other.copy_(high)
            parameter.clear_high_precision_init_val()
            assert parameter.get_high_precision_init_val() is None
        else:
            assert not isinstance(parameter, mz.QuantizedTensor)
            with torch.no_grad():
                other.copy_(parameter)
    got = step(module, sample(), RECIPES[recipe])
    expected = step(plain, sample(), RECIPES[recipe])
    assert_equal(got, expected, but=STATE)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    with mz.quantized_model_init(recipe=RECIPES[recipe]):
        other = MODULES[name]()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_equal(step(other, sample(1), RECIPES[recipe]), step(module, sample(1), RECIPES[recipe]))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with mz.autocast(recipe=RECIPES[recipe]):
        other(sample().requires_grad_(), *(([40, 0, 0],) if name == "grouped_linear" else ())).sum().backward()
    before = [p.dequantize().clone() for p in other.parameters() if isinstance(p, mz.QuantizedTensor)]
    optimizer.step()
    after = [p.dequantize() for p in other.parameters() if isinstance(p, mz.QuantizedTensor)]
    assert not torch.equal(before[0], after[0])


def test_history_may_change_its_length() -> None:
    module = make("linear")
    step(module, sample(), recipes.DelayedScaling(amax_history_len=2000))
    assert module.fp8_meta["scaling_fwd"].amax_history.shape == (2000, 3)
    step(module, sample(), recipes.DelayedScaling(amax_history_len=3))
    assert module.fp8_meta["scaling_fwd"].amax_history.shape == (3, 3)
    state = module.state_dict()
    other = make("linear")
    other.load_state_dict(state)
    assert torch.equal(other.amax_history_fwd, module.amax_history_fwd)


def test_options_are_copied_by_pickle() -> None:
    module = make("layernorm_mlp")
    step(module, sample(), RECIPES["mxfp8"], is_first_microbatch=True)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded._workspaces is None
    assert_equal(step(loaded, sample(), RECIPES["mxfp8"]), step(module, sample(), RECIPES["mxfp8"]))


def test_parts_of_one_weight_save_under_their_names() -> None:
    module = mz.Linear(IN, OUT, parameters_split={"query": 16, "key": 16, "value": 16}, **OPTIONS)
    assert set(module.state_dict()) == {f"{n}_{k}" for n in ("query", "key", "value") for k in ("weight", "bias")}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_assigned_from_the_meta_device(recipe: str) -> None:
    """`load_state_dict(assign=True)` and `to_empty` bring delayed scaling's buffers along, learnt or new."""
    learnt = make("linear")
    for seed in range(2):
        step(learnt, sample(seed=seed), RECIPES[recipe])
    for state in (make("linear").state_dict(), learnt.state_dict()):
        expected = make("linear")
        expected.load_state_dict(state)
        assigned, emptied = make("linear", device="meta"), make("linear", device="meta").to_empty(device="cpu")
        assigned.load_state_dict(state, assign=True)
        emptied.load_state_dict(state)
        want = step(expected, sample(), RECIPES[recipe])
        for module in (assigned, emptied):
            assert_equal(step(module, sample(), RECIPES[recipe]), want)
