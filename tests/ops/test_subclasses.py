"""A user's subclass of a built-in operation computes what it says: no fusion takes its place."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from mezzotint import ops, recipe
from tests.ops.user_ops import names, registries, step
from tests.recipes import sample

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
SPLITS = [3, 5]
FACTOR = 7.0


def linear(wide: int = 32, cls: Any = ops.BasicLinear) -> Any:
    return cls(64, wide, **OPTIONS)


def grouped(cls: Any = ops.GroupedLinear, width: int = 96) -> Any:
    return cls(2, 64, width, **OPTIONS)


# Name → what is subclassed; a pipeline in which it is fused, of the class in its place.
CHAINS: dict[str, tuple[Any, Any]] = {
    "activation": (ops.GELU, lambda cls: (linear(), ops.Bias(32, **OPTIONS), cls())),
    "bias": (ops.Bias, lambda cls: (linear(), cls(32, **OPTIONS), ops.GELU())),
    "linear before a bias": (ops.BasicLinear, lambda cls: (linear(cls=cls), ops.Bias(32, **OPTIONS))),
    "linear before a sum": (ops.BasicLinear, lambda cls: (linear(cls=cls), ops.AddExtraInput())),
    "linear before a scale": (
        ops.BasicLinear,
        lambda cls: (linear(cls=cls), ops.ConstantScale(0.5), ops.AddExtraInput()),
    ),
    "linear behind a branch": (ops.BasicLinear, lambda cls: (ops.MakeExtraOutput(in_place=True), linear(cls=cls))),
    "scale": (ops.ConstantScale, lambda cls: (linear(), cls(0.5), ops.AddExtraInput())),
    "sum": (ops.AddExtraInput, lambda cls: (linear(), ops.Bias(32, **OPTIONS), cls())),
    "branch": (ops.MakeExtraOutput, lambda cls: (cls(in_place=True), linear())),
    "branch before a norm": (ops.MakeExtraOutput, lambda cls: (cls(), ops.RMSNorm(64, **OPTIONS))),
    "norm": (ops.RMSNorm, lambda cls: (ops.MakeExtraOutput(), cls(64, **OPTIONS))),
    "first of an MLP": (ops.GroupedLinear, lambda cls: (grouped(cls, 128), ops.ScaledSwiGLU(), grouped())),
    "activation of an MLP": (ops.ScaledSwiGLU, lambda cls: (grouped(width=128), cls(), grouped())),
    "second of an MLP": (ops.GroupedLinear, lambda cls: (grouped(width=128), ops.ScaledSwiGLU(), grouped(cls))),
}
over_chains = pytest.mark.parametrize("name", CHAINS)


def build(name: str, cls: Any) -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(*CHAINS[name][1](cls))


def run(name: str, cls: Any, chosen: Any, model: Any = None, call: Any = None) -> dict[str, Any]:
    """A training step of the pipeline with this class in it."""
    model = build(name, cls) if model is None else model
    x = sample(8, dtype=torch.float32)
    kinds = [type(op) for op in model]
    extra: list[Any] = []
    if any(issubclass(kind, ops.AddExtraInput) for kind in kinds):
        extra = [sample(8, 1, torch.float32, 32)]
    if any(issubclass(kind, ops.GroupedLinear) for kind in kinds):
        run_model = model if call is None else call
        return step(
            model, x, chosen, sample(8, 2, torch.float32, 1)[:, 0], call=lambda x, s: run_model(x, SPLITS, s, SPLITS)
        )
    return step(model, x, chosen, *extra, call=call)


def sevenfold(base: Any, form: str) -> Any:
    """The class with one of its methods written anew: seven times what it gave."""
    body: dict[str, Any] = {}
    if form == "whole":

        def forward(self: Any, ctxs: Any, *args: Any, **given: Any) -> Any:
            y = getattr(super(made, self), f"{base._family}_forward")(ctxs, *args, **given)
            return y * FACTOR if base._family == "op" else (y[0] * FACTOR, y[1])

        body[f"{base._family}_forward"] = forward
    elif form == "split":

        def compute(self: Any, *args: Any, **given: Any) -> Any:
            y, *rest = getattr(super(made, self), f"{base._family}_forward_compute")(*args, **given)
            return (y * FACTOR, *rest)

        body[f"{base._family}_forward_compute"] = compute
    else:
        name = "fuser_backward" if base.fuser_backward is not ops.BasicOperation.fuser_backward else "op_backward"

        def backward(self: Any, *args: Any, **given: Any) -> Any:
            dx, *rest = getattr(super(made, self), name)(*args, **given)
            return (dx * FACTOR, *rest)

        body[name] = backward
    made = type(f"My{base.__name__}", (base,), body)
    return made


def assert_close(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@over_chains
@pytest.mark.parametrize("form", ["whole", "split", "backward"])
@pytest.mark.parametrize("chosen", [None, recipe.Float8CurrentScaling()], ids=["none", "current"])
def test_a_method_of_its_own_runs(name: str, form: str, chosen: Any) -> None:
    base = CHAINS[name][0]
    made = sevenfold(base, form)
    got = run(name, made, chosen)
    with registries(empty=True):
        expected, unchanged = run(name, made, chosen), run(name, base, chosen)
    assert_close(got, expected)
    assert not all(torch.allclose(expected[key], unchanged[key]) for key in ("output 0", "input"))


@over_chains
def test_a_subclass_without_methods_of_its_own_is_fused(name: str) -> None:
    base = CHAINS[name][0]

    class Plain(base):
        label = "mine"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.more = 1

        def extra_repr(self) -> str:
            return "mine"

        def own(self) -> int:
            return self.more

    models = [build(name, cls) for cls in (base, Plain)]
    chosen = recipe.Float8CurrentScaling()
    run(name, None, chosen, models[0])
    run(name, None, chosen, models[1])
    fused = [[[op.is_fused_op for op in groups[0]] for groups in model.fused_ops().values()] for model in models]
    assert fused[0] == fused[1]
    assert any(any(groups) for groups in fused[0])


@pytest.mark.parametrize("base", [ops.BasicLinear, ops.Linear, ops.GELU, ops.RMSNorm, ops.GroupedLinear])
def test_the_class_that_fully_shard_makes_computes_as_its_parent(base: Any) -> None:
    made: Any = type(f"FSDP{base.__name__}", (FSDPModule, base), {})  # as `fully_shard` does
    for name in ("_computes_as", "_is_module", "is_split", "_family"):
        assert getattr(made, name) is getattr(base, name), name


@pytest.mark.parametrize("helper", ["gradient", "_compute"])
def test_a_helper_that_the_fusion_stands_for_counts_too(helper: str) -> None:
    """Methods that the class's own forward and backward go through."""

    def written(self: Any, *args: Any) -> Any:
        return getattr(super(made, self), helper)(*args)

    made: Any = type("Made", (ops.GELU,), {helper: written})
    model = build("activation", made)
    run("activation", None, recipe.Float8CurrentScaling(), model)
    assert names(model.fused_ops()["forward"][0])[-1] == "Made"
    assert names(model.fused_ops()["backward"][0])[0] == "Made"


