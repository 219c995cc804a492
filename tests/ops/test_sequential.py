"""ops.Sequential as torch.nn.Sequential, and what stands between its operations."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import ops
from tests.ops.user_ops import OPTIONS, SplitGate, SplitSquare, mlp, names, step
from tests.recipes import RECIPES, assert_equal, sample

WIDTH = 32


def parts(count: int) -> list[Any]:
    return [ops.ConstantScale(i + 1) for i in range(count)]


def held(model: Any) -> list[float]:
    return [part.scale for part in model]


def pair(count: int = 4) -> tuple[Any, Any]:
    """The same modules in both."""
    made = parts(count)
    return ops.Sequential(*made), nn.Sequential(*made)


def assert_same(model: Any, torchs: Any) -> None:
    assert list(model._modules) == list(torchs._modules)
    assert all(a is b for a, b in zip(model, torchs, strict=True))
    assert len(model) == len(torchs)


# A list of modules, as torch has it


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.append(ops.ConstantScale(9)),
        lambda m: m.append(ops.ConstantScale(9)).append(ops.ConstantScale(8)),
        lambda m: m.extend(parts(2)),
        lambda m: m.insert(0, ops.ConstantScale(9)),
        lambda m: m.insert(2, ops.ConstantScale(9)),
        lambda m: m.insert(4, ops.ConstantScale(9)),
        lambda m: m.insert(-1, ops.ConstantScale(9)),
        lambda m: m.pop(1),
        lambda m: m.pop(-1),
        lambda m: m.__delitem__(0),
        lambda m: m.__delitem__(-2),
        lambda m: m.__delitem__(slice(1, 3)),
        lambda m: m.__setitem__(1, ops.ConstantScale(9)),
        lambda m: m.__setitem__(-1, ops.ConstantScale(9)),
        lambda m: m.add_module("other", ops.ConstantScale(9)),
        lambda m: m.add_module("1", ops.ConstantScale(9)),
        lambda m: setattr(m, "other", ops.ConstantScale(9)),
        lambda m: m.__iadd__(nn.Sequential(*parts(2))),
    ],
)
def test_changes_are_torchs(change: Any) -> None:
    model, torchs = pair()
    x = sample(4, width=WIDTH)
    model(x)  # what was grouped before is not run any more
    results = [change(target) for target in (model, torchs)]
    assert list(model._modules) == list(torchs._modules)
    assert held(model) == held(torchs)
    if isinstance(results[1], nn.Sequential):
        assert results[0] is model
        assert results[1] is torchs
    elif results[1] is not None:
        assert results[0] is results[1]
    assert torch.equal(model(x), torchs(x))


@pytest.mark.parametrize("index", [slice(None), slice(1, 3), slice(0, 0), slice(None, None, 2), slice(-2, None)])
def test_slices_are_torchs(index: slice) -> None:
    model, torchs = pair()
    made = model[index]
    assert type(made) is ops.Sequential
    assert_same(made, torchs[index])
    if index == slice(1, 3):
        assert_same(model.pop(index), torchs.pop(index))
        assert_same(model, torchs)
        made.append(ops.ConstantScale(9))  # its numbers start at 1: none of them is taken twice
        assert held(made) == [2, 3, 9]


def test_indices() -> None:
    model, torchs = pair()
    for i in range(-4, 4):
        assert model[i] is torchs[i]
    assert model["2"] is torchs[2]
    assert torchs[1] in model
    assert list(reversed(list(model))) == list(reversed(list(torchs)))
    for wrong in (4, -5, "other"):
        with pytest.raises(IndexError, match=r"index is .*: this Sequential has"):
            model[wrong]
    for wrong in (5, -5):
        with pytest.raises(IndexError, match="this Sequential has 4 modules"):
            model.insert(wrong, ops.Identity())
    with pytest.raises(IndexError, match="this Sequential has 0 modules"):
        ops.Sequential().pop()
    assert model.pop() is torchs[3]


def test_names() -> None:
    made = {"first": ops.ConstantScale(1), "second": ops.ConstantScale(2)}
    model = ops.Sequential(made)
    assert list(model._modules) == ["first", "second"]
    assert model.second is made["second"]
    assert model["second"] is made["second"]
    assert list(model[1:]._modules) == ["second"]
    model.append(ops.ConstantScale(3))
    assert list(model._modules) == ["first", "second", "2"]
    x = sample(4, width=WIDTH)
    assert torch.equal(model(x), ops.Sequential(*parts(3))(x))
    assert torch.equal(model(x, op_kwargs={"first": {}}), model(x))
    linears = ops.Sequential({"up": ops.Linear(WIDTH, 64, **OPTIONS), "down": ops.Linear(64, WIDTH, **OPTIONS)})
    names = ("weight", "bias", "_extra_state")
    assert set(linears.state_dict()) == {f"{linear}.{name}" for linear in ("up", "down") for name in names}


def test_sums() -> None:
    model, torchs = pair()
    other, torchs_other = pair(2)
    assert_same(model + other, torchs + torchs_other)
    assert type(model + other) is ops.Sequential
    assert held(model + parts(2)) == [1, 2, 3, 4, 1, 2]  # of any modules
    assert held(model) == [1, 2, 3, 4]
    kept = model
    model += other
    torchs += torchs_other
    assert model is kept
    assert_same(model, torchs)


def test_what_is_no_module() -> None:
    model, _ = pair()
    for change in (
        lambda: ops.Sequential(3),
        lambda: model.append(torch.relu),
        lambda: model.extend([ops.Identity(), None]),
        lambda: model.insert(0, "x"),
        lambda: model.__setitem__(0, torch.relu),
    ):
        with pytest.raises(TypeError, match="is no module: give torch"):
            change()


def test_an_empty_one_gives_its_input() -> None:
    x = sample(4)
    assert ops.Sequential()(x) is x
    with pytest.raises(ValueError, match="1 extra inputs were given: the operations of this Sequential take 0"):
        ops.Sequential()(x, x)


def test_it_is_a_module() -> None:
    model = ops.Sequential(ops.Dropout(0.5), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))
    assert not model.eval()[0].training
    assert model.to(torch.float32)[1].weight.dtype == torch.float32
    assert "(0): Dropout(p=0.5)" in repr(model)
    assert "(1): Linear(" in repr(model)
    x = sample(4, width=WIDTH, dtype=torch.float32)
    assert torch.equal(model(x), model[1](x))
    nested = nn.ModuleList([mlp(), ops.Sequential(mlp(), ops.Identity())])
    assert sum(isinstance(module, ops.Sequential) for module in nested.modules()) == 3


def test_one_operation_in_two_of_them() -> None:
    """Parameters are shared, as torch's modules share them."""
    linear = ops.Linear(WIDTH, WIDTH, **OPTIONS)
    first, second = ops.Sequential(linear, ops.GELU()), ops.Sequential(ops.GELU(), linear)
    x = sample(4, width=WIDTH)
    assert torch.equal(first(x), ops.GELU()(linear(x)))
    assert torch.equal(second(x), linear(ops.GELU()(x)))
    (first(x) + second(x)).float().sum().backward()
    both = linear.weight.grad.clone()
    linear.zero_grad()
    first(x).float().sum().backward()
    second(x).float().sum().backward()
    torch.testing.assert_close(both, linear.weight.grad, rtol=0.02, atol=0.02)


