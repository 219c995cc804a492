"""The pipeline and autograd: what is saved, who owns what, where backward ends, what a change of state brings."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import ops
from mezzotint import recipe as recipes
from mezzotint.functional import linear as functional_linear
from mezzotint.ops.op import Run
from tests.ops.user_ops import (
    OPTIONS,
    CountingLinear,
    SplitGate,
    SplitSquare,
    Square,
    mlp,
    names,
    registries,
    results,
    shaken,
    step,
    twin,
)
from tests.recipes import RECIPES, STATE, assert_equal, gradient, sample

WIDTH = 32
over_recipes = pytest.mark.parametrize("recipe", ["none", "delayed", "current", "mxfp8", "nvfp4"])


def x32(seed: int = 0, rows: int = 16, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return sample(rows, seed, dtype, WIDTH)


def linear(seed: int = 0, cls: Any = ops.BasicLinear, **options: Any) -> Any:
    torch.manual_seed(seed)
    return cls(WIDTH, WIDTH, **{**OPTIONS, **options})


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager", **options)


@contextmanager
def nothing_saved() -> Iterator[None]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        yield
    assert not saved


# Without gradients


over_modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@over_recipes
@over_modes
def test_without_gradients_the_numbers_are_the_same(mode: Any, recipe: str) -> None:
    model, x = mlp(), x32()
    expected = step(twin(model), x, RECIPES[recipe])["output 0"]
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    with mode(), nothing_saved(), mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = model(leaf)
    assert not y.requires_grad
    assert y.grad_fn is None
    assert torch.equal(y, expected)
    assert leaf.requires_grad
    assert leaf.is_leaf


@over_modes
@pytest.mark.parametrize("kind", ["leaf", "non-leaf", "view", "plain"])
def test_outputs_may_be_the_input_itself(mode: Any, kind: str) -> None:
    """MakeExtraOutput gives what it got: a tensor that the caller owns, whose flags are the caller's."""
    leaf = x32().requires_grad_(kind != "plain")
    x = {"non-leaf": leaf * 1, "view": leaf[2:]}.get(kind, leaf)
    flags = x.requires_grad, x.is_leaf, x.grad_fn
    for model in (ops.MakeExtraOutput(), ops.Sequential(ops.Identity(), ops.MakeExtraOutput(), ops.Identity())):
        with mode():
            y, extra = model(x)
        assert y is x
        assert extra is x
        assert flags == (x.requires_grad, x.is_leaf, x.grad_fn)
    with mode():
        y, extra = ops.Sequential(ops.Reshape((-1, 4)), ops.MakeExtraOutput())(x)
    assert flags == (x.requires_grad, x.is_leaf, x.grad_fn)
    assert torch.equal(y, x.detach().reshape(-1, 4))
    assert torch.equal(extra, y)


class NeverSaves(SplitSquare):
    def op_forward_save_ctx(self, *args: Any, **given: Any) -> None:
        raise AssertionError("there is no backward to save for")


def test_nothing_is_saved_where_nothing_needs_a_gradient() -> None:
    frozen = linear().requires_grad_(False)
    for model in (NeverSaves(), ops.Sequential(frozen, NeverSaves())):
        with nothing_saved():
            y = model(x32())
        assert not y.requires_grad
        with torch.no_grad():
            model(x32().requires_grad_())
    with pytest.raises(AssertionError, match="no backward to save for"):
        ops.Sequential(linear(), NeverSaves())(x32())
    ops.Sequential(NeverSaves(), linear())(x32())  # its backward is not reached


@pytest.mark.compile
def test_without_gradients_in_a_graph() -> None:
    """Compiled once for training and once for evaluation; the input comes back as an extra output."""

    def make() -> Any:
        return ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(WIDTH, **OPTIONS), linear())

    eager, model = make(), make()
    call = compiled(model)
    for seed in range(2):
        x = x32(seed)
        assert_equal(step(model, x, RECIPES["delayed"], call=call), step(eager, x, RECIPES["delayed"]))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), mz.autocast(recipe=RECIPES["delayed"]):
                got, expected = call(x), eager(x)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], x)
            assert not got[0].requires_grad