def test_a_class_mixed_in_counts_too() -> None:
    class Seven:
        def op_backward(self: Any, ctx: Any, grad_output: Any) -> Any:
            dx, grads = super().op_backward(ctx, grad_output)  # type: ignore[misc]
            return dx * FACTOR, grads

    class Mixed(Seven, ops.ConstantScale):
        pass

    with registries(empty=True):
        expected = run("scale", Mixed, None)
    assert_close(run("scale", Mixed, None), expected)


def test_a_reduce_scatter_of_its_own_is_not_overlapped() -> None:
    class Mine(ops.ReduceScatter):
        def _collect(self, x: Any) -> Any:
            return x

    for cls, count in ((ops.ReduceScatter, 1), (Mine, 2)):
        op = cls()
        op.process_group_size = 2
        fuser = ops.OperationFuser([linear(), op])
        assert len(fuser._groups(None, 2)[0]) == count


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("form", ["split", "backward"])
def test_a_subclass_in_a_graph(form: str) -> None:
    model = build("activation", sevenfold(ops.GELU, form))
    chosen = recipe.Float8CurrentScaling()
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(run("activation", None, chosen, model, call), run("activation", None, chosen, model))


# Whole operations and modules


class Adapted(ops.Linear):
    """A linear with another branch beside it, as modules are written."""

    def forward(self, input: Any, *rest: Any, **kwargs: Any) -> Any:
        return super().forward(input, *rest, **kwargs) + input.sum(-1, keepdim=True)


def test_a_forward_of_its_own_runs_in_a_pipeline() -> None:
    torch.manual_seed(0)
    adapted = Adapted(64, 32, **OPTIONS)
    model = ops.Sequential(ops.Identity(), adapted, ops.ReLU())
    x = sample(8, dtype=torch.float32)
    expected = torch.relu(torch.nn.functional.linear(x, adapted.weight, adapted.bias) + x.sum(-1, keepdim=True))
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x, op_kwargs={1: {"basic_op_kwargs": [{}, {}]}}), expected)


