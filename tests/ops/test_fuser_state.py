"""What a pipeline does when its state changes: recipes, keyword arguments, kept weights, devices, checkpoints."""

import io
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import ops
from mezzotint import recipe as recipes
from tests.ops.pipelines import WIDTH, compiled, linear, residual, x32
from tests.ops.user_ops import OPTIONS, SplitSquare, Square, mlp, names, shaken, step, twin
from tests.recipes import RECIPES, assert_equal, gradient

over_recipes = pytest.mark.parametrize("recipe", ["none", "delayed", "current", "mxfp8", "nvfp4"])


# State that changes between calls


@pytest.mark.parametrize("order", [("none", "mxfp8", "current", "delayed", "none"), ("delayed", "block", "delayed")])
def test_another_recipe_is_fused_again(order: tuple[str, ...]) -> None:
    model = residual()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for recipe in order:
        fresh = residual()
        fresh.load_state_dict(state)
        for part, other in zip(model.modules(), fresh.modules(), strict=True):  # what delayed scaling has learnt
            if isinstance(part, ops.BasicLinear):
                other.set_extra_state(part.get_extra_state())  # type: ignore[operator]
        assert_equal(step(model, x32(), RECIPES[recipe]), step(fresh, x32(), RECIPES[recipe]))
        made = {side: [names(group) for group in groups] for side, groups in model.fused_ops().items()}
        assert made == {side: [names(group) for group in groups] for side, groups in fresh.fused_ops().items()}
        assert ("BackwardActivationBias" in made["backward"][0]) == (recipe != "none")


def test_an_equal_recipe_and_the_same_gradients_are_not_fused_again() -> None:
    model = mlp()
    step(model, x32(), recipes.MXFP8BlockScaling())
    first = model.fused_ops()["forward"][0]
    step(model, x32(), recipes.MXFP8BlockScaling())
    assert all(a is b for a, b in zip(first, model.fused_ops()["forward"][0], strict=True))
    step(model, x32(), recipes.MXFP8BlockScaling(backward_override="dequantized"))
    assert not all(a is b for a, b in zip(first, model.fused_ops()["forward"][0], strict=True))