# Other modules between operations


class Shift(nn.Module):
    """Not fusible; it can be told by how much."""

    def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return x + by


def mixed() -> Any:
    """Four pipelines between torch's modules and ours."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"device": "cpu", "params_dtype": torch.bfloat16}
    return ops.Sequential(
        ops.MakeExtraOutput(),
        ops.Linear(WIDTH, WIDTH, **OPTIONS),
        nn.LayerNorm(WIDTH, dtype=torch.bfloat16),
        ops.AddExtraInput(),
        SplitGate(),
        mz.LayerNormLinear(WIDTH, WIDTH, **settings),
        Shift(),
        ops.GELU(),
        ops.BasicLinear(WIDTH, WIDTH, **OPTIONS),
        ops.AddExtraInput(),
        ops.Sequential(ops.GELU(), ops.Identity()),
        ops.MakeExtraOutput(),
    )


def one_by_one(model: Any, x: torch.Tensor, *extra: torch.Tensor) -> Any:
    """The same, each module called on its own."""
    outputs = []
    rest = list(extra)
    for module in model:
        count = getattr(module, "num_extra_inputs", 0)
        made = module(x, *rest[:count])
        rest = rest[count:]
        x, *more = made if isinstance(made, tuple) else (made,)
        outputs.extend(more)
    return (x, *outputs)


def test_groups() -> None:
    groups = mixed()._module_groups
    kinds = [type(group).__name__ for group in groups]
    fuser = "OperationFuser"
    assert kinds == [fuser, "LayerNorm", fuser, "LayerNormLinear", "Shift", fuser, "Sequential", fuser]
    assert [len(group._basic_ops) for group in groups if isinstance(group, ops.OperationFuser)] == [3, 2, 3, 1]
    model = mixed()
    with torch.no_grad():
        model(sample(4, width=WIDTH), *[sample(4, i, width=WIDTH) for i in range(3)])
    made = model.fused_ops()["forward"]
    assert [names(group) for group in made] == [
        ["MakeExtraOutput", "ForwardLinearBiasActivation"],
        ["AddExtraInput", "SplitGate"],
        ["GELU", "ForwardLinearBiasAdd"],
        ["MakeExtraOutput"],
    ]


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "mxfp8"])
def test_extra_inputs_go_to_their_pipelines(recipe: str) -> None:
    model, other = mixed(), mixed()
    x, extra = sample(8, width=WIDTH), [sample(8, i + 1, width=WIDTH) for i in range(3)]
    got = step(model, x, RECIPES[recipe], *extra)
    expected = step(other, x, RECIPES[recipe], *extra, call=lambda *given: one_by_one(other, *given))
    assert [name for name in got if name.startswith("output")] == [f"output {i}" for i in range(4)]
    for name in expected:  # a bias is added before the one rounding of a fused linear
        torch.testing.assert_close(got[name], expected[name], rtol=0.02, atol=0.1)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_the_wrong_number_over_several_pipelines(count: int) -> None:
    x = sample(4, width=WIDTH)
    with pytest.raises(ValueError, match=f"{count} extra inputs were given: the operations of this Sequential take 3"):
        mixed()(x, *[x] * count)


def test_keyword_arguments_go_to_other_modules_too() -> None:
    shift, x = Shift(), sample(4, width=WIDTH)
    model = ops.Sequential(SplitSquare(), shift, SplitSquare())
    got = model(x, op_kwargs={shift: {"by": 2.0}, 2: {"factor": 3.0}})
    y = x * x + 2.0
    assert torch.equal(got, y * y * 3)
    assert torch.equal(model(x, op_kwargs={1: {"by": 2.0}}), y * y)


@pytest.mark.slow
@pytest.mark.compile
def test_a_mix_compiles_whole() -> None:
    eager, model = mixed(), mixed()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, fullgraph=True, backend=counter)
    for seed in range(3):
        x, *extra = (sample(8, seed + i, width=WIDTH) for i in range(4))
        got = step(model, x, RECIPES["delayed"], *extra, call=call)
        expected = step(eager, x, RECIPES["delayed"], *extra)
        for name in expected:  # torch's norm and sums are other code in a graph
            torch.testing.assert_close(got[name], expected[name], rtol=0.02, atol=0.1)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.compile
def test_a_change_is_another_graph() -> None:
    model = ops.Sequential(*parts(2))
    call, x = torch.compile(model, fullgraph=True, backend="aot_eager"), sample(4, width=WIDTH)
    for change in (lambda: None, lambda: model.append(ops.ConstantScale(3)), lambda: model.pop(0)):
        change()
        assert_equal(step(model, x, call=call), step(model, x))


def test_missing_keys_have_the_names_of_the_state_dict() -> None:
    model = ops.Sequential(ops.Linear(16, 16, device="cpu"), ops.GELU())
    state = model.state_dict()
    assert sorted(state) == ["0._extra_state", "0.bias", "0.weight"]
    del state["0.weight"]
    assert model.load_state_dict(state, strict=False).missing_keys == ["0.weight"]