class OwnForward(ops.Linear):
    def fuser_forward_compute(self, input_: Any, *, basic_op_kwargs: Any, **given: Any) -> Any:
        linear_op, bias = self.basic_ops
        y, saved = linear_op.compute(input_, basic_op_kwargs[0]["run"], bias.bias)  # type: ignore[operator]
        return y * FACTOR, [(), ()], (*saved, input_)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, *, basic_op_kwargs: Any, **given: Any
    ) -> None:
        linear_op, bias = self.basic_ops
        linear_op.save(basic_op_ctxs[0], input_, tensors_to_save[:1], basic_op_kwargs[0]["run"])  # type: ignore[operator]
        bias.save(basic_op_ctxs[1])  # type: ignore[operator]


class OwnBackward(ops.Linear):
    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        linear_op, bias = self.basic_ops
        dy, db = bias.op_backward(basic_op_ctxs[1], grad_output * FACTOR)  # type: ignore[operator]
        dx, dw = linear_op.op_backward(basic_op_ctxs[0], dy)  # type: ignore[operator]
        return dx, [dw, db], [(), ()]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("cls", "changed"), [(OwnForward, "output 0"), (OwnBackward, "input")])
def test_a_fused_operation_that_is_given_runs_what_it_writes(cls: Any, changed: str, alone: bool) -> None:
    x, made = sample(8, dtype=torch.float32), []
    for each in (ops.Linear, cls):
        torch.manual_seed(0)
        op = each(64, 32, **OPTIONS)
        made.append(step(op if alone else ops.Sequential(op, ops.Identity()), x))
    for name, value in made[0].items():
        is_changed = name == changed or (changed == "input" and name.endswith(("weight", "bias")))
        torch.testing.assert_close(made[1][name], value * FACTOR if is_changed else value)


class SavesItsOwn(ops.FusedOperation):
    """A forward of users', as they were written when backward read the operations themselves."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **given: Any) -> Any:
        scale = self.basic_ops[0].scale
        basic_op_ctxs[1].save_for_backward(input_ * scale)
        return torch.nn.functional.gelu(input_ * scale, approximate="tanh"), [() for _ in self.basic_ops]


def test_contexts_that_a_users_forward_left_empty() -> None:
    x, made = sample(8, dtype=torch.float32), []
    for fuse in (lambda ops_: [SavesItsOwn(ops_)], list):
        with registries():
            ops.register_forward_fusion(lambda ops_, *, recipe, fuse=fuse: fuse(ops_), prepend=True)
            made.append(step(ops.Sequential(ops.ConstantScale(3.0), ops.GELU(), ops.AllReduce()), x))
    assert_close(*made)


# What a subclass is handed


class Upstream(ops.BasicLinear):
    """As a subclass is written there: the arguments of its forward are those, and no others."""

    def op_forward(
        self, ctx: Any, input_: Any, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> torch.Tensor:
        y = super().op_forward(
            ctx,
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
        )
        return y * FACTOR


@pytest.mark.parametrize(
    "chosen",
    [None, recipe.Float8CurrentScaling(), recipe.DelayedScaling(amax_history_len=2)],
    ids=["none", "current", "delayed"],
)
def test_a_whole_subclass_of_a_linear(chosen: Any) -> None:
    got = run("linear before a bias", Upstream, chosen)
    with registries(empty=True):
        expected = run("linear before a bias", sevenfold(ops.BasicLinear, "split"), chosen)
    assert_close(got, expected)


class Own(ops.BasicLinear):
    """Products of its own, of tensors that may come quantized."""

    def op_forward(self, ctx: Any, input_: Any, **given: Any) -> Any:
        ctx.save_for_backward(input_, self.weight)
        return torch.nn.functional.linear(input_, self.weight)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad_output @ weight, (grad_output.t() @ x,)


@pytest.mark.parametrize("chosen", [None, recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()])
def test_a_whole_form_gets_tensors(chosen: Any) -> None:
    """What a neighbour hands over quantized is a quantized tensor to it, which any operation of PyTorch takes."""
    torch.manual_seed(0)
    model = ops.Sequential(ops.RMSNorm(64, **OPTIONS), Own(64, 32, **OPTIONS), ops.GELU())
    got, x = step(model, sample(8, dtype=torch.float32), chosen), sample(8, dtype=torch.float32)
    expected = torch.nn.functional.gelu(
        torch.nn.functional.linear(torch.nn.functional.rms_norm(x, (64,)), model[1].weight), approximate="tanh"
    )
    torch.testing.assert_close(got["output 0"], expected, rtol=0.1, atol=0.1)
    assert got["1.weight"].abs().sum() > 0
