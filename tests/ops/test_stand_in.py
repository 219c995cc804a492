"""Pipelines in a graph, on stand-ins: what a graph holds of an operation, and what makes another graph."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import ops
from mezzotint import recipe as recipes
from mezzotint.ops.stand_in import run_stand_ins
from tests.ops.chains import step
from tests.ops.pipelines import linear, x32
from tests.ops.user_ops import OPTIONS, mlp, registries
from tests.recipes import assert_equal, gradient

pytestmark = pytest.mark.compile


def compiled(model: Any) -> tuple[Any, list[torch.fx.GraphModule]]:
    """The model compiled whole, and its graphs as Dynamo makes them."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend), graphs


def calls(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()], ids=["none", "mxfp8"])
def test_a_graph_has_one_call_for_a_pipeline(recipe: Any) -> None:
    model, twin = mlp(), mlp()
    call, graphs = compiled(model)
    assert_equal(step(model, x32(), (), recipe, call), step(twin, x32(), (), recipe))
    (graph,) = graphs
    assert calls(graph).count(run_stand_ins) == 1
    assert not [target for target in calls(graph) if isinstance(target, torch._ops.OpOverload)]


def change_scale(op: Any) -> None:
    op.scale = 3.0


def change_sign(op: Any) -> None:
    op.scale = -op.scale


def change_epsilon(op: Any) -> None:
    op.eps = 0.5


def change_shape(op: Any) -> None:
    op.target_shape = (8, 64)


def change_cache(op: Any) -> None:
    op.cache_quantized_input = True


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: ops.ConstantScale(2.0), change_scale),
        (lambda: ops.ConstantScale(0.0), change_sign),
        (lambda: ops.RMSNorm(32, **OPTIONS), change_epsilon),
        (lambda: ops.L2Normalization(), change_epsilon),
        (lambda: ops.Reshape((-1, 16)), change_shape),
        (lambda: ops.GELU(), change_cache),
    ],
)
def test_an_attribute_that_is_assigned_makes_another_graph(make: Any, change: Any) -> None:
    """And the value from before finds its graph again. Zeros with another sign are other bits."""
    model = ops.Sequential(make(), ops.Identity())
    call, graphs = compiled(model)
    for changes, count in ((False, 1), (True, 2), (False, 2)):
        if count == 2 and not changes:
            model[0] = make()
        if changes:
            change(model[0])
        assert_equal(step(model, x32(), call=call), step(model, x32()))
        assert len(graphs) == count


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: ops.Sequential(ops.RMSNorm(32, **OPTIONS), linear(seed)),
        lambda seed: ops.RMSNorm(32, **OPTIONS),
        lambda seed: linear(seed, ops.Linear),
    ],
    ids=["Sequential", "RMSNorm", "Linear"],
)
def test_equal_operations_share_a_graph(make: Any) -> None:
    """Each has its own parameters, and has not run before: a graph is not bound to those that it was traced with."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def run(model: Any, x: torch.Tensor) -> Any:
        return model(x)

    call = torch.compile(run, fullgraph=True, backend=counter)
    for seed in range(3):
        model = make(seed)
        with mz.autocast("mxfp8"):
            assert torch.equal(call(model, x32(seed)), model(x32(seed)))
    assert counter.frame_count == 1


def test_a_fusion_that_a_user_registers_later() -> None:
    asked: list[int] = []

    def fuse(operations: Any, *, recipe: Any) -> Any:
        asked.append(len(operations))
        return operations

    model = mlp()
    call, graphs = compiled(model)
    expected = step(model, x32(), (), None, call)
    with registries():
        ops.register_forward_fusion(fuse)
        assert_equal(step(model, x32(), (), None, call), expected)
        assert run_stand_ins not in calls(graphs[1])
        ops.OperationFuser.forward_fusion_functions.remove(fuse)
        assert_equal(step(model, x32(), (), None, call), expected)
    assert len(graphs) == 2


class Louder(ops.ConstantScale):
    """A user's operation: it reads an attribute that nobody here knows of."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.factor = 2.0

    def op_forward_compute(self, input_: Any, **given: Any) -> Any:
        return self.factor * super().op_forward_compute(input_, **given)[0], ()


def test_an_operation_of_a_users_is_walked_through() -> None:
    model = ops.Sequential(ops.GELU(), Louder(0.5))
    call, graphs = compiled(model)
    for factor in (2.0, 3.0):
        model[1].factor = factor
        assert_equal(step(model, x32(), call=call), step(model, x32()))
    assert [run_stand_ins in calls(graph) for graph in graphs] == [False, False]


def test_a_method_that_is_replaced_in_one_operation() -> None:
    model = ops.Sequential(ops.GELU(), ops.ConstantScale(0.5))
    call, graphs = compiled(model)
    assert_equal(step(model, x32(), call=call), step(model, x32()))
    model[1].op_forward_compute = lambda input_, **given: (3 * input_, ())
    assert_equal(step(model, x32(), call=call), step(model, x32()))
    assert [run_stand_ins in calls(graph) for graph in graphs] == [True, False]


def test_a_graph_does_not_write_to_an_extra_input() -> None:
    """Eager code may put the sum there; a graph plans its own memory."""
    model, x, extra = ops.Sequential(ops.GELU(), ops.AddExtraInput(in_place=True)), x32(), x32(1)
    call, _ = compiled(model)
    with torch.no_grad():
        y, held = call(x, extra), extra.clone()
        assert torch.equal(extra, x32(1))
        assert torch.equal(y, model(x, held))
        assert torch.equal(held, y)


def test_wrong_numbers_of_extra_inputs() -> None:
    model = ops.Sequential(ops.AddExtraInput(), ops.GELU())
    call, _ = compiled(model)
    for count, message in ((0, "0 extra inputs were given"), (2, "1 of 2 extra inputs are left")):
        with pytest.raises(Exception, match=message):
            call(x32(), *[x32()] * count)


def test_a_parameter_on_the_meta_device() -> None:
    """It is made when the graph is traced."""
    op = ops.RMSNorm(32, device="meta", dtype=torch.bfloat16)
    call, _ = compiled(op)
    with torch.device("cpu"):
        assert torch.equal(call(x32()), op(x32()))


def test_a_pipeline_that_runs_twice_before_its_backwards() -> None:
    """Each backward writes delayed scaling's state as it is then, and the last of them updates the scales."""
    model, twin = mlp(), mlp()
    call, _ = compiled(model)
    for step_number in range(3):
        results = []
        for target, run in ((model, call), (twin, twin)):
            with mz.autocast(recipe=recipes.DelayedScaling()):
                outputs = [run(x32(2 * step_number + i) * (1 + step_number)) for i in range(2)]
            for y in reversed(outputs):
                gradient(y).backward()
            state = {name: tensor.detach().clone() for name, tensor in target.named_buffers()}
            results.append(state | {name: tensor.grad for name, tensor in target.named_parameters()})
        assert_equal(*results)