def test_an_input_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x = x32()
    with torch.no_grad():
        assert torch.equal(mlp()(x), mlp()(x.clone()))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        mlp()(x)


# Extra inputs and outputs


def test_extra_inputs_and_outputs_have_gradients() -> None:
    """Against torch: y = Linear(x), with x given out and two tensors taken in."""
    torch.manual_seed(0)
    reference = nn.Linear(WIDTH, WIDTH, bias=False)
    model = ops.Sequential(
        ops.MakeExtraOutput(),
        ops.BasicLinear(WIDTH, WIDTH, device="cpu"),
        ops.AddExtraInput(),
        SplitGate(),
        ops.MakeExtraOutput(),
    )
    model[1].load_state_dict(reference.state_dict())
    tensors = [x32(seed, dtype=torch.float32).requires_grad_() for seed in range(3)]
    others = [t.detach().clone().requires_grad_() for t in tensors]
    x, added, gate = others
    y = (reference(x) + added) * gate
    expected = (y, x, gate, y)
    got = model(*tensors)
    assert len(got) == 4
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    sum(gradient(a * (i + 1)) for i, a in enumerate(got)).backward()
    sum(gradient(b * (i + 1)) for i, b in enumerate(expected)).backward()
    for a, b in zip(tensors, others, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(model[1].weight.grad, reference.weight.grad)


def test_one_output_alone_is_asked() -> None:
    """The gradient of an output that no loss reads is zero."""
    model = ops.Sequential(ops.MakeExtraOutput(), linear(), ops.MakeExtraOutput())
    for asked in range(3):
        leaf = x32().requires_grad_()
        outputs = model(leaf)
        gradient(outputs[asked]).backward()
        other = x32().requires_grad_()
        expected = (model(other)[0], other * 1, model(other)[2])[asked]
        gradient(expected).backward()
        assert torch.equal(leaf.grad, other.grad)


def test_an_extra_input_alone_needs_a_gradient() -> None:
    frozen = linear(cls=CountingLinear).requires_grad_(False)
    model = ops.Sequential(frozen, ops.AddExtraInput(), SplitSquare())
    extra = x32(1).requires_grad_()
    gradient(model(x32(), extra)).backward()
    other = x32(1).requires_grad_()
    gradient(SplitSquare()(frozen(x32()) + other)).backward()
    assert torch.equal(extra.grad, other.grad)
    assert frozen.backwards == 0


@pytest.mark.parametrize("count", [0, 2])
def test_the_wrong_number_of_extra_inputs(count: int) -> None:
    message = rf"{count} extra inputs were given.*take 1"
    with pytest.raises(ValueError, match=message):
        ops.AddExtraInput()(x32(), *[x32()] * count)
    with pytest.raises(ValueError, match=message):
        ops.Sequential(nn.Identity(), ops.AddExtraInput(), nn.Identity())(x32(), *[x32()] * count)
    with pytest.raises(ValueError, match=r"the extra input has shape \(4, 32\), the input \(16, 32\)"):
        ops.AddExtraInput()(x32(), x32(rows=4))


# Channels


def residual(*, to_caller: bool = False, in_place: bool = False, readers: int = 1) -> ops.Sequential:
    """x + f(x), with x by a channel."""
    make, inner = ops.MakeExtraOutput(in_place=in_place), list(mlp())
    make.set_extra_output_channel(0, "residual", output_to_caller=to_caller)
    adds = [ops.AddExtraInput(in_place=in_place) for _ in range(readers)]
    for add in adds:
        add.set_extra_input_channel(0, "residual")
    return ops.Sequential(make, *inner, *adds)


@over_recipes
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_a_channel_is_a_residual(recipe: str, readers: int) -> None:
    """As the caller gives the extra output back as an extra input; to the bit where one reads it."""
    model, x = residual(readers=readers), x32()
    got = step(model, x, RECIPES[recipe])
    plain = ops.Sequential(ops.MakeExtraOutput(), *mlp())
    adds = ops.Sequential(*[ops.AddExtraInput() for _ in range(readers)])

    def call(leaf: torch.Tensor) -> torch.Tensor:
        y, extra = plain(leaf)
        return adds(y, *[extra] * readers)

    expected = step(plain, x, RECIPES[recipe], call=call)
    assert torch.equal(got["output 0"], expected["output 0"])
    if readers == 1:
        assert_equal(got, expected)
    else:
        torch.testing.assert_close(got["input"], expected["input"], rtol=0.02, atol=0.05)


def test_a_channel_may_go_to_the_caller_as_well() -> None:
    x = x32()
    inside, outside = residual(), residual(to_caller=True)
    leaf = x.clone().requires_grad_()
    y, extra = outside(leaf)
    assert torch.equal(extra, x)
    gradient(y).backward()
    assert torch.equal(leaf.grad, step(inside, x)["input"])
    # The caller's gradient and those of the readers add up.
    both, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, extra = outside(both)
    (gradient(y) + extra.float().sum() * 3).backward()
    gradient(inside(other)).backward()
    torch.testing.assert_close(both.grad, other.grad + 3, rtol=0.02, atol=0.05)


def test_channels_leave_other_extra_inputs_in_order() -> None:
    make, first, second, third = ops.MakeExtraOutput(), SplitGate(), ops.AddExtraInput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "a", output_to_caller=False)
    second.set_extra_input_channel(0, "a")
    model = ops.Sequential(make, first, second, third)
    x, gate, added = (x32(seed).float() for seed in range(3))
    y, given = model(x, gate, added)
    torch.testing.assert_close(y, x * gate + x + added)
    assert torch.equal(given, gate)


