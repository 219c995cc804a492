"""State dicts, checkpoints, copies and moves."""

import copy
import gc
import io
import operator
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import mezzotint as mz
from mezzotint import ops
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
    """But for `_extra_state`, without which a state dict loads."""
    module, plain = make(name), other()
    step(module, sample(), RECIPES[recipe])
    state = module.state_dict()
    assert state.keys() == plain.state_dict().keys() | {"_extra_state"}
    assert plain.load_state_dict(state, strict=False).unexpected_keys == ["_extra_state"]
    module.load_state_dict(plain.state_dict(), strict=True)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, state[key])


def test_norms_load_torchs() -> None:
    mz.LayerNorm(IN, device="cpu").load_state_dict(nn.LayerNorm(IN).state_dict(), strict=True)
    mz.RMSNorm(IN, device="cpu").load_state_dict(nn.RMSNorm(IN).state_dict(), strict=True)


@over_modules
def test_delayed_scaling_saves_plain_tensors(name: str) -> None:
    module = make(name)
    fresh = module.state_dict()
    step(module, sample(), RECIPES["delayed"])
    state = module.state_dict()
    assert state.keys() == fresh.keys()
    assert state["_extra_state"].shape == fresh["_extra_state"].shape
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
    wanted = r"_extra_state has shape \(5, 7\): this module takes \(1 \+ history, 5\)"
    with pytest.raises(RuntimeError, match=wanted):
        make("linear").load_state_dict(state)
    with pytest.raises(RuntimeError, match=rf"0\.{wanted}"):
        nn.Sequential(make("linear")).load_state_dict({f"0.{key}": value for key, value in state.items()})
    with pytest.raises(ValueError, match=wanted):
        make("linear").set_extra_state(state["_extra_state"])
    with pytest.raises(TypeError, match="_extra_state is BytesIO: this module takes a tensor"):
        make("linear").load_state_dict(state | {"_extra_state": io.BytesIO()})


@pytest.mark.parametrize(("row", "value"), [(0, "nan"), (0, "inf"), (0, "0"), (0, "-1"), (2, "nan"), (2, "-1")])
def test_a_damaged_extra_state_is_refused(row: int, value: str) -> None:
    """Of either direction, before anything is written. A maximum may be infinite: a tensor had such a value."""
    for column in (1, 4):
        state, module = make("linear").state_dict(), make("linear")
        state["_extra_state"][0] = 3.0
        state["_extra_state"][2, 0] = float("inf")
        module.load_state_dict(state)
        assert module.scale_fwd.tolist() == [3.0] * 3
        state["_extra_state"][row, column] = float(value)
        other = make("linear")
        with pytest.raises(ValueError, match="_extra_state has scales that are not positive and finite"):
            other.load_state_dict(state)
        assert other.scale_fwd.tolist() == [1.0] * 3