class Regions(nn.Module):
    """autocast entered inside the compiled function, around pipelines and between them."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.first, self.second = ops.Sequential(linear(), ops.GELU()), ops.Sequential(ops.GELU(), linear())
        self.third = ops.Sequential(ops.RMSNorm(WIDTH, **OPTIONS), linear())
        self.recipe = recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with mz.autocast(recipe=self.recipe):
            x = self.second(x)
            with mz.autocast(enabled=False):
                x = self.first(x)
            with mz.autocast(recipe=recipes.Float8CurrentScaling()):
                return self.third(x)


@pytest.mark.compile
def test_autocast_inside_the_compiled_function() -> None:
    eager, model = Regions(RECIPES["delayed"]), Regions(RECIPES["delayed"])
    call = compiled(model)
    for seed in range(2):
        assert_equal(step(model, x32(seed), call=call), step(eager, x32(seed)))
    assert eager.second[1].scale_fwd[0] != 1
    assert eager.first[0].scale_fwd[0] == 1


@pytest.mark.compile
def test_a_history_that_grows_when_the_first_graph_is_made() -> None:
    """The buffers of a module have 1024 rows; a pipeline that nobody has run yet replaces them while it is traced."""
    model, eager = (ops.Sequential(linear(), ops.GELU(), linear()) for _ in range(2))
    eager.load_state_dict(model.state_dict())
    call = compiled(model)
    for length in (1100, 8):
        recipe = recipes.DelayedScaling(amax_history_len=length)
        for seed in range(2):
            assert_equal(step(model, x32(seed), recipe, call=call), step(eager, x32(seed), recipe))
    assert_equal(model.state_dict(), eager.state_dict())
    assert model[0].amax_history_bwd.shape[0] == 1100


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
def test_torch_autocast(recipe: str) -> None:
    """FP32 parameters and input, BF16 computation: as the module does it."""
    model = mlp(norm=ops.RMSNorm, dtype=torch.float32)
    module = mz.LayerNormMLP(WIDTH, WIDTH, activation="swiglu", normalization="RMSNorm", device="cpu")
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), model.parameters(), strict=True):
            parameter.copy_(value)
    found = []
    for target in (model, module):
        leaf = x32(dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            y = target(leaf)
        assert y.dtype == torch.bfloat16
        gradient(y).backward()
        assert leaf.grad.dtype == torch.float32
        found.append([y, leaf.grad, *[p.grad for p in target.parameters()]])
    for got, expected in zip(*found, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    assert torch.equal(found[0][0], found[1][0])


# Keyword arguments


def test_keyword_arguments_by_module_and_by_index() -> None:
    square = SplitSquare()
    model, x = ops.Sequential(ops.Identity(), square, nn.Identity(), Square()), x32()
    for key in (square, 1, -3, "1"):
        assert torch.equal(model(x, op_kwargs={key: {"factor": 3.0}}), (x * x * 3) * (x * x * 3))
    got = model(x, op_kwargs={1: {"factor": 2.0}, 3: {"factor": 0.5}})
    assert torch.equal(got, (x * x * 2) * (x * x * 2) * 0.5)
    assert torch.equal(square(x, factor=3.0), x * x * 3)
    twice = ops.Sequential(square, square)
    assert torch.equal(twice(x, op_kwargs={square: {"factor": 2.0}}), (x * x * 2) * (x * x * 2) * 2)
    fuser = ops.OperationFuser([square, ops.Identity()])
    assert torch.equal(fuser(x, basic_op_kwargs=[{"factor": 3.0}, {}]), x * x * 3)


def test_keyword_arguments_that_nobody_takes() -> None:
    model = ops.Sequential(ops.GELU(), ops.Linear(WIDTH, WIDTH, **OPTIONS), ops.Identity(), ops.Dropout(0.5))
    for index, name in enumerate(("GELU", "BasicLinear", "Identity", "Dropout")):
        with pytest.raises(TypeError, match=rf"{name} got the keyword arguments \['factor'\]"):
            model(x32(), op_kwargs={index: {"factor": 1.0}})
    with pytest.raises(TypeError, match=r"AddExtraInput got the keyword arguments \['factor'\]: it takes \[\]"):
        ops.AddExtraInput()(x32(), x32(), factor=1.0)
    with pytest.raises(ValueError, match="op_kwargs has GELU, which is no module of this Sequential"):
        model(x32(), op_kwargs={ops.GELU(): {}})
    with pytest.raises(IndexError, match="index is 4: this Sequential has 4 modules"):
        model(x32(), op_kwargs={4: {}})
    with pytest.raises(IndexError, match="index is 'gelu'"):
        model(x32(), op_kwargs={"gelu": {}})


@pytest.mark.parametrize("recipe", ["none", "current", "rowwise", "block", "mxfp8", "nvfp4"])
def test_kept_weights_are_the_same_weights(recipe: str) -> None:
    """Micro-batches of one step: the weights do not change, so keeping them changes no number."""
    kept, plain = mlp(), mlp()
    for seed, first in enumerate((True, False, False, True, False)):
        if seed == 3:  # an optimizer's step
            for model in (kept, plain):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5)
        kwargs = {1: {"is_first_microbatch": first}, 3: {"is_first_microbatch": first}}
        got = step(kept, x32(seed), RECIPES[recipe], op_kwargs=kwargs)
        assert_equal(got, step(plain, x32(seed), RECIPES[recipe]))
    workspaces = kept[1].basic_ops[0]._workspaces
    assert (workspaces is None) == (recipe == "none")


def test_kept_weights_are_not_made_again() -> None:
    model, x = mlp(), x32()
    kwargs = {1: {"is_first_microbatch": True}, 3: {"is_first_microbatch": True}}
    first = step(model, x, RECIPES["current"], op_kwargs=kwargs)
    with torch.no_grad():
        model[1].weight.zero_()
    again = {1: {"is_first_microbatch": False}, 3: {"is_first_microbatch": False}}
    assert torch.equal(step(model, x, RECIPES["current"], op_kwargs=again)["output 0"], first["output 0"])
    assert not torch.equal(step(model, x, RECIPES["current"])["output 0"], first["output 0"])


@pytest.mark.compile
def test_micro_batches_in_a_graph() -> None:
    eager, model = (ops.Sequential(ops.GELU(), linear()) for _ in range(2))
    call = compiled(model)
    for seed, first in enumerate((True, False, True)):
        kwargs = {1: {"is_first_microbatch": first}}
        got = step(model, x32(seed), RECIPES["delayed"], call=call, op_kwargs=kwargs)
        assert_equal(got, step(eager, x32(seed), RECIPES["delayed"], op_kwargs=kwargs))


@over_recipes
def test_gradients_are_added_to_main_grad(recipe: str) -> None:
    plain = mlp()
    torch.manual_seed(0)
    options: dict[str, Any] = {**OPTIONS, "accumulate_into_main_grad": True}
    model = ops.Sequential(
        ops.RMSNorm(WIDTH, **OPTIONS), ops.Linear(WIDTH, 64, **options), ops.SwiGLU(), ops.Linear(32, WIDTH, **options)
    )
    model.load_state_dict(plain.state_dict())
    weights = [model[i].weight for i in (1, 3)]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    totals = [torch.zeros(weight.shape) for weight in weights]
    for seed in range(2):
        expected, got = step(plain, x32(seed), RECIPES[recipe]), step(model, x32(seed), RECIPES[recipe])
        for i, total in zip((1, 3), totals, strict=True):
            total += expected[f"{i}.basic_ops.0.weight"].float()
        others = [name for name in got if not name.endswith("basic_ops.0.weight")]
        assert_equal({n: got[n] for n in others}, {n: expected[n] for n in others})
    for weight, total in zip(weights, totals, strict=True):
        # BF16 gradients were rounded before they were added, those into FP32 were not.
        torch.testing.assert_close(weight.main_grad, total, rtol=0.02, atol=0.02)
        assert weight.main_grad.any()


# Devices, copies, checkpoints


@pytest.mark.parametrize("by_context", [True, False])
def test_meta_parameters_are_made_before_the_first_run(by_context: bool) -> None:
    def make(device: Any) -> Any:
        return ops.Sequential(
            ops.LayerNorm(WIDTH, device=device),
            ops.Linear(WIDTH, 64, device=device),
            ops.SwiGLU(),
            ops.Quantize(),
            ops.Linear(WIDTH, WIDTH, device=device),
            ops.Bias(WIDTH, device=device),
        )

    if by_context:
        with torch.device("meta"):
            model = make(None)
    else:
        model = make("meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(1)  # as `step` does, in whose forward the parameters of `model` are made
    expected = make("cpu")
    assert_equal(
        step(model, x32(dtype=torch.float32), RECIPES["delayed"]),
        step(expected, x32(dtype=torch.float32), RECIPES["delayed"]),
    )
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_meta_parameters_can_be_loaded() -> None:
    """As sharded training does it: made on meta, given memory, filled from a checkpoint."""
    expected = mlp()
    with torch.device("meta"):
        model = mlp(device=None)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, ops.BasicOperation):
            module.reset_parameters()
    model.load_state_dict(expected.state_dict(), strict=True)
    assert_equal(step(model, x32(), RECIPES["delayed"]), step(expected, x32(), RECIPES["delayed"]))


@over_recipes
def test_a_deep_copy_goes_its_own_way(recipe: str) -> None:
    model = residual(to_caller=True)
    step(model, x32(), RECIPES[recipe])
    copied = twin(model)
    assert_equal(step(copied, x32(1), RECIPES[recipe]), step(twin(model), x32(1), RECIPES[recipe]))
    kept = step(twin(model), x32(2), RECIPES[recipe])
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    step(copied, x32(3), RECIPES[recipe])
    assert_equal(step(model, x32(2), RECIPES[recipe]), kept)
    assert all(a is b for a, b in zip(copied._module_groups[0]._basic_ops[1:2], [copied[1]], strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8", "nvfp4"])
def test_linears_have_torchs_keys(recipe: str, bias: bool) -> None:
    """But for `_extra_state`, without which they load."""
    op, plain = ops.Linear(WIDTH, 48, bias=bias, **OPTIONS), nn.Linear(WIDTH, 48, bias, dtype=torch.bfloat16)
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        gradient(op(x32())).backward()
    assert op.state_dict().keys() == plain.state_dict().keys() | {"_extra_state"}
    for a, b in ((plain, op), (op, plain)):
        with torch.no_grad():
            a.weight.normal_()
        state = {key: value for key, value in a.state_dict().items() if key != "_extra_state"}
        b.load_state_dict(state, strict=True)
        for key, value in state.items():
            assert torch.equal(value, b.state_dict()[key])
    torch.testing.assert_close(op(x32()), plain(x32()), rtol=0.02, atol=0.02)
    with pytest.raises(RuntimeError, match=r'Missing key.*weight"'):
        op.load_state_dict({}, strict=True)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        op.load_state_dict({**plain.state_dict(), "other": torch.ones(1)}, strict=True)


def test_a_sequential_has_torchs_keys() -> None:
    model = shaken(ops.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 64), ops.GELU(), ops.Linear(64, WIDTH)).cpu())
    plain = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU("tanh"), nn.Linear(64, WIDTH))
    learnt = {"1._extra_state", "3._extra_state"}
    assert model.state_dict().keys() == plain.state_dict().keys() | learnt
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if key not in learnt}, strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    x = x32(dtype=torch.float32)
    torch.testing.assert_close(model(x), plain(x))


def saved_and_loaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_delayed_scaling_saves_plain_tensors() -> None:
    model = residual()
    learnt = {"2._extra_state", "4._extra_state"}
    keys = set(model.state_dict()) - learnt
    step(model, x32(), RECIPES["delayed"])
    state = model.state_dict()
    assert set(state) - keys == learnt
    assert type(state["2._extra_state"]) is torch.Tensor
    assert state["2._extra_state"].dtype == torch.float32
    other = residual()
    other.load_state_dict(saved_and_loaded(state), strict=True)
    assert_equal(step(other, x32(1), RECIPES["delayed"]), step(model, x32(1), RECIPES["delayed"]))
    other.load_state_dict({key: state[key] for key in keys}, strict=True)  # without: as torch's own modules save


@over_recipes
def test_a_resumed_run_is_the_uninterrupted_one(recipe: str) -> None:
    def train(model: Any, optimizer: Any, seeds: Any) -> list[torch.Tensor]:
        losses = []
        for seed in seeds:
            torch.manual_seed(seed)
            with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                loss = gradient(model(x32(seed)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def make() -> tuple[Any, Any]:
        model = residual()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    whole, optimizer = make()
    train(whole, optimizer, range(3))
    state = saved_and_loaded([whole.state_dict(), optimizer.state_dict()])
    expected = train(whole, optimizer, range(3, 6))
    resumed, optimizer = make()
    resumed.load_state_dict(state[0], strict=True)
    optimizer.load_state_dict(state[1])
    got = train(resumed, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert_equal(dict(resumed.state_dict()), dict(whole.state_dict()))