def test_channels_of_two_writers() -> None:
    """Each reader has its own channel; gradients meet where they came from."""
    first, second = ops.MakeExtraOutput(), ops.MakeExtraOutput()
    first.set_extra_output_channel(0, "a", output_to_caller=False)
    second.set_extra_output_channel(0, "b", output_to_caller=False)
    gate, add = SplitGate(), ops.AddExtraInput()
    gate.set_extra_input_channel(0, "a")
    gate.set_extra_output_channel(0, "c", output_to_caller=False)
    add.set_extra_input_channel(0, "b")
    model = ops.Sequential(first, SplitSquare(), second, gate, add)
    leaf, other = (x32(dtype=torch.float32).requires_grad_() for _ in range(2))
    y = model(leaf)
    expected = other * other * other + other * other
    torch.testing.assert_close(y, expected)
    gradient(y).backward()
    gradient(expected).backward()
    torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_channels_in_a_graph(recipe: str) -> None:
    eager, model = residual(to_caller=True, readers=2), residual(to_caller=True, readers=2)
    call = compiled(model)
    for seed in range(2):
        x = x32(seed)
        assert_equal(step(model, x, RECIPES[recipe], call=call), step(eager, x, RECIPES[recipe]))


def test_channels_that_do_not_fit() -> None:
    def channelled(cls: Any, name: str) -> Any:
        op = cls()
        (op.set_extra_input_channel if cls is ops.AddExtraInput else op.set_extra_output_channel)(0, name)
        return op

    reader = channelled(ops.AddExtraInput, "a")
    with pytest.raises(ValueError, match=r"operation 1 \(AddExtraInput\) reads the channel 'a', which no operation"):
        ops.Sequential(ops.Identity(), reader)
    with pytest.raises(ValueError, match=r"operation 0 \(AddExtraInput\) reads the channel 'a'"):
        ops.Sequential(channelled(ops.AddExtraInput, "a"), channelled(ops.MakeExtraOutput, "a"))  # behind it
    with pytest.raises(ValueError, match=r"operation 1 \(MakeExtraOutput\) writes the channel 'a', which another"):
        ops.Sequential(channelled(ops.MakeExtraOutput, "a"), channelled(ops.MakeExtraOutput, "a"))
    with pytest.raises(ValueError, match="reads the channel 'a'"):  # a channel ends where a pipeline ends
        ops.Sequential(channelled(ops.MakeExtraOutput, "a"), nn.Identity(), channelled(ops.AddExtraInput, "a"))
    with pytest.raises(ValueError, match="index is 1: AddExtraInput has 1 extra inputs"):
        ops.AddExtraInput().set_extra_input_channel(1, "a")
    with pytest.raises(ValueError, match="index is 0: AddExtraInput has 0 extra outputs"):
        ops.AddExtraInput().set_extra_output_channel(0, "a")