def train(model: Any, seeds: Any) -> list[float]:
    losses = []
    for seed in seeds:
        with mz.autocast(recipe=RECIPES["delayed"]):
            loss = model(sample(seed=seed) * 30).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = mz.LayerNormMLP(IN, 2 * IN, **OPTIONS)
        self.linear = mz.Linear(IN, IN, **OPTIONS)
        self.ops = ops.Sequential(ops.Linear(IN, IN, device="cpu", dtype=torch.bfloat16), ops.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops(self.linear(self.mlp(x)))


def dcp_of_state_dicts(model: nn.Module, fresh: nn.Module, folder: Path) -> None:
    dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
    template = fresh.state_dict()
    dcp.load(template, checkpoint_id=folder, no_dist=True)
    fresh.load_state_dict(template)


def dcp_of_model_states(model: nn.Module, fresh: nn.Module, folder: Path) -> None:
    dcp.save(get_model_state_dict(model), checkpoint_id=folder, no_dist=True)
    template = get_model_state_dict(fresh)
    dcp.load(template, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(fresh, template)


def keys_of_the_template(model: nn.Module, fresh: nn.Module, folder: Path) -> None:
    """As Megatron's dist_checkpointing: what the fresh model has no key for is not read."""
    saved = model.state_dict()
    fresh.load_state_dict({key: saved[key] for key in fresh.state_dict()}, strict=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("error:delayed scaling begins with scales of 1")
@pytest.mark.parametrize("resume", [dcp_of_state_dicts, dcp_of_model_states, keys_of_the_template])
def test_loaders_with_a_fresh_model_as_template_resume_delayed_scaling(resume: Any, tmp_path: Path) -> None:
    model = Model()
    train(model, range(3))
    fresh = Model()
    resume(model, fresh, tmp_path)
    for key, buffer in model.named_buffers():
        assert torch.equal(fresh.get_buffer(key), buffer), key
    assert not torch.equal(fresh.linear.scale_bwd, torch.ones(2))
    assert train(fresh, range(3, 5)) == train(model, range(3, 5))


def test_a_template_with_a_longer_history() -> None:
    """It must have the length of the saved one: `init_fp8_meta_tensors` makes it so before anything runs."""
    recipe = recipes.DelayedScaling(amax_history_len=1500)
    module, fresh = make("linear"), make("linear")
    step(module, sample(), recipe)
    fresh.init_fp8_meta_tensors(recipe)
    assert fresh.state_dict()["_extra_state"].shape == module.state_dict()["_extra_state"].shape


@pytest.mark.cover(0)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_weights_without_their_scales_warn_when_delayed_scaling_runs(is_compiled: bool) -> None:
    model, other = Model(), Model()
    train(model, range(1))
    other.load_state_dict({key: value for key, value in model.state_dict().items() if "_extra_state" not in key})
    call = torch.compile(other, backend="eager", fullgraph=True) if is_compiled else other
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with mz.autocast(recipe=RECIPES["current"]):
            other(sample())  # has no use for scales
    with pytest.warns(UserWarning, match="delayed scaling begins with scales of 1.*no _extra_state"):
        train(call, range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(call, range(1, 2))  # once
        made = Model()
        made.load_state_dict(model.state_dict())
        train(made, range(1))
        model.load_state_dict({key: value for key, value in made.state_dict().items() if "_extra_state" not in key})
        train(model, range(1))  # has learnt itself


def test_upstreams_empty_extra_state_says_nothing() -> None:
    module = make("linear")
    step(module, sample(), RECIPES["delayed"])
    scale = module.scale_fwd.clone()
    module.load_state_dict(module.state_dict() | {"_extra_state": torch.empty(0, dtype=torch.uint8)})
    assert torch.equal(module.scale_fwd, scale)


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


@pytest.mark.cover(0)
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
    names = {f"{n}_{k}" for n in ("query", "key", "value") for k in ("weight", "bias")}
    assert set(module.state_dict()) == names | {"_extra_state"}


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


def new_weight(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(sample(OUT, seed))


@pytest.mark.parametrize("is_op", [False, True])
def test_a_weight_assigned_to_a_module_of_the_meta_device(is_op: bool) -> None:
    """Delayed scaling's buffers go where it is."""
    made = ops.Linear(IN, OUT, bias=False, device="meta", dtype=torch.bfloat16) if is_op else None
    module = mz.Linear(IN, OUT, bias=False, device="meta", params_dtype=torch.bfloat16) if made is None else made
    module.weight = new_weight()
    expected = mz.Linear(IN, OUT, bias=False, **OPTIONS)
    expected.weight = new_weight()
    for seed in range(2):
        want, got = (step(each, sample(seed=seed), RECIPES["delayed"]) for each in (expected, module))
        assert torch.equal(got["output"], want["output"])
    state = module.basic_ops[0] if is_op else module  # type: ignore[index]
    for key in STATE:
        assert torch.equal(getattr(state, key), getattr(expected, key))


def test_scales_follow_a_weight_that_is_assigned() -> None:
    """To a device, with what they have learnt; the meta device stands for another one here."""
    module = make("linear")
    step(module, sample(), RECIPES["delayed"])
    learnt = module.scale_fwd.clone()
    module.weight = new_weight()
    assert torch.equal(module.scale_fwd, learnt)
    module.weight = nn.Parameter(torch.empty(OUT, IN, device="meta", dtype=torch.bfloat16))
    assert torch.equal(module.scale_fwd, learnt)  # a parameter without values is no place to go to


@pytest.mark.gpu
def test_scales_follow_a_weight_to_the_gpu() -> None:
    module = make("linear")
    step(module, sample(), RECIPES["delayed"])
    learnt = module.scale_fwd.clone()
    module.weight = nn.Parameter(module.weight.detach().cuda())
    assert module.scale_fwd.is_cuda
    assert torch.equal(module.scale_fwd.cpu(), learnt)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_history_that_grows_in_inference_mode(is_compiled: bool) -> None:
    """Longer than the buffers that a module is made with: training goes on with it, in graphs too."""
    recipe = recipes.DelayedScaling(amax_history_len=1100)
    module, expected = make("linear"), make("linear")
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if is_compiled else module
    with torch.inference_mode(), mz.autocast(recipe=recipe):
        call(sample())
    with torch.no_grad(), mz.autocast(recipe=recipe):
        expected(sample())
    for seed in range(2):
        got = step(module, sample(seed=seed), recipe, call)
        assert_equal(got, step(expected, sample(seed=seed), recipe))
    assert module.amax_history_bwd.shape == (1100, 2)


@pytest.mark.cover(0)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_weights_kept_in_inference_mode_serve_training(is_compiled: bool) -> None:
    recipe = recipes.MXFP8BlockScaling(backward_override="dequantized")  # backward reads what forward does
    module, expected = make("linear"), make("linear")
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if is_compiled else module
    with torch.inference_mode(), mz.autocast(recipe=recipe):
        call(sample(), is_first_microbatch=True)
    step(expected, sample(), recipe, is_first_microbatch=True)
    got = step(module, sample(), recipe, call, is_first_microbatch=False)
    assert_equal(got, step(expected, sample(), recipe, is_first_microbatch=False))


def test_scales_of_weights_kept_in_inference_mode_are_saved_for_backward() -> None:
    module = mz.LayerNormMLP(IN, 64, checkpoint=True, device="cpu")
    with mz.autocast(recipe=RECIPES["delayed"]):
        with torch.inference_mode():
            module(sample(), is_first_microbatch=True)
        y = module(sample().requires_grad_(), is_first_microbatch=False)
    y.sum().backward()
    assert not module._weight_scales.is_inference()


def test_state_of_a_module_that_is_made_or_moved_in_inference_mode() -> None:
    with torch.inference_mode():
        made = make("linear")
        moved = make("linear", device="meta")
        moved.to_empty(device="cpu")
        loaded = make("linear", device="meta")
        loaded.load_state_dict(make("linear").state_dict(), assign=True)
    for module in (made, moved, loaded):
        assert not any(getattr(module, key).is_inference() for key in STATE)


def assert_tied(module: Any) -> None:
    quantizer = module.weight._quantizer
    assert quantizer.scale.data_ptr() == module.scale_fwd[1:].data_ptr()
    assert quantizer.amax.data_ptr() == module.amax_history_fwd[0, 1:].data_ptr()


def test_an_assigned_quantized_weight_has_the_scale_of_its_module() -> None:
    """And the other module keeps its own; so do a longer history, moves and copies."""
    with mz.quantized_model_init(recipe=RECIPES["delayed"]):
        module, other = make("linear"), make("linear")
    step(module, sample(), RECIPES["delayed"])
    other.load_state_dict(module.state_dict(), assign=True)
    assert_tied(other)
    assert_tied(module)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True), assign=True)
    assert_tied(other)
    for seed in range(2):
        assert_equal(
            step(other, sample(seed=seed), RECIPES["delayed"]), step(module, sample(seed=seed), RECIPES["delayed"])
        )
        for each in (other, module):
            with torch.no_grad():
                each.weight.add_(1.0)  # quantized by the scale, and seen
    assert torch.equal(other.amax_history_fwd, module.amax_history_fwd)
    assert torch.equal(other.weight.dequantize(), module.weight.dequantize())
    module.adjust_amax_history_length(2000)
    assert_tied(module)
    assert_tied(module.float())
    assert_tied(copy.deepcopy(module))


@over_modules
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_false_by_other_names(name: str, recipe: str) -> None:
    """`is_first_microbatch` of numpy, or an int: kept weights are used."""
    for false, true in ((np.False_, np.True_), (0, 1)):
        module, expected = make(name), make(name)
        for given, plain in ((true, True), (false, False)):
            assert_equal(
                step(module, sample(), RECIPES[recipe], is_first_microbatch=given),
                step(expected, sample(), RECIPES[recipe], is_first_microbatch=plain),
            )
            if plain:
                kept = module._workspaces
                with torch.no_grad():
                    for parameter in (*module.parameters(), *expected.parameters()):
                        parameter.mul_(2)
        assert all(map(operator.is_, module._workspaces, kept))
    with pytest.raises(TypeError, match="is_first_microbatch is 'no': give True, False or None"):
        step(module, sample(), RECIPES[recipe], is_first_microbatch="no")
