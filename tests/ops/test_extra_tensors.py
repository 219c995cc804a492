"""Extra inputs and outputs of a pipeline, channels between its operations, operations in place."""

from typing import Any

import pytest
import torch
from torch import nn

from mezzotint import ops
from mezzotint.ops import fusion
from tests.ops.pipelines import WIDTH, compiled, linear, residual, x32
from tests.ops.user_ops import CountingLinear, SplitGate, SplitSquare, mlp, step
from tests.recipes import RECIPES, assert_equal, gradient

over_recipes = pytest.mark.parametrize("recipe", ["none", "delayed", "current", "mxfp8", "nvfp4"])


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


@pytest.mark.cover(1)
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


class _RowMeans(ops.BasicOperation):
    """x, and the mean of each row's squares as an extra output."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **given: Any) -> Any:
        basic_op_ctxs[0].save_for_backward(input_)
        return input_, [(input_.square().mean(-1, keepdim=True),)]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        (x,) = basic_op_ctxs[0].saved_tensors
        return grad_output + basic_op_grad_extra_outputs[0][0] * 2 * x / x.shape[-1], [()], [()]


class _TimesRow(ops.BasicOperation):
    """x times an extra input, whose gradient is computed where it says that it needs one."""

    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **given: Any) -> Any:
        (row,) = basic_op_extra_inputs[0]
        basic_op_ctxs[0].needs_row = row.requires_grad
        basic_op_ctxs[0].save_for_backward(input_, row)
        return input_ * row, [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        x, row = basic_op_ctxs[0].saved_tensors
        drow = (grad_output * x).sum(-1, keepdim=True) if basic_op_ctxs[0].needs_row else None
        return grad_output * row, [()], [(drow,)]


@pytest.mark.parametrize("to_caller", [False, True])
def test_a_channel_that_a_whole_operation_computes_needs_a_gradient(to_caller: bool) -> None:
    """Of operations as Transformer Engine's users write them, against autograd."""
    producer, consumer = _RowMeans(), _TimesRow()
    producer.set_extra_output_channel(0, "means", output_to_caller=to_caller)
    consumer.set_extra_input_channel(0, "means")
    model = ops.Sequential(producer, consumer)
    x, other = (x32(dtype=torch.float32).requires_grad_() for _ in range(2))
    means = other.square().mean(-1, keepdim=True)
    expected = [other * means, *[means] * to_caller]
    made = model(x)
    for actual, value in zip(made if to_caller else [made], expected, strict=True):
        assert torch.equal(actual, value)
        assert actual.grad_fn is not None
    sum(gradient(value) for value in (made if to_caller else [made])).backward()
    sum(gradient(value) for value in expected).backward()
    torch.testing.assert_close(x.grad, other.grad)
    with torch.no_grad():
        made = model(x)
        assert not any(value.requires_grad for value in (made if to_caller else [made]))


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


@pytest.mark.cover(0)
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
    with pytest.raises(
        ValueError, match=r"operation 1 \(AddExtraInput\) reads the channel 'a', which has no producer: call"
    ):
        ops.Sequential(ops.Identity(), reader)
    with pytest.raises(
        ValueError, match="reads the channel 'a', which has no earlier producer, only operation 1: call"
    ):
        ops.Sequential(channelled(ops.AddExtraInput, "a"), channelled(ops.MakeExtraOutput, "a"))  # behind it
    with pytest.raises(
        ValueError, match=r"operation 1 \(MakeExtraOutput\) writes the channel 'a', .*multiple producers"
    ):
        ops.Sequential(channelled(ops.MakeExtraOutput, "a"), channelled(ops.MakeExtraOutput, "a"))
    with pytest.raises(ValueError, match="reads the channel 'a'"):  # a channel ends where a pipeline ends
        ops.Sequential(channelled(ops.MakeExtraOutput, "a"), nn.Identity(), channelled(ops.AddExtraInput, "a"))
    with pytest.raises(IndexError, match="index is 1, out of range: AddExtraInput has 1 extra inputs"):
        ops.AddExtraInput().set_extra_input_channel(1, "a")
    with pytest.raises(IndexError, match="index is 0, out of range: AddExtraInput has 0 extra outputs"):
        ops.AddExtraInput().set_extra_output_channel(0, "a")
    for channel in ("", 3):
        with pytest.raises(ValueError, match="give a non-empty string"):
            ops.AddExtraInput().set_extra_input_channel(0, channel)
    with pytest.raises(TypeError, match="output_to_caller must be a bool"):
        ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=1)


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


class _Doubled(ops.FusedOperation):
    """A residual and the sum with it, as one: the channel between them stays inside."""

    def __init__(self, start: ops.MakeExtraOutput, end: ops.AddExtraInput, gives: bool) -> None:
        super().__init__((start, end))
        self.gives = gives

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **given: Any) -> Any:
        assert basic_op_extra_inputs == [(), (None,)]
        return 2 * input_, [(input_ if self.gives else None,), ()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        ((extra,), _) = basic_op_grad_extra_outputs
        return 2 * grad_output + (0 if extra is None else extra), [(), ()], [(), (grad_output,)]


@pytest.mark.parametrize("to_caller", [True, False])
def test_a_channel_inside_of_a_fused_operation(monkeypatch: pytest.MonkeyPatch, to_caller: bool) -> None:
    start, end = ops.MakeExtraOutput(), ops.AddExtraInput()
    start.set_extra_output_channel(0, "residual", output_to_caller=to_caller)
    end.set_extra_input_channel(0, "residual")
    fused = _Doubled(start, end, to_caller)
    monkeypatch.setattr(fusion, "FORWARD_BACKWARD_FUSIONS", [])
    ops.register_forward_backward_fusion(lambda given, *, recipe: [fused])
    x = torch.randn(4, requires_grad=True)
    made = ops.Sequential(start, end)(x)
    y, *extra = made if to_caller else (made,)
    assert torch.equal(y, 2 * x)
    (y.sum() + sum(3 * each.sum() for each in extra)).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0 if to_caller else 2.0] * 4


def test_a_channel_that_is_left_out_is_named() -> None:
    class Silent(ops.BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **given: Any) -> Any:
            return input_, [(None,)]

    start, end = Silent(), ops.AddExtraInput()
    start.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    with pytest.raises(RuntimeError, match=r"operation 1 reads the channel 'residual' outside .* gave None"):
        ops.Sequential(start, end)(torch.ones(4))
    start, end = Silent(), ops.AddExtraInput()
    start.set_extra_output_channel(0, "residual", output_to_caller=True)
    end.set_extra_input_channel(0, "residual")
    with pytest.raises(
        RuntimeError, match=r"operation 0 \(Silent\) gave None for the channel 'residual', which is public"
    ):
        ops.Sequential(start, end)(torch.ones(4))