def test_channels_are_frozen_once_a_pipeline_is_built() -> None:
    add, make = ops.AddExtraInput(), ops.MakeExtraOutput()
    add.set_extra_input_channel(0, "a")
    add.set_extra_input_channel(0, None)  # taken back
    add(x32(), x32())
    for op in (add, make):
        ops.Sequential(op)
    with pytest.raises(RuntimeError, match="AddExtraInput is in a pipeline already"):
        add.set_extra_input_channel(0, "a")
    with pytest.raises(RuntimeError, match="MakeExtraOutput is in a pipeline already"):
        make.set_extra_output_channel(0, "a")


# In place


@over_recipes
@pytest.mark.parametrize("inner", ["linear", "mlp", "square"])
def test_in_place_gives_the_same_numbers(inner: str, recipe: str) -> None:
    def make(in_place: bool) -> Any:
        middle = {"linear": lambda: [linear()], "mlp": lambda: list(mlp()), "square": lambda: [SplitSquare()]}[inner]()
        return ops.Sequential(
            ops.MakeExtraOutput(in_place=in_place), *middle, ops.AddExtraInput(in_place=in_place), ops.Identity()
        )

    expected = step(make(False), x32(), RECIPES[recipe], x32(1))
    assert_equal(step(make(True), x32(), RECIPES[recipe], x32(1)), expected)


def test_in_place_takes_the_memory_of_the_extra_input() -> None:
    model, x, extra = ops.Sequential(linear(), ops.AddExtraInput(in_place=True)), x32(), x32(1)
    expected = model(x, extra.clone())
    y = model(x, extra)
    assert y.data_ptr() == extra.data_ptr()
    assert torch.equal(y, expected)
    # Not of one that has no memory for each element, or another dtype.
    for other in (torch.ones(1, WIDTH).bfloat16().expand(16, WIDTH), x32(1, dtype=torch.float32)):
        kept = other.clone()
        assert model(x, other).data_ptr() != other.data_ptr()
        assert torch.equal(other, kept)


def test_autograd_refuses_what_in_place_wrote_over() -> None:
    leaf = x32(1).requires_grad_()
    extra = leaf.exp()  # whose backward needs its output
    y = ops.AddExtraInput(in_place=True)(x32(), extra)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(y).backward()
    x = x32().requires_grad_() * 1
    for extra in (x, x[:]):
        with pytest.raises(RuntimeError, match="wrote over the input, which backward may need"):
            ops.Sequential(SplitSquare(), ops.AddExtraInput(in_place=True))(x, extra)


def test_in_place_by_a_channel_writes_to_nothing_of_the_caller() -> None:
    for mode in (torch.enable_grad, torch.no_grad):
        x = x32()
        with mode():
            y = residual(in_place=True)(x)
        assert torch.equal(x, x32())
        assert torch.equal(y, residual()(x))
    assert_equal(step(residual(in_place=True), x32()), step(residual(), x32()))
    # The gradient that the caller gives is the caller's.
    leaf, g = x32().requires_grad_(), x32(3)
    residual(in_place=True)(leaf).backward(g)
    assert torch.equal(g, x32(3))


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("inner", ["linear", "identity"])
def test_one_gradient_for_both_outputs(inner: str, expanded: bool) -> None:
    """Of a sum autograd hands one tensor to all terms, one number for all elements perhaps: nothing may be written."""

    def run(in_place: bool) -> list[torch.Tensor]:
        middle = linear() if inner == "linear" else ops.Identity()
        model = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), middle, ops.AddExtraInput())
        leaf, third, added = (x32(seed).requires_grad_() for seed in range(3))
        out, extra = model(leaf, added)
        total = third * 2 + extra + out  # its term `third` is computed before, so its backward comes last
        loss = total.sum() if expanded else gradient(total)
        loss.backward()
        return [leaf.grad, third.grad, added.grad]

    for got, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(got, expected)


