"""The forms that a forward is written in, and what an operation is told when it is written wrongly."""

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

import mezzotint as mz
from mezzotint import ops
from tests.ops.user_ops import OPTIONS, Gate, SplitGate, SplitSquare, Square, registries, step
from tests.recipes import RECIPES, assert_equal, sample


def method(*args: Any, **kwargs: Any) -> None:
    """In the place of any forward."""


FORMS = {
    "op": ("op_forward", "op_forward_compute", "op_forward_save_ctx"),
    "fuser": ("fuser_forward", "fuser_forward_compute", "fuser_forward_save_ctx"),
}
WRITTEN = [("op", ops.BasicOperation), ("fuser", ops.BasicOperation), ("fuser", ops.FusedOperation)]
over_bases = pytest.mark.parametrize(("family", "base"), WRITTEN)


def define(base: Any, *names: str) -> Any:
    return type("Made", (base,), dict.fromkeys(names, method))


# At class definition


@over_bases
def test_both_forms_raise(family: str, base: Any) -> None:
    whole, compute, save = FORMS[family]
    with pytest.raises(TypeError, match=rf"Made defines {whole} and {compute}.*whole or split") as error:
        define(base, whole, compute, save)
    assert f"def {compute}(self, input_, *" in str(error.value)
    assert f"def {save}(self" in str(error.value)


@over_bases
@pytest.mark.parametrize("half", [1, 2])
def test_half_a_form_raises(family: str, base: Any, half: int) -> None:
    name, other = FORMS[family][half], FORMS[family][3 - half]
    with pytest.raises(TypeError, match=f"Made defines {name} without {other}") as error:
        define(base, name)
    assert f"def {other}(self" in str(error.value)
    with pytest.raises(TypeError, match=f"Made defines {name} without {other}"):
        define(base, name, FORMS[family][0])  # beside the whole form


@pytest.mark.parametrize(("whole", "split"), [("op", "fuser"), ("fuser", "op")])
def test_both_forms_raise_across_families(whole: str, split: str) -> None:
    with pytest.raises(TypeError, match="whole or split, not both"):
        define(ops.BasicOperation, FORMS[whole][0], *FORMS[split][1:])


def test_the_base_classes_forwards_are_no_halves() -> None:
    """A subclass of BasicOperation inherits methods of all names: none of them completes a half."""
    with pytest.raises(TypeError, match="without op_forward_save_ctx"):
        define(define(ops.BasicOperation), "op_forward_compute")


@over_bases
def test_each_form_alone_is_fine(family: str, base: Any) -> None:
    whole, compute, save = FORMS[family]
    assert not define(base, whole).is_split
    assert define(base, compute, save).is_split


def test_a_half_may_come_from_a_class_mixed_in() -> None:
    class Saves:
        op_forward_save_ctx = SplitSquare.op_forward_save_ctx

    class Computes:
        op_forward_compute = SplitSquare.op_forward_compute

    class Mixed(Computes, Saves, ops.BasicOperation):
        op_backward = SplitSquare.op_backward

    assert Mixed.is_split
    assert_equal(step(Mixed(), sample(8)), step(SplitSquare(), sample(8)))
    with pytest.raises(TypeError, match="without op_forward_compute"):
        type("Half", (Saves, ops.BasicOperation), {})
    with pytest.raises(TypeError, match="whole or split"):
        type("Both", (Computes, Saves, ops.BasicOperation), {"op_forward": method})


# Subclasses


class WholeOfSplit(SplitSquare):
    """Inherits split halves, which must not run."""

    def op_forward(self, ctx: Any, input_: Any, **given: Any) -> Any:
        ctx.save_for_backward(input_ * 3)
        ctx.factor = 3.0
        return input_ * input_ * 9


class SplitOfWhole(Square):
    def op_forward_compute(self, input_: Any, **given: Any) -> Any:
        return input_ * input_ * 9, (input_ * 3,)

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **given: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)
        ctx.factor = 3.0


class OtherCompute(SplitSquare):
    """One half: the other one is the parent's."""

    def op_forward_compute(self, input_: Any, **given: Any) -> Any:
        return input_ * input_ * 9, (input_ * 9,)


class OtherSave(SplitOfWhole):
    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **given: Any) -> None:
        ctx.save_for_backward(input_)
        ctx.factor = 9.0


