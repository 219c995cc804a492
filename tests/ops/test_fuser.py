"""The pipeline and autograd: what is saved, who owns what, where backward ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from mezzotint import recipe as recipes
from mezzotint.functional import linear as functional_linear
from mezzotint.ops.run import Run
from tests.ops.pipelines import WIDTH, compiled, linear, residual, x32
from tests.ops.user_ops import OPTIONS, CountingLinear, SplitGate, SplitSquare, mlp, registries, results, step, twin
from tests.recipes import RECIPES, STATE, assert_equal, gradient

over_recipes = pytest.mark.parametrize("recipe", ["none", "delayed", "current", "mxfp8", "nvfp4"])


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
    monkeypatch.setattr(Run, "end_backward", lambda run: ended.append(run.grad_state.scale))
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