def test_several_in_place_outputs_share_a_gradient() -> None:
    def run(in_place: bool) -> torch.Tensor:
        parts = [part for seed in range(3) for part in (ops.MakeExtraOutput(in_place=in_place), linear(seed))]
        leaf = x32().requires_grad_()
        out, *extra = ops.Sequential(*parts)(leaf)
        gradient(sum(extra, out)).backward()
        return leaf.grad

    assert torch.equal(run(True), run(False))


# Views of the input


@pytest.mark.parametrize("name", ["reshape", "identity", "extra"])
def test_an_output_may_be_a_view_of_the_input(name: str) -> None:
    model: Any = {
        "reshape": ops.Reshape((WIDTH, -1)),
        "identity": ops.Identity(),
        "extra": ops.Sequential(ops.MakeExtraOutput(), ops.Reshape((-1,))),
    }[name]
    leaf = x32().requires_grad_()
    x = leaf * 1
    made = model(x)
    outputs = made if isinstance(made, tuple) else (made,)
    for y in outputs:
        assert y is not x
        assert y.data_ptr() == x.data_ptr()
        assert y.requires_grad
        assert y.grad_fn is not None
    sum(gradient(y) for y in outputs).backward()
    other = x32().requires_grad_()
    sum(gradient(other.reshape(y.shape)) for y in outputs).backward()
    assert torch.equal(leaf.grad, other.grad)
    assert x.grad_fn.name() == "MulBackward0"
    # In front of and behind torch's own operations.
    leaf.grad = other.grad = None
    made = model(leaf.exp())
    gradient((made[0] if isinstance(made, tuple) else made).cos()).backward()
    gradient(other.exp().reshape(outputs[0].shape).cos()).backward()
    assert torch.equal(leaf.grad, other.grad)


def test_an_extra_output_before_the_first_gradient_needs_none() -> None:
    model, x = ops.Sequential(ops.MakeExtraOutput(), linear(), ops.MakeExtraOutput()), x32()
    y, before, behind = model(x)
    assert [t.requires_grad for t in (y, before, behind)] == [True, False, True]
    assert before is not x
    assert before.data_ptr() == x.data_ptr()
    (gradient(y) + gradient(before) + gradient(behind)).backward()
    leaf = x32().requires_grad_()
    other = twin(model)
    other.zero_grad()
    made = other(leaf)
    (gradient(made[0]) + gradient(made[2])).backward()
    assert torch.equal(model[1].weight.grad, other[1].weight.grad)


@pytest.mark.compile
def test_one_tensor_as_input_and_as_extra_inputs_in_a_graph() -> None:
    model = ops.Sequential(SplitSquare(), ops.AddExtraInput(), SplitGate())

    def call(x: torch.Tensor) -> Any:
        return model(x, x, x)

    got, expected = (step(model, x32().float(), call=target) for target in (compiled(call), call))
    for name in expected:  # three gradients are added up, in another order
        torch.testing.assert_close(got[name], expected[name])


@pytest.mark.compile
def test_views_in_a_graph() -> None:
    model = ops.Sequential(ops.MakeExtraOutput(), ops.Reshape((WIDTH, -1)), ops.MakeExtraOutput(), ops.Identity())
    assert_equal(step(model, x32(), call=compiled(model)), step(model, x32()))


# Backward