class FuserOverOp(SplitSquare):
    """From one family to the other."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **given: Any) -> Any:
        basic_op_ctxs[0].save_for_backward(input_)
        basic_op_ctxs[0].factor = 9.0
        return input_ * input_ * 9, [()]


class OpOverFuser(FuserOverOp):
    op_forward = WholeOfSplit.op_forward


class GrandChild(OtherCompute):
    """Nothing of its own."""


@pytest.mark.parametrize(
    ("cls", "is_split"),
    [
        (WholeOfSplit, False),
        (SplitOfWhole, True),
        (OtherCompute, True),
        (OtherSave, True),
        (FuserOverOp, False),
        (OpOverFuser, False),
        (GrandChild, True),
    ],
)
def test_a_subclass_uses_its_own_form(cls: Any, is_split: bool) -> None:
    assert cls.is_split == is_split
    x = sample(8, dtype=torch.float32)
    got, expected = step(cls(), x), step(Square(), x, factor=9.0)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name])


def test_a_subclass_of_a_fused_operation_keeps_the_other_half() -> None:
    class Doubled(ops.fused.ForwardLinearBiasActivation):
        def fuser_forward_compute(self, input_: Any, **given: Any) -> Any:
            y, extra, saved = super().fuser_forward_compute(input_, **given)
            return y * 2, extra, saved

    assert Doubled.is_split
    with pytest.raises(TypeError, match="whole or split"):
        define(Doubled, "fuser_forward", "fuser_forward_compute")
    assert not define(Doubled, "fuser_forward").is_split

    def fuse(pipeline: Any, *, recipe: Any) -> Any:
        return [Doubled(linear=pipeline[0], bias=pipeline[1], activation=None)]

    linear = ops.Linear(64, 16, **OPTIONS)
    expected = linear(sample(8)) * 2
    with registries():
        ops.register_forward_fusion(fuse, prepend=True)
        assert torch.equal(ops.Sequential(linear)(sample(8)), expected)


def test_the_halves_of_a_split_form_make_a_whole_one() -> None:
    """Upstream's code calls `op_forward` and `fuser_forward` itself."""
    x = sample(8)
    given: dict[str, Any] = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
    ctx = ops.OperationContext()
    assert torch.equal(SplitSquare().op_forward(ctx, x, factor=2.0, **given), x * x * 2)
    assert ctx.factor == 2.0
    assert ctx.to_save[0] is x
    for op in (SplitSquare(), Square()):
        ctx = ops.OperationContext()
        y, extra = op.fuser_forward([ctx], x, basic_op_extra_inputs=[()], basic_op_kwargs=[{"factor": 2.0}], **given)
        assert torch.equal(y, x * x * 2)
        assert extra == [()]
        assert ctx.factor == 2.0


GIVEN: dict[str, Any] = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}


@pytest.mark.parametrize("cls", [SplitOfWhole, OtherSave])
def test_a_split_subclass_has_no_whole_form_of_its_parent(cls: Any) -> None:
    x, ctx = sample(8, dtype=torch.float32), ops.OperationContext()
    assert torch.equal(cls().op_forward(ctx, x, **GIVEN), x * x * 9)
    assert ctx.factor == (3.0 if cls is SplitOfWhole else 9.0)
    y, _ = cls().fuser_forward([ctx], x, basic_op_extra_inputs=[()], basic_op_kwargs=[{}], **GIVEN)
    assert torch.equal(y, x * x * 9)


def test_a_form_of_one_family_hides_those_of_the_other() -> None:
    """Also for who calls `fuser_forward` and `fuser_backward`, as a pipeline does."""

    class SplitOverFuser(FuserOverOp):
        op_forward_compute = SplitOfWhole.op_forward_compute
        op_forward_save_ctx = SplitOfWhole.op_forward_save_ctx

    class Backward(SplitSquare):
        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **given: Any) -> Any:
            raise AssertionError("not this one")

    class OpBackward(Backward):
        op_backward = Square.op_backward

    x = sample(8, dtype=torch.float32)
    for cls in (OpOverFuser, SplitOverFuser):
        given: dict[str, Any] = {"basic_op_extra_inputs": [()], "basic_op_kwargs": [{}], **GIVEN}
        ctx = ops.OperationContext()
        cls().fuser_forward([ctx], x, **given)
        assert ctx.factor == 3.0
    assert_equal(step(OpBackward(), x), step(SplitSquare(), x))


