"""Which operations are run as one: registries, the window matcher, the shipped fusions and users' own."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from mezzotint.ops import fused
from mezzotint.ops.fusion import replace_windows
from tests.ops.user_ops import OPTIONS, SplitSquare, mlp, names, registries, step
from tests.recipes import RECIPES, assert_equal, sample, splits

WIDTH = 64


# The window matcher


class Pair(ops.FusedOperation):
    """Two at once, in forward: their own forwards, one after the other."""

    def fuser_forward_compute(self, input_: Any, *, basic_op_kwargs: Any, **given: Any) -> Any:
        y, saved = input_, []
        for op, kwargs in zip(self.basic_ops, basic_op_kwargs, strict=True):
            y, tensors = op.op_forward_compute(
                y, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None, **kwargs
            )
            saved.append(tensors)
        return y, [() for _ in self.basic_ops], tuple(saved)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, *, basic_op_kwargs: Any, **given: Any
    ) -> None:
        for op, ctx, saved, kwargs in zip(self.basic_ops, basic_op_ctxs, tensors_to_save, basic_op_kwargs, strict=True):
            if ctx.requires_grad:
                op.op_forward_save_ctx(ctx, input_, saved, **kwargs)


class BothWays(Pair):
    """Two squares, forward and backward: what it saves only its own backward can read."""

    def fuser_forward_save_ctx(self, basic_op_ctxs: Any, input_: Any, *args: Any, **given: Any) -> None:
        basic_op_ctxs[1].save_for_backward(input_)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        (x,) = basic_op_ctxs[1].saved_tensors
        return 4 * x * x * x * grad_output, [(), ()], [(), ()]


def identities(count: int) -> list[Any]:
    return [ops.Identity() for _ in range(count)]


@pytest.mark.parametrize(
    ("size", "count", "sizes"),
    [
        (2, 4, [2, 2]),
        (2, 5, [2, 2, 1]),
        (3, 5, [3, 1, 1]),
        (3, 2, [1, 1]),
        (1, 2, [1, 1]),
        (2, 0, []),
    ],
)
def test_windows(size: int, count: int, sizes: list[int]) -> None:
    given = identities(count)
    made = replace_windows(given, size, lambda *window: Pair(window))
    assert [len(getattr(op, "basic_ops", [op])) for op in made] == sizes
    expanded = [op for group in made for op in getattr(group, "basic_ops", [group])]
    assert all(a is b for a, b in zip(expanded, given, strict=True))


def test_windows_overlap_and_the_first_that_fits_wins() -> None:
    marks = [ops.ConstantScale(scale) for scale in (1, 2, 2, 2, 1)]
    seen = []

    def fuse(*window: Any) -> Any:
        seen.append(tuple(int(op.scale) for op in window))
        return Pair(window) if all(op.scale == 2 for op in window) else None

    made = replace_windows(marks, 2, fuse)
    assert seen == [(1, 2), (2, 2), (2, 1)]
    assert names(made) == ["ConstantScale", "Pair", "ConstantScale", "ConstantScale"]


# Registries


def fuse_pairs(pipeline: Any, *, recipe: Any) -> Any:
    """Squares two by two."""

    def fuse(*window: Any) -> Any:
        return Pair(window) if all(isinstance(op, SplitSquare) for op in window) else None

    return replace_windows(pipeline, 2, fuse)


def fuse_both_ways(pipeline: Any, *, recipe: Any) -> Any:
    def fuse(*window: Any) -> Any:
        return BothWays(window) if all(isinstance(op, SplitSquare) for op in window) else None

    return replace_windows(pipeline, 2, fuse)


def test_the_shipped_ones_are_registered() -> None:
    assert ops.OperationFuser.forward_backward_fusion_functions
    assert ops.OperationFuser.forward_fusion_functions
    assert ops.OperationFuser.backward_fusion_functions
    before = list(ops.OperationFuser.forward_fusion_functions)
    with registries():
        ops.register_forward_fusion(fuse_pairs)
        assert ops.OperationFuser.forward_fusion_functions == [*before, fuse_pairs]
        ops.register_forward_fusion(fuse_both_ways, prepend=True)
        assert ops.OperationFuser.forward_fusion_functions == [fuse_both_ways, *before, fuse_pairs]
    assert ops.OperationFuser.forward_fusion_functions == before


REGISTER = {
    "forward": ops.register_forward_fusion,
    "backward": ops.register_backward_fusion,
    "joint": ops.register_forward_backward_fusion,
}
over_registries = pytest.mark.parametrize("which", REGISTER)


@over_registries
def test_what_is_no_function(which: str) -> None:
    with registries(), pytest.raises(TypeError, match=r"op_fusion_func is int: give a function \(ops, \*, recipe\)"):
        REGISTER[which](3)  # type: ignore[arg-type]


@over_registries
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_what_a_fusion_is_given(which: str, recipe: str) -> None:
    """The list that those before it made, and the recipe in force; joint ones first."""
    calls: list[Any] = []

    def note(label: str) -> Any:
        def fusion(pipeline: Any, *, recipe: Any) -> Any:
            calls.append((label, names(pipeline), recipe))
            return pipeline

        return fusion

    with registries(empty=True):
        for label in ("forward", "backward", "joint"):
            REGISTER[label](note(label))
        REGISTER[which](fuse_pairs, prepend=True)
        REGISTER[which](note("last"))
        ops.OperationFuser([SplitSquare(), SplitSquare()]).maybe_fuse_ops(True, RECIPES[recipe], torch.ones(2), ())
    basic = ["SplitSquare", "SplitSquare"]
    expected = []
    for label in ("joint", "forward", "backward"):
        is_fused = label == which or which == "joint"
        expected.append((label, ["Pair"] if is_fused else basic, RECIPES[recipe]))
        if label == which:
            expected.append(("last", ["Pair"], RECIPES[recipe]))
    assert calls == expected


@over_registries
@pytest.mark.parametrize("wrong", ["fewer", "twice", "order", "other", "none"])
def test_a_fusion_must_give_the_same_operations(which: str, wrong: str) -> None:
    def lose(pipeline: Any, *, recipe: Any) -> Any:
        made = {
            "fewer": pipeline[:-1],
            "twice": [*pipeline, pipeline[-1]],
            "order": pipeline[::-1],
            "other": [*pipeline[:-1], ops.GELU()],
            "none": [],
        }
        return made[wrong]

    model = ops.Sequential(ops.Identity(), ops.GELU())
    with registries():
        REGISTER[which](lose)
        with pytest.raises(RuntimeError, match=r"the fusion lose gave operations that expand to.*'Identity', 'GELU'\]"):
            model(sample(8))


def test_a_fusion_must_give_operations() -> None:
    def convert(pipeline: Any, *, recipe: Any) -> Any:
        return [torch.nn.GELU() for _ in pipeline]

    with registries():
        ops.register_forward_fusion(convert)
        with pytest.raises(TypeError, match="a pipeline holds GELU: give a BasicOperation or a FusedOperation"):
            ops.Sequential(ops.GELU())(sample(8))


def test_forward_and_backward_are_fused_independently() -> None:
    x = sample(8)
    expected = step(ops.Sequential(*[SplitSquare() for _ in range(3)]), x)
    with registries():
        ops.register_forward_fusion(fuse_pairs)
        model = ops.Sequential(*[SplitSquare() for _ in range(3)])
        assert_equal(step(model, x), expected)
    assert names(model.fused_ops()["forward"][0]) == ["Pair", "SplitSquare"]
    assert names(model.fused_ops()["backward"][0]) == ["SplitSquare"] * 3


@pytest.mark.parametrize("trained", [0, 1, 2, 3, 4])
def test_a_joint_fusion_that_backward_ends_in(trained: int) -> None:
    """Its backward cannot stop half way, and other backwards cannot read what it saves: it is undone in both passes."""

    class Weighted(SplitSquare):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def op_backward(self, ctx: Any, grad_output: Any) -> Any:
            dx, _ = super().op_backward(ctx, grad_output)
            return dx, (grad_output.float().sum().view(1),)

    class WeightedBoth(BothWays):
        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
            (x,) = basic_op_ctxs[1].saved_tensors
            middle = 2 * (x * x) * grad_output
            sums = [(g.float().sum().view(1),) for g in (middle, grad_output)]
            return 2 * x * middle, sums, [(), ()]

    def fuse(pipeline: Any, *, recipe: Any) -> Any:
        return replace_windows(pipeline, 2, lambda *window: WeightedBoth(window))

    def make() -> Any:
        model = ops.Sequential(*[Weighted() for _ in range(4)])
        for i, op in enumerate(model):
            op.requires_grad_(i >= trained)
        return model

    x = sample(8, dtype=torch.float32)
    model, plain = make(), make()
    with registries():
        ops.register_forward_backward_fusion(fuse)
        if trained == 4:
            assert not model(x).requires_grad
        else:
            assert_close(step(model, x, needs_grad=False), step(plain, x, needs_grad=False))
    made = {side: names(groups[0]) for side, groups in model.fused_ops().items()}
    expected = {1: ["Weighted"] * 2 + ["WeightedBoth"], 3: ["WeightedBoth"] + ["Weighted"] * 2}
    assert made["forward"] == expected.get(trained, ["WeightedBoth"] * 2)
    assert made["backward"] == made["forward"][::-1]


def assert_close(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in expected:
        assert (got[name] is None) == (expected[name] is None), name
        if got[name] is not None:
            torch.testing.assert_close(got[name], expected[name])


@pytest.mark.compile
def test_a_users_fusions_in_a_graph() -> None:
    x = sample(8)
    expected = step(ops.Sequential(*[SplitSquare() for _ in range(5)]), x)
    with registries():
        ops.register_forward_backward_fusion(fuse_both_ways)
        ops.register_forward_fusion(fuse_pairs)
        model = ops.Sequential(*[SplitSquare() for _ in range(5)])
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = step(model, x, call=call)
        eager = step(model, x)
    assert names(model.fused_ops()["forward"][0]) == ["BothWays", "BothWays", "SplitSquare"]
    assert_equal(got, eager)
    assert torch.equal(got["output 0"], expected["output 0"])


# What is shipped


def basic_linear() -> Any:
    return ops.BasicLinear(WIDTH, WIDTH, **OPTIONS)


def linear() -> Any:
    return ops.Linear(WIDTH, WIDTH, **OPTIONS)


def grouped() -> list[Any]:
    fc1 = ops.GroupedLinear(3, WIDTH, 2 * WIDTH, **OPTIONS)
    return [fc1, ops.SwiGLU(), ops.GroupedLinear(3, WIDTH, WIDTH, **OPTIONS)]


QUANTIZED = {  # pipelines → forward and backward groups under a recipe
    "linear, bias": (lambda: [linear()], ["ForwardLinearBiasActivation"], ["Bias", "BasicLinear"]),
    "linear, bias, activation": (
        lambda: [linear(), ops.GELU()],
        ["ForwardLinearBiasActivation"],
        ["BackwardActivationBias", "BasicLinear"],
    ),
    "linear, activation": (
        lambda: [basic_linear(), ops.GELU()],
        ["BasicLinear", "GELU"],
        ["GELU", "BasicLinear"],
    ),
    "linear, bias, scaled activation": (
        lambda: [linear(), ops.ScaledSReLU()],
        ["ForwardLinearBiasActivation", "ScaledSReLU"],
        ["ScaledSReLU", "Bias", "BasicLinear"],
    ),
    "linear, bias, add": (
        lambda: [linear(), ops.AddExtraInput()],
        ["ForwardLinearBiasAdd"],
        ["AddExtraInput", "Bias", "BasicLinear"],
    ),
    "linear, add in place": (
        lambda: [basic_linear(), ops.AddExtraInput(in_place=True)],
        ["ForwardLinearBiasAdd"],
        ["AddExtraInput", "BasicLinear"],
    ),
    "linear, scale, add": (
        lambda: [basic_linear(), ops.ConstantScale(0.5), ops.AddExtraInput()],
        ["ForwardLinearScaleAdd"],
        ["AddExtraInput", "BackwardLinearScale"],
    ),
    "linear, scale": (
        lambda: [basic_linear(), ops.ConstantScale(0.5)],
        ["BasicLinear", "ConstantScale"],
        ["BackwardLinearScale"],
    ),
    "branch in place, linear": (
        lambda: [ops.MakeExtraOutput(in_place=True), basic_linear()],
        ["MakeExtraOutput", "BasicLinear"],
        ["BackwardLinearAdd"],
    ),
    "branch, linear": (
        lambda: [ops.MakeExtraOutput(), basic_linear()],
        ["MakeExtraOutput", "BasicLinear"],
        ["BasicLinear", "MakeExtraOutput"],
    ),
    "branch, norm": (
        lambda: [ops.MakeExtraOutput(), ops.RMSNorm(WIDTH, **OPTIONS)],
        ["MakeExtraOutput", "RMSNorm"],
        ["BackwardAddRMSNorm"],
    ),
    "branch in place, norm": (
        lambda: [ops.MakeExtraOutput(in_place=True), ops.RMSNorm(WIDTH, **OPTIONS)],
        ["MakeExtraOutput", "RMSNorm"],
        ["RMSNorm", "MakeExtraOutput"],
    ),
    "experts": (grouped, ["GroupedMLP"], ["GroupedMLP"]),
    "alone": (lambda: [ops.GELU(), ops.Identity()], ["GELU", "Identity"], ["Identity", "GELU"]),
}
UNQUANTIZED = {  # where they differ without one
    "linear, bias, activation": (["ForwardLinearBiasActivation"], ["GELU", "Bias", "BasicLinear"]),
    "experts": (["GroupedLinear", "SwiGLU", "GroupedLinear"], ["GroupedLinear", "SwiGLU", "GroupedLinear"]),
}


def extra_inputs(pipeline: list[Any]) -> list[Any]:
    made: list[Any] = []
    for op in pipeline:
        if isinstance(op, ops.GroupedLinear):
            made.append(splits(8))
        elif isinstance(op, ops.AddExtraInput):
            made.append(sample(8))
        elif isinstance(op, ops.ScaledSReLU):
            made.append(torch.ones(8))
    return made


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "mxfp8"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_shipped_fusions(name: str, recipe: str) -> None:
    make, *expected = QUANTIZED[name]
    if recipe == "none":
        expected = list(UNQUANTIZED.get(name, expected))
    pipeline = make()
    model = ops.Sequential(*pipeline)
    assert model.fused_ops() == {"forward": [[]], "backward": [[]]}  # nothing has run
    y = run(model, sample(8).requires_grad_(), recipe, extra_inputs(pipeline))
    made = model.fused_ops()
    assert [names(made["forward"][0]), names(made["backward"][0])] == list(expected)
    fuser = model._module_groups[0]
    assert [op for op, _ in fuser._forward_ops] == made["forward"][0]
    assert [place for _, places in fuser._forward_ops for place in places] == list(range(len(fuser._basic_ops)))
    (y[0] if isinstance(y, tuple) else y).float().sum().backward()


def run(model: Any, x: torch.Tensor, recipe: str, extra: list[Any]) -> Any:
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        return model(x, *extra)


def test_every_shipped_fusion_is_seen() -> None:
    """Above; those that need several processes have tests of their own."""
    seen = {name for _, forward, backward in QUANTIZED.values() for name in (*forward, *backward)}
    parallel = {name for name in fused.__all__ if "ReduceScatter" in name or "AllGather" in name}
    assert set(fused.__all__) - parallel <= seen


def test_neighbours_are_fused_in_a_chain() -> None:
    """Each operation once, longer runs first."""
    model = ops.Sequential(
        ops.MakeExtraOutput(),
        *mlp(),
        ops.AddExtraInput(),
        ops.MakeExtraOutput(in_place=True),
        ops.BasicLinear(32, 32, **OPTIONS),
        ops.ConstantScale(2.0),
    )
    x = sample(8, width=32)
    run(model, x.requires_grad_(), "current", [sample(8, width=32)])
    made = model.fused_ops()
    assert names(made["forward"][0]) == [
        "MakeExtraOutput",
        "RMSNorm",
        "ForwardLinearBiasActivation",
        "ForwardLinearBiasAdd",
        "MakeExtraOutput",
        "BasicLinear",
        "ConstantScale",
    ]
    assert names(made["backward"][0]) == [
        "ConstantScale",
        "BackwardLinearAdd",
        "AddExtraInput",
        "Bias",
        "BasicLinear",
        "BackwardActivationBias",
        "BasicLinear",
        "BackwardAddRMSNorm",
    ]


def test_backward_that_ends_in_a_fusion_is_not_fused_there() -> None:
    model = ops.Sequential(ops.MakeExtraOutput(), *mlp())
    x = sample(8, width=32)
    run(model, x, "current", [])
    assert names(model.fused_ops()["backward"][0])[-2:] == ["RMSNorm", "MakeExtraOutput"]
    run(model, x.requires_grad_(), "current", [])
    assert names(model.fused_ops()["backward"][0])[-1:] == ["BackwardAddRMSNorm"]