@over_recipes
def test_two_backwards_give_the_same(recipe: str) -> None:
    model, leaf = residual(), x32().requires_grad_()
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        loss = gradient(model(leaf))
    found = []
    for retain in (True, True, False):
        torch.manual_seed(0)  # of stochastic rounding
        loss.backward(retain_graph=retain)
        found.append([leaf.grad, *[p.grad for p in model.parameters()]])
        leaf.grad = None
        model.zero_grad()
    for again in found[1:]:
        for a, b in zip(found[0], again, strict=True):
            assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@over_recipes
def test_an_operation_used_twice(recipe: str) -> None:
    """As a module used twice in one region: output, summed gradients, and delayed scaling's state."""
    op = linear()
    module = mz.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cpu")
    module.load_state_dict(op.state_dict())
    model = ops.Sequential(op, op)
    for seed in range(3):
        got = step(model, x32(seed), RECIPES[recipe])
        expected = step(module, x32(seed), RECIPES[recipe], call=lambda x: module(module(x)))
        assert torch.equal(got["output 0"], expected["output 0"])
        assert torch.equal(got["input"], expected["input"])
        assert torch.equal(got["0.weight"], expected["weight"])
        for name in STATE:
            assert torch.equal(getattr(op, name), getattr(module, name)), name
    if recipe == "delayed":
        assert (op.scale_fwd[:2] != 1).all()
        assert op.scale_bwd[0] != 1


@pytest.mark.compile
def test_an_operation_used_twice_in_a_graph() -> None:
    """Its parameters come twice, which autograd functions of a graph do not take as they are."""

    def make() -> Any:
        op, norm = linear(), ops.RMSNorm(WIDTH, **OPTIONS)
        return ops.Sequential(norm, op, norm, op)

    eager, model = make(), make()
    call = compiled(model)
    for seed in range(2):
        assert_equal(step(model, x32(seed), RECIPES["delayed"], call=call), step(eager, x32(seed), RECIPES["delayed"]))


@pytest.mark.parametrize("trained", [(0, 1, 2), (1, 2), (2,), (1,), (0,), ()])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_backward_ends_at_the_first_operation_that_needs_it(trained: tuple[int, ...], needs_grad: bool) -> None:
    linears = [linear(seed, CountingLinear) for seed in range(3)]
    for i, op in enumerate(linears):
        op.requires_grad_(i in trained)
    parts: list[Any] = [part for op in linears for part in (op, ops.GELU())]
    leaf = x32().requires_grad_(needs_grad)
    y = ops.Sequential(*parts)(leaf)
    first = 0 if needs_grad else min(trained, default=3)
    assert y.requires_grad == (first < 3)
    if not y.requires_grad:
        return
    gradient(y).backward()
    assert [op.backwards for op in linears] == [int(i >= first) for i in range(3)]
    assert [op.weight.grad is not None for op in linears] == [i in trained for i in range(3)]
    assert (leaf.grad is not None) == needs_grad
    # The gradients are those of an unfrozen pipeline.
    others = [linear(seed) for seed in range(3)]
    other = x32().requires_grad_()
    gradient(ops.Sequential(*[part for op in others for part in (op, ops.GELU())])(other)).backward()
    for op, free in zip(linears, others, strict=True):
        assert op.weight.grad is None or torch.equal(op.weight.grad, free.weight.grad)
    assert leaf.grad is None or torch.equal(leaf.grad, other.grad)