def test_a_child_completes_a_half_that_a_class_mixed_in_wrote() -> None:
    class Halves:
        op_forward_compute = SplitOfWhole.op_forward_compute
        op_forward_save_ctx = SplitOfWhole.op_forward_save_ctx

    class Split(Halves, Square):
        pass

    class Child(Split):
        def op_forward_save_ctx(self, ctx: Any, *args: Any, **given: Any) -> None:
            super().op_forward_save_ctx(ctx, *args, **given)

    x = sample(8)
    assert_equal(step(Child(), x), step(SplitOfWhole(), x))


@pytest.mark.parametrize("whole", [True, False])
def test_a_forward_without_extra_inputs_of_an_operation_with_some_raises(whole: bool) -> None:
    forms = (Square,) if whole else (SplitSquare,)
    cls = type("Made", forms, {"num_extra_inputs": 1})
    with pytest.raises(TypeError, match=r"extra inputs.*fuser_forward_compute"):
        cls()(sample(8), sample(8))


@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
@pytest.mark.parametrize("make", ["linear", "grouped", "quantize", "fused"])
def test_built_in_forwards_are_called_by_users(make: str, recipe: str) -> None:
    """Of upstream's code: a forward gets a context and the quantizers of the neighbours, and nothing else."""
    torch.manual_seed(0)
    linear, bias = ops.BasicLinear(64, 32, **OPTIONS), ops.Bias(32, **OPTIONS)
    made: dict[str, Any] = {
        "linear": linear,
        "grouped": ops.GroupedLinear(2, 64, 32, **OPTIONS),
        "quantize": ops.Quantize(True, True),
        "fused": ops.fused.ForwardLinearBiasActivation(linear=linear, bias=bias, activation=None),
    }
    op, x, splits = made[make], sample(8), [3, 5]
    extra = (splits,) if make == "grouped" else ()
    basic = list(op.basic_ops) if make == "fused" else [op]
    chosen = RECIPES[recipe]
    with mz.autocast(enabled=chosen is not None, recipe=chosen), torch.no_grad():
        expected = copy.deepcopy(op)(x, *extra)

    ctxs = [ops.OperationContext() for _ in basic]
    with mz.autocast(enabled=chosen is not None, recipe=chosen):
        if make in ("linear", "quantize"):
            y = op.op_forward(ctxs[0], x, **GIVEN)
        else:
            given = {"basic_op_extra_inputs": [extra for _ in basic], "basic_op_kwargs": [{} for _ in basic]}
            y, _ = op.fuser_forward(ctxs, x, **given, **GIVEN)
    plain = y.dequantize() if isinstance(y, mz.QuantizedTensorStorage) else y
    expected = expected.dequantize() if isinstance(expected, mz.QuantizedTensor) else expected
    assert torch.equal(plain, expected)
    if make == "linear":
        ctxs[0].saved_tensors = ctxs[0].to_save
        dx, (dw,) = op.op_backward(ctxs[0], torch.ones_like(y))
        assert (dx.shape, dw.shape) == (x.shape, op.weight.shape)
        with pytest.raises(TypeError, match=r"keyword arguments \['unknown'\]"):
            op.op_forward(ops.OperationContext(), x, unknown=1, **GIVEN)


# Whole forms in eager code and in graphs


def test_both_forms_compute_the_same() -> None:
    x, gate = sample(8), sample(8, 1)
    assert_equal(step(Square(), x, factor=3.0), step(SplitSquare(), x, factor=3.0))
    assert_equal(step(Gate(), x, None, gate), step(SplitGate(), x, None, gate))
    leaf = x.float().requires_grad_()
    (leaf * leaf * gate.float()).sum().backward()
    pipeline = ops.Sequential(Square(), Gate())
    other = x.float().requires_grad_()
    pipeline(other, gate.float())[0].sum().backward()
    torch.testing.assert_close(other.grad, leaf.grad)


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("make", [Square, lambda: ops.Sequential(ops.Identity(), Square()), Gate])
def test_a_whole_form_breaks_the_graph_and_says_why(make: Any) -> None:
    op, x = make(), sample(8)
    extra = (sample(8, 1),) if isinstance(op, Gate) else ()
    with pytest.raises(Unsupported, match="whole form") as error:
        torch.compile(op, fullgraph=True, backend="aot_eager")(x, *extra)
    for name in ("op_forward_compute", "op_forward_save_ctx", "fuser_forward_compute", "fuser_forward_save_ctx"):
        assert name in str(error.value)
    torch._dynamo.reset()
    assert_equal(step(op, x, None, *extra, call=torch.compile(op, backend="aot_eager")), step(op, x, None, *extra))


@pytest.mark.compile
@pytest.mark.parametrize(("make", "extra"), [(SplitSquare, ()), (SplitGate, (sample(8, 1),)), (OtherSave, ())])
def test_a_split_form_compiles_whole(make: Any, extra: Any) -> None:
    op, x = make(), sample(8)
    call = torch.compile(op, fullgraph=True, backend="aot_eager")
    assert_equal(step(op, x, None, *extra, call=call), step(op, x, None, *extra))


class WholeFusion(ops.FusedOperation):
    """Two squares at once, whole."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **given: Any) -> Any:
        middle = input_ * input_
        for ctx, x in zip(basic_op_ctxs, (input_, middle), strict=True):
            ctx.save_for_backward(x)
            ctx.factor = 1.0
        return middle * middle, [(), ()]


def fuse_squares(pipeline: Any, *, recipe: Any) -> Any:
    return [WholeFusion(pipeline)]


@pytest.mark.compile
def test_a_whole_form_of_a_fused_operation_breaks_the_graph_too() -> None:
    x = sample(8)
    with registries():
        ops.register_forward_fusion(fuse_squares, prepend=True)
        model = ops.Sequential(SplitSquare(), SplitSquare())
        expected = step(model, x)
        assert type(model.fused_ops()["forward"][0][0]) is WholeFusion
        with pytest.raises(Unsupported, match="whole form"):
            torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        torch._dynamo.reset()
        assert_equal(step(model, x, call=torch.compile(model, backend="aot_eager")), expected)


@pytest.mark.compile
def test_whole_operations_in_a_fused_one_that_is_split_compile() -> None:
    class SplitFusion(ops.FusedOperation):
        def fuser_forward_compute(self, input_: Any, **given: Any) -> Any:
            middle = input_ * input_
            return middle * middle, [(), ()], (input_, middle)

        def fuser_forward_save_ctx(self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **given: Any) -> None:
            for ctx, x in zip(basic_op_ctxs, tensors_to_save, strict=True):
                ctx.save_for_backward(x)
                ctx.factor = 1.0

    def fuse(pipeline: Any, *, recipe: Any) -> Any:
        return [SplitFusion(pipeline)]

    x, model = sample(8), ops.Sequential(Square(), Square())
    expected = step(ops.Sequential(Square(), Square()), x)
    with registries():
        ops.register_forward_fusion(fuse)
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_equal(step(model, x, call=call), expected)


# Contexts


def test_context() -> None:
    ctx = ops.OperationContext()
    assert ctx.requires_grad
    assert ctx.saved_tensors == ()
    x = sample(8)
    ctx.save_for_backward(x, None)
    ctx.anything = {"a": 1}
    assert ctx.to_save[0] is x
    assert ctx.anything == {"a": 1}
    with pytest.raises(AttributeError, match="other"):
        _ = ctx.other


def test_what_backward_writes_is_not_there_in_a_second_backward() -> None:
    class Writes(SplitSquare):
        def op_backward(self, ctx: Any, grad_output: Any) -> Any:
            assert ctx.requires_grad
            assert not hasattr(ctx, "seen")
            ctx.seen, ctx.factor = True, ctx.factor * 2
            return super().op_backward(ctx, grad_output)

    op, leaf = Writes(), sample(8).requires_grad_()
    y = op(leaf)
    y.sum().backward(retain_graph=True)
    first = leaf.grad
    leaf.grad = None
    y.sum().backward()
    assert torch.equal(first, leaf.grad)


def test_saved_tensors_are_watched_by_autograd() -> None:
    """They go through `save_for_backward`: writing to one of them is an error, not a wrong gradient."""
    leaf = sample(8).requires_grad_()
    x = leaf * 1
    y = SplitSquare()(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_quantized_storage_and_none_can_be_saved() -> None:
    from mezzotint import DType, Float8CurrentScalingQuantizer

    class Saves(ops.BasicOperation):
        def op_forward_compute(self, input_: Any, **given: Any) -> Any:
            quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu", rowwise=True, columnwise=False)
            return input_ * 1, (None, quantizer(input_), input_)

        def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **given: Any) -> None:
            ctx.save_for_backward(*tensors_to_save)

        def op_backward(self, ctx: Any, grad_output: Any) -> Any:
            nothing, x_q, x = ctx.saved_tensors
            assert nothing is None
            torch.testing.assert_close(x_q.dequantize(), x, atol=0.2, rtol=0.1)
            return grad_output, ()

    assert step(Saves(), sample(8))["input"] is not None


# Errors


class Wrong(ops.BasicOperation):
    """Gives as many of everything as it is told."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, params: int = 1, extra_inputs: int = 1, extra_outputs: int = 1, ops_: int = 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.counts = params, extra_inputs, extra_outputs, ops_

    def fuser_forward_compute(self, input_: Any, **given: Any) -> Any:
        return input_ * 1, [(input_ * 1,) * self.counts[2]] * self.counts[3], ()

    def fuser_forward_save_ctx(self, *args: Any, **given: Any) -> None:
        pass

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        return grad_output, [(torch.ones(1),) * self.counts[0]], [(grad_output,) * self.counts[1]]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"params": 2}, "Wrong gave gradients of 2 parameters: it has 1"),
        ({"params": 0}, "Wrong gave gradients of 0 parameters: it has 1"),
        ({"extra_inputs": 0}, "Wrong gave gradients of 0 extra inputs: it has 1"),
        ({"extra_outputs": 2}, r"operation 0 \(Wrong\) gave 2 extra outputs: it has 1"),
        ({"ops_": 2}, "Wrong gave extra outputs of 2 operations: it stands for 1"),
    ],
)
def test_wrong_numbers_raise(counts: dict[str, int], message: str) -> None:
    x = sample(8)
    step(Wrong(), x, None, x)
    with pytest.raises(RuntimeError, match=message):
        step(Wrong(**counts), x, None, x)