@over_recipes
@pytest.mark.parametrize("frozen", ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias"])
def test_a_frozen_parameter_changes_no_other_gradient(frozen: str, recipe: str) -> None:
    def freeze(model: Any, last: str) -> None:
        for name in model.state_dict():
            if name.endswith("state"):
                continue
            part, which = name.split(".")
            getattr(model[int(part)], which).requires_grad_(name != last)

    free, model = mlp(), mlp()
    freeze(model, frozen)
    expected, got = step(free, x32(), RECIPES[recipe]), step(model, x32(), RECIPES[recipe])
    gone = [name for name in got if got[name] is None]
    assert len(gone) == 1
    assert gone[0].endswith(frozen.split(".")[1])
    assert_equal({**got, gone[0]: expected[gone[0]]}, expected)


@over_recipes
@pytest.mark.parametrize("upto", [1, 2, 3])
def test_all_frozen_up_to_the_middle_of_a_fusion(upto: int, recipe: str) -> None:
    """Linear, bias and activation are one in forward: backward may end within."""
    free, model = mlp(), mlp()
    parameters = dict(model.named_parameters())
    for parameter in list(parameters.values())[:upto]:
        parameter.requires_grad_(False)
    expected = step(free, x32(), RECIPES[recipe], needs_grad=False)
    got = step(model, x32(), RECIPES[recipe], needs_grad=False)
    # What no backward reaches keeps delayed scaling's state of gradients as it was.
    unreached = [name for name in got if upto > 1 and name.startswith("1.basic_ops.0") and "bwd" in name]
    assert_equal(got, expected, but=(*unreached, *[name for name in got if got[name] is None]))
    assert [name for name in parameters if got[name] is None] == list(parameters)[:upto]


def test_an_input_that_needs_no_gradient() -> None:
    model = mlp()
    with_input, without = step(model, x32()), step(model, x32(), needs_grad=False)
    assert without.pop("input") is None
    del with_input["input"]
    assert_equal(without, with_input)


@over_recipes
@pytest.mark.parametrize("upto", [0, 2])
def test_an_input_gradient_that_nobody_needs_is_not_computed(
    upto: int, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first linear that is trained multiplies once in backward, the others twice."""
    model, products = ops.Sequential(*[linear(seed) for seed in range(4)]), []
    for op in list(model)[:upto]:
        op.requires_grad_(False)

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(kwargs)
        return multiply(*args, **kwargs)

    multiply = functional_linear.multiply
    monkeypatch.setattr(functional_linear, "multiply", counted)
    for needs_grad, expected in ((False, 2 * (4 - upto) - 1), (True, 8 - upto)):
        with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            y = model(x32().requires_grad_(needs_grad))
        products.clear()
        gradient(y).backward()
        assert len(products) == expected


def test_backwards_end_in_the_order_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a fused group as without fusions: processes that have fused otherwise meet over the same scales."""
    ended: list[Any] = []
    monkeypatch.setattr(Run, "end_backward", lambda run: ended.append(run.call.grad_state.scale))
    options: dict[str, Any] = {**OPTIONS, "bias": False}
    for is_empty, count in ((False, 1), (True, 3)):
        fc1, fc2 = ops.GroupedLinear(2, WIDTH, 2 * WIDTH, **options), ops.GroupedLinear(2, WIDTH, WIDTH, **options)
        model = ops.Sequential(fc1, ops.SwiGLU(), fc2)
        with registries(empty=is_empty), mz.autocast(recipe=recipes.DelayedScaling()):
            y = model(x32().requires_grad_(), [4, 12], [4, 12])
        ended.clear()
        gradient(y).backward()
        assert len(model.fused_ops()["backward"][0]) == count
        assert [scale is fc2.scale_bwd for scale in ended] == [True, False]
        assert ended[1] is fc1.scale_bwd


@over_recipes
def test_backward_is_decided_in_forward(recipe: str) -> None:
    """Whatever region it is called in."""
    expected = step(residual(), x32(), RECIPES[recipe])
    model, leaf = residual(), x32().requires_grad_()
    torch.manual_seed(1)
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = model(leaf)
    with mz.autocast(recipe=recipes.Float8BlockScaling()):
        gradient(y).backward()
    got = {"output 0": y.detach(), "input": leaf.grad, **results(model)}
    assert_equal(got, expected)


@over_recipes
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_pipeline(recipe: str, use_reentrant: bool) -> None:
    """The recomputation has the recipe and the scales of the first run, and counts nothing."""
    plain, model = residual(), residual()
    for seed in range(2):
        got = step(
            model, x32(seed), RECIPES[recipe], call=lambda x: mz.checkpoint(model, x, use_reentrant=use_reentrant)
        )
        assert_equal(got, step(plain, x32(seed), RECIPES[recipe]))


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