def test_what_is_not_written_is_named() -> None:
    class Nothing(ops.BasicOperation):
        pass

    class NoBackward(ops.BasicOperation):
        op_forward_compute = SplitSquare.op_forward_compute
        op_forward_save_ctx = SplitSquare.op_forward_save_ctx

    with pytest.raises(NotImplementedError, match=r"Nothing has no forward.*\n.*def op_forward_compute"):
        Nothing()(sample(8))
    y = NoBackward()(sample(8).requires_grad_())
    with pytest.raises(NotImplementedError, match="NoBackward has no backward: write op_backward"):
        y.sum().backward()

    class NothingFused(ops.FusedOperation):
        pass

    def fuse(pipeline: Any, *, recipe: Any) -> Any:
        return [NothingFused(pipeline)]

    with registries():
        ops.register_backward_fusion(fuse)
        y = SplitSquare()(sample(8).requires_grad_())
        with pytest.raises(NotImplementedError, match="NothingFused has no backward: write fuser_backward"):
            y.sum().backward()
        ops.register_forward_fusion(fuse)
        with pytest.raises(NotImplementedError, match=r"NothingFused has no forward.*\n.*def fuser_forward_compute"):
            SplitSquare()(sample(8))


def test_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="basic_ops is empty: FusedOperation needs"):
        ops.FusedOperation([])
    with pytest.raises(ValueError, match="ops is empty"):
        ops.OperationFuser([])
    with pytest.raises(TypeError, match="a pipeline holds Linear: give a BasicOperation"):
        ops.OperationFuser([torch.nn.Linear(2, 2)])  # type: ignore[list-item]
    linear = ops.BasicLinear(64, 16, **OPTIONS)
    with pytest.raises(ValueError, match="mode is 'both': give 'forward' or 'backward'"):
        linear.get_quantizer("both", 0)
    with pytest.raises(ValueError, match="index is 2: BasicLinear has 2 quantizers in mode 'forward'"):
        linear.get_quantizer("forward", 2)
    with pytest.raises(ValueError, match=r"input has shape \(8, 32\): its last dimension must be 64"):
        linear(sample(8, width=32))
    with pytest.raises(TypeError, match=r"inp has dtype torch.int64"):
        linear(torch.ones(8, 64, dtype=torch.int64))
    with pytest.raises(ValueError, match="basic_op_kwargs has 2 entries: this pipeline has 1"):
        ops.OperationFuser([linear])(sample(8), basic_op_kwargs=[{}, {}])
